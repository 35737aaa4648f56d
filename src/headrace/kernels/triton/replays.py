"""Choices of tokens launched again as CUDA graphs: a draw is a dozen kernels or two, each of which takes the host
longer to launch than the GPU to run.

R: rows of logits, V: vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from headrace.kernels.triton.sampling import MOST_LEADERS, Chooser, Needs

Launch = Callable[[], None]
MOST = 64
"""Graphs that are kept."""


def record(launch: Launch) -> Launch:
    """A CUDA graph of what `launch` launches: its replay. launch has been called before, and takes no memory."""
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        # torch.cuda.graph would empty the allocator first.
        graph.capture_begin(capture_error_mode="thread_local")
        launch()
        graph.capture_end()
    torch.cuda.current_stream().wait_stream(stream)
    return graph.replay


class Replays:
    """The launches of a chooser. Of a kind of choice from logits at one address the first is launched as it is, and
    compiles what is not compiled yet; the second is recorded, and replayed from then on. recorder: None records
    nothing."""

    def __init__(self, chooser: Chooser, recorder: Callable[[Launch], Launch] | None) -> None:
        self.chooser, self.replayed = chooser, 0
        self._recorder = recorder
        self._known: dict[tuple[object, ...], Launch | None] = {}

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
        replay = self._known[key]
        if replay is None:
            replay = self._known[key] = self._recorder(launch)
        replay()
        self.replayed += 1
