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
