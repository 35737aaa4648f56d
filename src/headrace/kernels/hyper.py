"""Hyper-connections: several residual streams, of which each half of a layer reads one sum, and to each of which it
adds (arXiv 2409.19606). Streams go on as they are, as HY4's do (transformers' HYV4HyperConnection), or each becomes a
sum of all by weights whose rows and columns sum up to one (manifold-constrained hyper-connections, as GLM-5.3-Flash's:
Glm5NextTextHyperConnection).

T: rows (tokens) of a step, S: streams, H: width of one. The streams of a row lie side by side: x [T, S H].
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from headrace.kernels import dispatch, ops
from headrace.kernels.extension import address, check, require, type_of
from headrace.kernels.gates import whole_vectors

MOST_STREAMS = 8
"""That the C++ kernels take (csrc/kernels.h)."""
TOGETHER = 16
"""Outputs of a product: torch adds up fewer in an order that depends on the row."""


class Mixing(NamedTuple):
    """Learned numbers, fp32: fn [n, S H], base [n] and scale [1 to 3], of what is read (n = S), of what is added to
    streams (S more), and of what each goes on in (S S more)."""

    fn: Tensor
    base: Tensor
    scale: Tensor


class Bounds(NamedTuple):
    """eps: of the norm of streams. least: is added to what streams count; magnitude: the most that is added to one
    counts, but for post_least. rounds: in which rows and columns of what streams go on in are divided by their sums."""

    eps: float
    least: float
    magnitude: float
    post_least: float = 0.0
    rounds: int = 0


class Counts(NamedTuple):
    """By what is added to streams, fp32 [T, S], and how much of each goes on in each, fp32 [T, from S, to S]; None:
    each as it is."""

    post: Tensor
    comb: Tensor | None = None

    def of(self, rows: Tensor) -> Counts:
        """Of some rows alone, int64 [n]."""
        return Counts(self.post[rows], None if self.comb is None else self.comb[rows])


def collect(x: Tensor, mixing: Mixing, streams: int, bounds: Bounds) -> tuple[Tensor, Counts | None]:
    """x [T, S H] -> the sum [T, H] that is read, and what `spread` takes, as far as mixing has it. With p = fn (x /
    rms(x)): the streams count sigmoid(p scale + base) + least."""
    if dispatch.native(x):
        return _collect_native(x, mixing, streams, bounds)
    flat = x.float()
    outputs = len(mixing.base)
    fn = torch.nn.functional.pad(mixing.fn, (0, 0, 0, -outputs % TOGETHER))
    factors = torch.rsqrt(flat.pow(2).mean(-1, keepdim=True) + bounds.eps)
    parts = (ops.linear(flat, fn)[:, :outputs] * factors).split(streams, dim=1)
    bases = mixing.base.split(streams)
    pre = _sigmoid(parts[0] * mixing.scale[0] + bases[0]) + bounds.least
    each = flat.unflatten(1, (streams, -1))
    total = _summed([each[:, s] * pre[:, s, None] for s in range(streams)]).to(x.dtype)
    if len(mixing.scale) == 1:
        return total, None
    post = bounds.magnitude * _sigmoid(parts[1] * mixing.scale[1] + bases[1]) + bounds.post_least
    if len(mixing.scale) == 2:
        return total, Counts(post)
    logits = [part * mixing.scale[2] + base for part, base in zip(parts[2:], bases[2:], strict=True)]
    return total, Counts(post, _balanced(logits, bounds))


def _balanced(logits: list[Tensor], bounds: Bounds) -> Tensor:
    """Rows of logits, S of [T, S] -> [T, S, S], by the rounds of Sinkhorn and Knopp."""
    rows = []
    for row in logits:
        counts = whole_vectors(torch.exp, row - row.amax(-1, keepdim=True))
        rows.append(counts / _summed(list(counts.unbind(-1)))[:, None] + bounds.least)
    comb = torch.stack(rows, dim=1)
    comb = comb / (_summed(list(comb.unbind(1))) + bounds.least)[:, None]
    for _ in range(bounds.rounds - 1):
        comb = comb / (_summed(list(comb.unbind(2))) + bounds.least)[:, :, None]
        comb = comb / (_summed(list(comb.unbind(1))) + bounds.least)[:, None]
    return comb


def spread(x: Tensor, part: Tensor, counts: Counts) -> Tensor:
    """x [T, S H], each stream as it goes on, with part [T, H] added as `counts` says: [T, S H]."""
    if dispatch.native(x):
        return _spread_native(x, part, counts)
    streams = counts.post.shape[1]
    each: Tensor = x.float().unflatten(1, (streams, -1))
    if counts.comb is not None:
        each = _summed([each[:, s, None] * counts.comb[:, s, :, None] for s in range(streams)])
    return (each + counts.post[..., None] * part.float()[:, None]).flatten(1).to(x.dtype)


def mean(x: Tensor, streams: int) -> Tensor:
    """x [T, S H] -> the mean of the streams [T, H]."""
    each = x.float().unflatten(1, (streams, -1))
    return (_summed(list(each.unbind(1))) * (1.0 / streams)).to(x.dtype)


def _summed(parts: list[Tensor]) -> Tensor:
    """One after another: the same bits for a row at every T."""
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return total


def _sigmoid(x: Tensor) -> Tensor:
    return whole_vectors(torch.sigmoid, x)


def _collect_native(x: Tensor, mixing: Mixing, streams: int, bounds: Bounds) -> tuple[Tensor, Counts | None]:
    rows, width, kinds = len(x), x.shape[1] // streams, len(mixing.scale)
    if not 1 <= kinds <= 3:
        raise ValueError(f"scale must be 1 to 3 numbers, got {kinds}")
    outputs = streams * (1, 2, 2 + streams)[kinds - 1]
    check("x", x, x.dtype, (rows, streams * width))
    for name, tensor, shape in zip(
        Mixing._fields, mixing, ((outputs, streams * width), (outputs,), (kinds,)), strict=True
    ):
        check(name, tensor, torch.float32, shape)
    out = x.new_empty(rows, width)
    post = torch.empty(rows, streams) if kinds > 1 else None
    comb = torch.empty(rows, streams, streams) if kinds > 2 else None
    require().collect_streams(
        type_of(x), x.data_ptr(), [each.data_ptr() for each in mixing], out.data_ptr(), address(post), address(comb),
        rows=rows, streams=streams, width=width, eps=bounds.eps, least=bounds.least, magnitude=bounds.magnitude,
        post_least=bounds.post_least, rounds=bounds.rounds, threads=torch.get_num_threads(),
    )  # fmt: skip
    return out, None if post is None else Counts(post, comb)


def _spread_native(x: Tensor, part: Tensor, counts: Counts) -> Tensor:
    (rows, streams), width = counts.post.shape, part.shape[1]
    check("x", x, x.dtype, (rows, streams * width))
    check("part", part, x.dtype, (rows, width))
    check("post", counts.post, torch.float32, (rows, streams))
    if counts.comb is not None:
        check("comb", counts.comb, torch.float32, (rows, streams, streams))
    out = torch.empty_like(x)
    require().spread_streams(
        type_of(x), x.data_ptr(), part.data_ptr(), counts.post.data_ptr(), address(counts.comb), out.data_ptr(),
        rows=rows, streams=streams, width=width, threads=torch.get_num_threads(),
    )  # fmt: skip
    return out
