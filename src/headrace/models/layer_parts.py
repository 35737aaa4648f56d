"""What layers of some models have beside attention and MLP: parts of models.spec's ModelConfig. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class LayerInputs:
    """What each layer adds of a token beside its residual stream (per-layer embeddings): `width` numbers, from a table
    of `vocab_size` tokens and from what enters the first layer. The layer gates them by its own stream."""

    width: int
    vocab_size: int


@dataclass(frozen=True, slots=True)
class Multipliers:
    """What numbers are multiplied by on their way through a layer, where models are trained so (maximal update
    parametrization): what gates a Mamba-2 layer's output, its channels by their parts (RecurrentSpec.channel_parts),
    and its steps; what `out` and `recurrent_out` make, the half of `up` that gates, and what `down` makes."""

    z: float
    channels: tuple[float, ...]
    gates: float
    out: float
    recurrent_out: float
    up: float
    down: float

    @property
    def of_rows(self) -> tuple[float, ...]:
        """All but those of channels."""
        return self.z, self.gates, self.out, self.recurrent_out, self.up, self.down


NO_TIMES = (1.0,) * 6
"""Multipliers.of_rows that change nothing."""


@dataclass(frozen=True, slots=True)
class HyperSpec:
    """Hyper-connections (arXiv 2409.19606): `streams` residual streams, whose sums are what attention and MLPs read,
    and to each of which they add. least: is added to what a stream counts; magnitude: the most that is added to it
    counts, but for post_least. rounds: each stream goes on as a sum of all, by weights that are balanced in so many
    rounds; 0: as it is. learned_end: what leaves the last layer is a learned sum of streams, not their mean."""

    streams: int
    least: float
    magnitude: float
    post_least: float = 0.0
    rounds: int = 0
    learned_end: bool = True

    @property
    def outputs(self) -> tuple[int, ...]:
        """Parts of what a half of a layer learns of its streams."""
        return (self.streams, self.streams, *((self.streams**2,) if self.rounds else ()))


@dataclass(frozen=True, slots=True)
class LatentSpec:
    """Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1): keys and values of all heads follow
    from one latent of `rank` numbers a token, and all heads share `rotated` numbers of a key, which carry its position.

    plain: numbers of a head's query and key that are not rotated; value: of a head's value. query_rank: width that
    queries pass through on their way, None: none. paired: files have numbers that are rotated together side by side.
    norm_eps: of the norms of latents, whatever the model's other norms have.
    """

    rank: int
    rotated: int
    plain: int
    value: int
    query_rank: int | None = None
    paired: bool = True
    norm_eps: float = 1e-6

    @property
    def query(self) -> int:
        """Numbers of a head's query as it is projected: those that are rotated first."""
        return self.rotated + self.plain

    def weights(self, heads: int, hidden: int) -> tuple[int, int]:
        """Elements of a layer's matrices before its attention, and behind it but for the MLP's."""
        width = self.query_rank or hidden
        queries = width * heads * self.query + (0 if self.query_rank is None else hidden * width)
        before = queries + hidden * (self.rotated + self.rank) + heads * self.plain * self.rank
        return before, heads * self.value * (self.rank + hidden)
