"""What all requests of one server share: the engine and its phase, the metrics, the tokenizer's thread."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Literal, TypeVar

from headrace import host
from headrace.config import EngineConfig
from headrace.server.abandoned import CLIENT_GONE as CLIENT_GONE
from headrace.server.abandoned import AbandonedPrefills
from headrace.server.admission import settle
from headrace.server.answer_memory import AnswerMemory
from headrace.server.engine import ServedCapacity, ServedEngine, ServedTokenizer
from headrace.server.history import rewrites_history
from headrace.server.job import Job, cancel
from headrace.server.keyring import Keyring
from headrace.server.loading import LoadLog
from headrace.server.metrics import ServerCounts, ServerMetrics
from headrace.server.parsers.registry import Formats, formats_of
from headrace.server.prompt_pins import PromptPins
from headrace.server.public import PublicPrefixes, prefixes_of, read_texts
from headrace.server.reading import ReadingPlaces
from headrace.server.refusals import Refusals
from headrace.server.responses.store import ResponseStore
from headrace.server.restarts import MOST, WINDOW_S, RestartLimit
from headrace.server.reuse import RecentRequests
from headrace.server.start import Line, ready_again_line, ready_lines, start_lines
from headrace.server.status import StatusLines, arrival_line, job_line
from headrace.server.tenants import Tenant
from headrace.stats import EngineStats
from headrace.types import EngineDead

log = logging.getLogger("headrace.server")

Phase = Literal["loading", "ready", "restarting", "failed"]
MakeEngine = Callable[[], Awaitable[ServedEngine]]
T = TypeVar("T")

REFUSED = "refused"
"""How a request ended that the engine did not take."""

RENDERING = 2
"""Threads that wait for chat templates; as many as there are processes that render them."""


class ServerState:
    """Life of the engine: loading -> ready [-> restarting -> ready ...] -> failed, or loading -> failed. `on_failure`
    is called once at the end.

    A failed engine is replaced if the settings say so, it can be made again, and RestartLimit allows it. `reason` says
    why it failed, `error` is what stopped it from loading, `loading` how far an engine is that loads. `listens`:
    requests come over HTTP.
    """

    def __init__(self, engine: ServedEngine | MakeEngine, config: EngineConfig) -> None:
        self.config = config
        self.names = config.served
        self.model = self.names.main
        self.phase: Phase = "loading"
        self.reason: str | None = None
        self.error: BaseException | None = None
        self.loading = LoadLog()
        self.public = PublicPrefixes()
        self.formats = Formats()
        self._public_texts = read_texts(config.server.public_prefix_file)
        self.refusals = Refusals(config.server.log_interval_s)
        self.keys = Keyring(config.server)
        self.abandoned = AbandonedPrefills(config)
        self.recent = RecentRequests()
        self.answers = answers = AnswerMemory() if config.server.replay_answers else None
        self.prompt_pins = PromptPins(config.server.cache_control_pins)
        self.metrics = ServerMetrics(self.stats, self.capacity, self.model)
        self.metrics.register(ServerCounts(self.keys, self.abandoned))
        self.on_failure: Callable[[], None] = lambda: None
        self.responses = ResponseStore(config.server.response_store_mb << 20)
        self.metrics.watch("responses_kept", "Responses kept for the next turn.", lambda: len(self.responses))
        self.metrics.watch("responses_kept_bytes", "Memory that they take.", lambda: self.responses.used)
        if answers is not None:
            self.metrics.watch("answers_remembered", "Conversations whose answers are.", lambda: len(answers))
            self.metrics.watch("answers_remembered_tokens", "Tokens of these answers.", lambda: answers.tokens)
        self.reading = ReadingPlaces(config.server.max_queued_requests)
        self.listens = False
        self.ending = False
        self._was_ready = False
        self._earlier = EngineStats()
        self._limit = RestartLimit()
        self._uptime_s = self._ready_s = self._load_s = self._load_start_s = 0.0
        self.created = int(time.time())
        self._given = engine
        self._engine: ServedEngine | None = None
        self._tokenizing = ThreadPoolExecutor(1, "tokenizer")  # one thread: tokenizers are not all thread-safe
        self._rendering = ThreadPoolExecutor(RENDERING, "templates")
        self._tasks: list[asyncio.Task[None]] = []

    @property
    def engine(self) -> ServedEngine:
        """The engine that answers. Raises EngineDead where there is none (any more)."""
        if self._engine is None or self.phase != "ready":
            raise EngineDead(self.reason or "the model is still loading")
        return self._engine

    @property
    def retry_after_s(self) -> int:
        """Whole seconds until a restarting engine should be ready, by the time the last one took to load."""
        left = self._load_s - (time.monotonic() - self._load_start_s)
        return max(1, math.ceil(left))

    @property
    def half_full(self) -> bool:
        """Whether half of the places for waiting requests are taken."""
        waiting = 0 if self._engine is None else self._engine.stats.scheduler.waiting
        return 2 * waiting >= self.config.server.max_queued_requests

    def retry_after_of(self, tenant: Tenant) -> float:
        """Seconds until what waits of a tenant should be computed."""
        return self.engine.retry_after_s(tenant.name, tenant.rules.weight)

    def stats(self) -> EngineStats:
        """Gauges of the engine that is ready, and counters of all engines since the start."""
        own = self._engine.stats if self._engine is not None and self._was_ready else EngineStats()
        return own.after(self._earlier)

    def capacity(self) -> ServedCapacity | None:
        """What the engine holds; None before it is ready."""
        return self._engine.capacity if self._engine is not None and self._was_ready else None

    def open(self) -> None:
        self._tasks.append(asyncio.create_task(self._live()))

    async def close(self) -> None:
        await cancel(*self._tasks)
        await self.abandoned.close()
        if self._engine is not None:
            if self.listens and self._engine.alive and self._engine.stats.restore.unstored:
                log.info("stopping: the engine stores what is left of its KV cache")
            await self._engine.shutdown()
        for threads in (self._tokenizing, self._rendering):
            threads.shutdown(wait=False, cancel_futures=True)

    async def in_tokenizer(self, work: Callable[..., T], *args: object) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._tokenizing, work, *args)

    async def in_renderer(self, work: Callable[..., T], *args: object) -> T:
        """Apart from the tokenizer's thread, which a template that does not end must not hold up."""
        return await asyncio.get_running_loop().run_in_executor(self._rendering, work, *args)

    async def _live(self) -> None:
        try:
            engine = await self._load()
        except Exception as error:
            self.error = error
            self._fail(f"the model cannot be served: {error or repr(error)}")
            return
        lines = asyncio.create_task(StatusLines(self._ready_engine, self.stats).run(self.config.server.log_interval_s))
        try:
            reason = await self._watch(engine)
            while self._may_restart():
                reason = await self._restart(reason)
            if self.ending:  # whoever signals all processes of the server ends its engine, too
                self.reason = reason
                log.info("stopping: %s", reason)
            else:
                self._fail(reason)
        finally:
            await cancel(lines)

    async def _load(self) -> ServedEngine:
        self._load_start_s = time.monotonic()
        engine = await self._given() if callable(self._given) else self._given
        self._engine = engine
        lines = asyncio.create_task(self.loading.run())
        try:
            await engine.start(phases=self.loading)
            self.loading.times.close()
            self.public = await self.in_renderer(prefixes_of, self._public_texts, engine.tokenizer)
            self.formats = _formats(engine.tokenizer, self.config)
            if told := await self.in_renderer(rewrites_history, engine.tokenizer):
                log.warning("%s", told)
        finally:
            await cancel(lines)
        again = self.phase == "restarting"
        self.phase, self._was_ready = "ready", True
        self._ready_s = time.monotonic()
        self._load_s = self._ready_s - self._load_start_s
        _tell(*([ready_again_line(self._load_s, self._limit.used, MOST)] if again else self._start_lines(engine)))
        return engine

    def _start_lines(self, engine: ServedEngine) -> list[Line]:
        ready = []
        if self.listens:
            ready = ready_lines(self.config, self.model, engine.tokenizer, host.process_age_s(), engine.capacity)
        lines = start_lines(engine.capacity, self.config, self.model, self.loading.weights, self.public.lines)
        return lines + ready

    def _ready_engine(self) -> ServedEngine | None:
        return self._engine if self.phase == "ready" and self._engine is not None and self._engine.alive else None

    async def _watch(self, engine: ServedEngine) -> str:
        """Waits until the engine has failed; what is to be said of it."""
        try:
            return f"the engine has failed: {await engine.wait_dead()}"
        except Exception as error:
            return f"the watch on the engine has failed: {error!r}"
        finally:
            self._uptime_s += time.monotonic() - self._ready_s

    def _may_restart(self) -> bool:
        if self.ending or not self.config.server.restart or not callable(self._given):
            return False
        allowed = self._limit.allows(self._uptime_s)
        if not allowed:
            log.error("not started again: %d restarts within %.0f s, and no request succeeded", MOST, WINDOW_S)
        return allowed

    async def _restart(self, reason: str) -> str:
        """Replaces the failed engine; returns when the new one has failed too, with the reason."""
        self.phase, self.reason, self.loading, self._load_start_s = "restarting", reason, LoadLog(), time.monotonic()
        log.error("%s; starting it again (restart %d of %d)", reason, self._limit.used, MOST)
        self.metrics.restarts.inc()
        self._earlier, self._was_ready = self.stats(), False
        try:
            if self._engine is not None:
                await self._engine.shutdown()
            engine = await self._load()
        except Exception as error:
            return f"the engine has failed and cannot be started again: {error or repr(error)}"
        self.reason = None
        return await self._watch(engine)

    def _fail(self, reason: str) -> None:
        self.phase, self.reason = "failed", reason
        log.error("%s", reason)
        self.on_failure()

    def arrived(self, job: Job, text: str) -> None:
        """A request goes to the engine. text: of its prompt."""
        if self.config.server.log_requests in ("params", "text"):
            _tell(arrival_line(job, text if self.config.server.log_requests == "text" else None))

    def finish(self, job: Job, outcome: str) -> None:
        """The account of one request that reached the engine, or was refused by it, however it ended."""
        settle(job, refused=outcome == REFUSED)
        if job.seen is not None:
            self.recent.answered(job.caller, job.seen, [choice.token_ids for choice in job.choices])
        if outcome == "done" and self.answers is not None:
            _remember(job, self.answers)
        if outcome == REFUSED:
            return  # and told as such
        if outcome == "done":
            self.metrics.observe(job)
            self._limit.note_success()
        elif outcome == CLIENT_GONE:
            self.metrics.gone.inc()
        if self.config.server.log_requests != "off":
            _tell(job_line(job, outcome, self.config.server.log_requests == "text"))


def _remember(job: Job, answers: AnswerMemory) -> None:
    """Its answers, for the next turn of the conversation."""
    for choice in job.choices:
        if choice.prompt.asked is not None:
            answers.add(*choice.prompt.asked, choice.token_ids)


def _formats(tokenizer: ServedTokenizer | None, config: EngineConfig) -> Formats:
    """How the model writes calls and reasoning."""
    if tokenizer is None:
        return Formats()
    return formats_of(
        tokenizer.chat_template,
        tool_parser=config.server.tool_call_parser,
        reasoning_parser=config.server.reasoning_parser,
        tokens=tokenizer.added_tokens,
        hidden=tokenizer.special_tokens,
    )


def _tell(*lines: Line) -> None:
    for line in lines:
        log.info("%s", line.text, extra=line.extra)
