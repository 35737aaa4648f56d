"""Which formats a model writes, chosen by its chat template, and the parser of a request's answers.

A format of calls is one file of this package and one line of TOOL_FORMATS; one of reasoning one line of
REASONING_FORMATS.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any, NamedTuple

from headrace.server.parsers.filters import FirstCall, WithoutTokens
from headrace.server.parsers.parts import OutputParser, PlainText
from headrace.server.parsers.reasoning import ReasoningParser
from headrace.server.turn import Tool, ToolChoice
from headrace.types import did_you_mean

NONE = "none"


class ToolFormat(NamedTuple):
    """module: its file in this package. parser: the class there. marks: special tokens that it reads."""

    module: str
    parser: str
    marks: tuple[str, ...] = ()
    by_name: bool = False
    """Calls have no mark: only names of the request's tools make them."""

    def load(self) -> Any:
        return import_module(f"headrace.server.parsers.{self.module}")


class ReasoningFormat(NamedTuple):
    """begin, end: what stands around reasoning. after: what follows it before the answer. answer: what begins the
    answer."""

    begin: str
    end: str
    after: str = ""
    answer: str = ""
    tokens: tuple[str, ...] = ()
    """Special tokens in these texts, where they are more than `begin` and `end`."""

    @property
    def marks(self) -> tuple[str, ...]:
        return self.tokens or (self.begin, self.end)


TOOL_FORMATS: dict[str, ToolFormat] = {
    "hermes": ToolFormat("hermes", "HermesParser", ("<tool_call>", "</tool_call>")),
    "llama3_json": ToolFormat("llama_json", "LlamaJsonParser", ("<|python_tag|>",), by_name=True),
    "mistral": ToolFormat("mistral", "MistralParser", ("[TOOL_CALLS]", "[CALL_ID]", "[ARGS]")),
    "json": ToolFormat("plain_json", "PlainJsonParser", by_name=True),
}
REASONING_FORMATS: dict[str, ReasoningFormat] = {
    "think": ReasoningFormat("<think>", "</think>"),
    "mistral": ReasoningFormat("[THINK]", "[/THINK]"),
}


@dataclass(frozen=True, slots=True)
class Formats:
    """How a model writes calls and reasoning: names of TOOL_FORMATS and REASONING_FORMATS, or 'none'.

    tokens: added tokens of the vocabulary, by text. hidden: those that the engine leaves out of texts by default
    (`skip_special_tokens`).
    """

    tools: str = NONE
    reasoning: str = NONE
    tokens: Mapping[str, int] = field(default_factory=dict, hash=False)
    hidden: frozenset[str] = frozenset()
    template: str = field(default="", repr=False, compare=False)

    @property
    def marks(self) -> tuple[str, ...]:
        """Texts that the parser reads as marks."""
        tools = TOOL_FORMATS[self.tools].marks if self.tools != NONE else ()
        return tools + (REASONING_FORMATS[self.reasoning].marks if self.reasoning != NONE else ())

    @property
    def needs_special_tokens(self) -> bool:
        """Whether the parser must see special tokens in the text: `SamplingParams(skip_special_tokens=False)`."""
        return any(mark in self.hidden for mark in self.marks)


def formats_of(
    template: str,
    *,
    tool_parser: str | None = None,
    reasoning_parser: str | None = None,
    tokens: Mapping[str, int] | None = None,
    hidden: Collection[str] = (),
) -> Formats:
    """The formats of the model with this chat template, which flags may name instead.

    tokens, hidden: as of `Formats`. Raises ValueError for a name that is none.
    """
    seen = {mark for mark in (tokens or {}) if mark not in template}
    text = "\n".join([template, *sorted(seen)])
    return Formats(
        _given("tool_parser", tool_parser, (*TOOL_FORMATS, NONE)) or parser_for(text),
        _given("reasoning_parser", reasoning_parser, (*REASONING_FORMATS, NONE)) or reasoning_for(text),
        dict(tokens or {}),
        frozenset(hidden),
        template,
    )


def _given(called: str, name: str | None, known: Collection[str]) -> str:
    if name is None or name == "auto":
        return ""
    if name not in known:
        raise ValueError(f"{called} must be one of {', '.join(known)}, got {name!r}{did_you_mean(name, known)}")
    return name


_TOOLS_BY: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("mistral", ("[TOOL_CALLS]",)),
    ("hermes", ("<tool_call>",)),
    ("llama3_json", ("<|python_tag|>",)),
    ("llama3_json", ("<|eom_id|>",)),
)
"""A format, and what a template of it contains; the first that fits counts."""


def parser_for(template: str) -> str:
    """The format of calls of a chat template: 'json' for one that shows tools in a way not known here."""
    return next((name for name, marks in _TOOLS_BY if all(mark in template for mark in marks)), "json")


def reasoning_for(template: str) -> str:
    """The format of reasoning of a chat template."""
    return next((name for name, form in REASONING_FORMATS.items() if form.end in template), NONE)


def call_id() -> str:
    return f"call_{secrets.token_hex(12)}"


def make_parser(
    formats: Formats,
    tools: Sequence[Tool] = (),
    choice: ToolChoice = ToolChoice(),
    prompt_end: str = "",
    new_id: Callable[[], str] | None = None,
) -> OutputParser:
    """The parser of one answer. prompt_end: the end of the rendered prompt, which tells whether the template has begun
    the reasoning. Without tools, or where none may be called, calls are text; reasoning is split in any case."""
    parser = _calls_parser(formats, tools, choice, new_id)
    if formats.reasoning in REASONING_FORMATS:
        begin, end, *_ = REASONING_FORMATS[formats.reasoning]
        parser = ReasoningParser(parser, begin, end, prompt_end.rstrip().endswith(begin))
    others = formats.hidden - set(formats.marks)
    return WithoutTokens(parser, others) if formats.needs_special_tokens and others else parser


def _calls_parser(
    formats: Formats, tools: Sequence[Tool], choice: ToolChoice, new_id: Callable[[], str] | None
) -> OutputParser:
    if formats.tools == NONE or not tools or choice.mode == NONE:
        return PlainText()
    form = TOOL_FORMATS[formats.tools]
    module = form.load()
    more = ([tool.name for tool in tools],) if form.by_name else ()
    parser: OutputParser = getattr(module, form.parser)(new_id or getattr(module, "call_id", call_id), *more)
    return parser if choice.parallel else FirstCall(parser)
