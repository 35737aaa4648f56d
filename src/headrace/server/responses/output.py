"""The output of a response: from the parts of an answer to its items, and to the events that stream them.

    reasoning       output_item.added, content_part.added, reasoning_text.delta ..., .done, content_part.done, item.done
    (as a summary)  output_item.added, reasoning_summary_part.added, reasoning_summary_text.delta ..., .done, part.done,
                    item.done
    message         output_item.added, content_part.added, output_text.delta ..., .done, content_part.done, item.done
    function_call   output_item.added, function_call_arguments.delta ..., .done, item.done

One item is open at a time; a part of another kind closes it and opens the next.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from headrace.server.parsers.parts import CallArguments, CallStart, Part, ReasoningPart, TextPart
from headrace.server.responses.items import Item, new_id, output_text
from headrace.server.responses.namespaces import Split, named
from headrace.server.responses.sealed import sealed

Status = Literal["in_progress", "completed", "incomplete"]
OutputEvent = dict[str, Any]
"""Without the sequence_number."""


@dataclass(frozen=True, slots=True)
class Told:
    """How reasoning and text are told. summary: reasoning as its own summary, for clients that show no other; sealed:
    with encrypted_content too."""

    summary: bool = False
    sealed: bool = False
    split: Split = field(default_factory=dict)
    """Of names of functions in namespaces."""


@dataclass(slots=True)
class Token:
    """One that was generated. logprob: as the text's logprobs have it, None where they were not asked for."""

    logprob: dict[str, Any] | None = None


class _Open(ABC):
    """The item under way."""

    kind: Literal["reasoning", "message", "function_call"]

    def __init__(self, index: int) -> None:
        self.index, self.id = index, new_id(self.kind)
        self.pieces: list[str] = []

    @property
    def text(self) -> str:
        return "".join(self.pieces)

    def added(self) -> list[OutputEvent]:
        return [self._of_item("response.output_item.added", self.item("in_progress", ""))]

    def more(self, text: str, tokens: Sequence[Token]) -> list[OutputEvent]:
        self.pieces.append(text)
        return [self.delta(text, tokens)]

    def done(self, status: Status) -> list[OutputEvent]:
        return [*self.text_done(), self._of_item("response.output_item.done", self.item(status, self.text))]

    @abstractmethod
    def item(self, status: Status, text: str) -> Item: ...

    @abstractmethod
    def delta(self, text: str, tokens: Sequence[Token]) -> OutputEvent: ...

    @abstractmethod
    def text_done(self) -> list[OutputEvent]: ...

    def _of_item(self, kind: str, item: Item) -> OutputEvent:
        return {"type": kind, "output_index": self.index, "item": item}

    def _event(self, kind: str, **more: Any) -> OutputEvent:
        return {"type": kind, "item_id": self.id, "output_index": self.index, **more}


class _Message(_Open):
    kind = "message"

    def __init__(self, index: int) -> None:
        super().__init__(index)
        self.logprobs: list[Any] = []

    def item(self, status: Status, text: str) -> Item:
        content = [] if status == "in_progress" else [output_text(text, self.logprobs)]
        return {"id": self.id, "type": "message", "status": status, "role": "assistant", "content": content}

    def added(self) -> list[OutputEvent]:
        return [*super().added(), self._event("response.content_part.added", content_index=0, part=output_text(""))]

    def delta(self, text: str, tokens: Sequence[Token]) -> OutputEvent:
        entries = [token.logprob for token in tokens if token.logprob is not None]
        self.logprobs += entries
        return self._event("response.output_text.delta", content_index=0, delta=text, logprobs=entries)

    def text_done(self) -> list[OutputEvent]:
        whole = output_text(self.text, self.logprobs)
        return [
            self._event("response.output_text.done", content_index=0, text=self.text, logprobs=self.logprobs),
            self._event("response.content_part.done", content_index=0, part=whole),
        ]


