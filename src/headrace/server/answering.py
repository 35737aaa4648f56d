"""From a request to its reply: what all routes that ask the engine have in common."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from typing import Protocol, TypeVar

import numpy as np
from fastapi import Request
from starlette.responses import Response

from headrace.server.admission import admit, settle
from headrace.server.errors import ApiError, JsonReply
from headrace.server.guard import TENANT
from headrace.server.job import Job
from headrace.server.prompt_progress import PromptProgress
from headrace.server.protocol import AskingBody, StreamedBody, read_body
from headrace.server.replies import OpenAIReplies, Replies
from headrace.server.request_ids import SCOPE
from headrace.server.reuse import Nearest, described
from headrace.server.run import JobRun, outcome_of
from headrace.server.state import CLIENT_GONE, ServerState
from headrace.server.stream import EventStream, Note, unless_gone
from headrace.server.turns import naming

READ_S = 60.0
"""A client that sends its body slower than this does not hold a place among the admitted any longer."""

TOLD_TOKENS = 24
"""Tokens of a prompt's beginning, and of its end, that --log-requests text shows."""

B = TypeVar("B", bound=AskingBody)


def check_model(state: ServerState, name: str) -> None:
    """Raises ApiError for a model that is not served."""
    if name not in state.names:
        told = f"the model {name[:100]!r} does not exist here; this server has {state.names.told}"
        raise ApiError(404, told, "model", "model_not_found")


def adapt(state: ServerState, job: Job, name: str | None) -> None:
    """The job is the adapter's of that name, if one is called so. Raises ApiError for a prompt that does not invoke
    it."""
    job.adapter = state.names.adapter(name)
    for prompt in job.prompts if job.adapter else ():
        with naming({"adapter": "model"}):
            state.engine.capacity.adapter_start(job.adapter, prompt.ids)


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
    async with admitted(state, request) as raw:
        body = await read_body(api.body, raw)
        if body.model is not None:
            check_model(state, body.model)
        job = await unless_gone(request.receive, api.job(state, body, arrival_s))
        job.priority = body.priority or 0
        adapt(state, job, body.model)
        with naming(job.names):
            admit(job, request.scope[TENANT], state.public, state.engine.capacity.max_model_len)
        job.nearest = await _nearest(state, job)
    replies = api.replies(state, body, job)
    run = await start(state, request, job)
    if isinstance(body, StreamedBody) and body.stream:
        note = _progress(run, replies) if body.wants_progress else None
        keepalive_s = state.config.server.sse_keepalive_s
        ending = _Ending(run)
        return EventStream(_frames(run, replies, ending), ending.end, keepalive_s, note)
    async with ended(run):
        await unless_gone(request.receive, run.drain(replies.take))
    return JsonReply(replies.whole())


async def start(state: ServerState, request: Request, job: Job) -> JobRun:
    """The job in the engine's queue. What the engine refuses it with before that is raised: the answer's status can
    still tell it."""
    request.scope[SCOPE] = job.request_id
    try:
        state.arrived(job, await _told_text(state, job))
        run = JobRun(state, job)
    except BaseException:
        settle(job, refused=True)
        raise
    try:
        await unless_gone(request.receive, run.queued())
    except BaseException as error:
        await run.end(outcome_of(error))
        raise
    if _is_compared(state, job):
        ids = np.array(job.prompts[0].ids, np.int32)
        job.seen = state.recent.add(job.caller, job.request_id, job.cache_salt, ids)
    return run


def _is_compared(state: ServerState, job: Job) -> bool:
    """Whether a job is compared with the caller's others: one prompt that is answered."""
    return len(job.prompts) == 1 and not job.prompts[0].embed and state.config.cache.prefix_caching


