"""Scores and embeddings from an engine that streams its answers: what AsyncLLM has beside generating."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterable, Sequence
from contextlib import aclosing
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from headrace.engine.embedding import EMBEDS, Vectors, check_classifies, check_dimensions, inputs_of, stacked
from headrace.engine.prompt_names import naming
from headrace.engine.prompts import Prompts
from headrace.engine.scoring import ScoreRequest, Text, at_once, plan_score
from headrace.outputs import Score
from headrace.types import Delta, InvalidRequest, Overloaded, SamplingParams, TokenLogprobs

if TYPE_CHECKING:
    from headrace.config import EngineConfig
    from headrace.engine.capacity import Capacity
    from headrace.engine.tokenizer import Tokenizer


T = TypeVar("T")

FULL_S = 0.5
"""Seconds, at most, until a request looks at a full queue again."""


class Generates(Protocol):
    """What is asked of the engine."""

    config: EngineConfig
    tokenizer: Tokenizer | None

    @property
    def capacity(self) -> Capacity: ...

    def generate(
        self,
        prompt: str | list[int],
        params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        cache_salt: str | None = None,
        public_prefix_tokens: int = 0,
        queued: Callable[[], None] | None = None,
        embed: bool = False,
    ) -> AsyncGenerator[Delta, None]: ...


class AsyncScores:
    """Part of AsyncLLM."""

    async def score(
        self: Generates,
        text: Text,
        options: Sequence[Text],
        *,
        cache_salt: str | None = None,
        public_prefix_tokens: int = 0,
    ) -> list[Score]:
        """The likelihood of each option (a text or token ids) as what follows the text, which is computed once; as
        LLM.score. Raises InvalidRequest, Overloaded or EngineDead; a cancelled call aborts its requests."""
        capacity = self.capacity
        plan = await asyncio.to_thread(plan_score, text, options, self.tokenizer, capacity.alike_tokens)
        await asyncio.to_thread(plan.check, capacity.check)
        longest = max(len(request.token_ids) for request in plan.requests)
        places = Places(at_once(longest, capacity.max_sequences, self.config.server))
        sharing: dict[str, Any] = dict(cache_salt=cache_salt, public_prefix_tokens=public_prefix_tokens)

        async def rows(request: ScoreRequest) -> list[TokenLogprobs]:
            found: list[TokenLogprobs] = []

            def take(delta: Delta) -> None:
                found.extend(row for row in delta.prompt_logprobs or delta.logprobs or [] if row is not None)

            def stream(queued: Callable[[], None]) -> AsyncGenerator[Delta, None]:
                return self.generate(list(request.token_ids), request.params, **sharing, queued=queued)

            await places.run(stream, take)
            return found

        return plan.scores(await all_of(rows(request) for request in plan.requests))

    async def embed(
        self: Generates,
        inputs: Prompts,
        *,
        dimensions: int | None = None,
        cache_salt: str | None = None,
        public_prefix_tokens: int = 0,
    ) -> Vectors:
        """Embeddings of a text, of texts, or of lists of token ids, fp32 [inputs, size]; as LLM.embed. Raises
        InvalidRequest, Overloaded or EngineDead; a cancelled call aborts its requests."""
        check_dimensions(dimensions, self.capacity.embedding_size, self.capacity.pooling)
        return await _pooled(self, inputs, dimensions, cache_salt, public_prefix_tokens)

    async def classify(
        self: Generates, inputs: Prompts, *, cache_salt: str | None = None, public_prefix_tokens: int = 0
    ) -> Vectors:
        """What a classifier's head says of a text, of texts, or of lists of token ids, fp32 [inputs, labels]; as
        LLM.classify. Raises InvalidRequest, Overloaded or EngineDead; a cancelled call aborts its requests."""
        check_classifies(self.capacity.pooling)
        return await _pooled(self, inputs, None, cache_salt, public_prefix_tokens)


async def _pooled(
    engine: Generates, inputs: Prompts, dimensions: int | None, cache_salt: str | None, public_prefix_tokens: int
) -> Vectors:
    capacity, tokenizer = engine.capacity, engine.tokenizer
    texts = inputs_of(inputs)
    if tokenizer is None and any(isinstance(each, str) for each in texts):
        raise InvalidRequest("the model folder has no tokenizer: pass token ids", "inputs")

    def encoded() -> list[list[int]]:
        return [tokenizer.encode(each) if tokenizer and isinstance(each, str) else list(each) for each in texts]  # type: ignore[arg-type]

    prompts = await asyncio.to_thread(encoded)
    for index, prompt in enumerate(prompts):
        with naming("inputs", index):
            capacity.check(prompt, EMBEDS, embed=True)
    places = Places(at_once(max(map(len, prompts)), capacity.max_sequences, engine.config.server))
    sharing: dict[str, Any] = dict(cache_salt=cache_salt, public_prefix_tokens=public_prefix_tokens)

    async def vector(prompt: list[int]) -> bytes | None:
        found: list[bytes | None] = [None]

        def take(delta: Delta) -> None:
            found.append(delta.embedding)

        def stream(queued: Callable[[], None]) -> AsyncGenerator[Delta, None]:
            return engine.generate(prompt, EMBEDS, **sharing, embed=True, queued=queued)

        await places.run(stream, take)
        return found[-1]

    return stacked(await all_of(map(vector, prompts)), capacity.pooling, dimensions)


class Places:
    """Places in the engine's queue for many requests of one call, so many at a time. Once all of these have been taken,
    a request that finds the queue full waits; before that it raises Overloaded."""

    def __init__(self, at_once: int) -> None:
        self._free, self._untaken = asyncio.Semaphore(at_once), at_once

    def _note(self) -> None:
        self._untaken -= 1

    async def run(
        self, stream: Callable[[Callable[[], None]], AsyncGenerator[Delta, None]], take: Callable[[Delta], None]
    ) -> None:
        """Hands on the deltas of a stream, which calls what it is given once it waits for its turn."""
        async with self._free:
            while True:
                try:
                    async with aclosing(stream(self._note)) as deltas:
                        async for delta in deltas:
                            take(delta)
                    return
                except Overloaded as full:
                    if self._untaken > 0:
                        raise
                    await asyncio.sleep(min(full.retry_after_s, FULL_S))


async def all_of(work: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """All results, in order. The first failure, or a cancellation, ends what is not done."""
    tasks = [asyncio.create_task(each) for each in work]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
