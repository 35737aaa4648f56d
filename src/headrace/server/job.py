"""One API request on its way through the engine: prompts x n sequences, one merged stream of events, one account."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from headrace.server.answer_memory import Owner
from headrace.server.breakpoints import AskedPin, Pinned
from headrace.server.engine import ServedEngine
from headrace.server.errors import broken_off
from headrace.server.parsers.parts import Answer, OutputParser, Part, PlainText
from headrace.server.replay import Replay
from headrace.server.reuse import Nearest, Reuse, Seen
from headrace.server.tenants import ANYBODY, Tenant
from headrace.stats import EngineStats
from headrace.types import Delta, Metrics, Overloaded, SamplingParams, TokenLogprobs

FULL_S = 0.5
"""Seconds, at most, until a prompt of a job under way looks at a full queue again."""


@dataclass(slots=True)
class Prompt:
    """`text` is set where a reply repeats it (echo); `params` are resolved for this prompt by ServedEngine.check;
    `public_tokens` at its beginning are the operator's (server.public). `parser` makes what takes the text of one
    sequence to parts. `shared` tokens at its beginning are counted with another prompt of the job. `embed`: its
    embedding is wanted, and no answer. `messages`: of a conversation, and `replay`: how its earlier answers were read;
    `asked`: whose it is, and its text, where its answer is to be remembered (server.answer_memory). `pins`: what of it
    is to stay in the cache. `left_open`: how long the answer may be is not the client's choice. `silent`: nobody is
    told the one token that the engine answers with, and it counts as none."""

    ids: Sequence[int]
    params: SamplingParams
    text: str = ""
    public_tokens: int = 0
    parser: Callable[[], OutputParser] = PlainText
    shared: int = 0
    embed: bool = False
    messages: Sequence[Mapping[str, Any]] = ()
    replay: Replay | None = None
    asked: tuple[Owner, str] | None = None
    pins: Sequence[AskedPin] = ()
    left_open: bool = False
    silent: bool = False


@dataclass(slots=True)
class ReplyChoice:
    """What one sequence has produced so far: `text` as the model wrote it, `answer` in parts."""

    index: int
    prompt: Prompt
    texts: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    embedding: bytes | None = None
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    last_s: float = 0.0
    answer: Answer = field(default_factory=Answer)
    parser: OutputParser = field(init=False)

    def __post_init__(self) -> None:
        self.parser = self.prompt.parser()

    def read(self, delta: Delta) -> list[Part]:
        """The parts that this delta adds to the answer."""
        parts = self.parser.push(delta.text)
        if delta.finish_reason is not None:
            parts += self.parser.finish()
        self.answer.add(parts)
        return parts

    @property
    def text(self) -> str:
        return "".join(self.texts)

    @property
    def cuts_call(self) -> bool:
        """Whether a stop string has ended it within a call, which nobody should make."""
        return self.finish_reason == "stop" and isinstance(self.stop_reason, str) and not self.answer.whole


@dataclass(slots=True)
class Event:
    """One delta, with the choice it belongs to and what it adds to the answer. `first`: the choice had none before."""

    choice: ReplyChoice
    delta: Delta
    first: bool
    parts: list[Part] = field(default_factory=list)


@dataclass(slots=True)
class Job:
    """Invariant: `choices[p * n + i]` is sequence i of prompt p and holds every event that `events` has given out.

    cache_salt: the client's, and the engine's once the job is `admitted` (server.admission). taken: tokens that its
    tenant has been charged. queued: set once the engine has taken all prompts into its queue, or `at_once` of them.
    left: the client is gone, and each prompt ends with its first token. remark: for the log. names: the engine's names
    of fields, None for the prompt -> the client's.
    priority: within the tenant, lower ones are computed first.
    seen: what is remembered of its prompt, if anything is; nearest: what it met (server.reuse).
    adapter: who answers in the model's place, by name.
    pinned: what has become of its pins, once that is known (server.prompt_pins).
    at_once: prompts that the engine has at a time, in their order; None: all. Once it has had so many, the others wait
    where they find the queue full.
    _cached: tokens found in the cache, by prompt, until its metrics tell; _held: deltas that wait for a prompt's log
    probabilities.
    """

    request_id: str
    prompts: list[Prompt]
    arrival_s: float
    cache_salt: str | None = None
    public_prefix_tokens: int = 0
    tenant: Tenant = ANYBODY
    admitted: bool = False
    taken: int = 0
    queued: asyncio.Event = field(default_factory=asyncio.Event)
    left: bool = False
    remark: str = ""
    names: Mapping[str | None, str] = field(default_factory=dict)
    created: int = field(default_factory=lambda: int(time.time()))
    choices: list[ReplyChoice] = field(default_factory=list)
    metrics: list[Metrics] = field(default_factory=list)
    first_s: float | None = None
    end_s: float | None = None
    gaps: list[float] = field(default_factory=list)
    at_once: int | None = None
    seen: Seen | None = None
    nearest: Nearest | None = None
    priority: int = 0
    pinned: Pinned | None = None
    adapter: str = ""
    _queued: int = 0
    _cached: dict[int, int] = field(default_factory=dict)
    _held: dict[int, list[Delta]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        each = [prompt for prompt in self.prompts for _ in range(prompt.params.n)]
        self.choices = [ReplyChoice(index, prompt) for index, prompt in enumerate(each)]

    @property
    def n(self) -> int:
        return self.prompts[0].params.n

    @property
    def prompt_tokens(self) -> int:
        return sum(len(prompt.ids) - prompt.shared for prompt in self.prompts)

    @property
    def cached_tokens(self) -> int:
        return sum(m.cached_tokens for m in self.metrics) + sum(self._cached.values())

    @property
    def output_tokens(self) -> int:
        return sum(len(choice.token_ids) for choice in self.choices if not choice.prompt.silent)

    @property
    def strategy(self) -> str:
        """How the prompts were computed: a name, several where they differ; empty with one rank."""
        return ", ".join(dict.fromkeys(m.strategy for m in self.metrics if m.strategy))

    @property
    def strategy_reason(self) -> str:
        return "; ".join(dict.fromkeys(m.strategy_reason for m in self.metrics if m.strategy_reason))

    @property
    def restored_tokens(self) -> int:
        return sum(m.restored_tokens for m in self.metrics)

    @property
    def restore_reason(self) -> str:
        return "; ".join(dict.fromkeys(m.restore_reason for m in self.metrics if m.restore_reason))

    @property
    def caller(self) -> Hashable:
        """Whose requests it is compared with."""
        return caller_of(self.tenant, self.cache_salt, self.adapter)

    @property
    def reuse(self) -> Reuse | None:
        """Why so much of the prompt came from the cache; None where that is not known."""
        if self.seen is None or not self.metrics:
            return None
        read = self.prompts[0].replay
        counts = (read.replayed, read.rewritten) if read is not None else ()
        return Reuse(self.prompt_tokens, self.cached_tokens, self.nearest, *counts)

    @property
    def done(self) -> bool:
        return all(choice.finish_reason for choice in self.choices)

    async def events(self, engine: ServedEngine, note: Callable[[EngineStats], None]) -> AsyncIterator[Event]:
        """Runs every prompt; closing this iterator, or cancelling its task, aborts what still runs.

        `note` is told the engine's counters as they stand at each delta. Raises ApiError where the engine has aborted
        an answer, and RuntimeError for a job that has not been admitted: it would meet any tenant's chunks.
        """
        if not self.admitted:
            raise RuntimeError("a job needs server.admission.admit before it goes to the engine")
        deltas = self._deltas(engine)
        try:
            async for p, delta in deltas:
                note(engine.stats)
                for each in self._ready(p, delta):
                    yield self._take(p, each)
        finally:
            self.end_s = time.monotonic()
            await aclose(deltas)

    def _ready(self, p: int, delta: Delta) -> list[Delta]:
        """Deltas of a prompt that may be told. The log probabilities of its tokens come with the first
        delta of its first sequence, and are for all of its choices: deltas of the others wait for it."""
        choice = self.choices[p * self.n]
        if self.n == 1 or choice.prompt.params.prompt_logprobs is None or choice.last_s:
            return [delta]
        held = self._held.setdefault(p, [])
        held.append(delta)
        if delta.index:
            return []
        del self._held[p]
        return [delta, *held[:-1]]

    def _take(self, p: int, delta: Delta) -> Event:
        choices, now = self.choices[p * self.n : (p + 1) * self.n], time.monotonic()
        choice = choices[delta.index]
        first = not choice.last_s
        if delta.token_ids:
            self.first_s = self.first_s or now
            if choice.token_ids:
                self.gaps.append((now - choice.last_s) / len(delta.token_ids))
        choice.last_s = now
        choice.texts.append(delta.text)
        choice.token_ids += delta.token_ids
        choice.logprobs += delta.logprobs or []
        choice.finish_reason = delta.finish_reason or choice.finish_reason
        choice.stop_reason = delta.stop_reason if delta.finish_reason else choice.stop_reason
        for each in choices if delta.prompt_logprobs else ():
            each.prompt_logprobs = delta.prompt_logprobs
        choice.embedding = delta.embedding or choice.embedding
        cached = delta.metrics.cached_tokens if delta.metrics else delta.cached_tokens
        if cached is not None:
            self._cached[p] = max(0, cached - choice.prompt.shared)
        if delta.metrics:
            self.metrics.append(replace(delta.metrics, cached_tokens=self._cached.pop(p)))
        if delta.finish_reason == "abort":
            raise broken_off(delta.stop_reason)
        return Event(choice, delta, first, choice.read(delta))

    def _deltas(self, engine: ServedEngine) -> AsyncIterator[tuple[int, Delta]]:
        return self._one(engine, 0) if len(self.prompts) == 1 else self._many(engine)

    def prompt_id(self, p: int) -> str:
        """The engine's request id of a prompt."""
        return self.request_id if len(self.prompts) == 1 else f"{self.request_id}-{p}"

    async def _one(self, engine: ServedEngine, p: int) -> AsyncIterator[tuple[int, Delta]]:
        while not self.left:
            stream = self._stream(engine, p)
            try:
                async for delta in stream:
                    yield p, delta
                    if self.left:
                        return
                return
            except Overloaded as full:
                if self.at_once is None or not self.queued.is_set():
                    raise
                wait_s = min(full.retry_after_s, FULL_S)
            finally:
                await aclose(stream)
            await asyncio.sleep(wait_s)

    def _stream(self, engine: ServedEngine, p: int) -> AsyncIterator[Delta]:
        prompt = self.prompts[p]
        return engine.generate(
            prompt.ids if isinstance(prompt.ids, list) else list(prompt.ids),
            prompt.params,
            request_id=self.prompt_id(p),
            cache_salt=self.cache_salt,
            public_prefix_tokens=max(self.public_prefix_tokens, prompt.public_tokens),
            queued=self._note_queued,
            embed=prompt.embed,
            adapter=self.adapter,
            tenant=self.tenant.name,
            weight=self.tenant.rules.weight,
            priority=self.priority,
            kv_share=self.tenant.rules.kv_share,
            kv_limit=self.tenant.rules.kv_limit,
            tier_quota=self.tenant.rules.tier_quota,
        )

    def _note_queued(self) -> None:
        self._queued += 1
        if self._queued == self._most:
            self.queued.set()

    @property
    def _most(self) -> int:
        """Prompts that the engine has at a time."""
        return min(self.at_once or len(self.prompts), len(self.prompts))

    async def _many(self, engine: ServedEngine) -> AsyncIterator[tuple[int, Delta]]:
        """All prompts at once. The first failure ends the others."""
        queue: asyncio.Queue[tuple[int, Delta] | BaseException | None] = asyncio.Queue(256)  # more wait before it
        turn = asyncio.Semaphore(self._most)
        tasks = [asyncio.create_task(_pump(self._one(engine, p), queue, turn)) for p in range(len(self.prompts))]
        try:
            running = len(tasks)
            while running:
                item = await queue.get()
                if isinstance(item, BaseException):
                    raise item
                if item is None:
                    running -= 1
                else:
                    yield item
        finally:
            await cancel(*tasks)


