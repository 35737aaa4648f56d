"""Shapes are refused at the door, before their request is queued: in every process that takes requests."""

from __future__ import annotations

import asyncio
import threading
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor

from headrace.engine.capacity import Capacity
from headrace.engine.tokenizer import Tokenizer
from headrace.types import SamplingParams, Structured

MOST_SEEN = 256
"""Shapes remembered as good; one that is told again is not looked at again."""


class ShapeDoor:
    """Checks the shapes of answers. For any thread; begins, and imports llguidance, with the first shape."""

    def __init__(self) -> None:
        self._good: OrderedDict[Structured, None] = OrderedDict()
        self._lock = threading.Lock()
        self._thread: ThreadPoolExecutor | None = None

    def check(self, params: SamplingParams, tokenizer: Tokenizer | None, capacity: Capacity) -> None:
        """Raises InvalidRequest (`param`: "structured") for a shape that this model's answers cannot have."""
        if params.structured is None or self._is_good(params.structured):
            return
        from headrace.engine.structured import compile
        from headrace.engine.structured.vocabulary import vocabulary_of

        vocabulary = vocabulary_of(tokenizer, capacity.vocab_size, capacity.eos_token_ids)
        compile.check(params.structured, vocabulary.tokens, vocabulary.added)
        with self._lock:
            self._good[params.structured] = None
            if len(self._good) > MOST_SEEN:
                self._good.popitem(last=False)

    async def check_beside(self, params: SamplingParams, tokenizer: Tokenizer | None, capacity: Capacity) -> None:
        """`check` on a thread of its own, one shape at a time: shapes that take long wait for each other alone."""
        if params.structured is None or self._is_good(params.structured):
            return
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, "headrace-shapes")
        await asyncio.get_running_loop().run_in_executor(self._thread, self.check, params, tokenizer, capacity)

    def _is_good(self, structured: Structured) -> bool:
        with self._lock:
            if structured not in self._good:
                return False
            self._good.move_to_end(structured)
            return True
