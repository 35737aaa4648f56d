"""The parts of an answer as content blocks, whole and as the events of a stream."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec
from pydantic_core import from_json

from headrace.server.parsers.parts import CallArguments, CallStart, Part, ReasoningPart, TextPart

Event = dict[str, Any]
"""Data of a server-sent event; its `type` is the event's name."""

SIGNATURE = ""
"""Of every thinking block: clients want one, and this server needs none to take a block back."""

PING: Event = {"type": "ping"}


def frame(event: Event) -> bytes:
    return b"event: %s\ndata: %s\n\n" % (event["type"].encode(), msgspec.json.encode(event))


class Blocks:
    """Content blocks as parts come. `add` and `finish` give the events that tell a client; `content` is the whole.

    A block ends where one of another kind begins. White space is held back until more text comes, and is left out where
    none does: clients may not send back a block of text that is empty. omit_thinking: blocks of thinking stay empty.
    """

    def __init__(self, omit_thinking: bool = False) -> None:
        self.omit_thinking = omit_thinking
        self._blocks: list[dict[str, Any]] = []
        self._pieces: list[list[str]] = []
        """Of each block: its text, thinking or arguments."""
        self._open = False
        self._space: list[str] = []
        self._calls: dict[int, int] = {}

    @property
    def content(self) -> list[dict[str, Any]]:
        """Blocks so far, as a whole message has them."""
        return [self._whole(index, block) for index, block in enumerate(self._blocks)]

    def add(self, parts: Iterable[Part]) -> list[Event]:
        events: list[Event] = []
        for part in parts:
            if isinstance(part, TextPart):
                events += self._text(part.text)
            elif isinstance(part, ReasoningPart):
                events += self._thinking(part.text)
            elif isinstance(part, CallStart):
                events += self._call(part)
            else:
                events += self._call_arguments(part)
        return events

    def finish(self) -> list[Event]:
        return self._stop()

    # ---- one kind of part each ---------------------------------------------------------------------------------------

    def _text(self, text: str) -> list[Event]:
        events: list[Event] = []
        if not self._is_open("text"):
            self._space.append(text)
            if not text.strip():
                return []
            text = "".join(self._space)
            events = self._begin({"type": "text", "text": ""})
        self._pieces[-1].append(text)
        return [*events, self._delta("text_delta", text=text)]

    def _thinking(self, text: str) -> list[Event]:
        events = [] if self._is_open("thinking") else self._begin({"type": "thinking", "thinking": "", "signature": ""})
        if self.omit_thinking or not text:
            return events
        self._pieces[-1].append(text)
        return [*events, self._delta("thinking_delta", thinking=text)]

    def _call(self, part: CallStart) -> list[Event]:
        events = self._begin({"type": "tool_use", "id": part.call_id, "name": part.name, "input": {}})
        self._calls[part.number] = len(self._blocks) - 1
        return events

    def _call_arguments(self, part: CallArguments) -> list[Event]:
        index = self._calls[part.number]
        self._pieces[index].append(part.text)
        delta = {"type": "input_json_delta", "partial_json": part.text}
        return [{"type": "content_block_delta", "index": index, "delta": delta}] if part.text else []

    # ---- blocks ------------------------------------------------------------------------------------------------------

    def _is_open(self, kind: str) -> bool:
        return self._open and bool(self._blocks[-1]["type"] == kind)

    def _begin(self, block: dict[str, Any]) -> list[Event]:
        events = self._stop()
        self._blocks.append(block)
        self._pieces.append([])
        self._open, self._space = True, []
        return [*events, {"type": "content_block_start", "index": len(self._blocks) - 1, "content_block": {**block}}]

    def _stop(self) -> list[Event]:
        if not self._open:
            return []
        signed = [self._delta("signature_delta", signature=SIGNATURE)] if self._is_open("thinking") else []
        self._open = False
        return [*signed, {"type": "content_block_stop", "index": len(self._blocks) - 1}]

    def _delta(self, kind: str, **more: str) -> Event:
        return {"type": "content_block_delta", "index": len(self._blocks) - 1, "delta": {"type": kind, **more}}

    def _whole(self, index: int, block: dict[str, Any]) -> dict[str, Any]:
        text = "".join(self._pieces[index])
        if block["type"] == "tool_use":
            return {**block, "input": call_input(text)}
        return {**block, block["type"]: text}


def call_input(text: str) -> dict[str, Any]:
    """Arguments as an object: as much of it as there is, where the answer was cut short. What is no JSON object is kept
    as text, under a name by which Anthropic's clients tell a model so."""
    if not text.strip():
        return {}
    try:
        found = from_json(text, allow_partial="trailing-strings", allow_inf_nan=False)
    except ValueError:
        found = None
    return found if isinstance(found, dict) else {"INVALID_JSON": text}


def stop_reason(finish: str | None, stopped_by: str | int | None, calls: bool, at_the_end: bool) -> str | None:
    """Anthropic's name for how an answer ended. at_the_end: of the context, before its max_tokens."""
    if finish == "length":
        return "model_context_window_exceeded" if at_the_end else "max_tokens"
    if finish == "stop" and isinstance(stopped_by, str):
        return "stop_sequence"
    if finish is None:
        return None
    return "tool_use" if calls else "end_turn"


def usage(prompt: int, cached: int, output: int, written: int) -> dict[str, int]:
    """As Anthropic counts: all three of the prompt add up to it. written: of the prompt, now in the cache."""
    return {
        "input_tokens": prompt - cached - written,
        "cache_creation_input_tokens": written,
        "cache_read_input_tokens": cached,
        "output_tokens": output,
    }


def message(message_id: str, model: str, content: list[dict[str, Any]], counts: dict[str, int]) -> dict[str, Any]:
    """A message that has not ended."""
    return {
        "id": message_id,
        "type": "message",
        "role": "assistant",
        "model": model,
        "content": content,
        "stop_reason": None,
        "stop_sequence": None,
        "usage": counts,
    }
