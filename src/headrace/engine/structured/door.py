"""Shapes are refused at the door, before their request is queued: in every process that takes requests."""

from __future__ import annotations

import asyncio
import json
import threading
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from headrace.engine.capacity import Capacity
from headrace.engine.confined import Closed, Confined, Died, Limits
from headrace.engine.structured import shape_worker as worker
from headrace.engine.tokenizer import Tokenizer
from headrace.types import InvalidRequest, SamplingParams, Structured

MOST_SEEN = 256
"""Shapes remembered as good; one that is told again is not looked at again."""

PROCESSES = 2
"""At most, each with the vocabulary: one shape that takes long does not hold up the others."""

WALL_S = 30.0

LIMITS = Limits(worker.__name__, worker.CPU_S, worker.MEMORY_BYTES, WALL_S, worker.MAX_REPLY)


class ShapeDoor:
    """Checks the shapes of answers. For any thread; begins, and imports llguidance, with the first shape."""

    def __init__(self) -> None:
        self._good: OrderedDict[Structured, None] = OrderedDict()
        self._lock = threading.Lock()
        self._threads: ThreadPoolExecutor | None = None
        self._processes: Confined | None = None
        self._closed = False

    def check(self, params: SamplingParams, tokenizer: Tokenizer | None, capacity: Capacity) -> None:
        """Raises InvalidRequest (`param`: "structured") for a shape that this model's answers cannot have. In this
        process: for callers who answer for their shapes."""
        if params.structured is None or self._is_good(params.structured):
            return
        from headrace.engine.structured import compile
        from headrace.engine.structured.vocabulary import vocabulary_of

        vocabulary = vocabulary_of(tokenizer, capacity.vocab_size, capacity.eos_token_ids)
        compile.check(params.structured, vocabulary.tokens, vocabulary.added)
        self._remember(params.structured)

    async def check_beside(self, params: SamplingParams, tokenizer: Tokenizer | None, capacity: Capacity) -> None:
        """The same in a process of its own, with limits of time and memory (`shape_worker`)."""
        if params.structured is None or self._is_good(params.structured):
            return
        if self._closed:
            raise _ending()
        if self._threads is None:
            self._threads = ThreadPoolExecutor(PROCESSES, "headrace-shapes")
        work = partial(self._check_confined, params.structured, tokenizer, capacity)
        await asyncio.get_running_loop().run_in_executor(self._threads, work)

    def _check_confined(self, structured: Structured, tokenizer: Tokenizer | None, capacity: Capacity) -> None:
        processes, kind = self._begun(tokenizer, capacity), structured.kind
        try:
            fault = json.loads(processes.ask(json.dumps({kind: getattr(structured, kind)}).encode()))
        except Closed:
            raise _ending() from None
        except Died as died:
            told = f"{kind}: compiling it {died.reason}; use a smaller or simpler one"
            raise InvalidRequest(told, "structured") from None
        if fault is not None:
            raise InvalidRequest(fault, "structured")
        self._remember(structured)

    def _begun(self, tokenizer: Tokenizer | None, capacity: Capacity) -> Confined:
        from headrace.engine.structured.vocabulary import tokens_of, usable

        tokenizer = usable(tokenizer)
        with self._lock:
            if self._processes is None:
                tokens, special = tokens_of(tokenizer, capacity.vocab_size)
                ends = [token for token in capacity.eos_token_ids if token < tokenizer.vocab_size]
                told = {"lengths": [*map(len, tokens)], "special": special, "ends": ends}
                added = {"added": dict(tokenizer.added_tokens)}
                self._processes = Confined(LIMITS, PROCESSES, (json.dumps(told | added).encode(), b"".join(tokens)))
                if self._closed:
                    self._processes.close()
            return self._processes

    def close(self) -> None:
        """Ends the processes; shapes that are being looked at are refused, and so are later ones."""
        self._closed = True
        if self._processes is not None:
            self._processes.close()
        if self._threads is not None:
            self._threads.shutdown(wait=False)

    def _remember(self, structured: Structured) -> None:
        with self._lock:
            self._good[structured] = None
            if len(self._good) > MOST_SEEN:
                self._good.popitem(last=False)

    def _is_good(self, structured: Structured) -> bool:
        with self._lock:
            if structured not in self._good:
                return False
            self._good.move_to_end(structured)
            return True


def _ending() -> InvalidRequest:
    return InvalidRequest("the server is ending", "structured")
