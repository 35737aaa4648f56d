"""The routes, and the small ones among them whole."""

from __future__ import annotations

from fastapi import APIRouter, FastAPI, Request
from starlette.responses import Response

from headrace.server.answering import answer
from headrace.server.anthropic.messages import Messages
from headrace.server.cache_api import install_cache
from headrace.server.chat import Chat
from headrace.server.classify import Classify
from headrace.server.completions import Completions
from headrace.server.embeddings import Embeddings
from headrace.server.errors import ApiError, JsonReply
from headrace.server.model_cards import list_models, tell_model
from headrace.server.openapi import document
from headrace.server.prefix_api import install_prefixes
from headrace.server.rerank import Rerank
from headrace.server.responses.api import install_responses, tenant_of
from headrace.server.scoring import Scoring
from headrace.server.sessions import install_sessions
from headrace.server.state import ServerState
from headrace.server.tokenizing import detokenize, tokenize, tokenizer_info


def install_routes(app: FastAPI, state: ServerState) -> None:
    router = APIRouter()
    _install_answers(router, state)
    _install_messages(router, state)
    _install_tokenizing(router, state)
    install_responses(router, state)
    install_cache(router, state)
    install_prefixes(router, state)
    install_sessions(router, state)
    _install_models(router, state)
    _install_status(router, state)
    app.include_router(router)
    app.state.routes = router.routes


def _install_answers(router: APIRouter, state: ServerState) -> None:
    @router.post("/v1/completions")
    async def completions(request: Request) -> Response:
        return await answer(state, request, Completions())

    @router.post("/v1/chat/completions")
    async def chat(request: Request) -> Response:
        return await answer(state, request, Chat(tenant_of(request)))

    @router.post("/v1/embeddings")
    async def embeddings(request: Request) -> Response:
        return await answer(state, request, Embeddings())

    @router.post("/v1/score")
    async def score(request: Request) -> Response:
        return await answer(state, request, Scoring())

    @router.post("/v1/classify")
    async def classify(request: Request) -> Response:
        return await answer(state, request, Classify())

    @router.post("/rerank")
    @router.post("/v1/rerank")
    @router.post("/v2/rerank")
    async def rerank(request: Request) -> Response:
        return await answer(state, request, Rerank())


def _install_messages(router: APIRouter, state: ServerState) -> None:
    messages = Messages()

    @router.post("/v1/messages")
    async def message(request: Request) -> Response:
        return await answer(state, request, messages.of(tenant_of(request)))

    @router.post("/v1/messages/count_tokens")
    async def count_tokens(request: Request) -> Response:
        return await messages.count(state, request)


def _install_tokenizing(router: APIRouter, state: ServerState) -> None:
    @router.post("/tokenize")
    async def tokens(request: Request) -> Response:
        return await tokenize(state, request)

    @router.post("/detokenize")
    async def text(request: Request) -> Response:
        return await detokenize(state, request)

    @router.get("/tokenizer_info")
    async def info() -> Response:
        return tokenizer_info(state)


def _install_models(router: APIRouter, state: ServerState) -> None:
    @router.get("/v1/models")
    async def models(request: Request) -> Response:
        return list_models(state, request)

    @router.get("/v1/models/{name:path}")
    async def model(request: Request, name: str) -> Response:
        return tell_model(state, request, name)


def _install_status(router: APIRouter, state: ServerState) -> None:
    @router.api_route("/health", methods=["GET", "HEAD"])
    async def health() -> Response:
        return _health(state)

    @router.get("/metrics")
    async def metrics() -> Response:
        return Response(state.metrics.page(), media_type="text/plain; version=0.0.4; charset=utf-8")

    @router.get("/openapi.json")
    async def openapi() -> Response:
        return JsonReply(document(state.keys.guarded))


def _health(state: ServerState) -> Response:
    """Open to anybody, so the reason of a failure is told only where no key guards the rest."""
    if state.phase == "ready":
        return JsonReply({"status": "ok"})
    if state.phase == "loading":
        told = f"the model is still loading{_how_far(state)}"
    else:
        told = "the engine has failed" if state.keys.guarded else str(state.reason)
        if state.phase == "restarting":
            told += f"; it is being started again{_how_far(state)}"
    again = {"Retry-After": str(state.retry_after_s)} if state.phase == "restarting" else None
    error = ApiError(503, told, None, state.phase, again)
    return JsonReply({"status": state.phase, **error.body()}, status_code=503, headers=error.headers)


def _how_far(state: ServerState) -> str:
    now = state.loading.times.now
    if now is None:
        return ""
    return f" ({now.text}{'' if now.share is None else f', {now.share:.0%}'})"
