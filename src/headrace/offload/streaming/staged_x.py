"""X of the chunks of one rank of several, outside: which chunks have it, and K and V projected from it (KVPR).

A chunk has X if this rank computed all of its rows: on context ranks the owner of a chunk may have had others compute
some. Tensor ranks keep the chunks of a context rank in turn (models.x_turns), here by their slots. H: hidden size.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from headrace import memory
from headrace.device import Device
from headrace.kernels.adapted_rows import rows_at
from headrace.kernels.backend import Backend
from headrace.kernels.block import Blocks, Watch
from headrace.kernels.records import Pool
from headrace.kv.own_chunks import OwnChunks, Slots
from headrace.kv.storage import zeros_on
from headrace.models.decoder import Decoder
from headrace.models.layers import OneByOne
from headrace.offload.streaming.staging import gather, gather_rows
from headrace.offload.streaming.store import OutsideStore
from headrace.offload.streaming.throughput import OperationWork, Throughput
from headrace.types import CHUNK

AT_ONCE, ON_DEVICE = 4, 64
"""Chunks of each tensor rank that are projected at a time: what is between the products stays in the cache, and does
not in a device's."""

Projected = dict[int | None, Slots]
"""Window -> places in OwnChunks.slots of the cached chunks that are projected; the others are loaded."""
Send = Callable[[Callable[[], None], int], None]
"""(what moves so many bytes out, how many)"""


class PreparedRows(NamedTuple):
    """Chunks that are projected together, as all layers need them, on the device. slots: in the store, of all; mine:
    where this rank keeps X of its own, int64. cos_sin: rotations of their rows. places, offsets int32 [n * 64]: where
    their keys and values go. layers: which project them."""

    slots: list[int]
    mine: Tensor
    cos_sin: Tensor | None
    places: Tensor
    offsets: Tensor
    layers: Blocks | OneByOne


