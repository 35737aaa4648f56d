"""Shapes of replies, for /openapi.json. Replies are made without them; tests hold the two together."""

from __future__ import annotations

from typing import Any, Literal, NotRequired

from typing_extensions import TypedDict

FinishReason = Literal["stop", "length", "tool_calls", "abort"]


TOKEN_IDS: dict[str, Any] = {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 2**31}}

PROMPT: dict[str, Any] = {
    "anyOf": [
        {"type": "string", "minLength": 1},
        {"type": "array", "items": {"type": "string", "minLength": 1}, "minItems": 1},
        {**TOKEN_IDS, "minItems": 1},
        {"type": "array", "items": {**TOKEN_IDS, "minItems": 1}, "minItems": 1},
    ]
}
"""What a request may give for a prompt."""


class ReuseFigures(TypedDict):
    """Why no more of the prompt came from the cache (server.reuse)."""

    cause: Literal["first", "continued", "text", "tokens", "salt", "computing", "scored", "evicted"]
    told: str
    request_id: str | None
    common_tokens: int
    text: str | None
    other_text: str | None
    message: int | None
    replayed: int


class PinnedFigures(TypedDict):
    """What of the prompt stays in the cache, whatever else is computed."""

    tokens: int
    expires_in_s: float
    refused: str | None


class Figures(TypedDict):
    """What the request cost."""

    ttft_s: float
    queue_s: float
    e2e_s: float
    cached_tokens: int
    new_tokens: int
    prompt_tokens_per_s: float | None
    decode_tokens_per_s: float | None
    strategy: str | None
    strategy_reason: str | None
    restored_tokens: int
    restore_reason: str | None
    reuse: ReuseFigures | None
    pinned: PinnedFigures | None


class CachedTokens(TypedDict):
    cached_tokens: int


class Usage(TypedDict):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: CachedTokens


class Choice(TypedDict):
    index: int
    finish_reason: FinishReason | None
    stop_reason: str | int | None
    logprobs: dict[str, Any] | None
    token_ids: NotRequired[list[int]]
    prompt_token_ids: NotRequired[list[int]]


class TextChoice(Choice):
    text: str
    prompt_logprobs: NotRequired[list[dict[str, Any] | None] | None]


class ChatCall(TypedDict):
    id: str
    type: Literal["function"]
    function: dict[str, str]


class ChatMessage(TypedDict):
    role: Literal["assistant"]
    content: str | None
    refusal: None
    reasoning_content: NotRequired[str]
    tool_calls: NotRequired[list[ChatCall]]
    token_ids: NotRequired[list[int]]


class ChatChoice(Choice):
    message: ChatMessage


class Reply(TypedDict):
    id: str
    created: int
    model: str
    usage: Usage
    headrace: Figures


class Completion(Reply):
    object: Literal["text_completion"]
    system_fingerprint: str
    choices: list[TextChoice]


class ChatCompletion(Reply):
    object: Literal["chat.completion"]
    system_fingerprint: str
    choices: list[ChatChoice]
    prompt_logprobs: NotRequired[list[dict[str, Any] | None] | None]


class ScoredOption(TypedDict):
    object: Literal["score.option"]
    index: int
    logprob: float
    mean_logprob: float
    greedy: bool
    start: int
    tokens: list[str]
    token_ids: list[int]
    token_logprobs: list[float]


class PromptUsage(TypedDict):
    prompt_tokens: int
    total_tokens: int
    prompt_tokens_details: CachedTokens


class Embedding(TypedDict):
    object: Literal["embedding"]
    index: int
    embedding: list[float] | str


class EmbeddingList(TypedDict):
    object: Literal["list"]
    data: list[Embedding]
    model: str
    usage: PromptUsage
    headrace: Figures


class Classified(TypedDict):
    index: int
    label: str
    probs: list[float]
    num_classes: int


class Classes(TypedDict):
    id: str
    object: Literal["list"]
    created: int
    model: str
    data: list[Classified]
    usage: PromptUsage
    headrace: Figures


class RankedText(TypedDict):
    text: str


class RankedDocument(TypedDict):
    index: int
    document: NotRequired[RankedText]
    relevance_score: float


class Reranked(TypedDict):
    id: str
    model: str
    results: list[RankedDocument]
    usage: PromptUsage
    headrace: Figures


class Scores(Reply):
    object: Literal["score"]
    data: list[ScoredOption]
    best: int


class MessageText(TypedDict):
    type: Literal["text"]
    text: str


class MessageThinking(TypedDict):
    type: Literal["thinking"]
    thinking: str
    signature: str


class MessageToolUse(TypedDict):
    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]


class MessageUsage(TypedDict):
    input_tokens: int
    cache_creation_input_tokens: int
    cache_read_input_tokens: int
    output_tokens: int


class AnthropicMessage(TypedDict):
    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[MessageText | MessageThinking | MessageToolUse]
    stop_reason: Literal["end_turn", "max_tokens", "stop_sequence", "tool_use", "model_context_window_exceeded"] | None
    stop_sequence: str | None
    usage: MessageUsage
    headrace: Figures


class CountedTokens(TypedDict):
    input_tokens: int


class Tokenized(TypedDict):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class Detokenized(TypedDict):
    prompt: str


class TokenizerInfo(TypedDict):
    bos_token: str | None
    eos_token: str | None
    pad_token: str | None
    chat_template: str | None
    model_max_length: int


class ModelCard(TypedDict):
    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str
    parent: str | None
    max_model_len: int


class AnthropicModel(TypedDict):
    """In place of ModelCard where the request has the header anthropic-version."""

    id: str
    type: Literal["model"]
    display_name: str
    created_at: str
    lifecycle: Literal["active"]
    max_input_tokens: int
    max_tokens: int


class ModelList(TypedDict):
    object: Literal["list"]
    data: list[ModelCard]


class AnthropicModelList(TypedDict):
    """In place of ModelList where the request has the header anthropic-version."""

    data: list[AnthropicModel]
    has_more: bool
    first_id: str
    last_id: str


class Health(TypedDict):
    status: Literal["ok"]


class NotHealthy(TypedDict):
    status: Literal["loading", "restarting", "failed"]
    error: Fault


class Fault(TypedDict):
    message: str
    type: str
    param: str | None
    code: str | None


class Error(TypedDict):
    error: Fault


class AnthropicFault(TypedDict):
    type: Literal[
        "invalid_request_error",
        "authentication_error",
        "permission_error",
        "not_found_error",
        "request_too_large",
        "rate_limit_error",
        "overloaded_error",
        "api_error",
    ]
    message: str


class AnthropicError(TypedDict):
    type: Literal["error"]
    error: AnthropicFault
    request_id: str | None


class SavedSession(TypedDict):
    object: Literal["session"]
    name: str
    model: str
    to: Literal["file", "tier"]
    tokens: int
    saved_tokens: int
    cached_tokens: int
    bytes: int
    seconds: float


class LoadedSession(TypedDict):
    object: Literal["session"]
    name: str
    model: str
    tokens: int
    saved_tokens: int
    restored_tokens: int
    bytes: int
    seconds: float
    why: str


class ListedSession(TypedDict):
    object: Literal["session"]
    name: str
    bytes: int
    saved: int


class SessionList(TypedDict):
    object: Literal["list"]
    data: list[ListedSession]


class DeletedSession(TypedDict):
    object: Literal["session.deleted"]
    name: str
    deleted: bool
