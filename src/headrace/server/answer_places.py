"""Where earlier answers begin in a rendered conversation: behind what they answer and what the template writes then.

The template is asked for that once for each role, over the shortest beginning of the conversation that ends with it:

    <user>Hi<end><assistant>Hello<end>...        rendered, "Hello" to be found
    <user>CONTENT<end><assistant>                the beginning with CONTENT for "Hi": the lead is "<end><assistant>"
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from headrace.server.replay import Known
from headrace.types import InvalidRequest

TOKENS = "token_ids"
"""Of a message in the form of chat templates: the tokens by which it is to be read. No template sees them."""

CONTENT = "headrace: the content of this message"

MOST_MISSES = 16
"""Answers that are not found before no more are looked for: each costs a search of the whole text."""

Message = Mapping[str, Any]


def leads(messages: Sequence[Message], render: Callable[[list[Message]], str]) -> dict[str, str]:
    """Role -> what stands between the content of its message and the answer to it. render: a conversation, up to where
    the assistant's next turn begins. Without the roles of which that cannot be seen."""
    found: dict[str, str] = {}
    seen: set[str] = set()
    for number in range(1, len(messages)):
        before = messages[number - 1]
        if messages[number]["role"] != "assistant" or before["role"] in seen:
            continue
        seen.add(before["role"])
        try:
            text = render([*messages[: number - 1], {**before, "content": CONTENT}])
        except InvalidRequest:
            continue  # the template wants more than that; the whole conversation has been rendered
        _, there, lead = text.rpartition(CONTENT)
        if there:
            found[before["role"]] = lead
    return found


def places(rendered: str, messages: Sequence[Message], lead_of: Mapping[str, str]) -> dict[int, int]:
    """Number of an assistant's message -> the character at which its text begins; without those that are not found."""
    found: dict[int, int] = {}
    at = misses = 0
    for number in range(1, len(messages)):
        if messages[number]["role"] != "assistant":
            continue
        before = messages[number - 1]
        start = _behind(rendered, before.get("content") or "", lead_of.get(before["role"]), at)
        if start is not None:
            found[number] = at = start
        elif (misses := misses + 1) == MOST_MISSES:
            break
    return found


def _behind(rendered: str, content: str, lead: str | None, at: int) -> int | None:
    """The end of the first content with its lead from `at` on; many templates trim the content."""
    for said in dict.fromkeys((content, content.strip())):
        if lead is not None and said + lead and (start := rendered.find(said + lead, at)) >= 0:
            return start + len(said) + len(lead)
    return None


def carried(rendered: str, messages: Sequence[Message], lead_of: Mapping[str, str]) -> tuple[list[Known], int]:
    """The answers whose messages hold their tokens, and how many more there are that are not found."""
    there = places(rendered, messages, lead_of)
    numbers = [number for number, message in enumerate(messages) if message.get(TOKENS)]
    known = [Known(there[number], messages[number][TOKENS]) for number in numbers if number in there]
    return known, len(numbers) - len(known)


def without_tokens(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """As a template takes them."""
    return [{name: value for name, value in message.items() if name != TOKENS} for message in messages]
