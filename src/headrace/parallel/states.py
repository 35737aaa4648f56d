"""Recurrent states on several ranks: who has each, and how it comes to the rank that computes what follows.

Every rank has memory for all states, under the same slots; of each slot one rank has the state, the one that wrote it
last. Slices are cut into runs where states are left (kv.states) and where another rank goes on:

    | rows of rank 0           | rows of rank 1 .. a state is kept | rows of rank 1 |
    from slot 3 into 5         from 5 into 5                       from 5 into 8

A run whose state another rank has gets it layer by layer: at once where the state was there before the group, otherwise
as soon as that rank has computed the layer's rows before it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from headrace.attention.recurrence import StepRecurrence
from headrace.kernels.records import LayerStates, RecurrentWeights
from headrace.kernels.recurrent import Recur
from headrace.kv.storage import StateStorage
from headrace.kv.table_state import NONE, Segment
from headrace.parallel.group_layout import RowRange, runs
from headrace.parallel.messages import StateMove, StateRun, StepGroup, WholeState
from headrace.parallel.transport import Tag, Transfer, Transport
from headrace.parallel.whole_states import WholeStates


class StateHolders:
    """Which rank has the state of each slot, as rank 0 knows it."""

    def __init__(self, slots: int) -> None:
        self.of = [0] * slots

    def route(
        self, segments: Sequence[Segment], start: int, bounds: Sequence[int], ranks: Sequence[int]
    ) -> list[StateRun]:
        """The runs of a slice that begins at `start`, computed by `ranks` between `bounds`; afterwards each target is
        with the rank that writes it."""
        found = []
        for end, source, target in segments:
            for rank, cut in _shards(bounds, ranks, start, end):
                found.append(StateRun(cut, source, target, rank, rank if source == NONE else self.of[source]))
                self.of[target] = rank
                source = target
            start = end
        return found


def _shards(bounds: Sequence[int], ranks: Sequence[int], start: int, end: int) -> Iterator[tuple[int, int]]:
    """Who computes the tokens start .. end-1, and up to where."""
    for begin, stop, rank in zip(bounds, bounds[1:], ranks, strict=False):
        if max(begin, start) < min(stop, end):
            yield rank, min(stop, end)


class GroupMove(NamedTuple):
    """A state that goes from rank to rank within a group; within: the sender writes it in the group, too."""

    move: StateMove
    within: bool


def moves_of(group: StepGroup) -> list[GroupMove]:
    """All of a group, in the same order on every rank."""
    found: dict[GroupMove, None] = {}
    written: set[tuple[int, int]] = set()
    for run in (run for part in group.parts for run in part.states):
        if run.source != NONE and run.origin != run.rank:
            found[GroupMove(StateMove(run.source, run.origin, run.rank), (run.origin, run.source) in written)] = None
        written.add((run.rank, run.target))
    return list(found)


class RankStates:
    """A rank's memory for states, and its links. first_layer: the number under which tags know the first recurrent
    layer; those before are the layers with attention. whole: of one of several tensor ranks, states of all of them."""

    def __init__(
        self, storage: StateStorage, transport: Transport, first_layer: int, whole: WholeStates | None = None
    ) -> None:
        self.storage, self.transport, self.first_layer, self.whole = storage, transport, first_layer, whole
        self.going: list[Transfer] = []

    def at(self, group: StepGroup, number: int) -> GroupStates:
        """The recurrent layers of a group. What the rank has of others' states leaves at once."""
        return GroupStates(self, group, number)

    def move(self, moves: Sequence[StateMove], number: int) -> None:
        """Between groups; returns when this rank has what it gets."""
        for index, move in enumerate(moves):
            if move.origin == self.transport.rank:
                self.send_all(move, number, index)
        for index, move in enumerate(moves):
            if move.rank == self.transport.rank:
                for work in (work for each in self.receive_all(move, number, index) for work in each):
                    work.wait()

    def exchange(self, states: Sequence[WholeState]) -> None:
        """Among the tensor ranks of context rank 0: see WholeState. Raises RankLost."""
        if self.whole is None or self.transport.rank > 0:
            return
        for each in states:
            (self.whole.scatter if each.read else self.whole.gather)(each.slot)

    def send_all(self, move: StateMove, number: int, index: int) -> None:
        for layer in range(self.storage.spec.layers):
            self.send(move, layer, number, index)

    def send(self, move: StateMove, layer: int, number: int, index: int) -> None:
        """A copy: the slot may be written again at any moment."""
        for tag, x in self._tagged(move, layer, number, index):
            self.going.append(self.transport.isend(x.clone(), move.rank, tag))

    def receive_all(self, move: StateMove, number: int, index: int) -> list[list[Transfer]]:
        """By layer: into the slot, which stands for no state of this rank until then."""
        return [
            [self.transport.irecv(x, move.origin, tag) for tag, x in self._tagged(move, layer, number, index)]
            for layer in range(self.storage.spec.layers)
        ]

    def _tagged(self, move: StateMove, layer: int, number: int, index: int) -> Iterator[tuple[Tag, Tensor]]:
        states: LayerStates = self.storage.layers[layer]
        for piece, x in enumerate((states.last[move.slot], states.matrices[move.slot])):
            if x.numel():  # a short convolution has no matrix
                yield Tag(number, self.first_layer + layer, 2 * index + piece), x

    def drain(self) -> None:
        """Until all that was sent has left."""
        for work in self.going:
            work.drain()
        self.going.clear()


class GroupStates(Recur):
    """Recur for a rank's rows of one group."""

    def __init__(self, states: RankStates, group: StepGroup, number: int) -> None:
        self.states, self.number = states, number
        mine = states.transport.rank
        moves = list(enumerate(moves_of(group)))
        self._leaving = [(i, move) for i, (move, within) in moves if move.origin == mine and within]
        for index, (move, within) in moves:
            if move.origin == mine and not within:
                states.send_all(move, number, index)
        self._coming = [states.receive_all(move, number, i) for i, (move, _) in moves if move.rank == mine]
        self._recur = StepRecurrence(states.storage, segment_rows(group, mine))

    def __call__(self, layer: int, mixed: Tensor, gates: Tensor | None, weights: RecurrentWeights) -> Tensor:
        for work in (work for each in self._coming for work in each[layer]):
            work.wait()
        out = self._recur(layer, mixed, gates, weights)
        for index, move in self._leaving:
            self.states.send(move, layer, self.number, index)
        return out


def segment_rows(group: StepGroup, rank: int) -> Tensor:
    """int64 [n, 4] as kernels.gated_delta takes them, of the rank's rows in a group, in the order of their parts."""
    first: dict[RowRange, int] = {}
    count = 0
    for run in runs(group, rank):
        first[run], count = count, count + run.rows
    rows = []
    for index, part in enumerate(group.parts):
        begin = part.start
        for each in part.states:
            if each.rank == rank:
                run = next(run for run in first if run.part == index and run.start <= begin < run.end)
                row = first[run] + begin - run.start
                rows.append((row, row + each.end - begin, each.source, each.target))
            begin = each.end
    return torch.tensor(rows, dtype=torch.int64).view(-1, 4)
