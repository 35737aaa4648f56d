"""The routes. A request is parsed, checked and tokenized here; the engine does the rest."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from typing import Any
from uuid import uuid4

from fastapi import APIRouter, FastAPI, Request
from starlette.responses import Response

from headrace.server.errors import ApiError, ClientGone, JsonReply, invalid
from headrace.server.job import Event, Job, Prompt, aclose
from headrace.server.protocol import ChatBody, CompletionBody, parse_body
from headrace.server.replies import ChatReplies, CompletionReplies, Replies
from headrace.server.state import ServerState
from headrace.server.stream import DONE, EventStream, sse, sse_error, unless_gone
from headrace.types import InvalidRequest, Overloaded, SamplingParams

RETRY_S = 1.0

READ_S = 60.0
"""A client that sends its body slower than this does not hold a place among the admitted any longer."""

TOLD_TOKENS = 24
"""Tokens of a prompt's beginning, and of its end, that --log-requests text shows."""

Body = CompletionBody | ChatBody


def install_routes(app: FastAPI, state: ServerState) -> None:
    router = APIRouter()

    @router.post("/v1/completions")
    async def completions(request: Request) -> Response:
        return await _answer(state, request, CompletionBody)

    @router.post("/v1/chat/completions")
    async def chat(request: Request) -> Response:
        return await _answer(state, request, ChatBody)

    @router.get("/v1/models")
    async def models() -> Response:
        return JsonReply({"object": "list", "data": [_model_card(state)]})

    @router.get("/v1/models/{name:path}")
    async def model(name: str) -> Response:
        _check_model(state, name)
        return JsonReply(_model_card(state))

    @router.get("/health")
    async def health() -> Response:
        return _health(state)

    @router.get("/metrics")
    async def metrics() -> Response:
        return Response(state.metrics.page(), media_type="text/plain; version=0.0.4; charset=utf-8")

    app.include_router(router)


def _model_card(state: ServerState) -> dict[str, Any]:
    return {
        "id": state.model,
        "object": "model",
        "created": state.created,
        "owned_by": "headrace",
        "root": state.config.model.folder,
        "max_model_len": state.engine.capacity.max_model_len,
    }


def _check_model(state: ServerState, name: str) -> None:
    if name != state.model:
        told = f"the model {name[:100]!r} does not exist here; this server has {state.model!r}"
        raise ApiError(404, told, "model", "model_not_found")


def _health(state: ServerState) -> Response:
    """Open to anybody, so the reason of a failure is told only where no key guards the rest."""
    if state.phase == "ready":
        return JsonReply({"status": "ok"})
    if state.phase == "loading":
        told = f"the model is still loading{_how_far(state)}"
    else:
        told = "the engine has failed" if state.config.server.api_key else str(state.reason)
        if state.phase == "restarting":
            told += f"; it is being started again{_how_far(state)}"
    return JsonReply({"status": state.phase, **ApiError(503, told, None, state.phase).body()}, status_code=503)


def _how_far(state: ServerState) -> str:
    now = state.loading.times.now
    if now is None:
        return ""
    return f" ({now.text}{'' if now.share is None else f', {now.share:.0%}'})"


async def _answer(state: ServerState, request: Request, kind: type[CompletionBody] | type[ChatBody]) -> Response:
    arrival_s = time.monotonic()
    with _admission(state):
        body: Body = parse_body(kind, await _read(request))
        if body.model is not None:
            _check_model(state, body.model)
        job = await unless_gone(request.receive, _job(state, body, arrival_s))
    state.arrived(job, await _told_text(state, job))
    replies = _replies(state, job, body)
    events = job.events(state.engine, state.metrics.note_peak)
    if body.stream:
        # The first event decides the status: a refusal after the headers could not carry one.
        with _account(state, job):
            first = await unless_gone(request.receive, anext(events))
        return EventStream(_stream(state, job, replies, events, first, body.wants_usage))
    with _account(state, job, last=True):
        await unless_gone(request.receive, _drain(events))
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


async def _read(request: Request) -> bytes:
    try:
        async with asyncio.timeout(READ_S):
            return await request.body()
    except TimeoutError:
        raise ApiError(408, f"the body did not arrive within {READ_S:.0f} s") from None


@contextmanager
def _admission(state: ServerState) -> Iterator[None]:
    """Bounds what is read and tokenized at one time, before the engine's own queue bounds what waits."""
    if state.admitting >= state.config.server.max_queued_requests:
        raise Overloaded(f"{state.admitting} requests are being read", RETRY_S)
    state.admitting += 1
    try:
        yield
    finally:
        state.admitting -= 1


