"""How the new tokens of a prompt are cut into shards.

Bounds are absolute positions that cut [start, start + tokens) into n shards: n + 1 numbers that never fall; a shard may
be empty. 'Entry' is one (K, V) pair of one token in one layer; 'product' is one row meeting one key, masked or not.
Sources: KV-Runahead (arXiv 2405.05329), equations 4 to 7, figures 4 and 5, section 4.3; context parallelism
(arXiv 2411.01783), section 3.4 (zigzag sharding).
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from itertools import accumulate, pairwise

Bounds = tuple[int, ...]
Fractions = tuple[float, ...]


def sizes_of(bounds: Sequence[int]) -> tuple[int, ...]:
    """Tokens of each shard."""
    return tuple(right - left for left, right in pairwise(bounds))


def bounds_of(sizes: Sequence[int], start: int = 0) -> Bounds:
    """The inverse of `sizes_of`: shards of these sizes, the first of which begins at `start`."""
    return tuple(accumulate(sizes, initial=start))


def fractions_of(bounds: Sequence[int]) -> Fractions:
    """Share of each shard; ValueError for no tokens at all."""
    tokens = bounds[-1] - bounds[0]
    if tokens < 1:
        raise ValueError(f"bounds {tuple(bounds)} hold no tokens: fractions need at least one")
    return tuple(size / tokens for size in sizes_of(bounds))


def even(tokens: int, shards: int) -> Bounds:
    """KVR-E and TSP: shards of equal size, the first ones one token longer where it does not divide."""
    return bounds_of(to_sizes([1.0] * shards, tokens))


def to_sizes(fractions: Sequence[float], tokens: int) -> tuple[int, ...]:
    """Whole tokens in proportion to `fractions` (any non-negative scale), by largest remainder; they sum to `tokens`.

    Equal remainders go to the earlier shard. Where there are as many tokens as shards, none is left empty.
    Raises ValueError for negative tokens, no shards, or fractions that are negative, not finite or all zero.
    """
    total = sum(fractions)
    if tokens < 0 or not fractions or not math.isfinite(total) or total <= 0 or min(fractions) < 0:
        raise ValueError(f"cannot share {tokens} tokens by {list(fractions)}: fractions must be >= 0, one of them > 0")
    exact = [tokens * fraction / total for fraction in fractions]
    sizes = [math.floor(x) for x in exact]
    order = sorted(range(len(sizes)), key=lambda i: (sizes[i] - exact[i], i))
    for i in order[: tokens - sum(sizes)]:
        sizes[i] += 1
    if tokens >= len(sizes):
        for i in (i for i, size in enumerate(sizes) if not size):
            sizes[max(range(len(sizes)), key=sizes.__getitem__)] -= 1
            sizes[i] = 1
    return tuple(sizes)


def interpolate(entries: Mapping[int, Sequence[float]], tokens: int) -> Fractions:
    """KVR-P: fractions for `tokens`, linear between the two nearest searched token counts, clamped outside them.

    Raises ValueError without entries, or where the two neighbours have different numbers of ranks.
    """
    if not entries:
        raise ValueError("no searched partitions to interpolate between: run `headrace tune`")
    known = sorted(entries)
    right = bisect_right(known, tokens)
    low, high = known[max(right - 1, 0)], known[min(right, len(known) - 1)]
    if len(entries[low]) != len(entries[high]):
        raise ValueError(f"partitions at {low} and {high} tokens are for different numbers of ranks: tune them again")
    weight = (tokens - low) / (high - low) if high > low and tokens > low else 0.0
    mixed = [a + weight * (b - a) for a, b in zip(entries[low], entries[high], strict=True)]
    return tuple(x / sum(mixed) for x in mixed)


def align(bounds: Sequence[int], unit: int) -> Bounds:
    """Inner bounds moved to the nearest absolute multiple of `unit` (64: chunks, 2,048: blocks); the ends stay.

    Order is kept; a shard may become empty where there are fewer units than shards. Halves are rounded up.
    """
    if unit < 1:
        raise ValueError(f"unit must be at least 1, got {unit}")
    first, last = bounds[0], bounds[-1]
    inner = [min(max((bound + unit // 2) // unit * unit, first), last) for bound in bounds[1:-1]]
    return (first, *inner, last)


def cut(fractions: Sequence[float], tokens: int, start: int = 0, unit: int = 1) -> Bounds:
    """Bounds of shards in proportion to `fractions`, aligned to `unit`."""
    return align(bounds_of(to_sizes(fractions, tokens), start), unit)


def zigzag(tokens: int, ranks: int, unit: int = 1, start: int = 0) -> Bounds:
    """2N shards of equal size, for `zigzag_ranks`: each rank's causal area is then the same (2N c^2, c = tokens/2N)."""
    return cut([1.0] * (2 * ranks), tokens, start, unit)


def zigzag_ranks(ranks: int) -> tuple[int, ...]:
    """Who computes each of the 2N shards: rank i has shards i and 2N-1-i."""
    return (*range(ranks), *reversed(range(ranks)))


def causal_pairs(rows: tuple[int, int], keys: tuple[int, int]) -> int:
    """(row, key) pairs with key <= row, for rows and keys in half-open ranges of absolute positions."""
    (r0, r1), (k0, k1) = rows, keys
    if r1 <= r0 or k1 <= k0:
        return 0
    return _below(r1 - k0) - _below(r0 - k0) - _below(r1 - k1) + _below(r0 - k1)


def _below(n: int) -> int:
    """1 + 2 + .. + n, and 0 for negative n."""
    return n * (n + 1) // 2 if n > 0 else 0
