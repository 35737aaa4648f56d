"""Prefills whose client has left (--on-disconnect finish): computed to their end, so that the retry finds them cached.

What an aborted request has computed in whole chunks stays cached in any case; this is about the rest of its prompt.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from typing import Protocol

from headrace.config import EngineConfig
from headrace.server.engine import ServedEngine
from headrace.server.job import Event, Job, cancel

MOST = 8
"""At one time."""

CLIENT_GONE = "client gone"
"""How a request ended whose client left."""

LOOK_S = 0.1
"""Seconds between two looks at the queue."""


class Leavable(Protocol):
    """A JobRun whose client has left."""

    @property
    def job(self) -> Job: ...
    @property
    def engine(self) -> ServedEngine: ...
    @property
    def reading(self) -> bool: ...

    async def drain(self, take: Callable[[Event], None]) -> None: ...

    async def close(self, outcome: str) -> None: ...


class AbandonedPrefills:
    """At most MOST; all give way as soon as a request waits for its turn. counts: by how they ended, 'finished' or
    'dropped'."""

    def __init__(self, config: EngineConfig) -> None:
        cached = config.cache.prefix_caching
        self._most = MOST if cached and config.server.on_disconnect == "finish" else 0
        self._tasks: set[asyncio.Task[None]] = set()
        self.counts: Counter[str] = Counter(finished=0, dropped=0)

    def __len__(self) -> int:
        return len(self._tasks)

    def take(self, run: Leavable) -> bool:
        """Goes on with the run's prefill and closes it, client gone, at the end. False, with nothing done, if there is
        none under way, a prompt has no answer or a retry would not read the cache, or there are too many."""
        reported = any(prompt.params.prompt_logprobs is not None for prompt in run.job.prompts)
        if len(self) >= self._most or reported or not run.reading:
            return False
        run.job.left = True
        task = asyncio.create_task(self._finish(run))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return True

    async def close(self) -> None:
        """Drops all."""
        await cancel(*self._tasks)

    async def _finish(self, run: Leavable) -> None:
        rest = asyncio.ensure_future(run.drain(lambda _: None))
        try:
            while not rest.done() and not run.engine.stats.scheduler.waiting:
                await asyncio.wait((rest,), timeout=LOOK_S)
        finally:
            finished = rest.done() and not rest.cancelled() and rest.exception() is None
            await cancel(rest)
            ended = "finished" if finished else "dropped"
            self.counts[ended] += 1
            run.job.remark = f"prefill {ended}"
            await run.close(CLIENT_GONE)
