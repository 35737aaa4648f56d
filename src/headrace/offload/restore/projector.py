"""K and V of stored chunks, projected from their activations with the model's own weights.

H: hidden size.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from headrace.kernels.backend import Backend
from headrace.kv.storage import KVStorage
from headrace.models.decoder import Decoder
from headrace.types import CHUNK


class Projector:
    """Puts K and V into a pool whose chunks have activations."""

    def __init__(self, decoder: Decoder, storage: KVStorage, backend: Backend) -> None:
        self.decoder, self.storage, self.backend = decoder, storage, backend

    def __call__(self, layer: int, x: Tensor, chunks: Sequence[int], slots: Sequence[int], prompt_len: int) -> None:
        """Chunks of a sequence, by number, which lie in these slots. x [n, 64, H]: activations of those that are this
        rank's (models.x_turns); tensor ranks call this alike. Raises RankLost."""
        self.put(layer, self.decoder.turns.gathered(x, chunks), chunks, slots, prompt_len)

    def put(self, layer: int, x: Tensor, chunks: Sequence[int], slots: Sequence[int], prompt_len: int) -> None:
        """As __call__, with the activations of all of them."""
        positions = positions_of(chunks)
        lengths = (positions + 1).clamp(min=prompt_len) if self.decoder.config.rope_depends_on_length else None
        k, v = self.decoder.project(layer, x.flatten(0, 1), positions, lengths)
        where = torch.tensor(slots, dtype=torch.int32).repeat_interleave(CHUNK)
        offsets = torch.arange(CHUNK, dtype=torch.int32).repeat(len(slots))
        self.backend.append(self.storage.pool(layer), k, v, where, offsets)


def positions_of(chunks: Sequence[int]) -> Tensor:
    """Absolute positions of the tokens of these chunks, int64 [64 n]."""
    return (torch.tensor(chunks, dtype=torch.int64)[:, None] * CHUNK + torch.arange(CHUNK)).view(-1)
