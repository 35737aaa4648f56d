"""Keys that rows choose by an indexer's scores (DSA; DeepSeek-V3.2, arXiv 2512.02556, section 2.1), in plain torch.

R: rows; N, I: heads of the indexer and their size; D: numbers stored of a token, the indexer's key first; C: keys that
a row chooses. A row's scores and choice depend on nothing but the row and the keys before it.
"""

from __future__ import annotations

import math
import threading
from itertools import accumulate
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from headrace.kernels.records import Pool
from headrace.types import CHUNK

TOGETHER = 64
"""Rows of a product: torch adds up fewer in another order."""
FEW = 1 << 14
"""Scores among which numpy chooses: more are chosen sooner by torch, with its threads."""
ALIGNED = 64
"""Bytes of a cache line, with which tensors begin."""


class IndexQueries(NamedTuple):
    """What an indexer makes of rows: q [R, N, I], of the type that is computed in, and weights fp32 [R, N] of its
    heads; None where rows choose blocks, by each head for itself. places fp32 [pool, I]: of the layer, where keys are
    pooled (config.IndexSpec)."""

    q: Tensor
    weights: Tensor | None = None
    places: Tensor | None = None

    @property
    def pool(self) -> int:
        """Keys of a pool."""
        return 1 if self.places is None else len(self.places)

    def of(self, rows: Tensor) -> IndexQueries:
        """Of some rows alone, int64 [n]."""
        return self._replace(q=self.q[rows], weights=None if self.weights is None else self.weights[rows])


