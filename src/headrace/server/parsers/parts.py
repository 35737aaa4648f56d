"""The parts of an assistant's answer, as they stream; every route tells them in its own shape."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol


class TextPart(NamedTuple):
    """More of the answer's text."""

    text: str


class ReasoningPart(NamedTuple):
    """More of what the model thought before it answered."""

    text: str


class CallStart(NamedTuple):
    """A call of a tool begins; calls of an answer are numbered from 0. `call_id` is made here, unless the model wrote
    one."""

    number: int
    call_id: str
    name: str


class CallArguments(NamedTuple):
    """More of a call's arguments: a piece of JSON text, as the model writes it. All pieces together are the whole."""

    number: int
    text: str


Part = TextPart | ReasoningPart | CallStart | CallArguments


class OutputParser(Protocol):
    """Takes the text of one sequence piece by piece. However the text is cut, the parts add up to the same Answer:
    an Answer that has taken all parts is a function of the whole text alone. Never raises: what is no call is text."""

    def push(self, text: str) -> list[Part]: ...

    def finish(self) -> list[Part]:
        """At the end of the text: what was held back."""
        ...


@dataclass(slots=True)
class Call:
    call_id: str
    name: str
    arguments: str = ""


@dataclass(slots=True)
class Answer:
    """The parts of one sequence, added up."""

    text: str = ""
    reasoning: str = ""
    calls: list[Call] = field(default_factory=list)

    @property
    def whole(self) -> bool:
        """Whether the arguments of its last call, if there is one, are JSON."""
        try:
            json.loads(self.calls[-1].arguments if self.calls else "{}", strict=False)
        except (ValueError, RecursionError):
            return False
        return True

    def add(self, parts: Iterable[Part]) -> None:
        for part in parts:
            if isinstance(part, TextPart):
                self.text += part.text
            elif isinstance(part, ReasoningPart):
                self.reasoning += part.text
            elif isinstance(part, CallStart):
                self.calls.append(Call(part.call_id, part.name))
            else:
                self.calls[part.number].arguments += part.text


class PlainText:
    """The parser of answers without parts."""

    def push(self, text: str) -> list[Part]:
        return [TextPart(text)] if text else []

    def finish(self) -> list[Part]:
        return []
