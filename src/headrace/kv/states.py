"""Recurrent states as the cache keeps them: one for each running sequence, and some behind chunks of the tree.

A state says all that its tokens leave behind in the recurrent layers, so a prefix can be taken from the tree as far as
a chunk of it has a state, and no further. States stand where prompts end, where branches part, and where answers have
come to, always behind a whole chunk:

    chunk 0 -- chunk 1 -- chunk 2 --+-- chunk 3* -- (64 tokens at most)       *: has a state
                            *       +-- chunk 3'

And where there is room, at milestones within long prompts (kv.milestones).

A step writes states in the order in which its slices were taken (Segment). What may be read or overwritten at that
moment may be so when the step is computed, in which nothing is out of that order; so a slot may be used again at once,
and a sequence may begin with a state that another leaves in the same step.

While a step is under way on a device, the one behind it may be planned (engine.overlap). The device computes them in
order, so the same holds for the slots of both. But the second may come to nothing, wholly or for some sequences. Until
it is under way nobody finds the chunks that know states of it (kv.names), nor are these told to leave; and the state
that an answer had before is dropped only when the step has ended.

A state cannot be cut as a table can. So of a slice with drafted tokens two are left: behind its known tokens, and, in a
slot of its own until the draft is settled, behind the drafted ones. Were all of them right, the sequence goes on from
there; otherwise from its known tokens, and those of the draft that were right are computed again with its next slice.
"""

from __future__ import annotations

from collections.abc import Iterable

from headrace.kv.checks import check_states
from headrace.kv.chunk_table import ChunkTable
from headrace.kv.milestones import INTERVAL
from headrace.kv.state_slots import StateSlots
from headrace.kv.step_states import StepStates
from headrace.kv.table_state import NONE, Ahead, Segment, TableState
from headrace.kv.tree import Node, PrefixTree
from headrace.types import CHUNK


