"""The engine for asyncio: it runs in a process of its own, and answers stream out of an async iterator."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time
import uuid
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing
from os import PathLike
from typing import Any, Self, Unpack

from headrace.config import EngineConfig, config_from_env
from headrace.config.keywords import SettingKeywords
from headrace.config.signature import PublicNames, public_names, shows_settings
from headrace.engine import messages as m
from headrace.engine import preflight, process
from headrace.engine.answer_streams import AnswerStreams, Stream
from headrace.engine.async_scores import AsyncScores
from headrace.engine.calls import Answer, EngineCall
from headrace.engine.capacity import Capacity, check_variables, model_folder
from headrace.engine.pending_calls import PendingCalls
from headrace.engine.prompts import conversation, one_params, token_ids
from headrace.engine.structured.door import ShapeDoor
from headrace.engine.tenant_keywords import TenantKeywords, taken_from
from headrace.engine.tokenizer import Tokenizer
from headrace.engine.waiting import WaitingPrompts
from headrace.engine.watchdog import Watchdog
from headrace.offload.tiers import own_disk
from headrace.progress import LoadPhase, OnPhase, Prefill, PrefillClock, both
from headrace.stats import EngineStats, KVStats
from headrace.types import CHUNK, MAX_N, Delta, EngineDead, InvalidRequest, Overloaded, Request, SamplingParams


@shows_settings
class AsyncLLM(AsyncScores, metaclass=PublicNames):
    """An engine process and its queue.

        async with AsyncLLM("tiny") as llm:
            async for delta in llm.generate("The code of Lisbon", SamplingParams(max_tokens=20)):
                print(delta.text, end="")

    `config`: an EngineConfig, or a model as LLM takes it, with settings as keywords. `async with` awaits start() and
    shutdown(). `stats`: the engine's figures after its last step; stats.summary() has the usual ones by plain names.
    It starts once and serves the event loop that started it: do all in one asyncio.run.
    Waiting requests are bounded by max_queued_requests and max_queued_tokens (Overloaded beyond). An engine process
    that says nothing for engine_timeout_s is killed; all waiting then end with EngineDead, as after any failure.
    """

    __dir__ = public_names

    def __init__(
        self, config: EngineConfig | str | PathLike[str] = "tiny", **settings: Unpack[SettingKeywords]
    ) -> None:
        if isinstance(config, EngineConfig):
            asked = config.replace(**settings) if settings else config
        else:
            asked = config_from_env(model=str(config), **settings)
        self.config = own_disk.resolved(asked)
        self.failure: str | None = None
        self.stats = EngineStats()
        self.tokenizer: Tokenizer | None = None
        self._capacity: Capacity | None = None
        self.begun: process.EngineStart | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._process: process.Process | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._listener: asyncio.Task[None] | None = None
        self._watch: asyncio.Task[None] | None = None
        self._watchdog = Watchdog(self.config.server.engine_timeout_s)
        self._dead = asyncio.Event()
        self._closing = False
        self._shapes = ShapeDoor()
        self._streams = AnswerStreams(lambda name: self._send(m.Abort(name)))
        self._calls = PendingCalls(self._send)
        self._queued = WaitingPrompts(0)
        self._prefilling = PrefillClock()

    def __repr__(self) -> str:
        model = repr(self.config.model.folder) if self._capacity is None else self._capacity.told
        failed = ", shut down" if self._closing else f", failed: {self.failure}" if self.failure else ""
        state = failed or (", not started" if self._capacity is None else "")
        return f"AsyncLLM({model}{state})"

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.shutdown()

    @property
    def capacity(self) -> Capacity:
        """Sizes of the loaded engine. Raises EngineDead before it is ready."""
        if self._capacity is None:
            raise EngineDead(self.failure or "the engine is not started: await start()")
        return self._capacity

    @property
    def alive(self) -> bool:
        return self._capacity is not None and self.failure is None

    @property
    def process_id(self) -> int | None:
        """Process id of the engine."""
        return self._process.pid if self._process else None

    @property
    def prefills(self) -> list[Prefill]:
        """Prompts that the engine is reading now, in order of arrival; a request leaves with its first token. Within a
        step what is done is estimated from `prefill_rate`."""
        return self._prefilling.prefills

    @property
    def prefill_rate(self) -> float:
        """Prompt tokens per second: see PrefillClock.rate."""
        return self._prefilling.rate

    async def start(self, progress: Callable[[int, int], None] | None = None, *, phases: OnPhase | None = None) -> None:
        """Starts the engine and returns when it is ready.

        progress(done, total): bytes of weights, as they are read. phases(LoadPhase): everything that takes time, from
        the first moment on; headrace.progress.PhaseTimes times it. Raises ValueError for settings or a model that
        cannot work, and at a second start; EngineDead for any other failure.
        """
        if self._loop is not None or self._closing:
            raise ValueError("an AsyncLLM starts once, and `async with` does it: make another")
        self._loop = asyncio.get_running_loop()
        tell = both(progress, phases)
        preflight.check(self.config)
        folder = model_folder(self.config.model.folder)
        tell(LoadPhase("starting the engine"))
        self._process, link = (self.begun or process.EngineStart()).take()
        reader, self._writer = await asyncio.open_connection(sock=link)
        self._send(m.LoadModel(self.config.flat))
        self._watch = asyncio.create_task(self._keep_watch(self._process))
        tokenizer = asyncio.create_task(  # while the weights arrive
            asyncio.to_thread(Tokenizer.load, folder, self.config.model.chat_template)
        )
        try:
            await self._until_ready(reader, tell)
            tell(LoadPhase("tokenizer"))
            self.tokenizer = await tokenizer
            if self.tokenizer is not None:
                self.tokenizer.warm_up()
        except BaseException:
            tokenizer.cancel()
            await self.shutdown()
            raise
        self._listener = asyncio.create_task(self._listen(reader))

    async def _until_ready(self, reader: asyncio.StreamReader, tell: OnPhase) -> None:
        while self._capacity is None:
            message = await self._receive(reader)
            if isinstance(message, m.EngineReady):
                self._capacity, self._watchdog.loading = message.capacity, False
                shared = message.capacity.kv_cache_tokens // CHUNK if self.config.cache.prefix_caching else 0
                self._queued = WaitingPrompts(shared)
                self.stats = EngineStats(kv=KVStats(chunks_total=message.capacity.kv_cache_tokens // CHUNK))
            elif isinstance(message, m.LoadProgress):
                tell(LoadPhase(message.phase, message.done, message.total))
            elif isinstance(message, m.EngineFailed) or message is None:
                told = message.reason if message else f"{await self._how_ended()} while loading"
                self.failure = self.failure or told
                settings = isinstance(message, m.EngineFailed) and message.settings
                raise ValueError(self.failure) if settings else EngineDead(self.failure)

    async def _listen(self, reader: asyncio.StreamReader) -> None:
        """Hands out what the engine says until it falls silent."""
        reason = ""
        try:
            while (message := await self._receive(reader)) is not None:
                if isinstance(message, m.Events):
                    self._hand_out(message)
                elif isinstance(message, m.Prefills):
                    known = [each for each in message.prefills if each.request_id in self._streams]
                    self._prefilling.begin(known, message.expected_s)
                elif isinstance(message, m.CallAnswer):
                    self._calls.take(message)
                elif isinstance(message, m.EngineFailed):  # it may yet take seconds to end
                    reason = message.reason
                    break
        except Exception as error:  # whatever it is, those who wait must hear of it
            reason = f"the link to the engine broke: {type(error).__name__}: {error}"
        self._die(reason or await self._how_ended())

    async def _how_ended(self) -> str:
        how = (
            "" if self._process is None or self._closing else await asyncio.to_thread(process.how_ended, self._process)
        )
        return f"the engine process ended{how}"

    async def _keep_watch(self, engine: process.Process) -> None:
        """Pings the engine process, and kills it once it hangs."""
        hangs = await self._watchdog.until_hung(lambda: self._send(m.EnginePing()))
        self.failure = self.failure or hangs
        process.kill(engine)  # the end of the socket does the rest

    async def _receive(self, reader: asyncio.StreamReader) -> m.FromEngine | None:
        """The next message, None at the end. Each is a sign of life."""
        message = await m.receive(reader)
        self._watchdog.heard()
        return message

    def _hand_out(self, events: m.Events) -> None:
        self.stats = events.stats
        self._prefilling.end(delta.request_id for delta in events.deltas)
        for request_id in events.started:
            self._queued.leave(request_id)
        for request_id, refused in events.refused.items():
            self._streams.put(request_id, refused.error)
        for delta in events.deltas:
            self._streams.put(delta.request_id, delta)
        self._streams.bound()

    async def call(self, call: EngineCall) -> Answer:
        """The engine's answer to a call (engine.calls). Raises InvalidRequest for what cannot be, EngineDead."""
        self._must_live()
        return await self._calls.ask(call)

    def _die(self, reason: str) -> None:
        if self.failure is None:
            self.failure = "the engine was shut down" if self._closing else reason
        self._calls.fail(self.failure)
        self._streams.fail(EngineDead(self.failure))
        self._queued.clear()
        self._prefilling.clear()
        self._dead.set()

    async def wait_dead(self) -> str:
        """Waits until the engine has failed or was shut down; the reason."""
        await self._dead.wait()
        return self.failure or ""

    def check(self, prompt_token_ids: list[int], params: SamplingParams, embed: bool = False) -> SamplingParams:
        """Parameters with max_tokens resolved. Raises InvalidRequest naming what cannot be served."""
        return self.capacity.check(prompt_token_ids, params, embed)

    async def check_shape(self, params: SamplingParams) -> None:
        """Raises InvalidRequest for a shape that answers cannot have. `generate` does so, too."""
        await self._shapes.check_beside(params, self.tokenizer, self.capacity)

    async def generate(
        self,
        prompt: str | list[int],
        params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        cache_salt: str | None = None,
        public_prefix_tokens: int = 0,
        queued: Callable[[], None] | None = None,
        embed: bool = False,
        adapter: str = "",
        **own: Unpack[TenantKeywords],
    ) -> AsyncGenerator[Delta, None]:
        """Streams the answer to a text or to token ids, a Delta for each step of each of the n sequences; with embed,
        one Delta that has the embedding of the text, and no answer. `queued` is called once the request waits for its
        turn. adapter: the name of one of lora_modules. own: tenant, weight, priority, kv_share, kv_limit, tier_quota,
        as LLM.generate has them.

        Raises InvalidRequest, Overloaded or EngineDead at the first item. Leaving the iterator early (break with
        aclose, or cancellation) aborts the request and frees its chunks.
        """
        self._must_live()
        tokens = self._tokens(prompt)
        params = self.check(tokens, one_params(params), embed)
        await self.check_shape(params)
        name = uuid.uuid4().hex if request_id is None or request_id == "" else request_id
        request = Request(name, tokens, params, cache_salt, public_prefix_tokens, time.monotonic(), embed, **own)
        request.adapter, request.adapter_start = adapter, self.capacity.adapter_start(adapter, tokens)
        stream = self._enqueue(request)
        unfinished = set(range(params.n))
        try:
            if queued is not None:
                queued()
            while unfinished:
                item = await stream.get()
                if isinstance(item, Exception):
                    raise item
                if item.index not in unfinished:
                    continue  # a delta that crossed an abort
                if item.finish_reason is not None:
                    unfinished.remove(item.index)
                yield item
        finally:
            if self._streams.close(name, stream):
                self._queued.leave(name)
                self._prefilling.drop(name)
                if unfinished:
                    self._send(m.Abort(name))

    async def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        cache_salt: str | None = None,
        public_prefix_tokens: int = 0,
        adapter: str = "",
        **template: Any,
    ) -> AsyncGenerator[Delta, None]:
        """Streams the answer to a conversation (messages with role and content), as generate does, with its keywords.
        Further ones go to the chat template."""
        own = taken_from(template)
        check_variables(template)
        self._must_live()
        if self.tokenizer is None:
            raise InvalidRequest("the model folder has no tokenizer: pass token ids to generate()", "messages")
        prompt = await asyncio.to_thread(self.tokenizer.apply_chat, conversation(messages), **template)
        sharing: dict[str, Any] = dict(
            request_id=request_id, cache_salt=cache_salt, public_prefix_tokens=public_prefix_tokens, adapter=adapter,
            **own,
        )  # fmt: skip
        async with aclosing(self.generate(prompt, params, **sharing)) as deltas:
            async for delta in deltas:
                yield delta

    def abort(self, request_id: str) -> None:
        """Ends a request: its iterator ends after a Delta with finish_reason 'abort' for each unfinished sequence.
        Unknown ids are ignored."""
        if request_id in self._streams:
            self._send(m.Abort(request_id))
            for index in range(MAX_N):
                self._streams.put(request_id, Delta(request_id, index, finish_reason="abort"))

    def _must_live(self) -> None:
        if not self.alive:
            raise EngineDead(self.failure or "the engine is not started: await start()")
        if asyncio.get_running_loop() is not self._loop:  # whatever the engine says would never arrive in this one
            raise EngineDead("this AsyncLLM belongs to the event loop that started it: do all in one asyncio.run")

    def _tokens(self, prompt: str | list[int]) -> list[int]:
        if not isinstance(prompt, str):
            return token_ids(prompt, "prompt")
        if self.tokenizer is None:
            raise InvalidRequest("the model folder has no tokenizer: pass token ids", "prompt")
        return self.tokenizer.encode(prompt)

    def _enqueue(self, request: Request) -> Stream:
        self._streams.check_free(request.request_id)
        queue, limits = self._queued, self.config.server
        if queue.is_full(request, limits.max_queued_requests, limits.max_queued_tokens):
            wait_s = self.retry_after_s(request.tenant, request.weight)
            raise Overloaded(f"the queue is full: {queue.told(request.tenant)}; try again in {wait_s:.0f} s", wait_s)
        try:
            self._send(m.Add(request))  # first: of what cannot be sent nothing is left
        except (TypeError, ValueError, OverflowError) as error:
            raise InvalidRequest(f"the request cannot be sent to the engine: {error}") from None
        queue.add(request)
        return self._streams.open(request.request_id)

    def retry_after_s(self, tenant: str = "", weight: float = 1.0) -> float:
        """Seconds that the new tokens of a tenant's waiting prompts take with its share of the rate so far, and no more
        than those of all prompts take, after what the step under way has begun to read; between 1 and 60. Prompts that
        wait for chunks of another one have no part in the step."""
        begun = sum(each.total - each.done for each in self.prefills if each.step)
        rate = self.stats.tokens.prefilled / self.stats.scheduler.step_s if self.stats.scheduler.step_s else 1000.0
        before = float(self._queued.new_tokens)
        if self.config.scheduler.policy == "fair":
            before = min(before, self._queued.of(tenant).new_tokens / self._queued.share(tenant, weight))
        return min(60.0, max(1.0, (begun + before) / max(rate, 1.0)))

    def _send(self, message: m.ToEngine) -> None:
        if self._writer is not None and not self._writer.is_closing():
            self._writer.write(m.frame(message))

    def _hang_up(self) -> None:
        """Closes the link, at which the engine process ends."""
        if self._writer is None:
            return
        try:
            self._writer.close()
        except RuntimeError:  # its event loop has been closed without a shutdown
            self._writer.get_extra_info("socket").shutdown(socket.SHUT_RDWR)

    async def shutdown(self) -> None:
        """Ends the engine process; requests under way end with EngineDead. May be called twice."""
        self._closing = True
        self._shapes.close()
        if self.tokenizer is not None:
            self.tokenizer.close()
        await _cancel(self._watch)
        self._hang_up()
        if self._process is not None:
            seconds = process.STORE_S if self.config.tiers is not None else process.END_S
            await asyncio.to_thread(process.end, self._process, seconds)
        await _cancel(self._listener)
        self._die("the engine was shut down")


async def _cancel(task: asyncio.Task[None] | None) -> None:
    if task is not None:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
