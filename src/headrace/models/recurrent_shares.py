"""A tensor rank's share of recurrent layers: value heads with the keys and queries that they read, or channels of a
short convolution, and the states of these alone.

Neither a value head nor a channel reads anything of another one, so each has the bits that it has on one rank. More
ranks than key heads hold copies of them, as of KV heads. The one thing that joins heads is the norm of a Mamba-2 layer,
over all heads of a group: where ranks share a group, it is taken of what they have gathered (models.hybrid.MambaLayer).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from headrace.config import RecurrentSpec

LEAST = 32
"""Outputs, and channels of short convolutions, that a rank has at least (models.shards)."""


@dataclass(frozen=True, slots=True)
class RecurrentShare:
    """What one of several tensor ranks computes. whole: all of it; spec: its share; key_heads, value_heads: which of
    all. Of a short convolution value_heads are channels."""

    whole: RecurrentSpec
    spec: RecurrentSpec
    key_heads: range
    value_heads: range

    @classmethod
    def of(cls, whole: RecurrentSpec, rank: int, size: int, channels: Sequence[range] | None = None) -> RecurrentShare:
        """channels: of each rank, where the layers are short convolutions. `size` fits."""
        if channels is not None:
            own = channels[rank]
            return cls(whole, replace(whole, value_dim=len(own)), range(0), own)
        keys, values = whole.key_heads, whole.value_heads
        count, first = max(1, keys // size), rank * keys // size
        spec = replace(whole, key_heads=count, value_heads=values // size)
        heads = range(rank * spec.value_heads, (rank + 1) * spec.value_heads)
        return cls(whole, spec, range(first, first + count), heads)

    @property
    def joins_groups(self) -> bool:
        """Whether other ranks have heads of the same groups of a Mamba-2 layer, which are normed together."""
        shared = self.spec.value_heads * self.whole.key_heads < self.whole.value_heads
        return self.whole.kind == "mamba2" and self.whole.normed and shared

    def rows(self, module: str, kind: str = "weight") -> list[range] | None:
        """This rank's rows of a tensor of a recurrent layer (models.slots), by its module and kind; None: it is no such
        tensor, or whole on every rank."""
        spec = self.whole
        if module == "gates":
            count = spec.gate_rows // spec.value_heads
            return _side_by_side((spec.value_heads,) * count, [self.value_heads] * count)
        found = {"mixed": self._mixed_rows, "conv": self.channels, "delta": [self.value_heads]}
        if spec.kind == "kda":
            found |= {"decays": [self._keys], "out_gates": [self._values]}
            found |= {"delta": [self._keys]} if kind == "dt_bias" else {}
        if spec.kind == "mamba2" and not self.joins_groups:
            found |= {"delta_norm": [self._values]}
        return found.get(module)

    @property
    def _mixed_rows(self) -> list[range]:
        return _side_by_side(self.whole.mixed_parts, self._mixed)

    @property
    def channels(self) -> list[range]:
        """Its channels among all that are convolved."""
        return _side_by_side(self.whole.channel_parts, self._channels)

    @property
    def _values(self) -> range:
        if self.whole.kind == "conv":
            return self.value_heads
        return _times(self.value_heads, self.whole.value_dim)

    @property
    def _keys(self) -> range:
        return _times(self.key_heads, self.whole.key_dim)

    @property
    def _channels(self) -> list[range]:
        if self.whole.kind == "conv":
            return [self._values]
        both = [self._keys, self._keys]
        return [self._values, *both] if self.whole.kind == "mamba2" else [*both, self._values]

    @property
    def _mixed(self) -> list[range]:
        few = range(self.whole.key_dim)
        return {
            "delta": [*self._channels, self._values],
            "kda": [*self._channels, few, few],  # each rank makes its decays and gates of all of them
            "mamba2": [self._values, *self._channels],
            "conv": [self._values] * 3,
        }[self.whole.kind]


def fits(spec: RecurrentSpec, size: int) -> bool:
    """Whether so many tensor ranks can share value heads out evenly, and key heads or copies of them."""
    if spec.kind == "conv":
        return spec.values >= LEAST * size
    keys, values = spec.key_heads, spec.value_heads
    return values % size == 0 and max(keys, size) % min(keys, size) == 0


def _times(heads: range, width: int) -> range:
    return range(heads.start * width, heads.stop * width)


def _side_by_side(widths: Sequence[int], parts: Sequence[range]) -> list[range]:
    """A range of each of several parts, as it lies where they lie one behind the other."""
    found, start = [], 0
    for width, part in zip(widths, parts, strict=True):
        found.append(range(start + part.start, start + part.stop))
        start += width
    return found
