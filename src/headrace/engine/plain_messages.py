"""Checks of the messages that a request brings, before a chat template sees them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from headrace.types import InvalidRequest


def plain_messages(messages: Any) -> list[dict[str, Any]]:
    """The messages with text-only content, checked. Other fields (tool_calls, name) go to the template as they are."""
    if not isinstance(messages, Sequence) or isinstance(messages, str) or not messages:
        raise InvalidRequest("messages must be a non-empty list", "messages")
    return [_plain_message(message, f"messages[{i}]") for i, message in enumerate(messages)]


def _plain_message(message: Any, where: str) -> dict[str, Any]:
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise InvalidRequest(f"{where} must be an object with a string `role`", "messages")
    content = message.get("content")
    if isinstance(content, list):
        content = "\n".join(_part_text(part, f"{where}.content[{i}]") for i, part in enumerate(content))
    elif content is None:
        if message["role"] != "assistant":
            raise InvalidRequest(f"{where}.content is missing", "messages")
    elif not isinstance(content, str):
        raise InvalidRequest(f"{where}.content must be a string or a list of text parts", "messages")
    return {**message, "content": content}


def _part_text(part: Any, where: str) -> str:
    kind = part.get("type") if isinstance(part, Mapping) else None
    if kind != "text":
        raise InvalidRequest(f"{where}: type {kind!r} is not supported, only 'text' is", "messages")
    if not isinstance(part.get("text"), str):
        raise InvalidRequest(f"{where}.text must be a string", "messages")
    return str(part["text"])
