"""Hyper-connections: several residual streams, of which each half of a layer reads one sum, and to each of which it
adds (arXiv 2409.19606; in the form of HYV4HyperConnection of transformers, whose streams do not mix with one another).

T: rows (tokens) of a step, S: streams, H: width of one. The streams of a row lie side by side: x [T, S H].
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from headrace.kernels import dispatch, ops
from headrace.kernels.extension import check, require, type_of
from headrace.kernels.gates import whole_vectors

MOST_STREAMS = 8
"""That the C++ kernels take (csrc/kernels.h)."""

TOGETHER = 16
"""Outputs of a product: torch adds up fewer in an order that depends on the row."""


class Mixing(NamedTuple):
    """Learned numbers, fp32: fn [2 S, S H], base [2 S] and scale [2], of what is read and of what is added; where
    nothing is added any more [S, S H], [S] and [1]."""

    fn: Tensor
    base: Tensor
    scale: Tensor


class Bounds(NamedTuple):
    """eps: of the norm of streams. least: is added to what streams count. magnitude: the most that is added to one
    counts, but for that."""

    eps: float
    least: float
    magnitude: float


def collect(x: Tensor, mixing: Mixing, streams: int, bounds: Bounds) -> tuple[Tensor, Tensor | None]:
    """x [T, S H] -> the sum [T, H] that is read, and fp32 [T, S] by which what is made of it is added to each stream,
    if mixing has that. With p = fn (x / rms(x)): the streams count sigmoid(p scale + base) + least."""
    if dispatch.native(x):
        return _collect_native(x, mixing, streams, bounds)
    flat = x.float()
    outputs = len(mixing.base)
    fn = torch.nn.functional.pad(mixing.fn, (0, 0, 0, -outputs % TOGETHER))
    factors = torch.rsqrt(flat.pow(2).mean(-1, keepdim=True) + bounds.eps)
    products = ops.linear(flat, fn)[:, :outputs] * factors
    pre = _sigmoid(products[:, :streams] * mixing.scale[0] + mixing.base[:streams]) + bounds.least
    each = flat.unflatten(1, (streams, -1))
    total = each[:, 0] * pre[:, :1]
    for stream in range(1, streams):
        total = total + each[:, stream] * pre[:, stream, None]
    if len(mixing.scale) == 1:
        return total.to(x.dtype), None
    post = _sigmoid(products[:, streams:] * mixing.scale[1] + mixing.base[streams:])
    return total.to(x.dtype), bounds.magnitude * post + bounds.least


def spread(x: Tensor, part: Tensor, post: Tensor) -> Tensor:
    """x [T, S H] with part [T, H] added to each stream, times what post fp32 [T, S] says: [T, S H]."""
    if dispatch.native(x):
        return _spread_native(x, part, post)
    each: Tensor = x.float().unflatten(1, (post.shape[1], -1))
    return (each + post[..., None] * part.float()[:, None]).flatten(1).to(x.dtype)


def _sigmoid(x: Tensor) -> Tensor:
    return whole_vectors(torch.sigmoid, x)


def _collect_native(x: Tensor, mixing: Mixing, streams: int, bounds: Bounds) -> tuple[Tensor, Tensor | None]:
    rows, width = len(x), x.shape[1] // streams
    adds, outputs = len(mixing.scale) > 1, len(mixing.base)
    check("x", x, x.dtype, (rows, streams * width))
    for name, tensor, shape in zip(
        Mixing._fields, mixing, ((outputs, streams * width), (streams * (1 + adds),), (1 + adds,)), strict=True
    ):
        check(name, tensor, torch.float32, shape)
    out, post = x.new_empty(rows, width), torch.empty(rows, streams) if adds else None
    require().collect_streams(
        type_of(x), x.data_ptr(), [each.data_ptr() for each in mixing], out.data_ptr(),
        0 if post is None else post.data_ptr(), rows=rows, streams=streams, width=width, eps=bounds.eps,
        least=bounds.least, magnitude=bounds.magnitude, threads=torch.get_num_threads(),
    )  # fmt: skip
    return out, post


def _spread_native(x: Tensor, part: Tensor, post: Tensor) -> Tensor:
    (rows, streams), width = post.shape, part.shape[1]
    check("x", x, x.dtype, (rows, streams * width))
    check("part", part, x.dtype, (rows, width))
    check("post", post, torch.float32, (rows, streams))
    out = torch.empty_like(x)
    require().spread_streams(
        type_of(x), x.data_ptr(), part.data_ptr(), post.data_ptr(), out.data_ptr(), rows=rows, streams=streams,
        width=width, threads=torch.get_num_threads(),
    )  # fmt: skip
    return out
