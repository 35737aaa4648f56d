"""Items of a conversation: what clients send as `input`, how it is kept, and the messages that a template reads.

An item is kept as the dict that GET /v1/responses/{id}/input_items shows: a message, a function_call, a
function_call_output or a reasoning item, with an id of ours.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterable, Sequence
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, FailFast, Field, ValidationError, field_validator, model_validator

from headrace.server.answer_places import TOKENS
from headrace.server.chat_body import arguments_object
from headrace.server.errors import ApiError, invalid
from headrace.server.protocol import Strict, explain
from headrace.server.responses.namespaces import flat_name
from headrace.server.responses.sealed import unsealed
from headrace.server.strict import refusal_as

MAX_ITEMS = 10_000
"""Of a conversation: items without text have no tokens that would bound them."""
MAX_ID = 256

Item = dict[str, Any]
Status = Literal["in_progress", "completed", "incomplete"] | None

PREFIXES = {"message": "msg", "function_call": "fc", "function_call_output": "fco", "reasoning": "rs"}

NOT_TEXT = {
    "input_image": "images are not supported",
    "input_file": "files are not supported",
    "input_audio": "audio is not supported",
    "computer_screenshot": "screenshots are not supported",
}


def new_id(kind: str) -> str:
    """Not to be guessed: whoever knows an item's id may refer to it."""
    return f"{PREFIXES[kind]}_{secrets.token_hex(24)}"


class Part(Strict):
    """Text. parsed: what the client made of it for itself; prompt_cache_breakpoint: chunks are cached anyway."""

    type: Literal["input_text", "output_text"]
    text: str
    annotations: list[Any] | None = None
    logprobs: list[Any] | None = None
    parsed: Any = None
    prompt_cache_breakpoint: Any = None

    @model_validator(mode="before")
    @classmethod
    def _refusal_is_text(cls, raw: Any) -> Any:
        return refusal_as(raw, "output_text")


class SummaryText(Strict):
    type: Literal["summary_text"]
    text: str


class ReasoningText(Strict):
    type: Literal["reasoning_text"]
    text: str


def _none_is_empty(value: Any) -> Any:
    return [] if value is None else value


def _texts(value: Any) -> Any:
    return [{"type": "input_text", "text": value}] if isinstance(value, str) else value


Parts = Annotated[list[Part], FailFast(), BeforeValidator(_texts)]
"""A text is one part."""


class _Item(Strict):
    id: str | None = None
    status: Status = None

    def kept(self) -> Item:
        """The item as it is kept, with an id of ours."""
        raise NotImplementedError

    def _kept(self, kind: str, **more: Any) -> Item:
        return {"id": new_id(kind), "type": kind, "status": self.status or "completed", **more}


class MessageItem(_Item):
    """phase: a label that templates do not know."""

    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: Parts
    phase: Literal["commentary", "final_answer"] | None = None

    def kept(self) -> Item:
        if self.role == "assistant":
            content = [output_text(part.text) for part in self.content]
        else:
            content = [{"type": "input_text", "text": part.text} for part in self.content]
        return self._kept("message", role=self.role, content=content)


class CallItem(_Item):
    """caller and async belong to tools that this server does not have; parsed_arguments is the client's."""

    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str
    namespace: str | None = None
    caller: Any = None
    created_by: Any = None
    parsed_arguments: Any = None

    def kept(self) -> Item:
        group = {} if self.namespace is None else {"namespace": self.namespace}
        return self._kept("function_call", call_id=self.call_id, name=self.name, arguments=self.arguments, **group)


class CallOutputItem(_Item):
    type: Literal["function_call_output"]
    call_id: str
    output: Parts
    name: str | None = None
    namespace: str | None = None
    caller: Any = None
    created_by: Any = None

    def kept(self) -> Item:
        text = "\n".join(part.text for part in self.output)
        return self._kept("function_call_output", call_id=self.call_id, output=text)


class ReasoningItem(_Item):
    """The reasoning in front of an answer; its text is taken from content, else summary, else encrypted_content."""

    type: Literal["reasoning"]
    summary: Annotated[list[SummaryText], FailFast(), BeforeValidator(_none_is_empty)] = Field(default_factory=list)
    content: Annotated[list[ReasoningText], FailFast(), BeforeValidator(_none_is_empty)] = Field(default_factory=list)
    encrypted_content: str | None = None

    @field_validator("encrypted_content")
    @classmethod
    def _ours(cls, value: str | None) -> str | None:
        return None if value is None else unsealed(value)

    def kept(self) -> Item:
        summary = [part.model_dump() for part in self.summary]
        content = [part.model_dump() for part in self.content]
        if self.encrypted_content is not None and not content:
            content = [{"type": "reasoning_text", "text": self.encrypted_content}]
        return self._kept("reasoning", summary=summary, content=content, encrypted_content=None)


class Reference(Strict):
    type: Literal["item_reference"] | None = None
    id: str


KINDS: dict[str, type[_Item] | type[Reference]] = {
    "message": MessageItem,
    "function_call": CallItem,
    "function_call_output": CallOutputItem,
    "reasoning": ReasoningItem,
    "item_reference": Reference,
}


