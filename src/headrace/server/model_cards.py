"""GET /v1/models: names of the model and of its adapters, in OpenAI's shape, or in Anthropic's for its clients."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from fastapi import Request
from starlette.responses import Response

from headrace.server.answering import check_model
from headrace.server.anthropic.errors import has_version
from headrace.server.errors import JsonReply
from headrace.server.state import ServerState


def list_models(state: ServerState, request: Request) -> Response:
    """All names, on one page."""
    names = (*state.names.listed, *state.names.adapters)
    if not has_version(request.scope["headers"]):
        return JsonReply({"object": "list", "data": [_openai(state, name) for name in names]})
    data = [_anthropic(state, name) for name in names]
    return JsonReply({"data": data, "has_more": False, "first_id": names[0], "last_id": names[-1]})


def tell_model(state: ServerState, request: Request, name: str) -> Response:
    check_model(state, name)
    return JsonReply((_anthropic if has_version(request.scope["headers"]) else _openai)(state, name))


def _openai(state: ServerState, name: str) -> dict[str, Any]:
    """An adapter has its model as `parent`, as in vLLM's lists."""
    folder = dict(state.config.adapters.each).get(name)
    return {
        "id": name,
        "object": "model",
        "created": state.created,
        "owned_by": "headrace",
        "root": folder or state.config.model.folder,
        "parent": None if folder is None else state.model,
        "max_model_len": state.engine.capacity.max_model_len,
    }


def _anthropic(state: ServerState, name: str) -> dict[str, Any]:
    longest = state.engine.capacity.max_model_len
    return {
        "type": "model",
        "id": name,
        "display_name": name,
        "created_at": datetime.fromtimestamp(state.created, UTC).isoformat().replace("+00:00", "Z"),
        "lifecycle": "active",
        "max_input_tokens": longest,
        "max_tokens": longest,
    }
