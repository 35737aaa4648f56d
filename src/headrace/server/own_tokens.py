"""`token_ids` of an assistant's message: by which tokens its text is to be read. They say just that, or are refused: a
list of tokens must not bring in what the message does not show, control tokens above all.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from headrace.server.answer_places import TOKENS, without_tokens
from headrace.server.chat_body import arguments_object
from headrace.server.errors import invalid
from headrace.server.job import ReplyChoice
from headrace.server.parsers.parts import Answer
from headrace.server.parsers.registry import NONE, REASONING_FORMATS, Formats, make_parser
from headrace.server.replay import BROKEN, TokenTexts
from headrace.server.replies import chat_message
from headrace.server.turn import Tool, ToolChoice, Turn

MARKS = 10_000
"""Characters that an answer may have around what its message says."""

SHOWN = 60
"""Characters of what tokens say that a refusal shows."""


def check_tokens(texts: TokenTexts, formats: Formats, turn: Turn, vocabulary: int) -> None:
    """Raises ApiError naming the first message whose token_ids do not say just what it says. vocabulary: its size."""
    for number, message in enumerate(turn.messages):
        tokens = message.get(TOKENS)
        why = tokens and _fault(texts, formats, turn.tools, message, tokens, vocabulary)
        if why:
            where = f"messages[{number}].{TOKENS}"
            raise invalid(
                f"{where}: {why}; send those of the reply with its message unchanged, or leave them out", where
            )


def tokens_to_carry(
    texts: TokenTexts, formats: Formats, tools: Sequence[Tool], choice: ReplyChoice
) -> list[int] | None:
    """An answer's tokens as its message may carry them back; None if they say something else: a stop string has cut
    the text within a token, or the text leaves out a special token."""
    tokens = choice.token_ids
    if isinstance(choice.stop_reason, str):
        tokens = tokens[: _within(texts, tokens, choice.text)]
    message = _as_given(chat_message(choice))
    return tokens if tokens and _says(texts, formats, tools, message, tokens) else None


def _fault(
    texts: TokenTexts, formats: Formats, tools: Sequence[Tool], message: Mapping[str, Any], tokens: Sequence[int],
    vocabulary: int,
) -> str:  # fmt: skip
    """Empty: none."""
    wrong = next((token for token in tokens if token >= vocabulary or not texts.knows(token)), None)
    if wrong is not None:
        return f"the vocabulary has no token {wrong}"
    if _says(texts, formats, tools, message, tokens):
        return ""
    control = next((texts.added[token] for token in tokens[:-1] if token in texts.added), None)
    held = f", with the control token {control!r}" if control else ""
    return f"the tokens say {texts.text(tokens)[:SHOWN]!r}{held}, which is not what the message says"


def _says(
    texts: TokenTexts, formats: Formats, tools: Sequence[Tool], message: Mapping[str, Any], tokens: Sequence[int]
) -> bool:
    """Whether an answer of these tokens is this message. A last token that ends the turn is no part of the text."""
    whole = texts.text(tokens)
    said = texts.text(tokens[:-1]) if tokens[-1] in texts.added else whole
    plain = not message.get("tool_calls") and not message.get("reasoning_content")
    if plain and (message.get("content") or "") in (whole, said, said.rstrip(BROKEN)):
        return True
    begins = ("",) if formats.reasoning == NONE else ("", REASONING_FORMATS[formats.reasoning].begin)
    called = bool(message.get("tool_calls"))
    choices = (ToolChoice(), ToolChoice(parallel=False)) if called else (ToolChoice("none"),)
    if any(texts.added.get(token) in formats.left_out for token in tokens[:-1]):
        return False  # the parser would leave them out without a word
    (shown,) = without_tokens([message])
    if len(whole) > 2 * len(json.dumps(shown, ensure_ascii=False)) + MARKS:
        return False  # far more text than the message has, which is not to be parsed
    return any(
        _is_answer(_parsed(formats, tools, choice, begun, text), message)
        for text in dict.fromkeys((said.rstrip(BROKEN), whole))
        for begun in begins
        for choice in choices
    )


def _parsed(formats: Formats, tools: Sequence[Tool], choice: ToolChoice, begun: str, said: str) -> Answer:
    """begun: how the prompt ended."""
    answer, parser = Answer(), make_parser(formats, tools, choice, begun)
    answer.add(parser.push(said))
    answer.add(parser.finish())
    return answer


def _is_answer(answer: Answer, message: Mapping[str, Any]) -> bool:
    calls = [(call.name, arguments_object(call.arguments)) for call in answer.calls]
    told = [call["function"] for call in message.get("tool_calls") or ()]
    return (
        answer.text == (message.get("content") or "")
        and answer.reasoning == (message.get("reasoning_content") or "")
        and calls == [(call["name"], call["arguments"]) for call in told]
    )


def _as_given(message: Mapping[str, Any]) -> dict[str, Any]:
    """A reply's message as it comes back in the form of chat templates."""
    functions = [call["function"] for call in message.get("tool_calls") or ()]
    calls = [{"function": {**each, "arguments": arguments_object(each["arguments"])}} for each in functions]
    return {**message, "tool_calls": calls}


def _within(texts: TokenTexts, tokens: Sequence[int], text: str) -> int:
    """How many of the first tokens say a beginning of the text."""
    fits, most = 0, len(tokens)
    while fits < most:
        tried = (fits + most + 1) // 2
        if text.startswith(texts.text(tokens[:tried])):
            fits = tried
        else:
            most = tried - 1
    return fits
