"""One rank: computes its part of each step and sends the hidden states that are wanted to rank 0."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from headrace.attention.execute import KeepActivations
from headrace.device import Device, current
from headrace.kernels.adapted_rows import row_numbers
from headrace.kernels.backend import Attend, backend_of
from headrace.kernels.block import Watch
from headrace.kv.storage import KVStorage, StateStorage
from headrace.models.decoder import Decoder, TokenBatch
from headrace.parallel import group_layout
from headrace.parallel.coming import Coming, NothingComes, SideStream
from headrace.parallel.group_context import GroupContext, TokenCounters
from headrace.parallel.merging import Kernels
from headrace.parallel.messages import RankStep, StepGroup
from headrace.parallel.outside import OutsideKV, PlacedGroup, placed
from headrace.parallel.states import RankStates
from headrace.parallel.step_fence import StepFence
from headrace.parallel.threads import RankThreads, one_rank_computes
from headrace.parallel.transport import LAST, Tag, Transfer, Transport
from headrace.parallel.whole_states import WholeStates
from headrace.parallel.workspace import Workspace
from headrace.strategies import STRATEGIES, load
from headrace.types import CHUNK

RUNS: dict[str, Callable[[GroupContext], Attend | None]] = {name: load(each.runs) for name, each in STRATEGIES.items()}

Hidden = dict[tuple[int, int, int], Tensor]
"""(group, part, position) -> hidden state [E]."""

PendingHidden = tuple[int, list[tuple[int, int]], Tensor, Transfer]
"""A receive of hidden states under way: group, (part, position) of each row, the rows, the receive."""


def device_of(decoder: Decoder) -> Device | None:
    """That which it computes on; None for the CPU."""
    device = current()
    return device if device.holds(torch.empty(0, device=decoder.device)) else None


class Rank:
    """A model, its pool or store of `storage.slots` chunks, and a place among the ranks of `transport`.

    threads: how many it computes with; None: as many as the caller has set. device: None for the CPU. fence: whoever
    sends it steps says so there (`sent`). tiers: may be set, with `coming`, to what takes a command for the rank's
    tiers and whom to answer. states: memory for those of recurrent layers, if the model has some.
    """

    def __init__(
        self,
        decoder: Decoder,
        storage: KVStorage | OutsideKV,
        backend: str,
        transport: Transport,
        threads: RankThreads | None = None,
        states: StateStorage | None = None,
    ) -> None:
        self.decoder, self.storage, self.transport, self.threads = decoder, storage, transport, threads
        spec = decoder.config.attention
        self.kernels = Kernels(backend_of(backend), spec, decoder.key_bias, decoder.sinks)
        self.workspace = Workspace(spec, storage.dtype, decoder.device)
        self.states = None if states is None else RankStates(states, transport, spec.layers, _whole(decoder, states))
        self.counters = TokenCounters()
        self.coming: Coming = NothingComes()
        self.tiers: Callable[[bytes, Callable[[bytes], None]], None] | None = None
        self.groups = 0
        self.device = device_of(decoder)
        self.side = None if self.device is None else SideStream(self.device)
        self.fence = StepFence(self.device)

    @property
    def pool(self) -> KVStorage:
        """Where its chunks lie, if that is its own memory: only then has it tiers."""
        assert isinstance(self.storage, KVStorage), "a rank whose KV is streamed has no pool"
        return self.storage

    @property
    def staged(self) -> int | None:
        """Chunks that it can have of a group at a time; None: any number."""
        return None if isinstance(self.storage, KVStorage) else self.storage.capacity

    def close(self) -> None:
        """Ends the threads that stream its KV. May be called again."""
        if not isinstance(self.storage, KVStorage):
            self.storage.close()

    def obey(self, command: bytes, answer: Callable[[bytes], None]) -> None:
        """Has the rank's tiers do something. Raises ValueError for one that has none."""
        if self.tiers is None:
            raise ValueError("this rank has no tiers")
        self.tiers(command, answer)

    @torch.inference_mode()
    def run(self, step: RankStep) -> Hidden:
        """Computes this rank's rows of the step. Rank 0 returns all wanted hidden states, the others nothing.

        Raises ValueError for a step that cannot be, RankLost if another rank is gone.
        """
        try:
            return self._run(step)
        finally:
            self.fence.computed()

    def _copy(self, copies: Sequence[tuple[int, int]]) -> None:
        for pair in copies:
            if not all(0 <= slot < self.pool.slots for slot in pair):
                raise ValueError(f"a chunk is to be copied between slots {pair} of {self.pool.slots}")
            self.pool.copy(*pair)

    def _run(self, step: RankStep) -> Hidden:
        for group in step.groups:
            group_layout.check(group, self.transport.size)
        if self.threads is not None:  # all ranks alike: rank 0 makes the logits, whoever computed the rows
            self.threads.use(one_rank_computes(step))
        self._copy(step.copies)
        found: Hidden = {}
        coming: list[PendingHidden] = []
        going: list[Transfer] = []
        if self.states is not None and step.moves:
            self.states.move(step.moves, self.groups)
        if self.states is not None:
            self.states.exchange(step.whole)
        first = self.groups + bool(step.moves)
        self.groups = first + len(step.groups)
        places = placed(step.groups, self.storage, self.coming, self.transport.rank, self.kernels.spec.windows)
        for index, (group, place) in enumerate(zip(step.groups, places, strict=True)):
            hidden = self._compute(place, first + index)
            mine = group_layout.wanted(group, self.transport.rank)
            if self.transport.rank == 0:
                found |= {(index, *key): row for key, row in zip(mine, hidden, strict=True)}
                coming += self._expect(index, group, first + index)
            elif mine:
                going.append(self.transport.isend(hidden.contiguous(), 0, Tag(first + index, LAST, 0)))
        for index, keys, rows, work in coming:
            work.wait()
            found |= {(index, *key): row for key, row in zip(keys, rows, strict=True)}
        for work in going:
            work.drain()
        if self.states is not None:
            self.states.drain()
        if not isinstance(self.storage, KVStorage):
            self.storage.computed()
        return found

    def _expect(self, index: int, group: StepGroup, number: int) -> list[PendingHidden]:
        """Receives of the hidden states that other ranks have."""
        width, dtype = self.decoder.config.embed_size, self.decoder.dtype
        found = []
        for rank in range(1, self.transport.size):
            keys = group_layout.wanted(group, rank)
            if keys:
                rows = torch.empty(len(keys), width, dtype=dtype, device=self.decoder.device)
                found.append((index, keys, rows, self.transport.irecv(rows, rank, Tag(number, LAST, 0))))
        return found

    def _compute(self, place: PlacedGroup, number: int) -> Tensor:
        """The wanted hidden states of this rank's rows, in their order: [n, E]."""
        group = place.group
        context = GroupContext(
            group, number, self.transport, place.storage, self.kernels, self.workspace, self.storage.slots,
            self.counters, place.coming, cuts=self.decoder.config.ends_in_attention, side=self.side,
        )  # fmt: skip
        recur = None if self.states is None else self.states.at(group, number)
        runs = group_layout.runs(group, self.transport.rank)
        none = self._nothing(self.decoder.config.embed_size)
        attend = RUNS[group.strategy](context)
        if attend is None:
            return none
        attend = place.told(attend)
        if not runs:
            self._pass_on(attend)
            return none
        rows = torch.tensor(_wanted_rows(group, runs), dtype=torch.int64)
        return self.decoder.forward(self._batch(group, runs), attend, rows, self._keep(place, runs), recur)

    def _keep(self, place: PlacedGroup, runs: list[group_layout.RowRange]) -> Watch | None:
        """Keeps the activations of rows in chunks that are this rank's own, and its turn among the tensor ranks."""
        group, storage = place.group, place.storage
        places = [group_layout.own_places(group, run, self.transport.rank, self.storage.slots) for run in runs]
        slots, offsets = (np.concatenate(each) for each in zip(*places, strict=True))
        if not isinstance(storage, KVStorage):
            return storage.keep(slots, offsets)
        if not storage.keeps_activations:
            return None
        chunks = np.concatenate([np.arange(run.start, run.end) for run in runs]) // CHUNK
        turns = self.decoder.turns
        mine = np.where(chunks % turns.ranks == turns.rank, slots, -1).astype(np.int32)
        return KeepActivations(mine, offsets, storage)

    def _pass_on(self, attend: Attend) -> None:
        """A rank without rows takes part in the exchange."""
        spec = self.kernels.spec
        for layer in range(spec.layers):
            kv_heads, dim = spec.shape(layer)
            q, kv = (self._nothing(heads, dim) for heads in (spec.heads, kv_heads))
            attend(layer, q, kv, kv)

    def _nothing(self, *shape: int) -> Tensor:
        """No rows."""
        return torch.empty(0, *shape, dtype=self.decoder.dtype, device=self.decoder.device)

    def _batch(self, group: StepGroup, runs: list[group_layout.RowRange]) -> TokenBatch:
        tokens: list[int] = []
        for run in runs:
            part = group.parts[run.part]
            tokens += part.tokens[run.start - part.start : run.end - part.start]
        positions = np.concatenate([np.arange(run.start, run.end) for run in runs])
        lengths = None
        if self.decoder.config.rope_depends_on_length:
            prompts = np.repeat([group.parts[run.part].prompt_len for run in runs], [run.rows for run in runs])
            lengths = torch.from_numpy(np.maximum(prompts, positions + 1))
        parts = [group.parts[run.part] for run in runs]
        own = [(run.start, run.end, p.adapter, p.adapter_start) for run, p in zip(runs, parts, strict=True)]
        return TokenBatch(torch.tensor(tokens), torch.from_numpy(positions), lengths, row_numbers(own))


def _whole(decoder: Decoder, states: StateStorage) -> WholeStates | None:
    """Of one of several tensor ranks."""
    group = decoder.turns.group
    return None if decoder.share is None or group is None else WholeStates(decoder.share, group, states)


def _wanted_rows(group: StepGroup, runs: list[group_layout.RowRange]) -> list[int]:
    rows: list[int] = []
    begin = 0
    for run in runs:
        part = group.parts[run.part]
        first = max(run.start, part.end - part.wanted)
        rows += range(begin + first - run.start, begin + run.rows)
        begin += run.rows
    return rows