@contextmanager
def _account(state: ServerState, job: Job, last: bool = False) -> Iterator[None]:
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


async def _drain(events: AsyncIterator[Event]) -> None:
    try:
        async for _ in events:
            pass
    finally:
        await aclose(events)


async def _stream(
    state: ServerState, job: Job, replies: Replies, events: AsyncIterator[Event], first: Event, wants_usage: bool
) -> AsyncIterator[bytes]:
    """The server-sent events of one job. A failure in their midst becomes an error event."""
    outcome = "client gone"
    try:
        for chunk in replies.chunks(first, wants_usage):
            yield sse(chunk)
        async for event in events:
            for chunk in replies.chunks(event, wants_usage):
                yield sse(chunk)
        if wants_usage:
            yield sse(replies.usage_chunk())
        outcome = "done"
        yield DONE
    except Exception as error:
        outcome = f"failed ({type(error).__name__})"
        yield sse_error(error)
    finally:
        await aclose(events)
        state.finish(job, outcome)


async def _job(state: ServerState, body: Body, arrival_s: float) -> Job:
    """Tokenizes and checks. Raises ApiError naming the field as the client knows it."""
    renamed = _names(body)
    try:
        params = body.to_params()
        if isinstance(body, ChatBody):
            prompts = [await _chat_prompt(state, body, params)]
        else:
            prompts = await _text_prompts(state, body, params)
    except InvalidRequest as error:
        raise invalid(str(error), renamed.get(error.param, error.param), error.code) from None
    if body.cache_salt is not None:
        for prompt in prompts:
            prompt.public_tokens = state.public.tokens(prompt.ids)
    prefix = "chatcmpl" if isinstance(body, ChatBody) else "cmpl"
    return Job(f"{prefix}-{uuid4().hex}", prompts, arrival_s, body.cache_salt, body.public_prefix_tokens or 0)


def _names(body: Body) -> dict[str | None, str]:
    """The engine's names of fields -> the client's."""
    if not isinstance(body, ChatBody):
        return {None: "prompt", "prompt_token_ids": "prompt"}
    most = "max_tokens" if body.max_completion_tokens is None else "max_completion_tokens"
    prompt = dict.fromkeys((None, "prompt", "prompt_token_ids"), "messages")
    return {**prompt, "logprobs": "top_logprobs", "max_tokens": most}


async def _chat_prompt(state: ServerState, body: ChatBody, params: SamplingParams) -> Prompt:
    messages = [message.for_template() for message in body.messages]
    kwargs = body.template_kwargs()
    tokenizer = _tokenizer(state, "messages")
    try:
        text = await state.in_renderer(lambda: tokenizer.render_chat(messages, **kwargs))
    except TypeError as error:
        raise invalid(f"chat_template_kwargs: {error}", "chat_template_kwargs") from None
    ids = await state.in_tokenizer(tokenizer.encode_chat, text)
    return Prompt(ids, state.engine.check(ids, params))


async def _text_prompts(state: ServerState, body: CompletionBody, params: SamplingParams) -> list[Prompt]:
    given = body.prompts()
    if len(given) > state.config.server.max_queued_requests:
        raise invalid(f"at most {state.config.server.max_queued_requests} prompts in one request", "prompt")
    return [await _text_prompt(state, prompt, params, bool(body.echo)) for prompt in given]


async def _text_prompt(state: ServerState, prompt: str | list[int], params: SamplingParams, echo: bool) -> Prompt:
    if isinstance(prompt, str):
        tokenizer = _tokenizer(state, "prompt")
        ids = await state.in_tokenizer(tokenizer.encode, prompt)
        return Prompt(ids, state.engine.check(ids, params), prompt)
    checked = state.engine.check(prompt, params)
    text = await state.in_tokenizer(_tokenizer(state, "echo").decode, prompt) if echo else ""
    return Prompt(prompt, checked, text)


def _tokenizer(state: ServerState, param: str) -> Any:
    tokenizer = state.engine.tokenizer
    if tokenizer is None:
        raise invalid("the model folder has no tokenizer: send token ids to /v1/completions", param)
    return tokenizer


def _replies(state: ServerState, job: Job, body: Body) -> Replies:
    tokenizer, ids = state.engine.tokenizer, bool(body.return_token_ids)
    if isinstance(body, ChatBody):
        return ChatReplies(job, state.model, tokenizer, ids)
    return CompletionReplies(job, state.model, tokenizer, ids, bool(body.echo))