async def _nearest(state: ServerState, job: Job) -> Nearest | None:
    """The caller's recent request that begins like the job's prompt for longest."""
    prompt, tokenizer = job.prompts[0], state.engine.tokenizer
    if not _is_compared(state, job):
        return None
    ids = np.array(prompt.ids, np.int32)
    near = state.recent.nearest(job.caller, ids, job.cache_salt)
    if near is not None and near.missing == "evicted" and prompt.params.prompt_logprobs is not None:
        near = near._replace(missing="scored")
    if near is None or tokenizer is None:
        return near
    decode = partial(tokenizer.decode, skip_special_tokens=False)
    return await state.in_tokenizer(described, near, ids, prompt.messages, decode)


async def _told_text(state: ServerState, job: Job) -> str:
    """Beginning and end of the first prompt where --log-requests text wants them, else nothing."""
    if state.config.server.log_requests != "text":
        return ""
    ids, tokenizer = job.prompts[0].ids, state.engine.tokenizer
    parts = [ids] if len(ids) <= 2 * TOLD_TOKENS else [ids[:TOLD_TOKENS], ids[-TOLD_TOKENS:]]
    if tokenizer is None:
        return " ... ".join(map(str, parts))
    return " ... ".join([await state.in_tokenizer(tokenizer.decode, part) for part in parts])


async def _read(request: Request) -> bytes:
    """The body. Raises ApiError for one that comes too slowly, or is compressed."""
    try:
        async with asyncio.timeout(READ_S):
            raw = await request.body()
    except TimeoutError:
        raise ApiError(408, f"the body did not arrive within {READ_S:.0f} s") from None
    encoding = request.headers.get("content-encoding", "identity")
    if encoding.lower() != "identity":
        told = f"bodies with content-encoding {encoding[:40]!r} are not read; send plain JSON"
        raise ApiError(415, told, None, "unsupported_encoding", {"Accept-Encoding": "identity"})
    return raw


@asynccontextmanager
async def admitted(state: ServerState, request: Request) -> AsyncIterator[bytes]:
    """The body. Bounds what is read and tokenized at one time, before the engine's own queue bounds what waits. Raises
    Overloaded; ApiError for a body that comes too slowly, or is compressed."""
    tenant = request.scope[TENANT]
    with state.reading.place(tenant, state.retry_after_of):
        raw, turn = await _read(request), state.reading.turn(tenant)
        acquiring = asyncio.ensure_future(turn.acquire())
        try:
            await unless_gone(request.receive, acquiring)
            yield raw
        finally:
            if not acquiring.cancelled():
                turn.release()


@asynccontextmanager
async def ended(run: JobRun) -> AsyncIterator[None]:
    """Ends the run with what is done within."""
    try:
        yield
    except BaseException as error:
        await run.end(outcome_of(error))
        raise
    await run.end("done")


class _Ending:
    """How a stream has ended so far."""

    def __init__(self, run: JobRun) -> None:
        self.run, self.outcome = run, CLIENT_GONE

    async def end(self) -> None:
        await self.run.end(self.outcome)


async def _frames(run: JobRun, replies: Replies, ending: _Ending) -> AsyncIterator[bytes]:
    """The server-sent events of one job. A failure becomes the last of them."""
    try:
        for frame in replies.opening():
            yield frame
        if (first := await run.first()) is not None:
            for frame in replies.frames(first):
                yield frame
        async for event in run.rest:
            for frame in replies.frames(event):
                yield frame
        await run.pinned()
        last = replies.ending()
        ending.outcome = "done"
        for frame in last:
            yield frame
    except Exception as error:
        ending.outcome = f"failed ({type(error).__name__})"
        for frame in replies.failure(error):
            yield frame


def _progress(run: JobRun, replies: Replies) -> Note:
    """Notes on how far the prompt is read."""
    assert isinstance(replies, OpenAIReplies), "other bodies have no such field"
    progress, frame = PromptProgress(run.job, run.engine), replies.progress

    def note() -> bytes | None:
        told = progress()
        return None if told is None else frame(told)

    return note
