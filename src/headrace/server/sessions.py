"""/v1/cache/sessions: a conversation's keys and values saved under a name, to go on from after a restart."""

from __future__ import annotations

import time
from typing import Any
from uuid import uuid4

from fastapi import APIRouter, Request
from pydantic import Field
from starlette.responses import Response

from headrace.engine.calls import DeleteSession, ListSessions, LoadSession, ReadSession, SaveSession, SessionCall
from headrace.engine.session_places import Place, check_saving
from headrace.offload.sessions.names import NO_STORAGE, NOT_FOUND, check_name
from headrace.server.admission import admit, check_public
from headrace.server.answering import adapt, admitted, check_model, ended, start
from headrace.server.cache_api import check_query
from headrace.server.chat_body import MAX_MESSAGES, MAX_TOOLS, Message, ToolBody, template_variables, tools_of
from headrace.server.encoding import encoded
from headrace.server.errors import ApiError, JsonReply, invalid
from headrace.server.guard import TENANT
from headrace.server.job import Job, Prompt, caller_of
from headrace.server.protocol import AskingBody, Body, read_body
from headrace.server.state import ServerState
from headrace.server.stream import unless_gone
from headrace.server.tenants import Tenant
from headrace.server.turn import Turn
from headrace.server.turns import made, naming, tokenizer_of, tokens_of
from headrace.types import InvalidRequest, SamplingParams, check_sharing

ONE_TOKEN = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)
"""What is asked of the engine to compute a session's tokens."""

FILE: Place = "file"
"""Where sessions are saved without `to`."""
SOURCES = ("prompt", "prompt_token_ids", "messages", "request_id")
STATUS = {NOT_FOUND: 404, NO_STORAGE: 507}


class LoadSessionBody(Body):
    cache_salt: str | None = None
    public_prefix_tokens: int | None = None

    def check(self) -> None:
        """Raises InvalidRequest."""
        check_sharing(self.cache_salt, self.public_prefix_tokens or 0)


class SaveSessionBody(LoadSessionBody, AskingBody):
    """A session: a text, token ids, a chat, or a recent request of this caller with its answer."""

    name: str
    to: Place | None = None
    prompt: str | None = None
    prompt_token_ids: list[int] | None = None
    messages: list[Message] | None = Field(None, min_length=1, max_length=MAX_MESSAGES, fail_fast=True)
    tools: list[ToolBody] | None = Field(None, max_length=MAX_TOOLS)
    chat_template_kwargs: dict[str, Any] | None = None
    request_id: str | None = None

    def check(self) -> None:
        """Raises InvalidRequest, and ApiError for fields that do not go together."""
        super().check()
        given = [name for name in SOURCES if getattr(self, name) is not None]
        if len(given) != 1:
            raise invalid(f"give one of {', '.join(SOURCES)}", given[1] if given else "prompt")
        for name in ("tools", "chat_template_kwargs"):
            if self.messages is None and getattr(self, name) is not None:
                raise invalid(f"{name} needs messages", name)

    def turn(self) -> Turn:
        messages = self.messages or []
        for number, message in enumerate(messages):
            message.check(f"messages[{number}]")
        template = template_variables(self.chat_template_kwargs)
        return Turn([message.for_template() for message in messages], tools_of(self.tools), template=template)


def install_sessions(router: APIRouter, state: ServerState) -> None:
    @router.post("/v1/cache/sessions")
    async def save(request: Request) -> Response:
        check_query(request.query_params, set())
        return await _save(state, request)

    @router.get("/v1/cache/sessions")
    async def listed(request: Request) -> Response:
        check_query(request.query_params, set())
        found = await _ask(state, ListSessions(request.scope[TENANT].name))
        return JsonReply({"object": "list", "data": [{"object": "session", **each} for each in found]})

    @router.post("/v1/cache/sessions/{name}/load")
    async def load(request: Request, name: str) -> Response:
        check_query(request.query_params, set())
        return await _load(state, request, name)

    @router.delete("/v1/cache/sessions/{name}")
    async def delete(request: Request, name: str) -> Response:
        check_query(request.query_params, set())
        await _ask(state, DeleteSession(name, request.scope[TENANT].name))
        return JsonReply({"object": "session.deleted", "name": name, "deleted": True})


