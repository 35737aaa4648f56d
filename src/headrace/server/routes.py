"""The routes, and the small ones among them whole."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, FastAPI, Request
from starlette.responses import Response

from headrace.server.answering import answer, check_model
from headrace.server.chat import Chat
from headrace.server.completions import Completions
from headrace.server.errors import ApiError, JsonReply
from headrace.server.scoring import Scoring
from headrace.server.state import ServerState


def install_routes(app: FastAPI, state: ServerState) -> None:
    router = APIRouter()

    @router.post("/v1/completions")
    async def completions(request: Request) -> Response:
        return await answer(state, request, Completions())

    @router.post("/v1/chat/completions")
    async def chat(request: Request) -> Response:
        return await answer(state, request, Chat())

    @router.post("/v1/score")
    async def score(request: Request) -> Response:
        return await answer(state, request, Scoring())

    @router.get("/v1/models")
    async def models() -> Response:
        return JsonReply({"object": "list", "data": [_model_card(state)]})

    @router.get("/v1/models/{name:path}")
    async def model(name: str) -> Response:
        check_model(state, name)
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
