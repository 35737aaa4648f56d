"""Random calls of attend: prefix trees, tensors and masks, and attention in fp64 to compare with.

R: rows, Hq, Hkv: query and KV heads, D: head size, n: keys that a row sees.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from torch import Tensor

from headrace.kernels import cpu
from headrace.kernels.records import Mask, Pool
from headrace.types import CHUNK

SHARED_FIXTURE = settings(
    deadline=None, max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)


@dataclass(frozen=True, repr=False)
class Case:
    """One call of attend. items and positions as cpu.attend takes them."""

    q: Tensor
    k: Tensor
    v: Tensor
    items: Tensor
    positions: Tensor
    scale: float
    window: int | None = None
    bias: Tensor | None = None
    cap: float | None = None
    sinks: Tensor | None = None

    def __repr__(self) -> str:
        kind, dims = self.q.dtype, (tuple(self.q.shape), tuple(self.k.shape))
        scores = f"window {self.window}, cap {self.cap}, sinks {self.sinks is not None}, bias {self.bias is not None}"
        return f"Case({kind}, q and k {dims}, {scores}, items {self.items.tolist()})"

    @property
    def pool(self) -> Pool:
        """In plain order."""
        return Pool(self.k, self.v)

    @property
    def mask(self) -> Mask:
        more = dict(bias=self.bias, cap=self.cap, sinks=self.sinks, scale=self.scale)
        return Mask(self.items, self.positions, window=self.window, **more)  # type: ignore[arg-type]

    def run(self) -> Tensor:
        return cpu.attend(self.q, arranged(self.pool), self.mask)

    def rows(self, begin: int, end: int) -> Case:
        """The same work for rows begin..end-1 only."""
        items = self.items.clone()
        items[:, 2:] = items[:, 2:].clamp(begin, end) - begin
        kept = items[items[:, 2] < items[:, 3]]
        return replace(self, q=self.q[begin:end], items=kept, positions=self.positions[begin:end].contiguous())


_last: list[Any] = []
"""A pool's tensors, how often each was written to, the instruction set, and that pool as it wants it."""


def arranged(pool: Pool) -> Pool:
    """cpu.arrange, which is kept for the next call: many follow each other on the same chunks."""
    asked = [[tensor._version for tensor in pool.tensors], cpu.isa()]
    if not _last or any(x is not y for x, y in zip(_last[0], pool.tensors, strict=True)) or _last[1] != asked:
        _last[:] = pool.tensors, asked, cpu.arrange(pool)
    return _last[2]


class Tree:
    """A random prefix tree: sequences in depth-first order, each with a path of chunks and rows at its end."""

    def __init__(self, generator: torch.Generator, sequences: int, depth: int, prefill: bool) -> None:
        self.generator = generator
        self.paths: list[list[int]] = [[] for _ in range(sequences)]
        self.covers: list[tuple[int, int, int, int]] = []  # (slot, key_start, first sequence, last sequence + 1)
        self._grow(0, sequences, 0, depth)
        self.lengths = [CHUNK * (len(path) - 1) + self.draw(1, CHUNK) for path in self.paths]
        self.row_counts = [self.draw(1, length) if prefill else 1 for length in self.lengths]

    def draw(self, low: int, high: int) -> int:
        return int(torch.randint(low, high + 1, (), generator=self.generator))

    def _grow(self, begin: int, end: int, level: int, depth: int) -> None:
        """Gives sequences begin..end-1 a common chunk, then splits them; a sequence alone ends in a private chunk."""
        for path in self.paths[begin:end]:
            path.append(len(self.covers))
        self.covers.append((len(self.covers), level * CHUNK, begin, end))
        while begin < end and (level + 1 < depth or end - begin > 1):
            middle = self.draw(begin + 1, end)
            self._grow(begin, middle, level + 1, depth) if level + 1 < depth else self._private(
                begin, middle, level + 1
            )
            begin = middle

    def _private(self, begin: int, end: int, level: int) -> None:
        for sequence in range(begin, end):
            self.paths[sequence].append(len(self.covers))
            self.covers.append((len(self.covers), level * CHUNK, sequence, sequence + 1))

    def items(self) -> Tensor:
        starts = torch.tensor([0, *self.row_counts]).cumsum(0).tolist()
        return torch.tensor([(s, k, starts[a], starts[b]) for s, k, a, b in self.covers], dtype=torch.int32)

    def positions(self) -> Tensor:
        spans = [torch.arange(n - rows, n) for n, rows in zip(self.lengths, self.row_counts, strict=True)]
        return torch.cat(spans)


def make_case(tree: Tree, heads: int, kv_heads: int, dim: int, dtype: torch.dtype, **options: object) -> Case:
    """Random tensors for the tree; keys that no row sees are NaN."""
    slots, rows = len(tree.covers), sum(tree.row_counts)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=tree.generator).to(dtype)

    case = Case(
        q=random(rows, heads, dim),
        k=random(slots, kv_heads, dim, CHUNK),
        v=random(slots, kv_heads, CHUNK, dim),
        items=tree.items(),
        positions=tree.positions(),
        scale=dim**-0.5,
    )
    case = replace(case, **options)  # type: ignore[arg-type]
    unseen = torch.ones(slots, CHUNK, dtype=torch.bool)
    for row in range(rows):
        slot, offset, _ = seen_keys(case, row)
        unseen[slot, offset] = False
    case.k.permute(0, 3, 1, 2)[unseen] = torch.nan
    case.v.permute(0, 2, 1, 3)[unseen] = torch.nan
    return case


