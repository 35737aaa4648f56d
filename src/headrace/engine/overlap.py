"""The host one step ahead of a GPU: while a step runs there, the next one is planned and launched.

    device   | step n          | step n+1        | step n+2
    host     | launch n+1 | waits | results of n, deltas, launch n+2 | waits | ...

Which tokens step n chooses only the device knows by then: step n+1 looks them up there (StepRows.before). All else
about step n+1 follows from counts: sequences go on, but for those whose length ends with step n, prompts go on by
slices, and requests that have come begin. What step n stores, recurrent states too, may be shared by step n+1, which
the device computes behind it. Nobody is preempted: where that is called for, the host waits for the step, as without
overlap.

A step that is planned so is not launched if the device cannot choose all of its tokens, or has no recording of it. It
then runs when step n has ended, before anything else is planned.

A sequence may end with a token of step n when step n+1 is under way with it. That row is computed in vain: it has no
result, its chunk gets no name, and the table is closed when the step has ended.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from headrace.engine.executor import Computed
from headrace.engine.flight import Flight
from headrace.engine.loader import Loaded
from headrace.engine.output import Output
from headrace.engine.sampler import Sampled
from headrace.engine.scheduler import Scheduler
from headrace.engine.sequence import SequenceState, Slice
from headrace.types import CHUNK

if TYPE_CHECKING:  # it imports Triton
    from headrace.engine.launched_draws import LaunchedDraws

PATIENCE = 16
"""Steps planned one behind the other while something waits for whose sake somebody may have to give way."""


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
        self.on = asked.scheduler.async_scheduling and not asked.speculation.on
        self._flight: Flight | None = None
        self._unsure: set[SequenceState] = set()
        self._waiting, self._patience, self._lacking = -1, 0, False

    # -- a step

    def begun(self) -> list[Slice] | None:
        """The slices of the step that was planned ahead, whose tokens are all known now; None: no step that still
        counts."""
        if self._flight is None:
            return None
        self.cache.launched()
        if not (slices := self._flight.living):
            self.land()
            return None
        for part in self._flight.unseen:
            if part.sequence not in self._flight.void:
                table = part.sequence.table
                assert table is not None and table.length == len(table.tokens), "a step ahead is of known tokens by now"
                if not table.length % CHUNK:
                    self.cache.arrived(table)
        return slices

    def run(self, slices: list[Slice], watched: bool) -> Computed:
        """Executor.run of these slices, which are those of `begun` if a step was planned ahead. When it returns the
        next one may be. watched: somebody looks at the logits, which that one would overwrite."""
        flight, self._flight = self._flight, None
        if flight is None:
            self._waiting, self._patience, self._lacking = len(self.scheduler.waiting), PATIENCE, False
            flight = Flight(slices)
        if flight.launched is None and (watched or not self._launch(flight)):
            return self._run(slices)
        try:
            self._flight = None if watched else self._next(flight)
            return self._landed(flight)
        finally:
            self._close(flight)

    def remove(self, sequence: SequenceState) -> None:
        """Takes an ended sequence out, at once or when the step that is under way with it has ended."""
        flight, self._waiting = self._flight, -1
        self._unsure.discard(sequence)
        if flight is None or not flight.drop(sequence):
            self.scheduler.remove(sequence)
        else:
            flight.ended.append(sequence)
            sequence.ended = True

    def check(self) -> None:
        """Raises AssertionError unless queues, tables and cache agree, whatever is under way. For tests."""
        under_way = () if self._flight is None else [part.sequence for part in self._flight.slices]
        self.scheduler.check(under_way)

    def land(self) -> None:
        """Waits for the step that is under way, if there is one, none of whose rows count any more."""
        flight, self._flight = self._flight, None
        self.cache.launched()
        if flight is not None:
            if flight.launched is not None:
                flight.launched.reading.wait()
            self._close(flight)
        self.cache.commit()

    def _run(self, slices: list[Slice]) -> Computed:
        if self._unsure:
            self._unsure.difference_update([part.sequence for part in slices if part.samples])
        return self.executor.run(slices)

    # -- the step behind it

    def _next(self, flight: Flight) -> Flight | None:
        """The step behind one that is under way, launched if that can be; None if the scheduler has to see that one's
        tokens first."""
        self._patience -= bool(self.scheduler.waiting)
        if self._lacking:
            return None
        unseen = [part for part in flight.sampling if flight.lasts or self._left(part) > 1]
        if self._is_alone(flight):
            if not unseen or not self._grow(unseen):
                return None
            slices = [Slice(part.sequence, part.end, 1) for part in unseen]
            following = Flight(slices, slices, lasts=max(0, flight.lasts - 1))
        else:
            following = self._planned(unseen)
            if not following.slices:
                self.cache.launched()
                return None
        self._launch(following, flight)
        return following

    def _is_alone(self, flight: Flight) -> bool:
        """Whether the scheduler would go on with the sequences of the step and no others: none else runs, and none
        waits that it might begin."""
        running, waiting = len(self.scheduler.running), len(self.scheduler.waiting)
        if len(flight.rows) < len(flight.slices) or running != len(flight.living) + len(flight.ended):
            return False
        return not waiting or (waiting == self._waiting and self._patience >= 0)

    def _planned(self, unseen: list[Slice]) -> Flight:
        """The scheduler's next step, in which the sequences of these slices go on with the tokens behind them."""
        scheduler, ends = self.scheduler, {part.sequence: part.end for part in unseen}
        looks = len(scheduler.waiting) != self._waiting or self._patience < 0
        if looks:
            self._patience = PATIENCE
        self.cache.plan_ahead()
        slices = scheduler.schedule(ends)
        self._waiting = len(scheduler.waiting)
        self._lacking = scheduler.lacking or (looks and self._waiting > 0 and scheduler.makes_way)
        return Flight(slices, [part for part in slices if ends.get(part.sequence) == part.start])

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
        self.cache.plan_ahead()
        for table in tables:
            self.cache.grow_unknown(table)
        return True

    # -- launching

    def _launch(self, flight: Flight, behind: Flight | None = None) -> bool:
        """Gives the step to the device, behind another; False: it is not of the kind that can be launched."""
        if not self.on or not self.executor.launches:
            return False
        before = None if behind is None else {part.sequence: behind.rows[part.sequence] for part in flight.unseen}
        goes_on = before is not None and len(before) == len(flight.slices)
        if not goes_on and not all(map(self._is_usual, flight.slices)):
            return False
        launched = self.executor.launch(flight.slices, before)
        if launched is None:
            return False
        flight.launched = launched
        flight.rows = {part.sequence: row for row, part in enumerate(launched.slices)}
        flight.lasts = flight.lasts or max(0, min(map(self._left, launched.slices), default=1) - 1)
        outputs = [self.outputs[part.sequence] for part in launched.slices]
        if self.draws is not None and not all(map(self._is_plain, launched.slices, outputs)):
            flight.drawn = self.draws.launch(launched, outputs)
        return True

    def _is_usual(self, part: Slice) -> bool:
        """Whether the device can choose the token behind the slice, if there is one, and all its chunks have come."""
        sequence = part.sequence
        if not sequence.draws or sequence.reusable is not None or self.scheduler.below.coming(sequence):
            return False
        if not part.samples:
            return True
        output = self.outputs[sequence]
        if output.matcher is not None or sequence in self._unsure:
            return False
        return self._is_plain(part, output) or (self.draws is not None and self.draws.takes(output))

    @staticmethod
    def _is_plain(part: Slice, output: Output) -> bool:
        """Whether the token behind the slice is that of the greatest logit."""
        return output.plain and not output.forbids(part.end - part.sequence.prompt_len)

    # -- landing

    def _landed(self, flight: Flight) -> Computed:
        """Waits for a step. What the device was not sure of is computed again, and chosen by the host."""
        launched = flight.launched
        assert launched is not None
        parts = [(part, row) for row, part in enumerate(launched.slices) if part.sequence not in flight.void]
        if flight.drawn is None:
            return Computed(launched.logits, parts, launched.greatest(), timed=launched.timed)
        sampled: dict[int, Sampled] = flight.drawn.sampled()
        for part, row in parts:
            if row not in sampled:
                self._again(part.sequence)
        parts = [(part, row) for part, row in parts if row in sampled]
        return Computed(launched.logits, parts, sampled=sampled, timed=launched.timed)

    def _again(self, sequence: SequenceState) -> None:
        self._unsure.add(sequence)
        if self._flight is not None and self._flight.drop(sequence):
            self._lacking = True  # its slots are free, and nobody is given them while a step writes there
        self._waiting = -1
        self.scheduler.again(sequence)

    def _close(self, flight: Flight) -> None:
        """When it has ended."""
        for sequence in flight.ended:
            self.scheduler.remove(sequence)
        flight.ended.clear()