class StateCache(StateSlots):
    """As many tables may be open as there are slots: one that needs a slot always gets one, at the price of kept
    states: first those at milestones, then the least recently used. So does a draft, as long as it leaves a slot for
    each of `tables`.

    interval: tokens between milestones, whole chunks. tables: that may be open in the coming step; may be set, at most
    `total`.
    """

    def __init__(self, total: int, tree: PrefixTree, interval: int = INTERVAL) -> None:
        if total < 1:
            raise ValueError(f"a model with recurrent layers needs at least one state, got {total}")
        super().__init__(total, interval)
        self.tree = tree
        self.tables = total
        self._read: set[int] = set()
        """Slots that segments of the step that was planned last read."""
        self._drafting = 0
        """Tables with a state ahead."""
        self._stepping: list[TableState] = []
        self._computing: dict[Node, tuple[ChunkTable, int]] = {}
        self._ahead = False
        """Whether `_planned` is behind a step under way, and may come to nothing yet."""
        tree.forget_state = self._forget

    # -- what a table may take from the tree

    def path(self, table: ChunkTable) -> tuple[list[Node], int, bool]:
        """The complete chunks of the tree that continue the table, how many of them end with a state at the latest,
        and whether the next one is being written."""
        nodes: list[Node] = []
        count, last = 0, table.nodes[-1] if table.nodes else None
        for chunk in range(table.length // CHUNK, table.reusable_chunks):
            node = self.tree.find(table.digest(chunk))
            if node is None or node.parent is not last:
                return nodes, count, False
            if not node.complete:
                return nodes, count, True
            nodes.append(node)
            last = node
            if node.state != NONE:
                count = len(nodes)
        return nodes, count, False

    def reachable(self, table: ChunkTable) -> tuple[list[Node], bool]:
        """The chunks that the table shall take from the tree now, which end with a state, and whether the next one is
        being written. Where the way parts from the tree's without a state, one is asked for."""
        nodes, count, blocked = self.path(table)
        if not blocked and count < len(nodes):
            if self._keep_in_step(nodes[-1]):
                count = len(nodes)
            else:
                table.track.marks.add(table.length + len(nodes) * CHUNK)
        return nodes[:count], blocked

    def attach(self, table: ChunkTable, node: Node) -> None:
        """The table, which the node is the last chunk of, goes on from its state."""
        if len(table.nodes) * CHUNK in table.track.marks:
            self.milestones.discard(node.state)
        self._let_go(table.track)
        table.track.slot = node.state
        self._hold(node.state)

    # -- a step

    def advance(self, table: ChunkTable, start: int, drafted: int = 0) -> None:
        """Plans the states of a slice that begins at `start` and ends at the table's length, with so many drafted
        tokens: no more than `draftable`."""
        track, end = table.track, table.length - drafted
        self._stepping.append(track)
        for chunk in range(start // CHUNK, end // CHUNK):
            self._computing[table.nodes[chunk]] = (table, chunk)
        answer = end // CHUNK * CHUNK
        answered = table.shares and answer > max(start, track.known)
        marks = {mark for mark in track.marks if start < mark <= end} if table.shares else set()
        needed = {*marks, answer} if answered else marks
        passed = self.milestones.passed(start, min(end, track.known - 1)) if table.shares else range(0)
        for mark in sorted({*needed, *passed, end}):
            milestone = mark not in needed and mark in passed and self._has_room(table, mark)
            if mark in needed or milestone or mark == end:
                self._add_segment(track, mark)
            if mark in needed or milestone:
                self._keep(table, mark // CHUNK - 1)
            if milestone:
                self.milestones.add(track.slot, mark, table)
        track.marks -= marks
        if answered:
            target = next(each.target for each in track.segments if each.end == answer)
            self._replace_answer(table, answer, target)
        if drafted:
            self._go_ahead(track, end, end + drafted)

    def _add_segment(self, track: TableState, end: int) -> None:
        """The tokens up to `end`, into a slot of the table's own."""
        source = track.slot
        self._own(track)
        track.segments.append(Segment(end, source, track.slot))
        self._read.add(source)
        self._written.add(track.slot)

    def _go_ahead(self, track: TableState, known: int, end: int) -> None:
        """Drafted tokens behind `known` ones, into a slot that is nobody's until they are settled."""
        if not self._free:
            self._evict(self.milestones.first(self.idle)[0])
        track.ahead = Ahead(self._free.pop(), known)
        self._drafting += 1
        track.segments.append(Segment(end, track.slot, track.ahead.slot))
        self._read.add(track.slot)
        self._written.add(track.ahead.slot)

    def _replace_answer(self, table: ChunkTable, answer: int, target: int) -> None:
        """Of an answer the latest state, in slot `target`, is kept alone."""
        self._planned.outdated.append((table, *table.track.answer))
        if not self._ahead:
            self._drop_outdated(self._planned)
        table.track.answer = (target if target in self._kept else NONE, answer // CHUNK - 1)

    def _drop_outdated(self, step: StepStates) -> None:
        for table, slot, chunk in step.outdated:
            if slot in self.idle and chunk < len(table.nodes) and table.nodes[chunk].state == slot:
                self._drop(slot)
        step.outdated.clear()

    def _has_room(self, table: ChunkTable, mark: int) -> bool:
        """Whether a state may be kept at a milestone, at the price of lesser ones at most; these make room."""
        track, node = table.track, table.nodes[mark // CHUNK - 1]
        if node.digest is None or node.state != NONE:
            return False
        own_is_lesser = self._own_milestone(track) < self.milestones.weight(mark)
        needed = 1 if track.owns or own_is_lesser else 2  # for the state there, and for what follows it
        if len(self._free) >= needed:
            return True
        lesser = self.milestones.lesser(mark, table, self.idle)
        if len(self._free) + len(lesser) < needed:
            return False
        for slot in lesser[: max(0, needed - len(self._free))]:
            self._evict(slot)
        return True

    def _keep(self, table: ChunkTable, chunk: int) -> None:
        """The table's own state, behind the chunk, becomes the chunk's; now if it has a name, else with `commit`."""
        track, node = table.track, table.nodes[chunk]
        if node.digest is None:
            self._kept[track.slot] = None
            self._planned.waiting[track.slot] = (table, chunk)
        elif node.state != NONE:
            self.milestones.discard(node.state)
            return
        else:
            self._kept[track.slot], node.state = node, track.slot
        track.owns = False
        self._refs[track.slot] = 1

    def _keep_in_step(self, node: Node) -> bool:
        """Keeps the state behind a chunk that a slice of the coming step passes, if there is a slot for it."""
        if node not in self._computing:
            return False
        table, chunk = self._computing[node]
        track, mark = table.track, (chunk + 1) * CHUNK
        at = next(i for i, each in enumerate(track.segments) if each.end >= mark)
        end, source, target = track.segments[at]
        if end == mark:
            if at + 1 < len(track.segments) or not track.owns:
                return False
            self._keep(table, chunk)
            return node.state != NONE
        slot = self._untouched()
        if slot is None:
            return False
        track.segments[at : at + 1] = [Segment(mark, source, slot), Segment(end, slot, target)]
        self._written.add(slot)
        self._kept[slot], node.state = node, slot
        self.idle[slot] = None
        return True

    def _untouched(self) -> int | None:
        """A slot that no segment of the step names yet: it may be written at any moment of it."""
        named = self._read | self._written
        slot = next((each for each in reversed(self._free) if each not in named), None)
        if slot is None:
            slot = next((each for each in self.milestones.first(self.idle) if each not in named), None)
            if slot is None:
                return None
            self._evict(slot)
        self._free.remove(slot)
        return slot

    def plan_ahead(self) -> None:
        """The step planned last is under way, and its segments were taken: the next one is planned behind it."""
        self._planned, self._under_way, self._ahead = self._under_way, self._planned, True
        self._forget_segments()

    def launched(self) -> None:
        """The step that was planned ahead is under way, or is the next to be computed."""
        self._ahead = False

    def commit(self) -> None:
        """After a step, when chunks have their names: states get theirs. Of one that is planned ahead none do."""
        self._settle(self._under_way)
        if not self._ahead:
            self._settle(self._planned)
            self._forget_segments()

    def _settle(self, step: StepStates) -> None:
        for slot, (table, chunk) in list(step.waiting.items()):
            node = table.nodes[chunk] if chunk < len(table.nodes) else None
            if node is not None and node.digest is not None and node.complete and node.state == NONE:
                self._kept[slot], node.state = node, slot
            elif slot in self.idle:
                self._drop(slot)
            else:
                self._take_back(table.track)
        step.waiting.clear()
        self._drop_outdated(step)

    def _forget_segments(self) -> None:
        for track in self._stepping:
            track.segments.clear()
        self._stepping.clear()
        self._computing.clear()
        self._read.clear()
        self._written.clear()

    # -- drafts

    def draftable(self, table: ChunkTable) -> int:
        """Most tokens that may be drafted behind all that are known: as far as the chunk goes, so that a state can be
        kept at its end; none where no slot is left."""
        return CHUNK - len(table.tokens) % CHUNK if self.tables + self._drafting < self.total else 0

    def settle(self, table: ChunkTable, length: int) -> int:
        """Between two steps: `length` tokens of the table are right, and none before the drafted ones is wrong. So many
        of them have a state, from which the table goes on."""
        track, ahead = table.track, table.track.ahead
        assert ahead is not None and length >= ahead.known, "a slice with a draft has a state behind its known tokens"
        if length < table.length:
            self._drop_ahead(track)
            return ahead.known
        track.ahead, self._drafting = None, self._drafting - 1
        self._let_go(track)
        track.slot, track.owns = ahead.slot, True
        return length

    def keep_drafted(self, table: ChunkTable) -> None:
        """After `settle`, when chunks have their names: where a draft that was right ends with its chunk, the state is
        kept as that of an answer is."""
        track, chunk = table.track, table.length // CHUNK - 1
        if table.length % CHUNK or not track.owns or table.nodes[chunk].digest is None:
            return
        slot = track.slot
        self._keep(table, chunk)
        self._replace_answer(table, table.length, slot)

    def _drop_ahead(self, track: TableState) -> None:
        if track.ahead is not None:
            self._free.append(track.ahead.slot)
            track.ahead, self._drafting = None, self._drafting - 1

    # -- slots

    def borrow(self) -> int | None:
        """A slot to be written to at once, which no slice of the coming step names; None if there is none to be had."""
        return self._untouched()

    def give_back(self, slot: int) -> None:
        """A borrowed slot that is of no use."""
        self._free.append(slot)

    def adopt(self, table: ChunkTable, slot: int) -> None:
        """A borrowed slot has the state behind the table's last chunk, which keeps it with the next `commit`."""
        self._let_go(table.track)
        table.track.slot, table.track.owns = slot, True
        self._keep(table, len(table.nodes) - 1)

    def nodes(self) -> list[Node]:
        """Chunks with states, between two steps, without those that a step planned ahead is still to write."""
        return [node for node in self._kept.values() if node is not None and node.complete]

    def close(self, table: ChunkTable) -> None:
        """Before the table's chunks are let go of."""
        self._drop_ahead(table.track)
        self._let_go(table.track)

    def check(self, tables: Iterable[ChunkTable]) -> None:
        """Raises AssertionError unless slots, tables and nodes agree. For tests, between two steps."""
        assert self._drafting == 0, "a draft was not settled"
        assert set(self.idle) == set(self._kept) - set(self._refs), "idle means kept, and held by nobody"
        assert all(slot in self._kept for slot in self.milestones), "a milestone's state is not kept"
        waiting = {*self._planned.waiting, *self._under_way.waiting}
        assert all((slot in waiting) == (node is None) for slot, node in self._kept.items()), "a state waits in vain"
        nodes = {slot: node for slot, node in self._kept.items() if node is not None}
        check_states(range(self.total), [*self._free, *self._kept], self._refs, nodes, tables, self.tree)
