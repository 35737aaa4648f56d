"""Shapes of what /v1/responses takes and answers, for /openapi.json. Tests hold them and the replies together."""

from __future__ import annotations

from typing import Any, Literal, NotRequired

from typing_extensions import TypedDict

from headrace.server.responses.items import MAX_ITEMS
from headrace.server.shapes import Figures

Status = Literal["in_progress", "completed", "incomplete"]


class OutputText(TypedDict):
    type: Literal["output_text"]
    text: str
    annotations: list[dict[str, Any]]
    logprobs: list[dict[str, Any]]


class InputText(TypedDict):
    type: Literal["input_text"]
    text: str


class ReasoningText(TypedDict):
    type: Literal["reasoning_text", "summary_text"]
    text: str


class MessageOfResponse(TypedDict):
    id: str
    type: Literal["message"]
    status: Status
    role: Literal["user", "assistant", "system", "developer"]
    content: list[OutputText | InputText]


class FunctionCall(TypedDict):
    id: str
    type: Literal["function_call"]
    status: Status
    call_id: str
    name: str
    namespace: NotRequired[str]
    arguments: str


class FunctionCallOutput(TypedDict):
    id: str
    type: Literal["function_call_output"]
    status: Status
    call_id: str
    output: str


class ReasoningOfResponse(TypedDict):
    id: str
    type: Literal["reasoning"]
    status: Status
    summary: list[ReasoningText]
    content: list[ReasoningText]
    encrypted_content: str | None


Item = MessageOfResponse | FunctionCall | FunctionCallOutput | ReasoningOfResponse


class InputTokens(TypedDict):
    cached_tokens: int
    cache_write_tokens: int


class OutputTokens(TypedDict):
    reasoning_tokens: int


class ResponseUsage(TypedDict):
    input_tokens: int
    input_tokens_details: InputTokens
    output_tokens: int
    output_tokens_details: OutputTokens
    total_tokens: int


class ModelResponse(TypedDict):
    id: str
    object: Literal["response"]
    created_at: int
    completed_at: int | None
    status: Literal["in_progress", "completed", "incomplete", "failed"]
    error: dict[str, str] | None
    incomplete_details: dict[str, str] | None
    model: str
    output: list[Item]
    usage: ResponseUsage | None
    background: bool
    instructions: str | None
    max_output_tokens: int | None
    max_tool_calls: int | None
    metadata: dict[str, str]
    parallel_tool_calls: bool
    previous_response_id: str | None
    prompt_cache_key: str | None
    reasoning: dict[str, str | None]
    safety_identifier: str | None
    service_tier: str
    store: bool
    temperature: float
    text: dict[str, Any]
    tool_choice: str | dict[str, Any]
    tools: list[dict[str, Any]]
    top_logprobs: int
    top_p: float
    truncation: Literal["disabled"]
    user: str | None
    headrace: NotRequired[Figures]


class DeletedResponse(TypedDict):
    id: str
    object: Literal["response"]
    deleted: Literal[True]


class ItemList(TypedDict):
    object: Literal["list"]
    data: list[Item]
    has_more: bool
    first_id: str | None
    last_id: str | None


class CountedInput(TypedDict):
    object: Literal["response.input_tokens"]
    input_tokens: int


def _item(kind: str, required: list[str], **properties: Any) -> dict[str, Any]:
    named = {"type": {"const": kind}, "id": {"type": ["string", "null"]}, **properties}
    return {"type": "object", "properties": named, "required": required}


TEXT = {"type": "string"}
PART = {
    "type": "object",
    "properties": {"type": {"enum": ["input_text", "output_text", "refusal"]}, "text": TEXT, "refusal": TEXT},
    "required": ["type"],
}
TEXTS = {"anyOf": [TEXT, {"type": "array", "items": PART}]}
ROLE = {"enum": ["user", "assistant", "system", "developer"]}

INPUT = {
    "anyOf": [
        TEXT,
        {
            "type": "array",
            "minItems": 1,
            "maxItems": MAX_ITEMS,
            "items": {
                "anyOf": [
                    _item("message", ["role", "content"], role=ROLE, content=TEXTS),
                    _item("function_call", ["type", "call_id", "name", "arguments"],
                          call_id=TEXT, name=TEXT, arguments=TEXT),
                    _item("function_call_output", ["type", "call_id", "output"], call_id=TEXT, output=TEXTS),
                    _item("reasoning", ["type"]),
                    _item("item_reference", ["id"], id=TEXT),
                ]
            },
        },
    ]
}  # fmt: skip
"""Of `input`, which is read item by item."""
