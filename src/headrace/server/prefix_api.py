"""The routes /v1/cache/prefixes: prefixes that are computed and pinned by name, listed, and released by their owner."""

from __future__ import annotations

import math
import time
from typing import Annotated, Any, Literal
from uuid import uuid4

from fastapi import APIRouter, Request
from pydantic import Field, StringConstraints
from starlette.responses import Response

from headrace.engine.calls import ListPrefixes, ReleasePrefix
from headrace.kv.pins import MAX_TTL_S, prompt_to_pin
from headrace.server.answering import answer
from headrace.server.breakpoints import TTL_S, AskedPin, tokens_before
from headrace.server.cache_api import check_query, tenant_of
from headrace.server.chat_body import MAX_MESSAGES, MAX_TOOLS, Message, TextPart, ToolBody, template_variables, tools_of
from headrace.server.encoding import encoded
from headrace.server.errors import ApiError, JsonReply, invalid
from headrace.server.job import Job, Prompt
from headrace.server.prompt_pins import NAMED, SOFT, made_id, owner_of
from headrace.server.prompts import prompt_usage
from headrace.server.protocol import AskingBody
from headrace.server.replies import InOnePiece, figures
from headrace.server.state import ServerState
from headrace.server.stream import unless_gone
from headrace.server.turn import Turn
from headrace.server.turns import made, naming, rendered, tokenizer_of
from headrace.types import InvalidRequest, SamplingParams, check_sharing

DEFAULT_TTL_S = TTL_S["5m"]

PrefixId = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,127}$")]

ANYTHING = Message.model_validate({"role": "user", "content": "0"})
"""Stands behind a prefix: templates may want a user's turn, and nothing of it is kept."""


class PrefixBody(AskingBody):
    """A beginning of prompts: a text, token ids, or messages with what a chat template shows beside them."""

    prompt: str | None = None
    prompt_token_ids: list[int] | None = None
    messages: list[Message] | None = Field(None, min_length=1, max_length=MAX_MESSAGES, fail_fast=True)
    tools: list[ToolBody] | None = Field(None, max_length=MAX_TOOLS)
    documents: list[dict[str, Any]] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    id: PrefixId | None = None
    ttl_seconds: float | None = Field(None, gt=0, le=MAX_TTL_S)
    ttl: Literal["5m", "1h"] | None = None
    cache_salt: str | None = None
    public_prefix_tokens: int | None = None

    @property
    def ttl_s(self) -> float:
        return TTL_S[self.ttl] if self.ttl is not None else self.ttl_seconds or DEFAULT_TTL_S

    def check(self) -> None:
        """Raises ApiError for fields that do not go together."""
        given = [name for name in ("prompt", "prompt_token_ids", "messages") if getattr(self, name) is not None]
        if len(given) != 1:
            told = f"give one of prompt, prompt_token_ids and messages, got {' and '.join(given) or 'none'}"
            raise invalid(told, given[-1] if given else "messages", None if given else "missing")
        for name in ("tools", "documents", "chat_template_kwargs"):
            if self.messages is None and getattr(self, name) is not None:
                raise invalid(f"{name} needs messages", name)
        if self.ttl is not None and self.ttl_seconds is not None:
            raise invalid("give either ttl or ttl_seconds", "ttl")
        if (self.id or "").startswith(SOFT):
            raise invalid(f"id: those of breakpoints begin with {SOFT!r}", "id")
        check_sharing(self.cache_salt, self.public_prefix_tokens or 0)

    def turns(self) -> tuple[Turn, Turn]:
        """A conversation that goes on behind the messages, and the same with a mark where it does."""
        messages = list(self.messages or [])
        for number, message in enumerate(messages):
            message.check(f"messages[{number}]")
        last = messages[-1]
        parts = last.content or [TextPart(type="text", text="")]
        marked = last.model_copy(update={"content": [*parts[:-1], parts[-1].marked()]})
        return self._turn([*messages, ANYTHING]), self._turn([*messages[:-1], marked, ANYTHING])

    def _turn(self, messages: list[Message]) -> Turn:
        told = [message.for_template() for message in messages]
        if len(told) > 1 and told[-2]["role"] == "user":
            told.pop()  # a user's turn is there
        template = template_variables(self.chat_template_kwargs)
        return Turn(told, tools_of(self.tools), documents=tuple(self.documents or ()), template=template)


