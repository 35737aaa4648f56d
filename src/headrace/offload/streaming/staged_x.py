"""X of the chunks of one rank of several, outside: which chunks have it, and K and V projected from it (KVPR).

A chunk has X if this rank computed all of its rows: on context ranks the owner of a chunk may have had others compute
some. Tensor ranks keep the chunks of a context rank in turn (models.x_turns), here by their slots. H: hidden size.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import torch
from torch import Tensor

from headrace import memory
from headrace.kernels.backend import Backend
from headrace.kernels.block import Watch
from headrace.kernels.records import Pool
from headrace.kv.own_chunks import OwnChunks, Slots
from headrace.models.decoder import Decoder
from headrace.offload.streaming.staging import gather
from headrace.offload.streaming.store import OutsideStore
from headrace.offload.streaming.throughput import OperationWork, Throughput
from headrace.types import CHUNK

AT_ONCE = 4
"""Chunks of each tensor rank that are projected at a time: what is between the products stays in the cache."""

Projected = dict[int | None, Slots]
"""Window -> places in OwnChunks.slots of the cached chunks that are projected; the others are loaded."""
Send = Callable[[Callable[[], None], int], None]
"""(what moves so many bytes out, how many)"""


class StagedX:
    """store: keeps X, in fast memory if it is `resident`. capacity: chunks of a staging buffer. weight_bytes: of a
    layer's matrices, where these are streamed over the same link.

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
    ) -> None:
        self.decoder, self.backend, self.store = decoder, backend, store
        self.resident, self.weight_bytes = resident, weight_bytes
        self.turns = decoder.turns
        self.most = -(-capacity // self.turns.ranks)
        shape = (self.most, CHUNK, store.hidden)
        self.buffers = [memory.zeros(shape, store.rows) for _ in range(0 if resident else buffers)]
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
        put = partial(self._put, torch.from_numpy(into))

        def watch(layer: int, x: Tensor) -> None:
            if self.resident:
                put(layer, x[rows])
            elif len(rows):
                kept = x[rows]
                send(partial(put, layer, kept), kept.nbytes)

        return watch

    def _put(self, into: Tensor, layer: int, x: Tensor) -> None:
        self.store.x[layer].view(-1, self.store.hidden)[into] = x

    # -- in

    def load(self, buffer: int, layer: int, slots: Slots) -> None:
        """X of those of these chunks that this rank keeps, into a staging buffer."""
        gather(self.buffers[buffer], self.store.x[layer], self._at(self.mine(slots)))

    def bytes_of(self, slots: Slots) -> int:
        """What `load` moves."""
        return 0 if self.resident else len(self.mine(slots)) * self.store.x_bytes

    def project(self, layer: int, buffer: int, pool: Pool, own: OwnChunks, places: Slots) -> float:
        """K and V of the chunks at these places, whose X has come, into the pool; the seconds it took. All tensor ranks
        call it alike. Raises RankLost."""
        began, taken = time.perf_counter(), 0
        for first in range(0, len(places), AT_ONCE * self.turns.ranks):
            some = places[first : first + AT_ONCE * self.turns.ranks]
            slots = own.slots[some]
            mine = self._at(self.mine(slots))
            x = self.store.x[layer][mine] if self.resident else self.buffers[buffer][taken : taken + len(mine)]
            taken += len(mine)
            whole = self.turns.gathered(x, slots.tolist())
            positions = (torch.from_numpy(own.numbers[some]).long()[:, None] * CHUNK + torch.arange(CHUNK)).view(-1)
            k, v = self.decoder.project(layer, whole.flatten(0, 1), positions, self._lengths(own, some, positions))
            offsets = torch.arange(CHUNK, dtype=torch.int32).repeat(len(some))
            self.backend.append(pool, k, v, torch.from_numpy(some).repeat_interleave(CHUNK), offsets)
        seconds = time.perf_counter() - began
        self.throughput.projected(len(places), seconds)
        return seconds

    def _lengths(self, own: OwnChunks, places: Slots, positions: Tensor) -> Tensor | None:
        """TokenBatch.rope_lengths of the projected rows: as when they were computed first."""
        if not self.decoder.config.rope_depends_on_length:
            return None
        return torch.maximum(torch.from_numpy(own.prompts[places]).long().repeat_interleave(CHUNK), positions + 1)