def caller_of(tenant: Tenant, salt: str | None, adapter: str) -> Hashable:
    """Who is told of recent requests with this salt, the engine's, to that adapter."""
    own = tenant.name or (None, salt)
    return (own, adapter) if adapter else own


async def _pump(stream: AsyncIterator[Any], queue: asyncio.Queue[Any], turn: asyncio.Semaphore) -> None:
    try:
        async with turn:
            async for item in stream:
                await queue.put(item)
    except Exception as error:
        await queue.put(error)
    else:
        await queue.put(None)
    finally:
        await aclose(stream)


async def aclose(stream: AsyncIterator[Any]) -> None:
    """Closes an asynchronous generator; other iterators have nothing to close."""
    close = getattr(stream, "aclose", None)
    if close is not None:
        await close()


async def cancel(*tasks: asyncio.Future[Any]) -> None:
    """Cancels the tasks and waits until their clean-up has run; a cancellation of the caller is raised behind it."""
    for task in tasks:
        task.cancel()
    own: asyncio.CancelledError | None = None
    while left := [task for task in tasks if not task.done()]:
        try:
            await asyncio.wait(left)
        except asyncio.CancelledError as cancelled:
            own = cancelled
    for task in tasks:
        if not task.cancelled():
            task.exception()  # asyncio logs those that nobody has asked for
    if own is not None:
        raise own