def index_scores(index: IndexQueries, pool: Pool, items: Tensor, positions: Tensor, keys: int) -> Tensor:
    """fp32 [R, keys]: sum over heads of weights * max(q . k, 0), -inf for keys behind a row's position. Where keys are
    pooled, [R, keys / pool], of pools, -inf for those that are not whole there.

    items int32 [n, 4], positions int64 [R]: as in kernels.records.Mask. What no item offers is -inf.
    """
    assert index.weights is not None, "heads count together"
    size, of = index.q.shape[2], index.pool
    scores = torch.full((len(index.q), keys // of), -torch.inf)
    for slot, key, begin, end in items.tolist():
        k = pool.v[slot, 0, :, : size * (1 + (of > 1))].float()
        if pool.v_scale is not None:
            k = k * pool.v_scale[slot, 0, :, None]
        k = k if index.places is None else pooled(k, index.places)
        of_chunk = _of_chunk(index.q[begin:end].float(), index.weights[begin:end], k)
        last = torch.arange(key, key + CHUNK, of) + of - 1
        unseen = last > positions[begin:end, None]
        scores[begin:end, key // of : (key + CHUNK) // of] = of_chunk.masked_fill(unseen, -torch.inf)
    return scores


def pooled(stored: Tensor, places: Tensor) -> Tensor:
    """stored [64, 2 I], keys and what they count, places [pool, I] -> keys of pools [64 / pool, I]."""
    keys, counts = stored.view(-1, len(places), stored.shape[1]).chunk(2, dim=-1)
    return ((counts + places).softmax(1) * keys).sum(1)


def _of_chunk(q: Tensor, weights: Tensor, k: Tensor) -> Tensor:
    """q [r, N, I], weights [r, N], k [n, I] -> [r, n]."""
    rows, heads, size = q.shape
    flat = torch.nn.functional.pad(q.reshape(rows * heads, size), (0, 0, 0, -(rows * heads) % TOGETHER))
    products = torch.cat([part @ k.t() for part in flat.split(TOGETHER)])[: rows * heads]
    met = products.view(rows, heads, len(k)).clamp(min=0.0)
    total = torch.zeros(rows, len(k))
    for head in range(heads):
        total = total + weights[:, head, None] * met[:, head]
    return total


def block_scores(q: Tensor, pool: Pool, items: Tensor, positions: Tensor, chunks: int) -> Tensor:
    """fp32 [R, N, chunks]: the greatest q . k of the keys of each chunk that a row sees, of the indexer's heads q [R,
    N, I], of which each KV head has one; -inf where it sees none. Of a token each KV head has I / N numbers of the
    indexer's key, the first of its own.
    """
    rows, heads, size = q.shape
    found = torch.full((rows, heads, chunks), -torch.inf)
    for slot, key, begin, end in items.tolist():
        parts = pool.k[slot, :, : size // heads].float()
        if pool.k_scale is not None:
            parts = parts * pool.k_scale[slot, :, None]
        flat = q[begin:end].float().reshape(-1, size)
        flat = torch.nn.functional.pad(flat, (0, 0, 0, -len(flat) % TOGETHER))
        products = torch.cat([part @ parts.reshape(size, CHUNK) for part in flat.split(TOGETHER)])
        scores = products[: (end - begin) * heads].view(-1, heads, CHUNK)
        unseen = torch.arange(key, key + CHUNK) > positions[begin:end, None]
        found[begin:end, :, key // CHUNK] = scores.masked_fill(unseen[:, None], -torch.inf).amax(-1)
    return found


def choose(scores: Tensor, count: int) -> Tensor:
    """The keys of the greatest `count` scores of each row, int32 [R, C], ascending; the first of equal ones. scores
    [R, keys], of which no row has fewer; one that is no number counts as the greatest."""
    if scores.numel() <= FEW:
        return torch.from_numpy(_chosen_of_few(scores.numpy(), count))
    scores = scores.nan_to_num(nan=torch.inf, posinf=torch.inf, neginf=-torch.inf)
    least = scores.topk(count, dim=-1).values[:, -1:]
    above, level = scores > least, scores == least
    open_places = count - above.sum(-1, keepdim=True)
    kept = above | (level & (level.cumsum(-1) <= open_places))
    return kept.nonzero()[:, 1].view(len(scores), count).int()


def _chosen_of_few(scores: NDArray[np.float32], count: int) -> NDArray[np.int32]:
    """The same in numpy, whose calls take a tenth of the time of torch's."""
    scores = np.where(np.isnan(scores), np.float32(np.inf), scores)
    least = np.partition(scores, -count, axis=-1)[:, -count, None]
    above, level = scores > least, scores == least
    kept = above | (level & (level.cumsum(-1) <= count - above.sum(-1, keepdims=True)))
    chosen: NDArray[np.int32] = kept.nonzero()[1].reshape(len(scores), count).astype(np.int32)
    return chosen


def gather(pool: Pool, tables: Tensor, chosen: Tensor, first: int, dtype: torch.dtype) -> Pool:
    """What rows have chosen, in chunks of their own: a pool of R ceil(C / 64) slots, those of a row one behind the
    other, with numbers first .. D - 1 of each token. Places behind the last key hold anything. Valid until the thread's
    next call.

    tables int32 [R, chunks]: the slots of each row's chunks; chosen int32 [R, C]; dtype: of the rows that attend to it.
    """
    slots, offsets = tables.gather(1, (chosen // CHUNK).long()).long(), (chosen % CHUNK).long()

    def taken(stored: Tensor, whole: Tensor) -> Tensor:
        """stored [slots, 1, 64, ...] at those places, in `whole`, which is alike."""
        whole.view(len(chosen), -1, *whole.shape[3:])[:, : chosen.shape[1]] = stored[slots, 0, offsets]
        return whole

    made = room(pool, len(chosen), chosen.shape[1], first)
    taken(pool.v[..., first:], made.v)
    if pool.v_scale is not None and made.v_scale is not None:
        taken(pool.v_scale, made.v_scale)
    return made


class _Kept(threading.local):
    """A thread's memory: new memory at each call would be touched for the first time, which takes longer than the rest
    of `gather`."""

    def __init__(self) -> None:
        self.bytes = torch.empty(0, dtype=torch.uint8)


_kept = _Kept()


def room(pool: Pool, rows: int, count: int, first: int) -> Pool:
    """Memory for what `gather` makes of a pool: the thread's."""
    slots, width = rows * chunks_of(count), pool.v.shape[-1] - first
    parts = Pool.parts(slots, 1, width, pool.v.dtype, once=True)
    sizes = [math.prod(shape) * dtype.itemsize for shape, dtype in parts]
    starts = list(accumulate((size + -size % ALIGNED for size in sizes), initial=0))
    if _kept.bytes.nbytes < starts[-1]:
        _kept.bytes = torch.empty(starts[-1], dtype=torch.uint8)
    pieces = zip(starts, sizes, parts, strict=False)
    return Pool.of([_kept.bytes[at : at + n].view(dtype).view(shape) for at, n, (shape, dtype) in pieces], once=True)


def chunks_of(count: int) -> int:
    """Chunks that so many keys take."""
    return -(-count // CHUNK)
