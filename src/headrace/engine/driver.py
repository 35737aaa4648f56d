"""Rank 0 of several: makes a step of slices for all ranks, has it computed, and collects what they say.

Who computes what is the planner's choice, made when a prompt's slice is scheduled, since it decides which rank shall
own the new chunks, or that of the restore that it belongs to (offload.restore.ranked_plan):

    chain, single      one rank keeps all: the last of the chain, whose order is turned so that this is the rank that
                       holds the beginning of the block, or else the one that holds most of a longer cached part, or
                       else the one with the most room
    the others         blocks of 2,048 tokens go round the ranks

A decoding sequence is computed by the rank that owns its newest chunk: alone if that rank owns all of its chunks, by
ring pass-Q otherwise.

Of a model with recurrent layers a prompt is computed by chain or single alone: where no rank has room for all new
chunks, each rank computes those that it owns, one after the other. Its states are with whoever computes
(parallel.states).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import msgspec
import torch
from torch import Tensor

from headrace.engine.executor import Computed, Executor, table_of, wanted_of, wanted_rows
from headrace.engine.group_room import GroupRoom
from headrace.engine.ranked_streams import RankedStreams
from headrace.engine.row_copies import Copy
from headrace.engine.sequence import SequenceState, Slice
from headrace.kv.cache import KVCache
from headrace.kv.chunk_table import ChunkTable, Owners
from headrace.logs import short_id
from headrace.parallel import messages
from headrace.parallel.interrupts import held_back
from headrace.parallel.messages import StateMove, StepGroup, StepPart, WholeState
from headrace.parallel.rank import Hidden, Rank
from headrace.parallel.states import StateHolders
from headrace.parallel.transport import RankLost
from headrace.planner.choice import StrategyChoice
from headrace.planner.schedule import keeper_of
from headrace.stats import EngineStats
from headrace.strategies import FALLBACK, KEEPS_ALL, STRATEGIES
from headrace.types import BLOCK_CHUNKS, CHUNK, chunks_for

log = logging.getLogger(__name__)

Advise = Callable[[int, int, Sequence[float], tuple[str, ...]], StrategyChoice]
"""(new tokens, cached tokens, of these on each rank, strategies allowed) -> StrategyChoice: see planner.choice."""

Places = list[tuple[int, int, int]]
"""(position up to which, group, part) of a slice, in order."""


@dataclass(slots=True)
class Driver(Executor):
    """Has steps computed by all ranks. send(step) hands a step to all other ranks, or raises RankLost.

    counts: prefills by strategy. end(): ends the other ranks. staged: chunks that a rank can have of a group at a time,
    if not any number; streams: what ranks have streamed, if they do. confirm(): see Executor. copies: whether chunks
    may be copied before a step.
    """

    rank: Rank
    cache: KVCache
    send: Callable[[bytes], None]
    advise: Advise
    allowed: tuple[str, ...] = tuple(STRATEGIES)
    counts: dict[str, int] = field(default_factory=dict)
    steps: int = 0
    end: Callable[[], None] = lambda: None
    staged: int | None = None
    streams: RankedStreams | None = None
    confirm: Callable[[], None] = lambda: None
    copies: bool = False
    holders: StateHolders | None = field(init=False)
    _planned: dict[SequenceState, StrategyChoice] = field(default_factory=dict)
    _copying: list[tuple[int, int]] = field(default_factory=list)
    _left: bool = False
    """A step was begun and not ended."""

    def __post_init__(self) -> None:
        self.holders = None if self.cache.states is None else StateHolders(self.cache.states.total)

    @property
    def size(self) -> int:
        return self.cache.ranks

    # -- when a slice is scheduled

    @property
    def copy(self) -> Copy | None:
        """See Executor.copy: where every rank has a part of each chunk, which it copies as the step begins."""
        return self._note_copy if self.copies and self.size == 1 and self.holders is None else None

    def _note_copy(self, source: int, target: int) -> None:
        self._copying.append((source, target))

    def owners(self, sequence: SequenceState, start: int, count: int) -> Owners | None:
        """Chooses how to compute a slice of a prompt, and who shall own its new chunks (Scheduler.owners)."""
        table = sequence.table
        assert table is not None, "a scheduled sequence has a table"
        if Slice(sequence, start, count).decodes:
            return None
        keeper = self._keeper(table, start, count)
        allowed = self.allowed if keeper is not None else self._without_keeper()
        cached_on = self._cached_on(table)
        wanted = sequence.planned.strategy(start) if sequence.planned else ""
        if wanted in allowed:
            allowed = (wanted,)
        if count <= CHUNK and keeper is not None and "single" in allowed and sum(cached_on) == cached_on[keeper]:
            choice = StrategyChoice(
                "single", (start, start + count), (keeper,), {}, "single: one chunk"
            )  # nothing to share
        else:
            choice = self.advise(count, start, cached_on, allowed)
        if choice.strategy == wanted:
            choice = replace(choice, reason=f"{choice.reason}; as the restore was planned")
        if choice.strategy in KEEPS_ALL and keeper is not None:
            self._planned[sequence] = replace(choice, ranks=ending_in(choice.ranks, keeper))
            return lambda chunk: keeper
        self._planned[sequence] = choice
        first = max(range(self.size), key=self.cache.available_on)
        joins = joined_block(table)
        return lambda chunk: joins.get(chunk // BLOCK_CHUNKS, keeper_of(chunk // BLOCK_CHUNKS, self.size, first))

    def _without_keeper(self) -> tuple[str, ...]:
        """Strategies for a slice whose new chunks no rank has room for."""
        if self.holders is not None:
            return ("single",)
        return tuple(set(self.allowed) - set(KEEPS_ALL)) or (FALLBACK,)

    def expected_s(self, slices: Sequence[Slice]) -> float:
        """As the planner predicted when the slices were scheduled."""
        choices = [self._planned[part.sequence] for part in slices if part.sequence in self._planned]
        return sum(choice.predicted_s.get(choice.strategy, 0.0) for choice in choices)

    def _keeper(self, table: ChunkTable, start: int, count: int) -> int | None:
        """The rank that would keep all new chunks; None if none has room for them."""
        new = chunks_for(start + count) - len(table.nodes)
        if start // CHUNK % BLOCK_CHUNKS:
            ranks = [table.owner(start // CHUNK - 1)]  # a block has one owner
        else:
            ranks = sorted(range(self.size), key=self.cache.available_on, reverse=True)
            cached_on = self._cached_on(table)
            if max(cached_on) >= count:  # rather where they are read than where most room is
                ranks.sort(key=cached_on.__getitem__, reverse=True)
        joins, last = joined_block(table), (chunks_for(start + count) - 1) // BLOCK_CHUNKS
        if last in joins:
            ranks = [rank for rank in ranks if rank == joins[last]]
        return next((rank for rank in ranks if self.cache.available_on(rank) >= new), None)

    def _cached_on(self, table: ChunkTable) -> list[float]:
        counts = [0.0] * self.size
        for chunk in range(len(table.nodes)):
            counts[table.owner(chunk)] += CHUNK
        return counts

    def add_stats(self, stats: EngineStats) -> None:
        stats.ranks.prefills = dict(self.counts)
        if self.streams is not None:
            stats.stream = self.streams.told()

    @property
    def told_late(self) -> bool:
        return self.streams is not None

    def close(self) -> None:
        self.end()

    # -- when the step is computed

    def run(self, slices: Sequence[Slice]) -> Computed:
        """See Executor.run. Raises RankLost."""
        groups, places = self._groups(slices)
        hidden = self._run(groups)
        rows: list[Tensor] = []
        for part, found in zip(slices, places, strict=True):
            rows += [hidden[(*_place(found, at), at)] for at in range(part.end - wanted_of(part), part.end)]
        if not rows:
            return Computed(torch.empty(0, 0), [], timed=self.rank.device is None)
        with torch.inference_mode():
            computed = wanted_rows(slices).computed(torch.stack(rows), self.rank.decoder.logits)
        return computed._replace(timed=self._waited(slices))

    def _waited(self, slices: Sequence[Slice]) -> bool:
        """Whether the step is over, so that its time counts. On a device it has only been launched: a prompt of which a
        token is drawn, which waits for it anyway, is waited for here."""
        device = self.rank.device
        if device is None:
            return True
        if len(slices) > 1 or slices[0].length == 1:
            return False
        over = device.event(blocking=True)
        over.record(device.current_stream())
        over.synchronize()
        return True

    def _run(
        self, groups: list[StepGroup], moves: Sequence[StateMove] = (), whole: Sequence[WholeState] = ()
    ) -> Hidden:
        """Raises RankLost, also behind a step that was left: whoever interrupts it twice leaves the ranks in it."""
        if self._left:
            raise RankLost("a step was interrupted, and the ranks are no longer in turn: make a new LLM")
        step = messages.RankStep(self.steps, groups, list(moves), self._copying, list(whole))
        self.steps, self._copying = self.steps + 1, []
        with held_back():
            try:
                self.send(messages.encode(step))
                return self.rank.run(step)
            except KeyboardInterrupt:
                self._left = True
                raise

    def fetch(self, slot: int) -> int:
        """Has rank 0 hold the state in a slot, between two steps (offload.stored_states.StateHome). Raises RankLost."""
        assert self.holders is not None, "only a model with recurrent layers has states"
        moves = [StateMove(slot, self.holders.of[slot], 0)] if self.holders.of[slot] != 0 else []
        whole = [WholeState(slot, read=False)] if self._several else []
        if moves or whole:
            self._run([], moves, whole)
            self.holders.of[slot] = 0
        return self.place(slot)

    def place(self, slot: int) -> int:
        """Where rank 0 has a state: tensor ranks have their parts, and the first of them room for one whole."""
        return 0 if self._several else slot

    def written(self, slot: int) -> None:
        """Rank 0 has put a state there. Raises RankLost."""
        assert self.holders is not None, "only a model with recurrent layers has states"
        self.holders.of[slot] = 0
        if self._several:
            self._run([], [], [WholeState(slot, read=True)])

    @property
    def _several(self) -> bool:
        """Whether tensor ranks have a part of each state."""
        return self.rank.states is not None and self.rank.states.whole is not None

    def _groups(self, slices: Sequence[Slice]) -> tuple[list[StepGroup], list[Places]]:
        """The groups in an order in which a chunk is written before another sequence reads it, and where each slice
        stands."""
        found: list[tuple[str, list[StepPart]]] = []
        kinds: list[tuple[str, bool]] = []
        places: list[Places] = []
        room = GroupRoom(self.staged, self.cache.pool.per_rank)
        for part in slices:
            strategy, made = self._part(part)
            # What decodes is computed together, whole prompts of single ranks one after the other.
            decodes = part.length == 1 or part.decodes
            kind = (strategy, STRATEGIES[strategy].fused or (strategy == "single" and decodes))
            places.append([])
            for each in apart(made) if strategy == "single" else [made]:
                if not (found and kinds[-1] == kind and kind[1] and room.takes(each, strategy)):
                    room.begin(each)
                    found.append((strategy, []))
                    kinds.append(kind)
                found[-1][1].append(each)
                places[-1].append((each.end, len(found) - 1, len(found[-1][1]) - 1))
        return [StepGroup(strategy, parts) for strategy, parts in found], places

    def _part(self, part: Slice) -> tuple[str, StepPart]:
        table = table_of(part)
        choice = self._planned.pop(part.sequence, None)
        if choice is None:
            strategy, bounds, ranks = self._decode(part, table)
        else:
            choice = self._possible(choice, part, table)
            strategy, bounds, ranks = choice.strategy, list(choice.bounds), list(choice.ranks)
            self._note(part, choice)
            mark_activations(table, bounds, ranks)
        slots = table.slots[: chunks_for(part.end)].tolist()
        wanted, prompt_len = wanted_of(part), part.sequence.prompt_len
        made = StepPart(part.tokens, part.start, slots, bounds, ranks, wanted, prompt_len)
        if self.holders is not None:
            states = self.holders.route(table.track.segments, part.start, bounds, ranks)
            made = msgspec.structs.replace(made, states=states)
        if part.sequence.adapter is not None:
            number, start = part.sequence.adapter
            made = msgspec.structs.replace(made, adapter=number, adapter_start=start)
        return strategy, made

    def _decode(self, part: Slice, table: ChunkTable) -> tuple[str, list[int], list[int]]:
        home = table.owner(part.start // CHUNK)
        alone = bool((table.slots // self.cache.pool.per_rank == home).all())
        return "single" if alone else "ring-q", [part.start, part.end], [home]

    def _possible(self, choice: StrategyChoice, part: Slice, table: ChunkTable) -> StrategyChoice:
        """The choice, or pass-KV where chunks had to be placed on ranks that would not see them."""
        if choice.strategy not in KEEPS_ALL:
            return choice
        owners = {table.owner(chunk) for chunk in range(part.start // CHUNK, chunks_for(part.end))}
        if owners == {choice.ranks[-1]}:
            return choice
        if self.holders is not None:
            bounds, ranks = runs_of_owners(table, part)
            reason = f"{choice.strategy} had no rank with room for all new chunks: single, by the owners in turn"
            return replace(choice, strategy="single", bounds=bounds, ranks=ranks, reason=reason)
        other = self.advise(part.length, part.start, self._cached_on(table), (FALLBACK,))
        return replace(other, reason=f"{choice.strategy} had no room on rank {choice.ranks[-1]}: {other.reason}")

    def _note(self, part: Slice, choice: StrategyChoice) -> None:
        self.counts[choice.strategy] = self.counts.get(choice.strategy, 0) + 1
        part.sequence.strategy, part.sequence.strategy_reason = choice.strategy, choice.reason
        request = short_id(part.sequence.request.request_id)
        log.debug("%-8s  %d tokens after %d: %s", request, part.length, part.start, choice.reason)


def _place(places: Places, position: int) -> tuple[int, int]:
    """(group, part) of a position."""
    return next((group, part) for end, group, part in places if position < end)


def runs_of_owners(table: ChunkTable, part: Slice) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """(bounds, ranks) of a slice each of whose new chunks is computed by its owner."""
    bounds, ranks = [part.start], [table.owner(part.start // CHUNK)]
    for chunk in range(part.start // CHUNK + 1, chunks_for(part.end)):
        if table.owner(chunk) != ranks[-1]:
            bounds.append(chunk * CHUNK)
            ranks.append(table.owner(chunk))
    return (*bounds, part.end), tuple(ranks)


def apart(part: StepPart) -> list[StepPart]:
    """Each shard of a part as one of its own."""
    if len(part.ranks) == 1:
        return [part]
    made = []
    for begin, end, rank in zip(part.bounds, part.bounds[1:], part.ranks, strict=False):
        wanted = max(0, min(end - begin, end - (part.end - part.wanted)))
        tokens, slots = part.tokens[begin - part.start : end - part.start], part.slots[: chunks_for(end)]
        states = [run for run in part.states if begin < run.end <= end]
        own = (part.adapter, part.adapter_start)
        made.append(StepPart(tokens, begin, slots, [begin, end], [rank], wanted, part.prompt_len, states, *own))
    return made


def joined_block(table: ChunkTable) -> dict[int, int]:
    """The block of which later chunks are on their way already, and the owner of these; most tables have none."""
    if table.joins is None or not table.joins[0] % BLOCK_CHUNKS:
        return {}
    chunk, owner = table.joins
    return {chunk // BLOCK_CHUNKS: owner}


def mark_activations(table: ChunkTable, bounds: Sequence[int], ranks: Sequence[int]) -> None:
    """Takes note of chunks whose owner lacks activations: another rank computes some of their rows."""
    for begin, end, rank in zip(bounds, bounds[1:], ranks, strict=False):
        for chunk in range(begin // CHUNK, chunks_for(end)) if end > begin else ():
            table.nodes[chunk].activations &= table.owner(chunk) == rank


def ending_in(ranks: Sequence[int], keeper: int) -> tuple[int, ...]:
    """The ranks in an order that ends in `keeper`, which changes places with the last (or comes in for it)."""
    order = list(ranks)
    if keeper in order:
        order[order.index(keeper)] = order[-1]
    order[-1] = keeper
    return tuple(order)
