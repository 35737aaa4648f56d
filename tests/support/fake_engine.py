"""An engine without a model, with the interface of AsyncLLM: it answers with the prompt's own tokens, over and over.

A token is a byte. Sequence i of a request starts i tokens into the prompt. Chunks are counted as the real cache counts
them, so that leaks show; delays and failures can be injected.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Unpack

from headrace.config import EngineConfig
from headrace.engine.adapters import ServedAdapter, started
from headrace.engine.calls import Answer, EngineCall, PinPrefix
from headrace.engine.tenant_keywords import TenantKeywords
from headrace.pooling import Pooling
from headrace.progress import LoadPhase, OnPhase, Prefill
from headrace.stats import EngineStats, KVStats
from headrace.types import (
    CHUNK,
    Delta,
    EngineDead,
    InvalidRequest,
    Metrics,
    Overloaded,
    SamplingParams,
    chunks_for,
)
from tests.support.fake_sequence import FakeSequence

EOS = 256
VOCAB = 258


class FakeTokenizer:
    vocab_size = VOCAB
    eos_token_id = EOS
    has_chat_template = True
    chat_template = "{% for message in messages %}{{ message.content }}{% endfor %}"
    """A test of tools sets another; what is rendered stays the same."""
    rerank_template = ""
    added_tokens: ClassVar[dict[str, int]] = {}
    named_tokens: ClassVar[dict[str, str | None]] = {"bos_token": None, "eos_token": "<256>", "pad_token": None}
    special_tokens: ClassVar[frozenset[str]] = frozenset()

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return list(text.encode())

    def decode(self, token_ids: list[int], skip_special_tokens: bool = True) -> str:
        return b"".join(map(self.token_bytes, token_ids)).decode("utf-8", "replace")

    def token_bytes(self, token: int) -> bytes:
        return bytes([token]) if token < 256 else b"<%d>" % token

    def token_text(self, token: int) -> str:
        return self.token_bytes(token).decode("utf-8", "replace")

    def render_chat(
        self,
        messages: Any,
        add_generation_prompt: bool = True,
        tools: Any = None,
        *,
        documents: Any = None,
        sign: str = "",
        enable_thinking: bool | None = None,
        thinking: bool | None = None,
        reasoning_effort: str | None = None,
    ) -> str:
        if any(m.get("content") == "refuse me" for m in messages):
            raise InvalidRequest("the chat template refused the messages", "messages")
        return "".join((m.get("content") or "") + "\n" for m in messages) + sign

    def encode_chat(self, text: str) -> list[int]:
        return self.encode(text)


INVOCATIONS = {"late": tuple(b"Now:")}
"""Tokens at which adapters of these names begin."""


@dataclass(frozen=True)
class FakeCapacity:
    kv_cache_tokens: int = 64_000
    kv_bytes_per_token: int = 1024
    kv_cache_dtype: str = "bytes"
    max_model_len: int = 4000
    max_sequences: int = 8
    vocab_size: int = VOCAB
    backend: str = "fake"
    dtype: str = "bytes"
    model: str = "fake"
    kernels: dict[str, str] = field(default_factory=lambda: {"attention": "echo"})
    ranks: str = ""
    experts: str = ""
    fingerprint: str = "fp_fake"
    architecture: str = "FakeForCausalLM"
    layers: int = 1
    quantization: str = "none"
    alike_tokens: int = 0
    embedding_size: int = 4
    pooling: Pooling = Pooling()
    adapters: tuple[ServedAdapter, ...] = ()
    writes: bool = True

    def adapter_of(self, name: str) -> ServedAdapter | None:
        return next((each for each in self.adapters if each.name == name), None)

    def adapter_start(self, name: str, tokens: list[int]) -> int:
        return started(self.adapters, name, tokens)


def pinned(call: PinPrefix) -> dict[str, Any]:
    """The answer of an engine that pins whatever it is asked to."""
    chunks = len(call.tokens) // CHUNK
    told = {"id": call.id, "tokens": chunks * CHUNK, "chunks": chunks, "bytes": chunks * CHUNK * 1024}
    return {**told, "ttl_s": call.ttl_s, "expires_in_s": call.ttl_s}


Salted = tuple[str | None, tuple[int, ...]]
"""A salt, and tokens under it."""


class FakeEngine:
    """Answers repeat the prompt, or are what `scripts` holds: a text a request, first in, first out, token by token,
    which then stops. `start_s`, `token_s` and `chunk_s` (of a prompt; 0: it is read at once, and half of it counts as
    cached) are delays; `running_limit` sequences of requests run at once, the others wait. With `labels` it classifies:
    the first logit is the prompt's length. `answers`: to calls, by their type: a function of the call.
    `asked`: prompts and parameters so far; `read`: what has been read of them,
    if it took time."""

    def __init__(
        self,
        config: EngineConfig,
        start_s: float = 0.0,
        token_s: float = 0.0,
        running_limit: int = 8,
        chunk_s: float = 0.0,
        labels: tuple[str, ...] = (),
    ) -> None:
        self.config = config
        self.start_s, self.token_s, self.chunk_s = start_s, token_s, chunk_s
        self.read: list[Salted] = []
        adapters = tuple(ServedAdapter(name, INVOCATIONS.get(name, ()), name) for name in config.adapters.names)
        self.capacity = FakeCapacity(pooling=Pooling(normalize=not labels, labels=labels), adapters=adapters)
        self.tokenizer: FakeTokenizer | None = FakeTokenizer()
        self.failure: str | None = None
        self.stats = EngineStats(kv=KVStats(chunks_total=1000))
        self.start_error: Exception | None = None
        self.fail_after_tokens: int | None = None
        self.abort_after: int | None = None
        self.aborted: list[str] = []
        self.strategy = self.strategy_reason = self.restore_reason = ""
        self.restored_tokens = 0
        self.salts: list[tuple[str | None, int]] = []
        self.own: list[TenantKeywords] = []
        self.adapters: list[str] = []
        self.scripts: list[str] = []
        self.asked: list[tuple[str, SamplingParams]] = []
        self.prefills: list[Prefill] = []
        self.prefill_rate = 0.0
        self.answers: dict[type, Any] = {PinPrefix: pinned}
        self._started = False
        self._dead = asyncio.Event()
        self._turn = asyncio.Semaphore(running_limit)

    @property
    def alive(self) -> bool:
        return self._started and self.failure is None

    async def start(self, progress: Callable[[int, int], None] | None = None, *, phases: OnPhase | None = None) -> None:
        for done in (1, 2):
            if phases is not None:
                phases(LoadPhase("weights", done, 2))
            await asyncio.sleep(self.start_s / 2)
            if progress is not None:
                progress(done, 2)
        if self.start_error is not None:
            raise self.start_error
        self._started = True

    async def shutdown(self) -> None:
        self.die("the engine was shut down")

    async def check_shape(self, params: SamplingParams) -> None:
        if params.structured is not None and params.structured.regex == "refuse me":
            raise InvalidRequest("regex cannot be taken: refuse me", "structured")

    async def call(self, call: EngineCall) -> Answer:
        return self.answers[type(call)](call)

    def retry_after_s(self, tenant: str, weight: float) -> float:
        return 7.0 if tenant else 2.5

    async def wait_dead(self) -> str:
        await self._dead.wait()
        return self.failure or ""

    def die(self, reason: str) -> None:
        self.failure = self.failure or reason
        self._dead.set()

    def check(self, prompt_token_ids: list[int], params: SamplingParams, embed: bool = False) -> SamplingParams:
        room = self.capacity.max_model_len - len(prompt_token_ids)
        if not prompt_token_ids:
            raise InvalidRequest("the prompt is empty", "prompt")
        if room < 1:
            raise InvalidRequest("the prompt is too long", "prompt", "context_length_exceeded")
        if not all(0 <= token < VOCAB for token in prompt_token_ids):
            raise InvalidRequest("token id outside the vocabulary", "prompt")
        params.check_vocabulary(VOCAB)
        if (params.max_tokens or 0) > room:
            raise InvalidRequest("max_tokens is too large", "max_tokens")
        return replace(params, max_tokens=room) if params.max_tokens is None else params

    async def generate(
        self,
        prompt: str | list[int],
        params: SamplingParams,
        *,
        request_id: str | None = None,
        cache_salt: str | None = None,
        public_prefix_tokens: int = 0,
        queued: Callable[[], None] | None = None,
        embed: bool = False,
        adapter: str = "",
        **own: Unpack[TenantKeywords],
    ) -> AsyncIterator[Delta]:
        if not self.alive:
            raise EngineDead(self.failure or "not started")
        if self.stats.scheduler.waiting >= self.config.server.max_queued_requests:
            raise Overloaded("the queue is full", 2.5)
        assert isinstance(prompt, list) and request_id is not None
        self.salts.append((cache_salt, public_prefix_tokens))
        self.own.append(own)
        self.adapters.append(adapter)
        self.asked.append((FakeTokenizer().decode(prompt), params))
        run = FakeRun(self, prompt, params, request_id, cache_salt)
        run.embed = embed
        try:
            if queued is not None:
                queued()
            await run.wait_for_turn()
            await run.read()
            while not run.done:
                for delta in await run.step():
                    yield delta
        finally:
            run.close()


class FakeRun:
    """One request. Invariant: its chunks are in `stats.kv.chunks_used` from its turn until close()."""

    def __init__(
        self, engine: FakeEngine, prompt: list[int], params: SamplingParams, request_id: str, salt: str | None
    ) -> None:
        self.engine, self.prompt, self.params, self.request_id, self.salt = engine, prompt, params, request_id, salt
        self.cached = 0
        self.arrival = time.monotonic()
        self.turn = self.first = 0.0
        self.embed = False
        self.script = list(engine.scripts.pop(0).encode()) if engine.scripts else None
        self.sequences = [FakeSequence(self, index) for index in range(params.n)]
        self.chunks = chunks_for(len(prompt)) + params.n

    @property
    def found(self) -> int:
        """Tokens of the prompt that count as cached."""
        return self.cached if self.engine.chunk_s else len(self.prompt) // 64 * 64 // 2

    @property
    def done(self) -> bool:
        return all(sequence.finish for sequence in self.sequences)

    async def wait_for_turn(self) -> None:
        stats = self.engine.stats
        stats.scheduler.waiting += 1
        try:
            await self.engine._turn.acquire()
        finally:
            stats.scheduler.waiting -= 1
        self.turn = time.monotonic()
        stats.scheduler.running += 1
        stats.kv.chunks_used += self.chunks
        stats.kv.chunks_unshared += 2 * self.chunks
        stats.tokens.prompt += len(self.prompt)
        stats.tokens.prefilled += len(self.prompt)
        if strategy := self.engine.strategy:
            stats.ranks.prefills[strategy] = stats.ranks.prefills.get(strategy, 0) + 1

    async def read(self) -> None:
        """The prompt, a chunk at a time; what an earlier request with its salt has read is cached."""
        engine, key = self.engine, (self.salt, tuple(self.prompt))
        if not engine.chunk_s:
            return
        whole = (len(self.prompt) - 1) // 64 * 64
        self.cached = min(whole, max((_common(key, other) // 64 * 64 for other in engine.read), default=0))
        for done in range(self.cached, len(self.prompt), 64):
            step = min(64, len(self.prompt) - done)
            self.note_prefill(Prefill(self.request_id, done, self.cached, len(self.prompt), step))
            await asyncio.sleep(engine.chunk_s)
            engine.read.append((self.salt, tuple(self.prompt[: done + step])))
        self.note_prefill(None)

    def note_prefill(self, now: Prefill | None) -> None:
        others = [each for each in self.engine.prefills if each.request_id != self.request_id]
        self.engine.prefills = [*others, now] if now else others

    async def step(self) -> list[Delta]:
        """One token for each unfinished sequence."""
        await asyncio.sleep(self.engine.token_s)
        engine = self.engine
        if engine.fail_after_tokens is not None and engine.stats.tokens.generated >= engine.fail_after_tokens:
            engine.die("injected failure")
        if engine.failure:
            raise EngineDead(engine.failure)
        deltas = [sequence.next() for sequence in self.sequences if not sequence.finish]
        self.first = self.first or time.monotonic()
        engine.stats.tokens.generated += len(deltas)
        engine.stats.scheduler.steps += 1
        if self.done:
            deltas[-1].metrics = self._metrics()
        return deltas

    def _metrics(self) -> Metrics:
        now = time.monotonic()
        output = sum(len(sequence.token_ids) for sequence in self.sequences)
        times = (self.first - self.arrival, now - self.arrival, self.turn - self.arrival)
        engine = self.engine
        made = Metrics(*times, len(self.prompt), self.found, output, engine.strategy, engine.strategy_reason)
        return replace(made, restored_tokens=engine.restored_tokens, restore_reason=engine.restore_reason)

    def close(self) -> None:
        stats = self.engine.stats
        if self.engine.chunk_s:
            self.note_prefill(None)
        if self.turn:
            stats.scheduler.running -= 1
            stats.kv.chunks_used -= self.chunks
            stats.kv.chunks_unshared -= 2 * self.chunks
            self.engine._turn.release()
        if self.done:
            stats.finished.length += 1
        else:
            stats.finished.abort += 1
            self.engine.aborted.append(self.request_id)


def _common(one: Salted, other: Salted) -> int:
    """Tokens that both begin with, where their salts are the same."""
    same = 0
    while one[0] == other[0] and same < min(len(one[1]), len(other[1])) and one[1][same] == other[1][same]:
        same += 1
    return same
