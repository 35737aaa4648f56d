"""Choices of tokens launched again as CUDA graphs: a draw is a dozen kernels or two, each of which takes the host
longer to launch than the GPU to run.

R: rows of logits, V: vocabulary.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from functools import partial

from torch import Tensor

from headrace.device import Graph
from headrace.kernels.triton.sampling import MOST_LEADERS, Chooser, Needs

log = logging.getLogger(__name__)

Launch = Callable[[], None]
Recorder = Callable[[Launch], tuple[Graph, None]]
"""Device.graph. What it records has been launched before, and takes no memory."""
MOST = 64
"""Graphs that are kept."""


class Replays:
    """The launches of a chooser. Of a kind of choice from logits at one address the first is launched as it is, and
    compiles what is not compiled yet; the second is recorded, and replayed from then on. recorder: None records
    nothing, nor does one that has failed."""

    def __init__(self, chooser: Chooser, recorder: Recorder | None) -> None:
        self.chooser, self.replayed = chooser, 0
        self._recorder = recorder
        self._known: dict[tuple[object, ...], Graph | None] = {}

    def room(self, rows: int) -> int:
        """How many rows a choice of so many is launched for: those behind them must be filled in, too."""
        return rows if self._recorder is None else min(1 << (rows - 1).bit_length(), self.chooser.rows)

    def choose(self, logits: Tensor, rows: int, needs: Needs) -> None:
        """Chooser.choose of `room(rows)` rows from logits [R, V]."""
        rows, leaders = self.room(rows), needs.leaders
        if leaders:
            needs = replace(needs, leaders=min(1 << (leaders - 1).bit_length(), MOST_LEADERS))
        launch = partial(self.chooser.choose, logits, rows, needs)
        key = (logits.data_ptr(), logits.stride(0), logits.dtype, rows, needs)
        if self._recorder is None or key not in self._known:
            launch()
            self._known[key] = None
            while len(self._known) > MOST:
                del self._known[next(iter(self._known))]
            return
        found = self._known[key] or self._recorded(launch)
        if found is None:
            launch()
            return
        self._known[key] = found
        found.replay()
        self.replayed += 1

    def _recorded(self, launch: Launch) -> Graph | None:
        """None, with a line in the log: it cannot be recorded. All choices are launched from then on."""
        assert self._recorder is not None
        try:
            return self._recorder(launch)[0]
        except RuntimeError as error:  # no memory, for one
            log.warning("choices of tokens are launched, not recorded: %s", error)
            self._recorder = None
            return None
