"""Tools for models whose chat template knows of none: told in the system text, called in plain JSON."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from headrace.server.turn import Tool

TOLD = (
    "You can call functions. To call one, answer with a JSON object of the form "
    '{"name": "...", "arguments": {...}} and nothing else; to call several, with a list of such objects. '
    "The functions, one a line:"
)


def knows_tools(template: str) -> bool:
    """Whether a chat template shows tools, calls and their results."""
    return "tools" in template


def told_in_text(messages: Sequence[dict[str, Any]], tools: Sequence[Tool]) -> list[dict[str, Any]]:
    """The messages with tools, calls and results as text. Tools stand first, so that they are part of the cached
    beginning."""
    texts = [_as_text(message) for message in messages]
    if not tools:
        return texts
    listed = [json.dumps(tool.for_template()["function"], ensure_ascii=False) for tool in tools]
    told = "\n".join([TOLD, *listed])
    if texts and texts[0]["role"] == "system":
        return [{**texts[0], "content": f"{told}\n\n{texts[0]['content']}"}, *texts[1:]]
    return [{"role": "system", "content": told}, *texts]


def _as_text(message: dict[str, Any]) -> dict[str, Any]:
    if message["role"] == "tool":
        return {
            "role": "user",
            "content": f"Result of the call {message.get('tool_call_id', '')}: {message['content']}",
        }
    if not message.get("tool_calls"):
        return message
    calls = [
        {"name": call["function"]["name"], "arguments": call["function"]["arguments"]} for call in message["tool_calls"]
    ]
    told = json.dumps(calls[0] if len(calls) == 1 else calls, ensure_ascii=False)
    text = message.get("content") or ""
    kept = {name: value for name, value in message.items() if name != "tool_calls"}
    return {**kept, "content": f"{text}\n{told}" if text else told}
