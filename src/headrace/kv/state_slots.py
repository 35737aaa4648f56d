"""Which slot of recurrent states is whose: slots are free, a table's own, or kept behind a chunk (kv.states)."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable

from headrace.kv.milestones import NO_MILESTONE, Milestones
from headrace.kv.step_states import StepStates
from headrace.kv.table_state import NONE, TableState
from headrace.kv.tree import Node


class StateSlots:
    """Slots 0 .. total-1.

    idle: kept slots that no table goes on from, in the order of their use. milestones: kept slots that are there for
    nothing else. leaving: may be set to be told of each chunk whose state is evicted, while the slot still has it.
    """

    def __init__(self, total: int, interval: int) -> None:
        self.total = total
        self.evictions = 0
        self.idle: OrderedDict[int, None] = OrderedDict()
        self.milestones = Milestones(interval)
        self.leaving: Callable[[Node], None] | None = None
        self._free = list(range(total - 1, -1, -1))
        self._kept: dict[int, Node | None] = {}
        """Kept slots with their nodes; None: until their step is committed."""
        self._refs: dict[int, int] = {}
        self._written: set[int] = set()
        """Slots that segments of the step that was planned last write."""
        self._planned, self._under_way = StepStates(), StepStates()

    @property
    def kept(self) -> int:
        """States behind chunks."""
        return len(self._kept)

    def _own(self, track: TableState) -> None:
        """Gives the table a slot that it may write to."""
        if track.owns:
            return
        if not self._free and self.idle:
            first = self.milestones.first(self.idle)[0]
            own = self._own_milestone(track)
            if own == NO_MILESTONE or own > self.milestones.worth(first):
                self._evict(first)
        if self._free:
            self._let_go(track)
            track.slot, track.owns = self._free.pop(), True
        else:  # every other slot is some table's, or is worth more than a milestone: this one is nobody else's
            self._take_back(track)

    def _take_back(self, track: TableState) -> None:
        """A kept state that one table alone goes on from is its own again."""
        assert self._refs.pop(track.slot) == 1, "more tables than states"
        self.milestones.discard(track.slot)
        self._unkeep(track.slot)
        track.owns = True

    def _hold(self, slot: int) -> None:
        self._refs[slot] = self._refs.get(slot, 0) + 1
        self.idle.pop(slot, None)

    def _let_go(self, track: TableState) -> None:
        """The table has no state any more."""
        slot, track.slot = track.slot, NONE
        if slot == NONE:
            return
        if track.owns:
            track.owns = False
            self._free.append(slot)
            return
        self._refs[slot] -= 1
        if not self._refs[slot]:
            del self._refs[slot]
            self.idle[slot] = None

    def _own_milestone(self, track: TableState) -> int:
        """The weight of the milestone that the table alone goes on from; more than any where there is none."""
        alone = not track.owns and self._refs.get(track.slot) == 1
        return self.milestones.worth(track.slot) if alone else NO_MILESTONE

    def _evict(self, slot: int) -> None:
        self.evictions += 1
        self._tell(slot)
        self._drop(slot)

    def _tell(self, slot: int) -> None:
        """What the step planned last is still to write is lost: `leaving` would find other numbers."""
        node = self._kept[slot]
        if self.leaving is not None and node is not None and slot not in self._written:
            self.leaving(node)

    def _drop(self, slot: int) -> None:
        """Frees a slot that no table goes on from."""
        del self.idle[slot]
        self.milestones.discard(slot)
        self._unkeep(slot)
        self._free.append(slot)

    def _unkeep(self, slot: int) -> None:
        """The slot is no chunk's any more, nor to become one's."""
        node = self._kept.pop(slot)
        for step in (self._planned, self._under_way):
            step.waiting.pop(slot, None)
        if node is not None:
            node.state = NONE

    def _forget(self, node: Node) -> None:
        """The node leaves the tree."""
        self._tell(node.state)
        self._drop(node.state)
