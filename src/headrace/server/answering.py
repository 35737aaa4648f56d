"""From a request to its reply: what all routes that ask the engine have in common."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from typing import Protocol, TypeVar

from fastapi import Request
from starlette.responses import Response

from headrace.server.errors import ApiError, ClientGone, JsonReply
from headrace.server.job import Event, Job, aclose
from headrace.server.protocol import Body, StreamedBody, parse_body
from headrace.server.replies import Replies
from headrace.server.state import ServerState
from headrace.server.stream import EventStream, unless_gone
from headrace.types import InvalidRequest, Overloaded

RETRY_S = 1.0

READ_S = 60.0
"""A client that sends its body slower than this does not hold a place among the admitted any longer."""

TOLD_TOKENS = 24
"""Tokens of a prompt's beginning, and of its end, that --log-requests text shows."""

B = TypeVar("B", bound=Body)


def check_model(state: ServerState, name: str) -> None:
    """Raises ApiError for a model that is not served."""
    if name not in state.names:
        told = f"the model {name[:100]!r} does not exist here; this server has {state.names.told}"
        raise ApiError(404, told, "model", "model_not_found")


class Api(Protocol[B]):
    """What a route has of its own: its bodies, what the engine is to do about them, and its replies."""

    body: type[B]

    async def job(self, state: ServerState, body: B, arrival_s: float) -> Job:
        """Tokenizes and checks. Raises ApiError naming the field as the client knows it."""
        ...

    def replies(self, state: ServerState, body: B, job: Job) -> Replies: ...


async def answer(state: ServerState, request: Request, api: Api[B]) -> Response:
    """One request, from its body to its reply or to the beginning of its stream."""
    arrival_s = time.monotonic()
    with admission(state):
        body = parse_body(api.body, await read(request))
        if body.model is not None:
            check_model(state, body.model)
        job = await unless_gone(request.receive, api.job(state, body, arrival_s))
    state.arrived(job, await _told_text(state, job))
    replies = api.replies(state, body, job)
    events = job.events(state.engine, state.metrics.note_peak)
    if isinstance(body, StreamedBody) and body.stream:
        # The first event decides the status: a refusal after the headers could not carry one.
        with account(state, job):
            first = await unless_gone(request.receive, anext(events))
        return EventStream(_stream(state, job, replies, events, first))
    with account(state, job, last=True):
        await unless_gone(request.receive, _drain(events, replies))
    return JsonReply(replies.whole())


async def _told_text(state: ServerState, job: Job) -> str:
    """Beginning and end of the first prompt where --log-requests text wants them, else nothing."""
    if state.config.server.log_requests != "text":
        return ""
    ids, tokenizer = job.prompts[0].ids, state.engine.tokenizer
    parts = [ids] if len(ids) <= 2 * TOLD_TOKENS else [ids[:TOLD_TOKENS], ids[-TOLD_TOKENS:]]
    if tokenizer is None:
        return " ... ".join(map(str, parts))
    return " ... ".join([await state.in_tokenizer(tokenizer.decode, part) for part in parts])


async def read(request: Request) -> bytes:
    try:
        async with asyncio.timeout(READ_S):
            return await request.body()
    except TimeoutError:
        raise ApiError(408, f"the body did not arrive within {READ_S:.0f} s") from None


@contextmanager
def admission(state: ServerState) -> Iterator[None]:
    """Bounds what is read and tokenized at one time, before the engine's own queue bounds what waits."""
    if state.admitting >= state.config.server.max_queued_requests:
        raise Overloaded(f"{state.admitting} requests are being read", RETRY_S)
    state.admitting += 1
    try:
        yield
    finally:
        state.admitting -= 1


@contextmanager
def account(state: ServerState, job: Job, last: bool = False) -> Iterator[None]:
    """Every request that the engine took is accounted for once: at its end, or where it failed."""
    try:
        yield
    except (Overloaded, InvalidRequest):
        raise  # refused, and told as such
    except ClientGone:
        state.finish(job, "client gone")
        raise
    except BaseException as error:
        state.finish(job, f"failed ({type(error).__name__})")
        raise
    if last:
        state.finish(job, "done")


async def _drain(events: AsyncIterator[Event], replies: Replies) -> None:
    try:
        async for event in events:
            replies.take(event)
    finally:
        await aclose(events)


async def _stream(
    state: ServerState, job: Job, replies: Replies, events: AsyncIterator[Event], first: Event
) -> AsyncIterator[bytes]:
    """The server-sent events of one job. A failure in their midst becomes an error event."""
    outcome = "client gone"
    try:
        for frame in replies.frames(first):
            yield frame
        async for event in events:
            for frame in replies.frames(event):
                yield frame
        ending = replies.ending()
        outcome = "done"
        for frame in ending:
            yield frame
    except Exception as error:
        outcome = f"failed ({type(error).__name__})"
        for frame in replies.failure(error):
            yield frame
    finally:
        await aclose(events)
        state.finish(job, outcome)
