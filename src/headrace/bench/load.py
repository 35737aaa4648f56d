"""Streaming requests through the openai client, timed where a user would feel it. For `demo` and `bench serve`."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

ChatMessage = dict[str, str]


@dataclass(slots=True)
class Sample:
    """One answered request. Times in seconds, as the client saw them."""

    text: str
    ttft_s: float
    total_s: float
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int


def new_client(base_url: str, api_key: str | None) -> Any:
    """An AsyncOpenAI client that tries once. Raises RuntimeError with the remedy where the package is missing."""
    try:
        from openai import AsyncOpenAI
    except ImportError:
        raise RuntimeError("this command needs the openai package: pip install 'headrace[demo]'") from None
    return AsyncOpenAI(base_url=base_url, api_key=api_key or "none", max_retries=0, timeout=600)


async def ask(client: Any, model: str, messages: list[ChatMessage], **options: Any) -> Sample:
    """One streaming chat request."""
    began, first, texts, usage = time.perf_counter(), 0.0, [], None
    stream = await client.chat.completions.create(
        model=model, messages=messages, stream=True, stream_options={"include_usage": True}, **options
    )
    async for chunk in stream:
        usage = chunk.usage or usage
        if chunk.choices and chunk.choices[0].delta.content:
            first = first or time.perf_counter()
            texts.append(chunk.choices[0].delta.content)
    end = time.perf_counter()
    if usage is None:
        raise RuntimeError("the stream ended without its usage")
    cached = usage.prompt_tokens_details.cached_tokens
    times = ((first or end) - began, end - began)
    return Sample("".join(texts), *times, usage.prompt_tokens, cached, usage.completion_tokens)


async def ask_all(
    client: Any,
    model: str,
    conversations: Sequence[list[ChatMessage]],
    at_once: int,
    done: Callable[[], None] = lambda: None,
    starts: Sequence[float] = (),
    **options: Any,
) -> list[Sample]:
    """All of them, at most `at_once` at a time, in the order given; each after so many seconds of `starts`, if given.
    The first failure ends the rest."""
    turn = asyncio.Semaphore(at_once)

    async def one(messages: list[ChatMessage], start: float) -> Sample:
        await asyncio.sleep(start)
        async with turn:
            sample = await ask(client, model, messages, **options)
        done()
        return sample

    async with asyncio.TaskGroup() as group:
        tasks = [
            group.create_task(one(messages, start))
            for messages, start in zip(conversations, starts or [0.0] * len(conversations), strict=True)
        ]
    return [task.result() for task in tasks]


def first_error(error: BaseException) -> BaseException:
    """The failure inside a group of failures."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


def quantile(values: Sequence[float], share: float) -> float:
    """The value below which about `share` of the values are."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]
