"""Tools for models whose chat template knows of none: told in the system text, called in plain JSON.

DeepSeek's templates show calls and their results, but no tools: these are told as DeepSeek-V3.1's model card does.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from headrace.server.parsers import deepseek_v3, deepseek_v31
from headrace.server.turn import Tool

WRITTEN = {"deepseek_v3": deepseek_v3.written("NAME", "ARGUMENTS"),
           "deepseek_v31": deepseek_v31.written("NAME", "ARGUMENTS")}  # fmt: skip
"""Formats whose templates show calls and results, but no tools: how a call is written."""
TOLD = (
    "You can call functions. To call one, answer with a JSON object of the form "
    '{"name": "...", "arguments": {...}} and nothing else; to call several, with a list of such objects. '
    "The functions, one a line:"
)


def knows_tools(template: str) -> bool:
    """Whether a chat template shows tools, calls and their results."""
    return "tools" in template


def call_shown(template: str, called: str) -> str:
    """How calls of a format are written, where this template, which shows no tools, shows calls in it; '' if not."""
    return WRITTEN.get(called, "") if "tool_calls" in template else ""


def told_in_text(messages: Sequence[dict[str, Any]], tools: Sequence[Tool], written: str = "") -> list[dict[str, Any]]:
    """The messages with tools as text; calls and results too, unless the template shows these. Tools stand first, so
    that they are part of the cached beginning.

    written: as of call_shown.
    """
    texts = [_with_json(message) if written else _as_text(message) for message in messages]
    if not tools:
        return texts
    told = _told_as_headings(tools, written) if written else _told_as_lines(tools)
    if texts and texts[0]["role"] == "system":
        return [{**texts[0], "content": f"{told}\n\n{texts[0]['content']}"}, *texts[1:]]
    return [{"role": "system", "content": told}, *texts]


def _told_as_lines(tools: Sequence[Tool]) -> str:
    return "\n".join([TOLD, *(json.dumps(tool.for_template()["function"], ensure_ascii=False) for tool in tools)])


def _told_as_headings(tools: Sequence[Tool], written: str) -> str:
    listed = [
        f"### {tool.name}\nDescription: {tool.description or ''}\n\n"
        f"Parameters: {json.dumps(tool.parameters, ensure_ascii=False)}"
        for tool in tools
    ]
    how = (
        f"To use tools, write exactly this:\n{written}\n\nNAME is the name of a tool, ARGUMENTS a JSON object that "
        "fits its parameters. Several calls follow each other before the last mark."
    )
    return "\n\n".join(["## Tools\nYou have access to these tools:", *listed, how])


def _with_json(message: dict[str, Any]) -> dict[str, Any]:
    """With the arguments of calls as the text that the template puts between its marks."""
    if not message.get("tool_calls"):
        return message
    calls = []
    for call in message["tool_calls"]:
        arguments = json.dumps(call["function"]["arguments"], ensure_ascii=False)
        calls.append({**call, "function": {**call["function"], "arguments": arguments}})
    return {**message, "tool_calls": calls}


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
