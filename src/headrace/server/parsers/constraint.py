"""The grammar that forces calls, bounds reasoning, or lets an answer of a given shape follow reasoning."""

from __future__ import annotations

import json
from collections.abc import Sequence

from headrace.errors import InvalidRequest
from headrace.server.parsers.lark import MOST_CALLS, Grammar, bare, pattern_of, refused
from headrace.server.parsers.registry import NONE, REASONING_FORMATS, TOOL_FORMATS, Formats, ReasoningFormat
from headrace.server.turn import Reasoning, Tool, ToolChoice
from headrace.structured import Structured

ANY_TEXT = "/(?s:.*)/"
BREAK = r"/\n{0,2}/"
"""Between reasoning and the answer."""
REST = "<[*]>*"
"""Any tokens, added ones too."""
CHARACTERS_PER_TOKEN = 4
"""What a token of a budget stands for where the mark that ends reasoning is no token of the vocabulary."""


def constraint(
    formats: Formats,
    tools: Sequence[Tool],
    choice: ToolChoice,
    reasoning: Reasoning,
    prompt_end: str,
    structured: Structured | None,
) -> Structured | None:
    """What an answer must look like, or None if it may be any text.

    Required and named calls: one call, or up to MOST_CALLS where several are allowed, with arguments that fit their
    schemas. `structured` alone: an answer of that shape; where tools may be called, such an answer or calls. Reasoning
    may come first where the model reasons, at most of its budget. A budget alone: reasoning, then any text. With tools
    that may be called, and nothing else, nothing is forced, strict tools or not.

    Raises InvalidRequest (tools, tool_choice, structured) for what no grammar can be made of.
    """
    callable_tools = _callable(formats, tools, choice)
    if structured is None and not callable_tools and reasoning.budget is None:
        return None
    grammar = Grammar(formats.tokens)
    thought = _thought(grammar, formats, reasoning, prompt_end)
    forced = bool(callable_tools) and choice.mode == "required"
    if structured is None and not forced:
        free = thought is None or reasoning.budget is None
        return None if free else Structured(grammar=grammar.done(f"{thought} {REST}"))
    form = REASONING_FORMATS.get(formats.reasoning)
    if structured is not None and thought is None and not callable_tools and not (form and form.answer):
        return structured
    answers = []
    if callable_tools:
        most = MOST_CALLS if choice.parallel else 1
        answers.append(TOOL_FORMATS[formats.tools].load().calls_grammar(grammar, callable_tools, most))
        _check_texts(formats, callable_tools)
    if structured is not None and not forced:
        before = grammar.text(form.answer, form.marks) if form and form.answer else ""
        answers.append(f"{before} {grammar.shape(structured)}")
    answer = grammar.rule(" | ".join(answers))
    if thought is None:
        return Structured(grammar=grammar.done(answer))
    whether = "" if _opened(formats, prompt_end) else "?"
    return Structured(grammar=grammar.done(f"({thought}){whether} {answer}"))


def _check_texts(formats: Formats, tools: Sequence[Tool]) -> None:
    """Raises InvalidRequest if a text that would be forced contains an added token that the parser reads as a mark, or
    leaves out: the call would not be read as it was forced."""
    read = [token for token in (*formats.marks, *formats.left_out) if token in formats.tokens]
    for tool in tools if read else ():
        text = f"{tool.name} {json.dumps(bare(tool.parameters), ensure_ascii=False)}"
        found = next((token for token in read if token in text), None)
        if found is not None:
            told = f"its calls cannot be forced: its name or parameters contain {found!r}"
            raise refused(tool, f"{told}, which is a mark of this model's format")


def _opened(formats: Formats, prompt_end: str) -> bool:
    """Whether the prompt ends within reasoning."""
    return prompt_end.rstrip().endswith(REASONING_FORMATS[formats.reasoning].begin)


def _callable(formats: Formats, tools: Sequence[Tool], choice: ToolChoice) -> list[Tool]:
    """The tools that may be called. Raises InvalidRequest if a call is asked for and cannot be made."""
    if choice.mode == NONE:
        return []
    named = [tool for tool in tools if not choice.names or tool.name in choice.names]
    if choice.mode == "required" and not named:
        raise InvalidRequest("tool_choice asks for a call, and tools has no such tool", "tool_choice")
    if formats.tools == NONE:
        if choice.mode == "required":
            raise InvalidRequest("tool_choice asks for a call, and this server has no parser of calls", "tool_choice")
        return []
    return named


def _thought(grammar: Grammar, formats: Formats, reasoning: Reasoning, prompt_end: str) -> str | None:
    """An expression for reasoning, from what the prompt has of it to where the answer begins; None where none comes."""
    form = REASONING_FORMATS.get(formats.reasoning)
    if form is None:
        return None
    opened = _opened(formats, prompt_end)
    if not opened and (reasoning.enabled is False or prompt_end.rstrip().endswith(form.end)):
        return None
    begin = "" if opened else grammar.text(form.begin, form.marks)
    after = grammar.text(form.after, form.marks) if form.after else grammar.rule(BREAK)
    return f"{begin} {_body(grammar, form, reasoning.budget)} {after}"


def _body(grammar: Grammar, form: ReasoningFormat, budget: int | None) -> str:
    """An expression for reasoning and the mark that ends it."""
    if form.end in grammar.tokens:
        end = grammar.text(form.end, form.marks)
        limit = "" if budget is None else f"[max_tokens={budget}]"
        return end if budget == 0 else f"{grammar.rule(ANY_TEXT, limit)} {end}"
    most = "*" if budget is None else f"{{0,{budget * CHARACTERS_PER_TOKEN}}}"
    return grammar.rule(f"/(?s:.{most}){pattern_of(form.end)}/", "[lazy]")
