"""What all requests of one server share: the engine and its phase, the metrics, the tokenizer's thread."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Literal, TypeVar

from headrace.config import EngineConfig
from headrace.server.engine import Capacity, Engine
from headrace.server.job import Job, cancel
from headrace.server.metrics import ServerMetrics
from headrace.server.status import StatusLines, capacity_lines, job_line
from headrace.types import EngineDead, EngineStats

log = logging.getLogger("headrace.server")

Phase = Literal["loading", "ready", "failed"]
MakeEngine = Callable[[], Awaitable[Engine]]
T = TypeVar("T")


class ServerState:
    """Life of the engine: loading -> ready -> failed, or loading -> failed. `on_failure` is called once at the end.

    `reason` says why it failed, `error` is what stopped it from loading, `loaded` the share of the model that is in.
    """

    def __init__(self, engine: Engine | MakeEngine, config: EngineConfig) -> None:
        self.config = config
        self.model = config.served_model_name or config.model
        self.phase: Phase = "loading"
        self.reason: str | None = None
        self.error: BaseException | None = None
        self.loaded = 0.0
        self.metrics = ServerMetrics(self.stats, self.capacity, self.model)
        self.on_failure: Callable[[], None] = lambda: None
        self.admitting = 0
        self._was_ready = False
        self.created = int(time.time())
        self._given = engine
        self._engine: Engine | None = None
        self._tokenizing = ThreadPoolExecutor(1, "tokenizer")  # one thread: tokenizers are not all thread-safe
        self._tasks: list[asyncio.Task[None]] = []

    @property
    def engine(self) -> Engine:
        """The engine that answers. Raises EngineDead where there is none (any more)."""
        if self._engine is None or self.phase != "ready":
            raise EngineDead(self.reason or "the model is still loading")
        return self._engine

    def stats(self) -> EngineStats:
        return self._engine.stats if self._engine is not None and self._was_ready else EngineStats()

    def capacity(self) -> Capacity | None:
        """What the engine holds; None before it is ready."""
        return self._engine.capacity if self._engine is not None and self._was_ready else None

    def open(self) -> None:
        self._tasks.append(asyncio.create_task(self._live()))

    async def close(self) -> None:
        await cancel(*self._tasks)
        if self._engine is not None:
            await self._engine.shutdown()
        self._tokenizing.shutdown(wait=False, cancel_futures=True)

    async def in_tokenizer(self, work: Callable[..., T], *args: object) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._tokenizing, work, *args)

    async def _live(self) -> None:
        try:
            engine = await self._load()
        except Exception as error:
            self.error = error
            self._fail(f"the model cannot be served: {error or repr(error)}")
            return
        lines = asyncio.create_task(StatusLines(self.stats).run(self.config.log_interval_s))
        try:
            self._fail(f"the engine has failed: {await engine.wait_dead()}")
        except Exception as error:
            self._fail(f"the watch on the engine has failed: {error!r}")
        finally:
            await cancel(lines)

    async def _load(self) -> Engine:
        engine = await self._given() if callable(self._given) else self._given
        self._engine = engine
        await engine.start(self._note_progress)
        for line in capacity_lines(engine.capacity, self.config, self.model):
            log.info(line)
        self.phase, self._was_ready = "ready", True
        return engine

    def _note_progress(self, done: int, total: int) -> None:
        """Tells of every tenth of the loading."""
        before, self.loaded = self.loaded, done / max(1, total)
        if int(before * 10) < int(self.loaded * 10):
            log.info("loading %s: %.0f %%", self.config.model, self.loaded * 100)

    def _fail(self, reason: str) -> None:
        self.phase, self.reason = "failed", reason
        log.error("%s", reason)
        self.on_failure()

    def finish(self, job: Job, outcome: str) -> None:
        """The account of one request that reached the engine, however it ended."""
        if outcome == "done":
            self.metrics.observe(job)
        elif outcome == "client gone":
            self.metrics.gone.inc()
        log.info(job_line(job, outcome))
