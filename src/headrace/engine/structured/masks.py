"""Masks of allowed tokens, computed beside the steps: asked for when a step's tokens are known, and ready before the
next step's logits are.

    engine  | commit, ask |   step: layers, logits   | sample | commit, ask |
    masks                 | masks |                                         | masks |
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
from llguidance import LLExecutor

from headrace import cores
from headrace.engine.structured.matcher import SequenceMatcher
from headrace.engine.structured.vocabulary import Vocabulary
from headrace.logs import shown

MOST_THREADS = 8


class MaskThread:
    """One thread that computes the masks of a step, several at a time where there are cores to spare."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, "headrace-masks")
        self._executor = LLExecutor(num_threads=max(1, min(MOST_THREADS, cores.usable() // 2)))

    def do(self, work: Callable[[], None]) -> Future[None]:
        """Has something short done, after what was asked for before."""
        return self._thread.submit(work)

    def ask(self, matchers: Sequence[SequenceMatcher], vocabulary: Vocabulary) -> None:
        """Has the masks of these matchers computed, each for its present place."""
        job = self.do(lambda: self._compute(matchers, vocabulary))
        for matcher in matchers:
            matcher.job = job

    def _compute(self, matchers: Sequence[SequenceMatcher], vocabulary: Vocabulary) -> None:
        try:
            self.compute(matchers, vocabulary)
        except Exception as error:  # of one step's masks; the engine goes on with the others
            for matcher in matchers:
                matcher.fail(shown(error))

    def compute(self, matchers: Sequence[SequenceMatcher], vocabulary: Vocabulary) -> None:
        """The same, at once, on the caller's thread. A matcher that has failed gets none."""
        work = [(matcher, native) for matcher in matchers if (native := matcher.native) is not None]
        if not work:
            return
        words = np.empty((len(work), vocabulary.words), np.int32)
        places = [(native, row) for row, (_, native) in enumerate(work)]
        self._executor.unsafe_compute_mask_ptr(places, words.ctypes.data, words.shape[1] * 4, len(work))
        for (matcher, _), row in zip(work, vocabulary.masks(words), strict=True):
            matcher.note(row)

    def close(self) -> None:
        """Ends the thread, after the job under way."""
        self._thread.shutdown(wait=True, cancel_futures=True)
