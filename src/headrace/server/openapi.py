"""GET /openapi.json: every route with its body, its replies and its errors, made from what checks them.

Bodies are parsed by hand, so that errors name fields; ROUTES says which route takes which. A new route adds its line
(docs/extending.md); tests compare the lines with the application's routes.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from pydantic import TypeAdapter
from pydantic.json_schema import GenerateJsonSchema, models_json_schema

from headrace.server import cache_shapes, shapes
from headrace.server.anthropic.body import CountBody, MessagesBody
from headrace.server.anthropic.errors import MESSAGES, MODELS
from headrace.server.chat_body import ChatBody
from headrace.server.classify import ClassifyBody
from headrace.server.embeddings import EmbeddingBody
from headrace.server.prefix_api import PrefixBody
from headrace.server.protocol import Body, CompletionBody
from headrace.server.rerank import RerankBody
from headrace.server.responses import shapes as responses
from headrace.server.responses.body import ResponsesBody
from headrace.server.scoring import ScoreBody
from headrace.server.sessions import LoadSessionBody, SaveSessionBody
from headrace.server.tokenizing import DetokenizeBody, TokenizeBody
from headrace.types import MAX_LISTED, MAX_SALT, MAX_STOP_LENGTH, MAX_STOPS, RANGES
from headrace.version import __version__

PLACE = re.compile(r"\{(\w+)\}")
"""A parameter in a path."""

REF = "#/components/schemas/{model}"

OPEN = "/health"
"""The route that no key guards."""

KEYS = {
    "bearer": {"type": "http", "scheme": "bearer"},
    "x-api-key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
}
"""How a key may come, either way."""


@dataclass(frozen=True, slots=True)
class Route:
    """One operation. replies: TypedDicts of server.shapes, of which a reply has one; without any it is plain text.
    streams: with `stream` the reply is server-sent events. query: names of its parameters there."""

    method: str
    path: str
    summary: str
    body: type[Body] | None = None
    replies: tuple[Any, ...] = ()
    streams: bool = False
    query: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """Of the operation: get_v1_models."""
        words = PLACE.sub("one", self.path).strip("/").replace("/", "_").replace(".", "_")
        return f"{self.method.lower()}_{words}"

    @property
    def errors(self) -> tuple[Any, ...]:
        """Shapes of a refusal; of models it depends on the client."""
        if self.path.startswith(MESSAGES):
            return (shapes.AnthropicError,)
        return (shapes.Error, shapes.AnthropicError) if self.path.startswith(MODELS) else (shapes.Error,)


RESPONSES = "/v1/responses"
ONE = RESPONSES + "/{response_id}"
RERANK = ("/v1/rerank", "/v2/rerank", "/rerank")
"""Jina's and vLLM's, Cohere's, and llama.cpp's."""
SESSIONS = "/v1/cache/sessions"
PAGED = ("cache_salt", "limit", "order", "after")
PREFIXES = "/v1/cache/prefixes"
TREE = ("cache_salt", "limit", "after", "all")

ROUTES = (
    Route("POST", "/v1/completions", "The continuation of a text.", CompletionBody, (shapes.Completion,), True),
    Route("POST", "/v1/chat/completions", "The next turn of a chat.", ChatBody, (shapes.ChatCompletion,), True),
    Route("POST", MESSAGES, "The next turn, in Anthropic's shape.", MessagesBody, (shapes.AnthropicMessage,), True),
    Route("POST", f"{MESSAGES}/count_tokens", "Tokens of such a prompt.", CountBody, (shapes.CountedTokens,)),
    Route("POST", "/v1/score", "The likelihood of options after a text.", ScoreBody, (shapes.Scores,)),
    Route("POST", "/v1/embeddings", "A vector for each text.", EmbeddingBody, (shapes.EmbeddingList,)),
    Route("POST", "/v1/classify", "Probabilities of a classifier's labels.", ClassifyBody, (shapes.Classes,)),
    *(Route("POST", path, "Documents by their relevance.", RerankBody, (shapes.Reranked,)) for path in RERANK),
    Route("POST", RESPONSES, "A response, in OpenAI's newer shape.", ResponsesBody, (responses.ModelResponse,), True),
    Route("POST", f"{RESPONSES}/input_tokens", "Tokens of such a prompt.", ResponsesBody, (responses.CountedInput,)),
    Route("GET", ONE, "A kept response.", None, (responses.ModelResponse,), query=("cache_salt",)),
    Route("DELETE", ONE, "Forgets a kept response.", None, (responses.DeletedResponse,), query=("cache_salt",)),
    Route("GET", f"{ONE}/input_items", "What its model was given.", None, (responses.ItemList,), query=PAGED),
    Route("GET", "/v1/cache/tree", "Cached chunks, who shares them.", None, (cache_shapes.SegmentPage,), query=TREE),
    Route("POST", PREFIXES, "Computes and pins a prefix.", PrefixBody, (cache_shapes.NewPrefix,)),
    Route("GET", PREFIXES, "Pinned prefixes.", None, (cache_shapes.PrefixList,), query=("cache_salt",)),
    Route("GET", f"{PREFIXES}/{{prefix_id}}", "One of them.", None, (cache_shapes.Prefix,), query=("cache_salt",)),
    Route("DELETE", f"{PREFIXES}/{{prefix_id}}", "Ends a pin.", None, (cache_shapes.Released,), query=("cache_salt",)),
    Route("POST", "/v1/cache/reset", "Forgets all that no request uses.", None, (cache_shapes.CacheReset,)),
    Route("POST", "/tokenize", "Token ids of a text or a chat.", TokenizeBody, (shapes.Tokenized,)),
    Route("POST", "/detokenize", "The text of token ids.", DetokenizeBody, (shapes.Detokenized,)),
    Route("GET", "/tokenizer_info", "Special tokens and chat template.", None, (shapes.TokenizerInfo,)),
    Route("POST", SESSIONS, "Saves a session by name.", SaveSessionBody, (shapes.SavedSession,)),
    Route("GET", SESSIONS, "The saved sessions.", None, (shapes.SessionList,)),
    Route("POST", f"{SESSIONS}/{{name}}/load", "Loads one.", LoadSessionBody, (shapes.LoadedSession,)),
    Route("DELETE", f"{SESSIONS}/{{name}}", "Deletes one.", None, (shapes.DeletedSession,)),
    Route("GET", MODELS, "The served model, by all names.", None, (shapes.ModelList, shapes.AnthropicModelList)),
    Route("GET", f"{MODELS}/{{name}}", "It by one name.", None, (shapes.ModelCard, shapes.AnthropicModel)),
    Route("GET", OPEN, "Whether requests are answered.", None, (shapes.Health,)),
    Route("HEAD", OPEN, "The same, by the status alone."),
    Route("GET", "/metrics", "Figures for Prometheus."),
    Route("GET", "/openapi.json", "This document.", None, (dict[str, Any],)),
)

STOPS = {
    "type": "array",
    "items": {"type": "string", "minLength": 1, "maxLength": MAX_STOP_LENGTH},
    "maxItems": MAX_STOPS,
}

BOUNDS = {name: {"minimum": low, "maximum": high} for name, low, high, _, _ in RANGES}

FIELDS: dict[str, dict[str, Any]] = {
    **BOUNDS,
    "max_completion_tokens": BOUNDS["max_tokens"],
    "max_output_tokens": BOUNDS["max_tokens"],
    "messages": {"minItems": 1},
    "query": {"minLength": 1},
    "top_n": {"minimum": 1},
    "top_p": {"exclusiveMinimum": 0, "maximum": 1},
    "cache_salt": {"minLength": 1, "maxLength": MAX_SALT},
    "public_prefix_tokens": {"minimum": 0, "maximum": 2**31},
    "stop_token_ids": {"items": shapes.TOKEN_IDS["items"], "maxItems": MAX_LISTED},
    "logprob_token_ids": {"items": shapes.TOKEN_IDS["items"], "maxItems": MAX_LISTED},
    "tokens": {"items": shapes.TOKEN_IDS["items"]},
    "prompt_token_ids": {"items": shapes.TOKEN_IDS["items"]},
    "logit_bias": {
        "propertyNames": {"pattern": "^[0-9]{1,10}$"},
        "additionalProperties": {"type": "number", "minimum": -100, "maximum": 100},
        "maxProperties": MAX_LISTED,
    },
    "stop": {"anyOf": [STOPS["items"], STOPS, {"type": "null"}]},
    "stop_sequences": {"anyOf": [STOPS, {"type": "null"}]},
    "top_logprobs": {"minimum": 0, "maximum": 20},
}
"""What fields of bodies may hold beyond their types; their records check it, not their models."""

ALSO: dict[type[Body], dict[str, Any]] = {
    CompletionBody: {"required": ["prompt"], "properties": {"prompt": shapes.PROMPT}},
    ResponsesBody: {"required": ["input"], "properties": {"input": responses.INPUT}},
    TokenizeBody: {
        "oneOf": [{"required": ["prompt"]}, {"required": ["messages"]}],
        "properties": {
            "prompt": {"type": "string"},
            "messages": {"type": "array", "items": {"$ref": REF.format(model="Message")}, "minItems": 1},
        },
    },
}
"""What bodies check by themselves."""


def document(guarded: bool, routes: Iterable[Route] = ROUTES) -> dict[str, Any]:
    """An OpenAPI 3.1 document. guarded: a key is wanted."""
    routes = tuple(routes)
    paths: dict[str, Any] = {}
    for route in routes:
        paths.setdefault(route.path, {})[route.method.lower()] = _operation(route)
    return {
        "openapi": "3.1.0",
        "info": {"title": "Headrace", "version": __version__},
        "paths": paths,
        "components": {"schemas": _schemas(routes), "securitySchemes": KEYS if guarded else {}},
        "security": [{name: []} for name in KEYS] if guarded else [],
    }


# ---- operations ------------------------------------------------------------------------------------------------------


def _operation(route: Route) -> dict[str, Any]:
    told: dict[str, Any] = {"operationId": route.name, "summary": route.summary, "responses": _responses(route)}
    if parameters := _parameters(route):
        told["parameters"] = parameters
    if route.body is not None:
        told["requestBody"] = {"required": True, "content": _json(route.body)}
    if route.path == OPEN:
        told["security"] = []
    return told


def _parameters(route: Route) -> list[dict[str, Any]]:
    places = [(name, "path") for name in PLACE.findall(route.path)] + [(name, "query") for name in route.query]
    return [
        {"name": name, "in": place, "required": place == "path", "schema": {"type": "string"}} for name, place in places
    ]


def _responses(route: Route) -> dict[str, Any]:
    if route.method == "HEAD":
        return {"200": {"description": "Ready."}, "503": {"description": "Not ready."}}
    content = _json(*route.replies) if route.replies else {"text/plain": {"schema": {"type": "string"}}}
    if route.streams:
        content["text/event-stream"] = {}
    responses = {"200": {"description": "The reply.", "content": content}}
    if route.path == OPEN:
        return {**responses, "503": {"description": "Not ready.", "content": _json(shapes.NotHealthy)}}
    told = {"401": "The key is missing or wrong.", "503": "The model loads, or the engine has failed."}
    if "{response_id}" in route.path or "{prefix_id}" in route.path:
        told |= {"404": "It is not kept.", "400": "A parameter is wrong."}
    if "{name}" in route.path or route.body is not None:
        told |= {"404": "It is not there, or another model."}
    if route.body is not None:
        told |= {"400": "A field is wrong.", "408": "The body is slow.", "413": "The body is too large.",
                 "415": "The body is compressed.",
                 "429": "Too many requests wait, or a limit of the key is reached."}  # fmt: skip
    told["default"] = "Another refusal, or a fault of the server."
    refusals = {code: {"description": words, "content": _json(*route.errors)} for code, words in told.items()}
    return responses | dict(sorted(refusals.items()))


def _json(*kinds: Any) -> dict[str, Any]:
    listed = [{"type": "object"} if kind == dict[str, Any] else _ref(kind) for kind in kinds]
    return {"application/json": {"schema": listed[0] if len(listed) == 1 else {"anyOf": listed}}}


def _ref(kind: Any) -> dict[str, str]:
    return {"$ref": REF.format(model=kind.__name__)}


# ---- schemas ---------------------------------------------------------------------------------------------------------


class Untitled(GenerateJsonSchema):
    """Without titles that only repeat a field's name."""

    def field_title_should_be_set(self, schema: Any) -> bool:
        return False