class _Reasoning(_Open):
    kind = "reasoning"

    def __init__(self, index: int, told: Told) -> None:
        super().__init__(index)
        self.told = told

    def item(self, status: Status, text: str) -> Item:
        parts = [] if status == "in_progress" else [self._part(text)]
        summary, content = (parts, []) if self.told.summary else ([], parts)
        hidden = sealed(text) if self.told.sealed and parts else None
        named = {"summary": summary, "content": content, "encrypted_content": hidden, "status": status}
        return {"id": self.id, "type": "reasoning", **named}

    def _part(self, text: str) -> dict[str, str]:
        return {"type": "summary_text" if self.told.summary else "reasoning_text", "text": text}

    def added(self) -> list[OutputEvent]:
        return [*super().added(), self._event(f"{self._names[0]}.added", **self._at, part=self._part(""))]

    def delta(self, text: str, tokens: Sequence[Token]) -> OutputEvent:
        return self._event(f"{self._names[1]}.delta", **self._at, delta=text)

    def text_done(self) -> list[OutputEvent]:
        part, text = self._names
        return [
            self._event(f"{text}.done", **self._at, text=self.text),
            self._event(f"{part}.done", **self._at, part=self._part(self.text)),
        ]

    @property
    def _names(self) -> tuple[str, str]:
        if self.told.summary:
            return "response.reasoning_summary_part", "response.reasoning_summary_text"
        return "response.content_part", "response.reasoning_text"

    @property
    def _at(self) -> dict[str, int]:
        return {"summary_index" if self.told.summary else "content_index": 0}


class _Call(_Open):
    kind = "function_call"

    def __init__(self, index: int, start: CallStart, split: Split) -> None:
        super().__init__(index)
        self.start, self.names = start, named(start.name, split)

    def item(self, status: Status, text: str) -> Item:
        told = {"call_id": self.start.call_id, **self.names, "arguments": text, "status": status}
        return {"id": self.id, "type": "function_call", **told}

    def delta(self, text: str, tokens: Sequence[Token]) -> OutputEvent:
        return self._event("response.function_call_arguments.delta", delta=text)

    def text_done(self) -> list[OutputEvent]:
        told = {"name": self.names["name"], "arguments": self.text}
        return [self._event("response.function_call_arguments.done", **told)]


@dataclass(slots=True)
class Output:
    """The items of one answer. take() and end() return the events of what they were given.

    Tokens count where the next part belongs: those that a parser holds back, or that are no text, go with it.
    """

    told: Told = Told()
    items: list[Item] = field(default_factory=list)
    reasoning_tokens: int = 0
    _open: _Open | None = None
    _waiting: list[Token] = field(default_factory=list)

    def take(self, parts: Sequence[Part], tokens: Sequence[Token] = ()) -> list[OutputEvent]:
        self._waiting += tokens
        out: list[OutputEvent] = []
        for part in parts:
            out += self._part(part)
        return out

    def end(self, status: Status = "completed") -> list[OutputEvent]:
        """status: of the item that is open. An answer of nothing is a message of nothing."""
        out: list[OutputEvent] = []
        known = self._known()
        if all(item["type"] == "reasoning" for item in known) and (status == "completed" or not known):
            out += self._begin(_Message(self._next()))
        if isinstance(self._open, _Message):
            entries = self._tokens()
            if any(token.logprob is not None for token in entries):
                out.append(self._open.delta("", entries))
        return out + self._close(status)

    def _part(self, part: Part) -> list[OutputEvent]:
        out: list[OutputEvent] = []
        if isinstance(part, CallStart):
            self._tokens()
            return self._begin(_Call(self._next(), part, self.told.split))
        if not part.text:
            return out
        if isinstance(part, TextPart) and not isinstance(self._open, _Message):
            out = self._begin(_Message(self._next()))
        if isinstance(part, ReasoningPart) and not isinstance(self._open, _Reasoning):
            out = self._begin(_Reasoning(self._next(), self.told))
        assert self._open is not None
        if isinstance(part, CallArguments):
            assert isinstance(self._open, _Call) and self._open.start.number == part.number, "calls are told one by one"
        tokens = self._tokens()
        if isinstance(part, ReasoningPart):
            self.reasoning_tokens += len(tokens)
        return out + self._open.more(part.text, tokens)

    def _tokens(self) -> list[Token]:
        tokens, self._waiting = self._waiting, []
        return tokens

    def _known(self) -> list[Item]:
        return [*self.items, self._open.item("in_progress", "")] if self._open is not None else self.items

    def _next(self) -> int:
        return len(self.items) + (self._open is not None)

    def _begin(self, new: _Open) -> list[OutputEvent]:
        closed = self._close("completed")
        self._open = new
        return closed + new.added()

    def _close(self, status: Status) -> list[OutputEvent]:
        if self._open is None:
            return []
        events = self._open.done(status)
        self.items.append(events[-1]["item"])
        self._open = None
        return events