def output_text(text: str, logprobs: list[Any] | None = None) -> Item:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs or []}


def read_input(given: Any, found: Callable[[str], Item | None]) -> list[Item]:
    """The items of `input`. found: the kept item of an id. Raises ApiError naming the first one at fault."""
    if isinstance(given, str):
        given = [{"role": "user", "content": given}]
    if not isinstance(given, list) or not given:
        raise invalid("input must be a text or a list of items, and not empty", "input")
    _check_number(given)
    return [_read(raw, f"input[{number}]", found) for number, raw in enumerate(given)]


def _check_number(items: Sequence[Any]) -> None:
    if len(items) > MAX_ITEMS:
        raise invalid(f"input: at most {MAX_ITEMS:,} items in a conversation, got {len(items):,}", "input")


def _read(raw: Any, where: str, found: Callable[[str], Item | None]) -> Item:
    try:
        item = _class(raw, where).model_validate(raw)
    except ValidationError as error:
        raise _not_text(raw, where) or explain(error, raw, where) from None
    if not isinstance(item, Reference):
        assert isinstance(item, _Item)
        return item.kept()
    kept = found(item.id)
    if kept is None:
        told = "it was not kept (store=false), or no longer is; send the item itself"
        raise ApiError(
            404, f"{where}: no item has the id {item.id[:MAX_ID]!r}: {told}", f"{where}.id", "item_not_found"
        )
    return kept


def _class(raw: Any, where: str) -> type[_Item] | type[Reference]:
    if not isinstance(raw, dict):
        raise invalid(f"{where} must be an object", where, "invalid_type")
    kind = raw.get("type")
    if kind is None:
        kind = "message" if "role" in raw else "item_reference" if "id" in raw else None
    if not isinstance(kind, str) or kind not in KINDS:
        told = f"{where}.type: {str(kind)[:60]!r} is not supported; items are {', '.join(KINDS)}"
        raise invalid(told, f"{where}.type")
    return KINDS[kind]


def _not_text(raw: Any, where: str) -> ApiError | None:
    """What is to be said of the first part that is an image, a file or audio; None if there is none."""
    for field in ("content", "output"):
        parts = raw.get(field)
        for number, part in enumerate(parts if isinstance(parts, list) else ()):
            told = NOT_TEXT.get(str(part.get("type"))) if isinstance(part, dict) else None
            if told is not None:
                path = f"{where}.{field}[{number}].type"
                return invalid(f"{path}: {told}; send text", path, "unsupported_parameter")
    return None


def check_conversation(items: Sequence[Item]) -> None:
    """Raises ApiError for too many items, and for an output without its call, which no template could show."""
    _check_number(items)
    called: set[str] = set()
    for item in items:
        if item["type"] == "function_call":
            called.add(item["call_id"])
        elif item["type"] == "function_call_output" and item["call_id"] not in called:
            told = f"no tool call found for function call output with call_id {item['call_id'][:MAX_ID]!r}"
            raise invalid(f"{told}; send its function_call before it", "input")


def messages_of(items: Iterable[Item], instructions: str | None = None) -> list[dict[str, Any]]:
    """In the form of chat templates. Reasoning, text and calls of one turn are one message of the assistant."""
    messages: list[dict[str, Any]] = []
    names: dict[str, str] = {}
    if instructions:
        messages.append({"role": "system", "content": instructions})
    for item in items:
        kind = item["type"]
        if kind == "function_call_output":
            told = {"role": "tool", "tool_call_id": item["call_id"], "content": item["output"]}
            name = names.get(item["call_id"])
            messages.append(told if name is None else {**told, "name": name})
        elif kind == "message" and item["role"] != "assistant":
            role = "system" if item["role"] == "developer" else item["role"]
            messages.append({"role": role, "content": text_of(item)})
        else:
            if kind == "function_call":
                names[item["call_id"]] = flat_name(item.get("namespace"), item["name"])
            _add_to_turn(messages, item)
    return messages


def _add_to_turn(messages: list[dict[str, Any]], item: Item) -> None:
    """Adds to the assistant's message under way, or begins one. A turn is reasoning, then text, then calls; what comes
    behind its calls, and before their outputs, still belongs to it."""
    turn = messages[-1] if messages and messages[-1]["role"] == "assistant" else None
    spoken = turn is not None and bool(turn["content"]) and "tool_calls" not in turn
    if turn is None or (spoken and item["type"] != "function_call"):
        turn = {"role": "assistant", "content": "", **({TOKENS: item[TOKENS]} if TOKENS in item else {})}
        messages.append(turn)
    if item["type"] == "function_call":
        name = flat_name(item.get("namespace"), item["name"])
        function = {"name": name, "arguments": arguments_object(item["arguments"])}
        turn.setdefault("tool_calls", []).append({"id": item["call_id"], "type": "function", "function": function})
    elif item["type"] == "message":
        turn["content"] += text_of(item)
    elif text := text_of(item):
        turn["reasoning_content"] = turn.get("reasoning_content", "") + text


def text_of(item: Item) -> str:
    """Of a message or of reasoning."""
    return "\n".join(part["text"] for part in item["content"] or item.get("summary") or ())
