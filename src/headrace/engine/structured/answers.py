"""The structured answers of an engine: matchers of its sequences, grammars and the threads that serve them.

A grammar is compiled beside the steps. Until it is there its sequences are held: their prompts are computed to all but
the last token. A grammar known before is had at once, and its sequence is not held.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial

from llguidance import LLMatcher

from headrace.engine.sequence import SequenceState
from headrace.engine.structured.grammars import BadGrammar, Grammars
from headrace.engine.structured.masks import MaskThread
from headrace.engine.structured.matcher import SequenceMatcher
from headrace.engine.structured.vocabulary import Vocabulary, vocabulary_of
from headrace.engine.tokenizer import Tokenizer
from headrace.logs import shown
from headrace.stats import StructuredStats
from headrace.types import InvalidRequest, Structured

WAIT_S = 0.005
"""So long does an engine wait for a grammar where it has nothing else to do, before it looks for new requests."""


class StructuredAnswers:
    """width, ends: of the logits, and the end-of-sequence tokens. jump_ahead: whether forced tokens are appended
    without sampling; answers are the same in every schedule either way, but not the one way as the other.

    All methods are the engine's. Threads begin with the first structured request.
    """

    def __init__(self, tokenizer: Tokenizer | None, width: int, ends: Sequence[int]) -> None:
        self.jump_ahead = True
        self.stats = StructuredStats()
        self.held: dict[SequenceState, SequenceMatcher] = {}
        self._of = (tokenizer, width, tuple(ends))
        self._grammars = Grammars()
        self._masks: MaskThread | None = None
        self._compiling: ThreadPoolExecutor | None = None
        self._vocabulary: Vocabulary | None = None

    def begin(self, sequence: SequenceState) -> SequenceMatcher:
        """The matcher of a new sequence whose parameters have a shape; it is compiled beside the steps."""
        params = sequence.request.params
        assert params.structured is not None
        if self._compiling is None or self._masks is None:
            self._compiling, self._masks = ThreadPoolExecutor(1, "headrace-grammars"), MaskThread()
        # A forced token has no logits of its own, and so no log probability.
        matcher = SequenceMatcher(self.jump_ahead and params.logprobs is None)
        known = self._grammars.known(params.structured)
        work = partial(self._open, matcher, params.structured, known, self._masks)
        if known is None:
            matcher.job = self._compiling.submit(work)
            self.held[sequence] = matcher
            sequence.held = True
        else:
            matcher.job = self._masks.do(work)
        self.stats.requests += sequence.index == 0
        return matcher

    def _open(
        self, matcher: SequenceMatcher, structured: Structured, known: LLMatcher | None, masks: MaskThread
    ) -> None:
        try:
            if self._vocabulary is None:
                self._vocabulary = vocabulary_of(*self._of)
            matcher.open(known or self._grammars.matcher(structured, self._vocabulary), self._vocabulary)
            masks.compute([matcher], self._vocabulary)
        except (BadGrammar, InvalidRequest) as error:
            matcher.fail(str(error))
        except Exception as error:  # of one request; the engine goes on with the others
            matcher.fail(shown(error))

    def release(self) -> None:
        """Lets go of the held sequences whose grammar has come, or cannot be had."""
        for sequence, matcher in list(self.held.items()):
            if matcher.job is None or matcher.job.done():
                self.drop(sequence)

    def drop(self, sequence: SequenceState) -> None:
        """Holds a sequence no longer."""
        if self.held.pop(sequence, None) is not None:
            sequence.held = False

    def wait(self) -> None:
        """Where nothing can be computed: waits a moment for a grammar."""
        jobs: list[Future[None]] = [matcher.job for matcher in self.held.values() if matcher.job is not None]
        if jobs:
            with contextlib.suppress(TimeoutError):
                jobs[0].exception(WAIT_S)

    def fault(self, matcher: SequenceMatcher) -> str:
        """Waits for a matcher's mask, counting the seconds. Why it cannot go on, empty where it can."""
        if matcher.job is not None and not matcher.job.done():
            began = time.perf_counter()
            matcher.job.exception()
            self.stats.waited_s += time.perf_counter() - began
        return matcher.fault

    def ask(self, matchers: Sequence[SequenceMatcher]) -> None:
        """Has the masks for the next tokens computed while the next step runs."""
        if matchers and self._masks is not None and self._vocabulary is not None:
            self._masks.ask(matchers, self._vocabulary)

    def told(self) -> StructuredStats:
        """Its counters as they stand."""
        self.stats.grammars = self._grammars.compiled
        return self.stats

    def close(self) -> None:
        """Ends the threads. May be called again."""
        if self._compiling is not None:
            self._compiling.shutdown(wait=True, cancel_futures=True)
        if self._masks is not None:
            self._masks.close()