def seen_keys(case: Case, row: int) -> tuple[Tensor, Tensor, Tensor]:
    """(slot, offset in the chunk, position) of each key that the row sees: [n] each."""
    mine = case.items[(case.items[:, 2] <= row) & (row < case.items[:, 3])].long()
    slots = mine[:, 0].repeat_interleave(CHUNK)
    offsets = torch.arange(CHUNK).repeat(len(mine))
    positions = mine[:, 1].repeat_interleave(CHUNK) + offsets
    here = int(case.positions[row])
    window = case.window or here + 1
    near = positions > here - window if window > 0 else positions // -window == here // -window
    seen = (positions <= here) & near
    return slots[seen], offsets[seen], positions[seen]


def in_fp64(case: Case) -> tuple[Tensor, Tensor]:
    """All keys and values [Hkv, slots * 64, D]."""
    k, v = case.k.permute(1, 0, 3, 2), case.v.permute(1, 0, 2, 3)
    return k.flatten(1, 2).double(), v.flatten(1, 2).double()


def seen_scores(case: Case, row: int, keys: Tensor) -> Tensor:
    """fp64 scores of the keys that the row sees, of all `keys` [Hkv, slots * 64, D]: [Hq, n]."""
    slots, offsets, positions = seen_keys(case, row)
    k = keys[:, slots * CHUNK + offsets]
    q = case.q[row].double().view(len(k), -1, k.shape[2])
    scores = (q @ k.transpose(1, 2)).flatten(0, 1) * case.scale
    if case.cap is not None:
        scores = torch.tanh(scores / case.cap) * case.cap
    return scores if case.bias is None else scores + case.bias[:, positions].double()


def truth(case: Case) -> tuple[Tensor, Tensor]:
    """fp64 attention [R, Hq, D], and the sum over keys of p |v|, to which errors are compared."""
    keys, values = in_fp64(case)
    outs, sizes = [], []
    for row in range(len(case.q)):
        slots, offsets, _ = seen_keys(case, row)
        v = values[:, slots * CHUNK + offsets]
        scores = seen_scores(case, row, keys)
        if case.sinks is None:
            p = scores.softmax(-1)
        else:
            p = torch.cat((scores, case.sinks[:, None].double()), dim=-1).softmax(-1)[:, :-1]
        p = p.view(len(v), -1, v.shape[1])
        outs.append((p @ v).flatten(0, 1))
        sizes.append((p @ v.abs()).flatten(0, 1))
    return torch.stack(outs), torch.stack(sizes)


def check(case: Case) -> None:
    """Error bound, relative to sum p |v|: 1e-5 in fp32; in bf16 also 2^-8 for P and 2^-8 for the output."""
    expected, size = truth(case)
    bound = 1e-5 + (2**-7 if case.q.dtype == torch.bfloat16 else 0)
    error = (case.run().double() - expected).abs()
    assert (error <= bound * size + 1e-30).all(), f"error {float((error / size).max()):.2e}, bound {bound:.2e}"


def reordered(items: Tensor, generator: torch.Generator) -> Tensor:
    """The items in another order that keeps each row's ascending, some cut in two."""
    rows = [tuple(item) for item in items.tolist()]
    for _ in range(4 * len(rows)):
        i = int(torch.randint(0, max(len(rows) - 1, 1), (), generator=generator))
        (_, _, a, b), (_, _, c, d) = rows[i], rows[min(i + 1, len(rows) - 1)]
        if b <= c or d <= a:
            rows[i], rows[i + 1] = rows[i + 1], rows[i]
    cut = []
    for slot, key, begin, end in rows:
        middle = int(torch.randint(begin, end + 1, (), generator=generator))
        cut += [(slot, key, begin, middle), (slot, key, middle, end)]
    return torch.tensor(cut, dtype=torch.int32)


@st.composite
def cases(draw: st.DrawFn, most: int = 6) -> Case:
    """Random trees, head layouts, windows, biases and types."""
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))
    tree = Tree(generator, draw(st.integers(1, most)), draw(st.integers(1, 4)), draw(st.booleans()))
    heads, kv_heads = draw(st.sampled_from([(1, 1), (4, 4), (4, 2), (6, 2), (5, 1), (8, 1)]))
    bias = 10 * torch.randn(heads, max(tree.lengths), generator=generator) if draw(st.booleans()) else None
    return make_case(
        tree, heads, kv_heads, draw(st.sampled_from([32, 64, 80, 96, 128, 256, 8, 20])),
        draw(st.sampled_from([torch.float32, torch.bfloat16])), bias=bias,
        window=draw(st.sampled_from([None, None, 1, 7, 64, 100, -1, -50, -128])),
        cap=draw(st.sampled_from([None, None, 0.5, 50.0])),
        sinks=3 * torch.randn(heads, generator=generator) if draw(st.booleans()) else None,
    )  # fmt: skip
