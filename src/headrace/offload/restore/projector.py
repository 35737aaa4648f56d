"""K and V of stored chunks, projected from their activations with the model's own weights, and with its adapters.

H: hidden size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from headrace.kernels.adapted_rows import rows_at
from headrace.kernels.backend import Backend
from headrace.kv.storage import KVStorage
from headrace.models.decoder import Decoder
from headrace.models.x_turns import XTurns
from headrace.offload.ranked.words import Prompt
from headrace.types import CHUNK


class Projector:
    """Puts K and V into a pool whose chunks have activations. turns: whose these are; by default the decoder's."""

    def __init__(self, decoder: Decoder, storage: KVStorage, backend: Backend, turns: XTurns | None = None) -> None:
        self.decoder, self.storage, self.backend = decoder, storage, backend
        self.turns = decoder.turns if turns is None else turns

    def __call__(self, chunks: Sequence[int], slots: Sequence[int], of: Prompt) -> Callable[[int], None]:
        """What projects a layer, given its number, of chunks of a sequence, by number, which lie in these slots. It
        takes the activations of those that are this rank's from there (models.x_turns). Tensor ranks call it alike.
        Raises RankLost."""
        return _Projected(self, chunks, slots, of)


class _Projected:
    """What all layers have in common is made once: to carry it to a device for each would have the host wait."""

    def __init__(self, by: Projector, chunks: Sequence[int], slots: Sequence[int], of: Prompt) -> None:
        self.by, self.chunks, decoder = by, chunks, by.decoder
        positions = positions_of(chunks)
        lengths = (positions + 1).clamp(min=of.length) if decoder.config.rope_depends_on_length else None
        self.cos_sin = decoder.rope.at(positions, lengths).to(decoder.device) if decoder.rope else None
        adapted = rows_at(positions, of.adapter, of.adapter_start)
        self.layers = decoder.layers if adapted is None else decoder.layers.adapted_by(adapted)
        mine = [slot for chunk, slot in zip(chunks, slots, strict=True) if by.turns.mine(chunk)]
        where = torch.tensor(slots, dtype=torch.int32).repeat_interleave(CHUNK)
        offsets = torch.arange(CHUNK, dtype=torch.int32).repeat(len(slots))
        places = (torch.tensor(mine, dtype=torch.int64), where, offsets)
        self.mine, self.slots, self.offsets = (each.to(decoder.device) for each in places)

    def __call__(self, layer: int) -> None:
        storage = self.by.storage
        assert storage.x is not None, "the pool keeps activations"
        x = self.by.turns.gathered(storage.x[layer].index_select(0, self.mine), self.chunks)
        k, v = self.layers.project(layer, x.flatten(0, 1), self.cos_sin)
        self.by.backend.append(storage.pool(layer), k, v, self.slots, self.offsets)


def positions_of(chunks: Sequence[int]) -> Tensor:
    """Absolute positions of the tokens of these chunks, int64 [64 n]."""
    return (torch.tensor(chunks, dtype=torch.int64)[:, None] * CHUNK + torch.arange(CHUNK)).view(-1)