class Prefixes:
    """An Api (server.answering): the prefix is computed as a prompt of one token's answer, which nobody is told."""

    body = PrefixBody

    async def job(self, state: ServerState, body: PrefixBody, arrival_s: float) -> Job:
        body.check()
        source = next(name for name in ("prompt", "prompt_token_ids", "messages") if getattr(body, name) is not None)
        names: dict[str | None, str] = dict.fromkeys((None, "prompt", "prompt_token_ids", "messages"), source)
        with naming(names):
            tokens = await _tokens(state, body)
            ids = prompt_to_pin(tokens)
            params = state.engine.check(ids, SamplingParams(max_tokens=1))
        own = made_id(NAMED, ids[:-1], body.cache_salt, state.names.adapter(body.model))
        asked = AskedPin(len(ids) - 1, body.ttl_s, body.id or own)
        prompt = Prompt(ids, params, pins=[asked], silent=True)
        salt, public = body.cache_salt, body.public_prefix_tokens or 0
        return Job(f"prefix-{uuid4().hex}", [prompt], arrival_s, salt, public, names=names)

    def replies(self, state: ServerState, body: PrefixBody, job: Job) -> PrefixReplies:
        return PrefixReplies(job)


class PrefixReplies(InOnePiece):
    def __init__(self, job: Job) -> None:
        self.job = job

    def whole(self) -> dict[str, Any]:
        assert self.job.pinned is not None and self.job.pinned.prefix is not None, "else it was refused"
        cached = {"cached_tokens": self.job.cached_tokens}
        return {**told(self.job.pinned.prefix), **cached, "usage": prompt_usage(self.job),
                "headrace": figures(self.job)}  # fmt: skip


def told(pin: dict[str, Any]) -> dict[str, Any]:
    """A pin of the engine's (kv.pins.Pins.told) as replies have it."""
    kind = "cache_control" if pin["id"].startswith(SOFT) else "prefix"
    return {
        "id": pin["id"],
        "object": "cache.prefix",
        "kind": kind,
        "tokens": pin["tokens"],
        "chunks": pin["chunks"],
        "bytes": pin["bytes"],
        "ttl_seconds": pin["ttl_s"],
        "expires_at": math.floor(time.time() + pin["expires_in_s"]),
    }


async def _tokens(state: ServerState, body: PrefixBody) -> list[int]:
    """The prefix: of messages, what every conversation begins with that begins with them."""
    if body.prompt_token_ids is not None:
        return body.prompt_token_ids
    if body.prompt is not None:
        return await encoded(state, tokenizer_of(state, "prompt").encode, body.prompt, "prompt")
    tokenizer = tokenizer_of(state, "messages")
    plain, marked = await made(body.turns, len(body.messages or ()))
    text, other = [(await state.in_renderer(rendered, tokenizer, turn)).text for turn in (plain, marked)]
    ids = await encoded(state, tokenizer.encode_chat, text, "messages")
    return ids[: await state.in_tokenizer(tokens_before, tokenizer, ids, text, other)]


def install_prefixes(router: APIRouter, state: ServerState) -> None:
    @router.post("/v1/cache/prefixes")
    async def create(request: Request) -> Response:
        check_query(request.query_params, set())
        return await answer(state, request, Prefixes())

    @router.get("/v1/cache/prefixes")
    async def listed(request: Request) -> Response:
        return JsonReply({"object": "list", "data": await _own(state, request)})

    @router.get("/v1/cache/prefixes/{prefix_id}")
    async def retrieve(request: Request, prefix_id: str) -> Response:
        found = next((each for each in await _own(state, request) if each["id"] == prefix_id), None)
        if found is None:
            raise _not_found(prefix_id)
        return JsonReply(found)

    @router.delete("/v1/cache/prefixes/{prefix_id}")
    async def release(request: Request, prefix_id: str) -> Response:
        call = ReleasePrefix(prefix_id, _owner(request))
        try:
            await unless_gone(request.receive, state.engine.call(call))
        except InvalidRequest as error:
            if error.code != "not_found":
                raise
            raise _not_found(prefix_id) from None
        return JsonReply({"id": prefix_id, "object": "cache.prefix", "deleted": True})


async def _own(state: ServerState, request: Request) -> list[dict[str, Any]]:
    """Oldest first."""
    pins = await unless_gone(request.receive, state.engine.call(ListPrefixes(_owner(request))))
    return [told(each) for each in pins]


def _owner(request: Request) -> str:
    check_query(request.query_params, {"cache_salt"})
    salt, tenant = request.query_params.get("cache_salt"), tenant_of(request)
    check_sharing(salt, 0)
    return owner_of(tenant, tenant.salt(salt))


def _not_found(prefix_id: str) -> ApiError:
    told_why = f"no pinned prefix has the id {prefix_id[:128]!r}: it was released, its time is over, or it never was"
    return ApiError(404, told_why, "id", "not_found")
