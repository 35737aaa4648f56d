"""Which formats a model writes, chosen by its chat template, and the parser of a request's answers.

A format of calls is one file of this package and one line of TOOL_FORMATS; one of reasoning one line of
REASONING_FORMATS.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib import import_module
from typing import Any, NamedTuple

from headrace.config.server import REASONING_ALIASES, TOOL_ALIASES
from headrace.server.parsers.filters import FirstCall, WithoutTokens
from headrace.server.parsers.parts import OutputParser, PlainText
from headrace.server.parsers.reasoning import MarkedAnswerParser, ReasoningParser
from headrace.server.turn import Tool, ToolChoice
from headrace.types import did_you_mean

NONE = "none"


class ToolFormat(NamedTuple):
    """module: its file in this package. parser: the class there. marks: special tokens that it reads."""

    module: str
    parser: str
    marks: tuple[str, ...] = ()

    def load(self) -> Any:
        return import_module(f"headrace.server.parsers.{self.module}")


class ReasoningFormat(NamedTuple):
    """begin, end: what stands around reasoning. after: what follows it before the answer. answer: what begins the
    answer. around: marks that an answer may stand between."""

    begin: str
    end: str
    after: str = ""
    answer: str = ""
    tokens: tuple[str, ...] = ()
    """Special tokens in these texts, where they are more than `begin` and `end`."""
    around: tuple[str, str] = ("", "")

    @property
    def marks(self) -> tuple[str, ...]:
        return self.tokens or (self.begin, self.end)


HARMONY_TOKENS = ("<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|call|>", "<|return|>", "<|constrain|>")
DEEPSEEK_TOKENS = tuple(f"<｜tool▁{name}｜>" for name in ("calls▁begin", "calls▁end", "call▁begin", "sep", "call▁end"))

TOOL_FORMATS: dict[str, ToolFormat] = {
    "hermes": ToolFormat("hermes", "HermesParser", ("<tool_call>", "</tool_call>")),
    "qwen3_coder": ToolFormat("qwen3_coder", "Qwen3CoderParser", ("<tool_call>", "</tool_call>")),
    "seed_oss": ToolFormat("seed_oss", "SeedOssParser", ("<seed:tool_call>", "</seed:tool_call>")),
    "glm45": ToolFormat(
        "glm45",
        "Glm45Parser",
        ("<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
    ),
    "minimax_m2": ToolFormat("minimax_m2", "MiniMaxM2Parser", ("<minimax:tool_call>", "</minimax:tool_call>")),
    "deepseek_v3": ToolFormat("deepseek_v3", "DeepSeekV3Parser", DEEPSEEK_TOKENS),
    "deepseek_v31": ToolFormat("deepseek_v31", "DeepSeekV31Parser", DEEPSEEK_TOKENS),
    "llama3_json": ToolFormat("llama_json", "LlamaJsonParser", ("<|python_tag|>",)),
    "mistral": ToolFormat("mistral", "MistralParser", ("[TOOL_CALLS]", "[CALL_ID]", "[ARGS]")),
    "nemotron_json": ToolFormat("nemotron_json", "NemotronJsonParser", ("<TOOLCALL>", "</TOOLCALL>")),
    "hunyuan_a13b": ToolFormat("hunyuan_a13b", "HunYuanParser", ("<tool_calls>", "</tool_calls>")),
    "cohere": ToolFormat("cohere", "CohereParser", ("<|START_ACTION|>", "<|END_ACTION|>")),
    "lfm2": ToolFormat("lfm2", "Lfm2Parser", ("<|tool_call_start|>", "<|tool_call_end|>")),
    "olmo3": ToolFormat("olmo3", "Olmo3Parser", ("<function_calls>", "</function_calls>")),
    "pythonic": ToolFormat("pythonic", "PythonicParser", ("<|python_start|>", "<|python_end|>")),
    "openai": ToolFormat("harmony", "HarmonyParser", HARMONY_TOKENS),
    "json": ToolFormat("plain_json", "PlainJsonParser"),
}
REASONING_FORMATS: dict[str, ReasoningFormat] = {
    "hunyuan_a13b": ReasoningFormat(
        "<think>", "</think>", tokens=("<think>", "</think>", "<answer>", "</answer>"), around=("<answer>", "</answer>")
    ),
    "think": ReasoningFormat("<think>", "</think>"),
    "mistral": ReasoningFormat("[THINK]", "[/THINK]"),
    "seed_oss": ReasoningFormat("<seed:think>", "</seed:think>"),
    "cohere": ReasoningFormat("<|START_THINKING|>", "<|END_THINKING|>"),
    "harmony": ReasoningFormat(
        "<|channel|>analysis<|message|>", "<|end|>", "<|start|>assistant", "<|channel|>final<|message|>", HARMONY_TOKENS
    ),
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
    left_out: tuple[str, ...] = ()
    """Of those, what a parser that needs special tokens leaves out itself."""

    @property
    def harmony(self) -> bool:
        """One format for both."""
        return self.tools == "openai" or self.reasoning == "harmony"

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
    vocabulary = "\n".join(tokens or ())
    found = Formats(
        _given("tool_parser", tool_parser, (*TOOL_FORMATS, NONE), TOOL_ALIASES) or parser_for(template, vocabulary),
        _given("reasoning_parser", reasoning_parser, (*REASONING_FORMATS, NONE), REASONING_ALIASES)
        or reasoning_for(template, vocabulary),
        dict(tokens or {}),
        frozenset(hidden),
    )
    others = sorted(found.hidden - {*found.marks, ""}, key=len)
    # A token within another is left out with the shorter one alone: marks of a parser must not contain each other.
    apart = [token for i, token in enumerate(others) if not any(shorter in token for shorter in others[:i])]
    return replace(found, left_out=tuple(apart))


def _given(called: str, name: str | None, known: Collection[str], aliases: Mapping[str, str]) -> str:
    if name is None or name == "auto":
        return ""
    name = aliases.get(name, name)
    if name not in known:
        raise ValueError(f"{called} must be one of {', '.join(known)}, got {name!r}{did_you_mean(name, known)}")
    return name


_TOOLS_BY = (
    ("mistral", "[TOOL_CALLS]"),
    ("openai", "<|channel|>"),
    ("seed_oss", "<seed:tool_call>"),
    ("qwen3_coder", "<function="),
    ("glm45", "<arg_key>"),
    ("minimax_m2", "<minimax:tool_call>"),
    ("hermes", "<tool_call>"),
    ("nemotron_json", "<TOOLCALL>"),
    ("hunyuan_a13b", "<tool_calls>"),
    ("cohere", "<|START_ACTION|>"),
    ("lfm2", "<|tool_call_start|>"),
    ("olmo3", "<function_calls>"),
    ("deepseek_v3", "<｜tool▁sep｜>", "```json"),
    ("deepseek_v31", "<｜tool▁sep｜>"),
    ("pythonic", "func_name1("),
    ("llama3_json", '"parameters": dictionary'),
    ("llama3_json", "<|python_tag|>"),
    ("pythonic", "<|python_start|>"),
)
"""A format, and what a template or vocabulary of it contains; the first that fits counts."""


def parser_for(template: str, vocabulary: str = "") -> str:
    """The format of calls of a chat template; by the texts of the vocabulary's added tokens for one that shows tools
    without a mark that is known here; 'json' where neither tells. One that shows no tools must have its mark in the
    vocabulary, too: a model without that token knows the format by hearsay."""
    shows = "tools" in template
    fitting = (
        name
        for place in ((template, vocabulary) if shows else (template,))
        for name, *marks in _TOOLS_BY
        if all(mark in place for mark in marks) and (shows or marks[0] in vocabulary)
    )
    return next(fitting, "json")


def reasoning_for(template: str, vocabulary: str = "") -> str:
    """The format of reasoning of a chat template, or of its vocabulary."""
    forms = REASONING_FORMATS.items()
    return next((name for place in (template, vocabulary) for name, form in forms if _reasons(form, place)), NONE)


def _reasons(form: ReasoningFormat, text: str) -> bool:
    return all(mark in text for mark in form.tokens[:3] or (form.end,))


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
    if formats.reasoning != NONE and not formats.harmony:
        form = REASONING_FORMATS[formats.reasoning]
        inner = MarkedAnswerParser(parser, *form.around) if form.around[0] else parser
        parser = ReasoningParser(inner, form.begin, form.end, prompt_end.rstrip().endswith(form.begin))
    return WithoutTokens(parser, formats.left_out) if formats.needs_special_tokens and formats.left_out else parser


def _calls_parser(
    formats: Formats, tools: Sequence[Tool], choice: ToolChoice, new_id: Callable[[], str] | None
) -> OutputParser:
    called = formats.tools != NONE and bool(tools) and choice.mode != NONE
    if not called and not formats.harmony:
        return PlainText()
    form = TOOL_FORMATS["openai" if formats.harmony else formats.tools]
    module = form.load()
    parser: OutputParser = getattr(module, form.parser)(
        new_id or getattr(module, "call_id", call_id), tools if called else ()
    )
    return parser if choice.parallel else FirstCall(parser)