def _schemas(routes: Iterable[Route]) -> dict[str, Any]:
    """By name: bodies, shapes of replies, and what they hold."""
    bodies = dict.fromkeys(route.body for route in routes if route.body is not None)
    replies = dict.fromkeys(
        kind for route in routes for kind in (*route.replies, *route.errors) if kind != dict[str, Any]
    )
    asked: Any = [(body, "validation") for body in bodies]
    _, found = models_json_schema(asked, ref_template=REF, schema_generator=Untitled)
    schemas: dict[str, Any] = found["$defs"]
    for body in bodies:
        schemas[body.__name__] = _as_taken(body, schemas[body.__name__])
    for kind in (*replies, shapes.NotHealthy):
        made = TypeAdapter(kind).json_schema(ref_template=REF, schema_generator=Untitled)
        schemas |= made.pop("$defs", {})
        schemas[kind.__name__] = made
    return dict(sorted(schemas.items()))


def _as_taken(body: type[Body], schema: dict[str, Any]) -> dict[str, Any]:
    """A body's schema as parse_body takes it: bounds, fields that are not used, and none that are refused."""
    given = schema["properties"].items()
    fields = {name: _bounded(told, FIELDS.get(name, {})) for name, told in given if name not in body.refused}
    fields |= {name: {"description": "Accepted without effect."} for name in sorted(body.ignored)}
    also = ALSO.get(body, {})
    return {**schema, **also, "properties": fields | also.get("properties", {})}


def _bounded(told: dict[str, Any], more: dict[str, Any]) -> dict[str, Any]:
    """A field as its model has it, with more where the model does not say it. What it may be made of is told anew."""
    return {**more, **{key: value for key, value in told.items() if key not in more or key in ("minimum", "maximum")}}
