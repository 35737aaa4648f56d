"""The host one step ahead of a GPU: while a step runs there, the next one is planned and launched.

    device   | step n          | step n+1        | step n+2
    host     | launch n+1 | waits | results of n, deltas, launch n+2 | waits | ...

Which tokens step n chooses only the device knows by then: step n+1 looks them up there (StepRows.before). All else
about step n+1 follows from counts. It is launched ahead if it decodes the sequences of step n, but for those whose
length ends with it, and the device chooses all their tokens; else the host waits for step n, as without overlap.

A sequence may end with a token of step n when step n+1 is under way with it. That row is computed in vain: it has no
result, its chunk gets no name, and the table is closed when the step has ended.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from headrace.engine.executor import Computed
from headrace.engine.loader import Loaded
from headrace.engine.output import Output
from headrace.engine.programs import Launched
from headrace.engine.sampler import Sampled
from headrace.engine.scheduler import Scheduler
from headrace.engine.sequence import SequenceState, Slice
from headrace.types import CHUNK

if TYPE_CHECKING:  # it imports Triton
    from headrace.engine.launched_draws import Drawn, LaunchedDraws

PATIENCE = 16
"""Steps launched one behind the other while something waits that the scheduler could not begin."""


@dataclass(slots=True, eq=False)
class Flight:
    """A step under way. slices: in the order in which they were planned; rows: of their sequences. drawn: its tokens,
    where some are not just the most likely ones. lasts: how many more steps no sequence reaches its greatest length.

    void: sequences whose rows count no more; ended: those of them whose tables are closed when the step has ended."""

    slices: list[Slice]
    launched: Launched
    rows: dict[SequenceState, int]
    lasts: int
    drawn: Drawn | None = None
    void: set[SequenceState] = field(default_factory=set)
    ended: list[SequenceState] = field(default_factory=list)

    @property
    def living(self) -> list[Slice]:
        return [part for part in self.slices if part.sequence not in self.void] if self.void else self.slices


class Overlap:
    """Runs an engine's steps, ahead where that can be. outputs: of all sequences that have not ended. draws: where the
    device draws tokens."""

    def __init__(
        self,
        loaded: Loaded,
        scheduler: Scheduler,
        outputs: Mapping[SequenceState, Output],
        draws: LaunchedDraws | None,
    ) -> None:
        self.executor, self.cache, self.capacity = loaded.executor, loaded.cache, loaded.capacity
        self.scheduler, self.outputs, self.draws = scheduler, outputs, draws
        asked = loaded.config
        self.on = asked.scheduler.async_scheduling and not asked.speculation.on and loaded.cache.states is None
        self._flight: Flight | None = None
        self._unsure: set[SequenceState] = set()
        self._waiting, self._patience = -1, 0

    def begun(self) -> list[Slice] | None:
        """The slices of the step that is under way, whose tokens are all known now; None: no step that still counts."""
        if self._flight is None:
            return None
        if not (slices := self._flight.living):
            self.land()
            return None
        for part in slices:
            table = part.sequence.table
            assert table is not None and table.length == len(table.tokens), "a step ahead is of known tokens by now"
            if not table.length % CHUNK:
                self.cache.arrived(table)
        return slices

    def run(self, slices: list[Slice], watched: bool) -> Computed:
        """Executor.run of these slices, which are those of `begun` if a step is under way. When it returns the next one
        may be. watched: somebody looks at the logits, which that one would overwrite."""
        flight = self._flight or (None if watched else self._launch_known(slices))
        if flight is None:
            if self._unsure:
                self._unsure.difference_update([part.sequence for part in slices if part.samples])
            return self.executor.run(slices)
        try:
            self._flight = None if watched else self._launch_next(flight)
            return self._landed(flight)
        finally:
            self._close(flight)

    def remove(self, sequence: SequenceState) -> None:
        """Takes an ended sequence out, at once or when the step that is under way with it has ended."""
        flight, self._waiting = self._flight, -1
        self._unsure.discard(sequence)
        if flight is not None and sequence in flight.rows and sequence not in flight.void:
            flight.void.add(sequence)
            flight.ended.append(sequence)
        else:
            self.scheduler.remove(sequence)

    def check(self) -> None:
        """Raises AssertionError unless queues, tables and cache agree, whatever is under way. For tests."""
        self.scheduler.check(() if self._flight is None else self._flight.rows)

    def land(self) -> None:
        """Waits for the step that is under way, if there is one, none of whose rows count any more."""
        flight, self._flight = self._flight, None
        if flight is not None:
            flight.launched.reading.wait()
            self._close(flight)

    def _launch_known(self, slices: list[Slice]) -> Flight | None:
        """A step whose tokens are known; None if it is not of the kind that a step can follow unseen."""
        self._waiting, self._patience = len(self.scheduler.waiting), PATIENCE
        if not self.on or not self.executor.launches or not all(map(self._is_usual, slices)):
            return None
        return self._launch(slices)

    def _is_usual(self, part: Slice) -> bool:
        """Whether the slice is a decoding one, behind which the device can choose, and all its chunks have come."""
        sequence = part.sequence
        if part.length != 1 or not part.decodes or not part.samples or sequence in self._unsure:
            return False
        if self.scheduler.below.coming(sequence):
            return False
        output = self.outputs[sequence]
        if output.matcher is not None or sequence.n_output < sequence.request.params.min_tokens:
            return False
        return output.plain or (self.draws is not None and output.draws_freely)

    def _launch_next(self, flight: Flight) -> Flight | None:
        """The step behind one that is under way; None if the host has to see its tokens first."""
        staying = flight.living
        if not self._is_settled(len(staying) + len(flight.ended)):
            return None
        if flight.lasts < 1:
            staying = [part for part in staying if self._left(part) > 1]
        if not staying or not self._grow(staying):
            return None
        following = self._launch([Slice(part.sequence, part.end, 1) for part in staying], flight)
        if following is None:
            for part in staying:
                assert part.sequence.table is not None
                self.cache.keep(part.sequence.table, part.end, part.end)
        return following

    def _is_settled(self, flying: int) -> bool:
        """Whether the scheduler would go on with the sequences of the step, of which so many hold chunks: no others
        run, and none waits that it might begin."""
        if len(self.scheduler.running) != flying:
            return False
        if not self.scheduler.waiting:
            return True
        self._patience -= 1
        return len(self.scheduler.waiting) == self._waiting and self._patience >= 0

    def _left(self, part: Slice) -> int:
        """Tokens that its sequence may still have, that behind the slice among them."""
        sequence = part.sequence
        length, most = self.capacity.max_model_len, sequence.request.params.max_tokens
        return (length if most is None else min(length, sequence.prompt_len + most)) - part.end

    def _grow(self, parts: list[Slice]) -> bool:
        """Makes room for a token more of each, if nobody has to give way for it."""
        tables = [part.sequence.table for part in parts if part.sequence.table is not None]
        accounts = [table.account for table in tables if not table.length % CHUNK]
        if accounts and len(accounts) > min(map(self.cache.available_for, set(accounts))):
            return False
        for table in tables:
            self.cache.grow_unknown(table)
        return True

    def _launch(self, slices: list[Slice], behind: Flight | None = None) -> Flight | None:
        launched = self.executor.launch(slices, None if behind is None else behind.rows)
        if launched is None:
            return None
        lasts = behind.lasts - 1 if behind is not None and behind.lasts > 0 else min(map(self._left, slices)) - 1
        flight = Flight(slices, launched, {part.sequence: row for row, part in enumerate(launched.slices)}, lasts)
        if self.draws is not None and (behind is None or behind.drawn is not None):
            outputs = [self.outputs[sequence] for sequence in flight.rows]
            if not all(output.plain for output in outputs):
                flight.drawn = self.draws.launch(launched, outputs)
        return flight

    def _landed(self, flight: Flight) -> Computed:
        """Waits for a step. What the device was not sure of is computed again, and chosen by the host."""
        launched = flight.launched
        parts = [(part, row) for row, part in enumerate(launched.slices) if part.sequence not in flight.void]
        if flight.drawn is None:
            return Computed(launched.logits, parts, launched.greatest())
        sampled: dict[int, Sampled] = flight.drawn.sampled()
        for part, row in parts:
            if row not in sampled:
                self._again(part.sequence)
        return Computed(launched.logits, [(part, row) for part, row in parts if row in sampled], sampled=sampled)

    def _again(self, sequence: SequenceState) -> None:
        self._unsure.add(sequence)
        if self._flight is not None:
            self._flight.void.add(sequence)
        self._waiting = -1
        self.scheduler.again(sequence)

    def _close(self, flight: Flight) -> None:
        """When it has ended."""
        for sequence in flight.ended:
            self.scheduler.remove(sequence)
        flight.ended.clear()