class StagedX:
    """store: keeps X, in fast memory if it is `resident`. capacity: chunks of a staging buffer. weight_bytes: of a
    layer's matrices, where these are streamed over the same link. device: which computes; None: the host.

    share: which part of the chunks that have X is projected; None: as link and arithmetic are found to be.
    """

    def __init__(
        self,
        decoder: Decoder,
        backend: Backend,
        store: OutsideStore,
        capacity: int,
        buffers: int,
        resident: bool = False,
        weight_bytes: int = 0,
        device: Device | None = None,
    ) -> None:
        self.decoder, self.backend, self.store = decoder, backend, store
        self.resident, self.weight_bytes, self.device = resident, weight_bytes, device
        self.place = torch.device("cpu") if device is None else device.place
        self.turns = decoder.turns
        self.most = -(-capacity // self.turns.ranks)
        shape = (self.most, CHUNK, store.hidden)
        fast = memory.zeros if device is None else zeros_on(device.place)
        self.buffers = [fast(shape, store.rows) for _ in range(0 if resident else buffers)]
        self.share: float | None = None
        self.throughput = Throughput(store.chunk_bytes, store.x_bytes // self.turns.ranks, resident)
        self._whole = np.zeros(store.slots, dtype=bool)

    def mine(self, slots: Slots) -> Slots:
        """Those of these slots whose X this rank keeps."""
        return slots[slots % self.turns.ranks == self.turns.rank]

    def _at(self, slots: Slots) -> Slots:
        """Where in the store their X lies."""
        return slots // np.int32(self.turns.ranks)

    # -- what is projected

    def choose(self, groups: Sequence[OwnChunks]) -> list[Projected]:
        """For the groups of a step, in their order. All tensor ranks call it alike. Raises RankLost."""
        fresh = np.zeros(self.store.slots, dtype=bool)
        able: list[list[Slots]] = []
        wished: list[int] = []
        for own in groups:
            able.append([self._able(own, cached, fresh) for cached in own.cached.values()])
            wished += [self._wish(own, len(c), len(x)) for c, x in zip(own.cached.values(), able[-1], strict=True)]
            self._whole[own.slots[own.begun]] = True
            self._whole[own.slots[own.foreign]] = False
            fresh[own.slots[own.written]] = True
        counts = iter(self._agreed(wished))
        return [
            {window: places[: next(counts)] for window, places in zip(own.cached, some, strict=True)}
            for own, some in zip(groups, able, strict=True)
        ]

    def _able(self, own: OwnChunks, cached: Slots, fresh: np.ndarray) -> Slots:
        """Places of the cached chunks that have X, as many of each tensor rank as a buffer holds."""
        slots = own.slots[cached]
        found = cached[self._whole[slots] & ~fresh[slots] & np.isin(cached, own.written, invert=True)]
        turns = own.slots[found] % self.turns.ranks
        fits = np.ones(len(found), dtype=bool)
        for rank in range(self.turns.ranks):
            fits[np.flatnonzero(turns == rank)[self.most :]] = False
        return found[fits]

    def _wish(self, own: OwnChunks, cached: int, able: int) -> int:
        """How many chunks to project so that a layer takes least; none on a rank without rows whose weights are
        streamed, since it does not load them."""
        if not able or (self.weight_bytes and not own.rows):
            return 0
        if self.share is not None:
            return math.ceil(self.share * able)
        return self.throughput.split(cached, able, self.work(own))

    def _agreed(self, wished: list[int]) -> list[int]:
        """Tensor ranks project the same chunks: as many as they wish in the mean."""
        group = self.turns.group
        if group is None or not wished:
            return wished
        told = group.gather(torch.tensor([wished]), [len(wished)] * group.size)
        counts: list[int] = (told.view(group.size, -1).sum(0) // group.size).tolist()
        return counts

    def work(self, own: OwnChunks) -> OperationWork:
        return OperationWork(own.rows, self.weight_bytes)

    # -- out

    def keep(self, own: OwnChunks, places: Slots, offsets: Slots, send: Send) -> Watch:
        """What Decoder.forward calls as `watch`: keeps X of rows by the place in `own` (-1: of another rank's chunk)
        and offset of each."""
        here = np.flatnonzero(places >= 0)
        slots = own.slots[places[here]]
        mine = slots % self.turns.ranks == self.turns.rank
        rows, into = torch.from_numpy(here[mine]), self._at(slots[mine]).astype(np.int64) * CHUNK + offsets[here[mine]]
        rows = rows.to(self.place)
        leaves = self.device is not None and not self.resident
        put = partial(self._put_outside, into) if leaves else partial(self._put, torch.from_numpy(into).to(self.place))

        def watch(layer: int, x: Tensor) -> None:
            if self.resident:
                put(layer, x[rows])
            elif len(rows):
                kept = x[rows]
                send(partial(put, layer, kept), kept.nbytes)

        return watch

    def _put(self, into: Tensor, layer: int, x: Tensor) -> None:
        self.store.x[layer].view(-1, self.store.hidden)[into] = x

    def _put_outside(self, into: NDArray[np.int64], layer: int, x: Tensor) -> None:
        """Out of a device; rows that lie behind each other there go in one copy."""
        gather_rows(self.store.x[layer].view(-1, self.store.hidden), x, into)

    # -- in

    def load(self, buffer: int, layer: int, slots: Slots) -> None:
        """X of those of these chunks that this rank keeps, into a staging buffer."""
        gather(self.buffers[buffer], self.store.x[layer], self._at(self.mine(slots)))

    def bytes_of(self, slots: Slots) -> int:
        """What `load` moves."""
        return 0 if self.resident else len(self.mine(slots)) * self.store.x_bytes

    def prepare(self, own: OwnChunks, places: Slots) -> list[PreparedRows]:
        """What `project` takes of the chunks at these places."""
        some = (AT_ONCE if self.device is None else ON_DEVICE) * self.turns.ranks
        return [self._prepared(own, places[first : first + some]) for first in range(0, len(places), some)]

    def _prepared(self, own: OwnChunks, places: Slots) -> PreparedRows:
        slots = own.slots[places]
        positions = (torch.from_numpy(own.numbers[places]).long()[:, None] * CHUNK + torch.arange(CHUNK)).view(-1)
        rope, lengths = self.decoder.rope, self._lengths(own, places, positions)
        return PreparedRows(
            slots.tolist(),
            torch.from_numpy(self._at(self.mine(slots))).long().to(self.place),
            rope.at(positions, lengths).to(self.place) if rope else None,
            torch.from_numpy(places).repeat_interleave(CHUNK).to(self.place),
            torch.arange(CHUNK, dtype=torch.int32).repeat(len(places)).to(self.place),
            self._layers(own, places, positions),
        )

    def project(self, layer: int, buffer: int, pool: Pool, rows: Sequence[PreparedRows]) -> None:
        """K and V of these chunks, whose X has come, into the pool. All tensor ranks call it alike. Raises RankLost."""
        taken = 0
        for each in rows:
            count = len(each.mine)
            x = self.store.x[layer][each.mine] if self.resident else self.buffers[buffer][taken : taken + count]
            taken += count
            whole = self.turns.gathered(x, each.slots)
            k, v = each.layers.project(layer, whole.flatten(0, 1), each.cos_sin)
            self.backend.append(pool, k, v, each.places, each.offsets)

    def _layers(self, own: OwnChunks, places: Slots, positions: Tensor) -> Blocks | OneByOne:
        """With the adapters of the projected rows: that of any sequence that meets a chunk, whose name is of it."""
        layers = self.decoder.layers
        if not len(own.adapters) or own.adapters[:, 0].max() < 0:
            return layers
        each = torch.from_numpy(own.adapters[places]).long().repeat_interleave(CHUNK, 0)
        adapted = rows_at(positions, each[:, 0], each[:, 1])
        return layers if adapted is None else layers.adapted_by(adapted)

    def _lengths(self, own: OwnChunks, places: Slots, positions: Tensor) -> Tensor | None:
        """TokenBatch.rope_lengths of the projected rows: as when they were computed first."""
        if not self.decoder.config.rope_depends_on_length:
            return None
        return torch.maximum(torch.from_numpy(own.prompts[places]).long().repeat_interleave(CHUNK), positions + 1)
