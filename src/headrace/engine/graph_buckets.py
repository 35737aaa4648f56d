"""Steps with prompts in them as CUDA graphs: by buckets of rows, as far as launching them takes longer than computing.

The host takes as long to launch one row as thousands. Where the GPU takes longer still, the host is ahead of it: a
graph would save nothing, and its rows of padding would be computed. So the device is asked, as the engine starts, up to
which bucket a replay is faster than its launches; larger steps are launched. D: rows that tokens are drawn from, V:
vocabulary.
"""

from __future__ import annotations

import logging
import time
from functools import partial
from itertools import product

import torch

from headrace.attention.recurrence import ReplayedRecurrence
from headrace.device import current
from headrace.engine.graphs import ROUNDS, CudaGraphs, Key, Recorded, Recordings
from headrace.engine.programs import Launched, Logits, StepRows
from headrace.kernels.step_copies import ReadBack
from headrace.kv.table_state import NONE

log = logging.getLogger(__name__)

SMALL = (16, 64, 128, 256)
"""Rows of the first buckets: so few take about as long as one, which reads all weights as well."""
FEW_DRAWN = 64
"""Rows that tokens are drawn from, in the first of two kinds of recordings."""
RECORDING_S = 5.0
"""Seconds that recordings before the first step may take; others are made when they are first needed."""


def buckets(most: int) -> list[int]:
    """Rows of recordings, ascending up to `most`: from 256 on two for each doubling, so a third at most is padding."""
    sizes = [*SMALL]
    while sizes[-1] < most:
        power = 1 << (sizes[-1].bit_length() - 1)
        sizes += [power * 3 // 2, 2 * power]
    return [*(size for size in sizes if size < most), most]


class PromptGraphs(Recordings):
    """Steps of up to `rows` rows, some of which, or none, tokens are drawn from; none reports hidden states. What does
    not fit is computed eagerly. decoding: what replays the other steps."""

    def __init__(self, decoding: CudaGraphs, rows: int) -> None:
        states, most = decoding.states, decoding.sizes[-1]
        recurrence = None if states is None else ReplayedRecurrence(states, rows, most)
        super().__init__(
            decoding.decoder, decoding.storage, decoding.eager, decoding.step.prompts(), decoding.turns, recurrence,
            decoding.pool, decoding.logits,
        )  # fmt: skip
        self.stats, self.sizes = decoding.stats, buckets(rows)
        decoding.otherwise = self.run  # long runs among its rows are tasks of flash, for which there is room here
        drawn = decoding.sizes[-1]
        self.drawn = sorted({min(FEW_DRAWN, drawn), drawn})
        self._read_back = ReadBack(2 * drawn, torch.int32, current())

    @torch.inference_mode()
    def record_usual(self) -> None:
        """Finds the buckets that pay, and records them for prompts alone, then for those beside sequences that decode.
        The largest first: the others lie in its memory."""
        ends = time.monotonic() + RECORDING_S
        self._leave_what_pays()
        log.info("steps with prompts of up to %d rows are replayed", max(self.sizes, default=0))
        for rounds, adapted in product((0, ROUNDS[0]), self._usual):
            for rows in reversed(self.sizes):
                key = Key(rows, rounds, self.drawn[0], adapted)
                if key not in self._recorded and time.monotonic() < ends:
                    self._recording(key)
        current().synchronize()

    def run(self, step: StepRows) -> Logits:
        launched = self.launch(step)
        if launched is None:
            return self._launched(step)
        return Logits(launched.logits, launched.greatest())

    @torch.inference_mode()
    def launch(self, step: StepRows) -> Launched | None:
        """As CudaGraphs.launch."""
        plan = step.planned.plan
        drawn = list(range(plan.rows)) if step.wanted is None else step.wanted
        rows = next((size for size in self.sizes if size >= plan.rows), None)
        chosen = next((count for count in self.drawn if count >= len(drawn)), None)
        rounds = None if rows is None or chosen is None or not self._takes(step) else self._fill(plan)
        if rows is None or chosen is None or rounds is None:
            return None
        adapters = step.adapters()
        key = Key(rows, next(each for each in (0, *ROUNDS) if each >= rounds), chosen, adapters is not None)
        if step.before is not None and key not in self._recorded:
            return None
        self.step.send(step.tokens(), plan.positions, plan.row_offsets, drawn, adapters)
        recorded = self._recording(key)
        if recorded is None:
            self.sizes = [size for size in self.sizes if size < rows]
            return None
        self._replay(recorded)
        self.stats.replayed += 1
        self.stats.prompts += 1
        self.stats.ahead += step.before is not None
        count, reading = len(drawn), self._read_back.begin(recorded.chosen)
        slices = [part for part in step.slices if part.samples]
        return Launched(slices, count, recorded.logits[:count], self.step.chosen[:count], reading)

    def _recording(self, key: Key) -> Recorded | None:
        """None, with a line in the log: it cannot be recorded, or has other bits than its launches."""
        if key in self._recorded:
            return self._recorded[key]
        self._spare_states()
        try:
            launched = self._compute(key)[0].clone()
            recorded = self._capture(key)
        except RuntimeError as error:  # no memory, for one
            log.warning("steps of %d rows with prompts in them are launched, not recorded: %s", key.rows, error)
            return None
        recorded.graph.replay()
        if torch.equal(launched.view(torch.int32), recorded.logits.view(torch.int32)):  # NaN is not equal to itself
            return recorded
        log.warning("steps of %d rows with prompts in them are launched: a replay has other bits", key.rows)
        del self._recorded[key]
        return None

    def _leave_what_pays(self) -> None:
        """Leaves the buckets whose rows are computed faster than they are launched."""
        device = current()
        while self.sizes:
            key = Key(self.sizes.pop(), 0, self.drawn[0])
            recorded = self._recording(key)
            if recorded is None:
                continue
            self._begin_anew(key.rows)
            launched, _ = device.timed(partial(self._compute, key))
            _, replayed = device.timed(recorded.graph.replay)
            if replayed <= launched:
                self.sizes.append(key.rows)
                return
            del self._recorded[key]
            # Launching takes as long for fewer rows; computing does not take less than its share.
            self.sizes = [size for size in self.sizes if size <= key.rows * launched / replayed]

    def _begin_anew(self, rows: int) -> None:
        """Has all rows be those of one sequence, whose state is left where none is yet: before the first step."""
        if self.recurrence is not None:
            self.recurrence.fill(torch.tensor([[0, rows, NONE, 0]]), rows)
            self.recurrence.memory.send()
