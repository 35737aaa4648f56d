"""Recurrent states of tensor ranks as wholes: what tiers store is the state of all heads, whoever has computed them.

Each tensor rank has the states of its own heads (models.recurrent_shares). The first has room for one whole state: the
others give it theirs before it is stored, and get theirs once it has been read. So a state that any number of ranks
stored is restored by any other.
"""

from __future__ import annotations

import torch
from torch import Tensor

from headrace.kernels.records import LayerStates
from headrace.kv.storage import StateStorage
from headrace.models.recurrent_shares import RecurrentShare
from headrace.models.shards import ShardGroup, Share


class WholeStates:
    """shares: what each tensor rank computes. room: on the first of them, one whole state."""

    def __init__(self, share: Share, group: ShardGroup, own: StateStorage) -> None:
        self.shares, self.group, self.own = share.recurrent_shares, group, own
        whole = self.shares[0].whole
        self.room = StateStorage(whole, 1, own.dtype, own.layers[0].last.device) if group.rank == 0 else None

    def gather(self, slot: int) -> None:
        """Puts the state in a slot of every rank into the room of the first. All ranks call it. Raises RankLost."""
        for layer, own in enumerate(self.own.layers):
            for place, x in enumerate((own.last, own.matrices)):
                sizes = [self._size(each, place) for each in self.shares]
                if not all(sizes):
                    continue  # a short convolution has no matrix
                made = self.group.gather(x[slot].reshape(1, -1), sizes)
                if self.room is not None:
                    self._put(self.room.layers[layer], place, made.flatten().split(sizes))

    def scatter(self, slot: int) -> None:
        """Puts the parts of the state in the room of the first into that slot of every rank. All ranks call it. Raises
        RankLost."""
        for layer, own in enumerate(self.own.layers):
            for place, x in enumerate((own.last, own.matrices)):
                if x[slot].numel():
                    parts = None if self.room is None else self._parts(self.room.layers[layer], place)
                    x[slot] = self.group.scatter(parts, x[slot])

    def _size(self, share: RecurrentShare, place: int) -> int:
        spec = share.spec
        if place == 0:
            return (spec.kernel - 1) * spec.channels
        return spec.value_heads * spec.key_dim * spec.value_dim

    def _put(self, whole: LayerStates, place: int, parts: tuple[Tensor, ...]) -> None:
        for share, part in zip(self.shares, parts, strict=True):
            if place == 0:
                whole.last[0][:, _numbers(share.channels)] = part.view(-1, share.spec.channels)
            else:
                own = whole.matrices[0, share.value_heads.start : share.value_heads.stop]
                own.copy_(part.view_as(own))

    def _parts(self, whole: LayerStates, place: int) -> list[Tensor]:
        """What each rank has of a whole state."""
        if place == 0:
            return [whole.last[0][:, _numbers(share.channels)] for share in self.shares]
        return [whole.matrices[0, share.value_heads.start : share.value_heads.stop] for share in self.shares]


def _numbers(ranges: list[range]) -> Tensor:
    return torch.cat([torch.arange(part.start, part.stop) for part in ranges])
