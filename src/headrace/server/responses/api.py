"""The route of a new response, and those of responses that are kept."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from headrace.server.answering import admitted, answer, check_model
from headrace.server.errors import ApiError, JsonReply, invalid
from headrace.server.guard import TENANT
from headrace.server.job import Job
from headrace.server.protocol import read_body
from headrace.server.replies import Shown
from headrace.server.responses.body import ResponsesBody
from headrace.server.responses.items import MAX_ID, Item, check_conversation, messages_of, read_input
from headrace.server.responses.reply import Kept, ResponseReplies
from headrace.server.responses.store import Owner, ResponseStore
from headrace.server.state import ServerState
from headrace.server.stream import unless_gone
from headrace.server.tenants import Tenant
from headrace.server.turn import Turn
from headrace.server.turns import Sharing, job_of, naming, tokenizer_of, tokens_of

NAMES: dict[str | None, str] = {
    **dict.fromkeys((None, "prompt", "prompt_token_ids", "messages"), "input"),
    "logprobs": "top_logprobs",
    "max_tokens": "max_output_tokens",
    "structured": "text.format",
}
"""The engine's names of fields -> the client's."""

PAGE, MOST_PAGE = 20, 100
"""Items of a page of input_items."""


class Responses:
    """An Api (server.answering), of one request."""

    body = ResponsesBody

    def __init__(self, tenant: str) -> None:
        self.tenant = tenant
        self._given: list[Item] = []

    async def job(self, state: ServerState, body: ResponsesBody, arrival_s: float) -> Job:
        names = NAMES if body.has_form else {**NAMES, "structured": body.shape_field or "text.format"}
        with naming(names):
            params = body.to_params()
            turn = self.turn(state, body)
            sharing = Sharing(body.cache_salt, body.public_prefix_tokens or 0, self.tenant)
            job = await job_of(state, turn, params, "resp_", arrival_s, sharing)
        job.names = names
        return job

    def turn(self, state: ServerState, body: ResponsesBody) -> Turn:
        tokenizer_of(state, "input")
        self._given = self._conversation(state.responses, body)
        tools = body.functions()
        return Turn(messages_of(self._given, body.instructions), tools, body.choice(tools), body.thinking())

    def _conversation(self, store: ResponseStore, body: ResponsesBody) -> list[Item]:
        """All that the model is to read, as items."""
        owner = (self.tenant, body.cache_salt)
        before: list[Item] | None = []
        if body.previous_response_id is not None:
            before = store.conversation(owner, body.previous_response_id)
        if before is None:
            told = f"previous response with id {str(body.previous_response_id)[:MAX_ID]!r} not found: {LOST}"
            raise invalid(told, "previous_response_id", "previous_response_not_found")
        items = before + read_input(body.input, lambda item_id: store.item(owner, item_id))
        check_conversation(items)
        return items

    def replies(self, state: ServerState, body: ResponsesBody, job: Job) -> ResponseReplies:
        kept = Kept(state.responses, (self.tenant, body.cache_salt), self._given, body.store is not False)
        return ResponseReplies(job, body, Shown(body.model or state.model, state.engine.tokenizer), kept)


LOST = "it was not kept (store=false), was deleted, or made room for others; send the whole conversation as input"


def install_responses(router: APIRouter, state: ServerState) -> None:
    store = state.responses

    @router.post("/v1/responses")
    async def create(request: Request) -> Response:
        return await answer(state, request, Responses(tenant_of(request)))

    @router.post("/v1/responses/input_tokens")
    async def input_tokens(request: Request) -> Response:
        async with admitted(state, request) as raw:
            body = await read_body(ResponsesBody, raw)
            if body.model is not None:
                check_model(state, body.model)
            with naming(NAMES):
                params = body.to_params()
                turn = Responses(tenant_of(request)).turn(state, body)
                tokens = await unless_gone(request.receive, tokens_of(state, turn))
                # Of a prompt that is too long the tokens are told; all else is refused as for an answer.
                state.engine.check(tokens[:1], params)
        return JsonReply({"object": "response.input_tokens", "input_tokens": len(tokens)})

    @router.get("/v1/responses/{response_id}")
    async def retrieve(request: Request, response_id: str) -> Response:
        _check_query(request, {"cache_salt", "include", "include[]", "stream", "include_obfuscation", "starting_after"})
        if request.query_params.get("stream", "false").lower() not in ("false", "0"):
            raise invalid("a response that has ended cannot be streamed; leave stream out", "stream")
        found = store.response(_owner(request), response_id)
        if found is None:
            raise _not_found(response_id)
        return Response(found, media_type="application/json")

    @router.delete("/v1/responses/{response_id}")
    async def delete(request: Request, response_id: str) -> Response:
        _check_query(request, {"cache_salt"})
        if not store.delete(_owner(request), response_id):
            raise _not_found(response_id)
        return JsonReply({"id": response_id, "object": "response", "deleted": True})

    @router.get("/v1/responses/{response_id}/input_items")
    async def input_items(request: Request, response_id: str) -> Response:
        _check_query(request, {"cache_salt", "include", "include[]", "limit", "order", "after"})
        items = store.given(_owner(request), response_id)
        if items is None:
            raise _not_found(response_id)
        return JsonReply(page(items, request.query_params))


def tenant_of(request: Request) -> str:
    """Whose responses these are: with one key, or none, there is one tenant."""
    tenant: Tenant = request.scope[TENANT]
    return tenant.name


def _owner(request: Request) -> Owner:
    return tenant_of(request), request.query_params.get("cache_salt")


def _not_found(response_id: str) -> ApiError:
    told = f"no response has the id {response_id[:MAX_ID]!r}: it was not kept, was deleted, or made room for others"
    return ApiError(404, told, "response_id", "response_not_found")


def _check_query(request: Request, known: set[str]) -> None:
    for name in request.query_params:
        if name not in known:
            raise invalid(f"unknown query parameter {name[:60]!r}", name[:60], "unknown_parameter")


def page(items: list[Item], query: Any) -> dict[str, Any]:
    """The items that a query with limit, order and after asks for. Raises ApiError naming what is wrong."""
    limit, order, after = query.get("limit", str(PAGE)), query.get("order", "desc"), query.get("after")
    if not (limit.isascii() and limit.isdigit() and len(limit) < 4 and 1 <= int(limit) <= MOST_PAGE):
        raise invalid(f"limit must be 1 to {MOST_PAGE}", "limit")
    if order not in ("asc", "desc"):
        raise invalid("order must be asc or desc", "order")
    listed = items if order == "asc" else items[::-1]
    if after is not None:
        at = next((number for number, item in enumerate(listed) if item["id"] == after), None)
        if at is None:
            raise invalid(f"no item has the id {after[:MAX_ID]!r}", "after")
        listed = listed[at + 1 :]
    data = listed[: int(limit)]
    ends = {"first_id": data[0]["id"], "last_id": data[-1]["id"]} if data else {"first_id": None, "last_id": None}
    return {"object": "list", "data": data, "has_more": len(listed) > len(data), **ends}