async def _save(state: ServerState, request: Request) -> Response:
    """Computes what is not cached, as any request does, and saves it."""
    arrival_s, tenant = time.monotonic(), request.scope[TENANT]
    async with admitted(state, request) as raw:
        body = await read_body(SaveSessionBody, raw)
        if body.model is not None:
            check_model(state, body.model)
        body.check()
        check_saving(state.config, body.name, body.to or FILE)
        source = next(name for name in SOURCES if getattr(body, name) is not None)
        names: dict[str | None, str] = dict.fromkeys((None, "prompt", "prompt_token_ids", "max_tokens"), source)
        with naming(names):
            ids, adapter = await unless_gone(request.receive, _tokens(state, body, tenant))
            prompt = Prompt(ids, state.engine.check(ids, ONE_TOKEN), silent=True)
        sharing = (body.cache_salt, body.public_prefix_tokens or 0)
        job = Job(f"session-{uuid4().hex}", [prompt], arrival_s, *sharing, names=names, priority=body.priority or 0)
        adapt(state, job, adapter)
        with naming(names):
            admit(job, tenant, state.public, state.engine.capacity.max_model_len)
    run = await start(state, request, job)
    async with ended(run):
        await unless_gone(request.receive, run.drain(lambda event: None))
    public = max(job.public_prefix_tokens, prompt.public_tokens)
    call = SaveSession(body.name, tenant.name, ids, job.cache_salt, public, body.to or FILE, adapter)
    told = await unless_gone(request.receive, _ask(state, call))
    reply = {name: told[name] for name in ("tokens", "saved_tokens", "bytes", "seconds")}
    own = {"name": body.name, "model": adapter or state.names.main, "to": body.to or FILE}
    return JsonReply({"object": "session", **own, "cached_tokens": job.cached_tokens, **reply})


async def _load(state: ServerState, request: Request, name: str) -> Response:
    """What is public of the session's tokens is found out here, as for every request: its file may not say so."""
    tenant: Tenant = request.scope[TENANT]
    async with admitted(state, request) as raw:
        body = await read_body(LoadSessionBody, raw or b"{}")
        if body.model is not None:
            check_model(state, body.model)
        body.check()
        check_public(body.public_prefix_tokens or 0, tenant)
    salt, public = tenant.salt(body.cache_salt), body.public_prefix_tokens or 0
    found = await _ask(state, ReadSession(name, tenant.name, salt))
    tokens, model = found["tokens"], found["adapter"] or state.names.main
    if body.model is not None and state.names.adapter(body.model) != found["adapter"]:
        raise invalid(f"this session is of {model!r}; name that, or leave model out", "model")
    if salt is not None:
        public = max(public, state.public.tokens(tokens))
    told = await unless_gone(request.receive, _ask(state, LoadSession(name, tenant.name, salt, public)))
    return JsonReply({"object": "session", "name": name, "model": model, **told})


async def _ask(state: ServerState, call: SessionCall) -> Any:
    """The engine's answer. Raises ApiError."""
    try:
        state.config.sessions.must_save(state.config.cache.prefix_caching)
        if not isinstance(call, ListSessions):
            check_name(call.name)
        return await state.engine.call(call)
    except InvalidRequest as error:
        status = STATUS.get(error.code or "", 400)
        raise ApiError(status, str(error), error.param, error.code or "invalid_value") from None


async def _tokens(state: ServerState, body: SaveSessionBody, tenant: Tenant) -> tuple[list[int], str]:
    """A session's tokens, and the adapter that computes them; "": the model itself."""
    adapter = state.names.adapter(body.model)
    if body.prompt_token_ids is not None:
        return body.prompt_token_ids, adapter
    if body.prompt is not None:
        return await encoded(state, tokenizer_of(state, "prompt").encode, body.prompt, "prompt"), adapter
    if body.request_id is None:
        return await tokens_of(state, await made(body.turn, len(body.messages or ()))), adapter
    asked = ("", *state.names.adapters) if body.model is None else (adapter,)
    return _seen(state, body.request_id, tenant, tenant.salt(body.cache_salt), asked)


def _seen(
    state: ServerState, request_id: str, tenant: Tenant, salt: str | None, adapters: tuple[str, ...]
) -> tuple[list[int], str]:
    """The tokens of a recent request of this caller to one of the adapters, with its answer; and which."""
    looked = ((each, state.recent.find(caller_of(tenant, salt, each), request_id)) for each in adapters)
    adapter, seen = next(((each, found) for each, found in looked if found is not None), ("", None))
    if seen is None:
        told = f"no recent request {request_id[:100]!r} of this caller; only those with one prompt are remembered"
        raise ApiError(404, told, "request_id", "not_found")
    if seen.running:
        raise invalid("this request is not answered yet", "request_id")
    if seen.answers > 1:
        told = f"this request has {seen.answers} answers, each another conversation; give messages or prompt_token_ids"
        raise invalid(told, "request_id")
    found: list[int] = seen.ids.tolist()
    return found, adapter
