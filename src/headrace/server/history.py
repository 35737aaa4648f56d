"""Whether a chat template keeps what it wrote: turn N + 1 must begin with turn N, or nothing behind is cached."""

from __future__ import annotations

import logging
from typing import Any

from headrace.server.engine import ServedTokenizer
from headrace.types import InvalidRequest

log = logging.getLogger(__name__)

TURNS = ("Rain or snow?", "Rain, I think.", "Since when?", "Since noon.", "Thank you.")
"""A conversation; every other one is the model's."""


def rewrites_history(tokenizer: ServedTokenizer | None) -> str:
    """A warning where the template writes an earlier turn in other words once the conversation goes on; empty if it
    does not, or has nothing to say of such a conversation."""
    if tokenizer is None or not tokenizer.chat_template:
        return ""
    try:
        one, two, three = (_written(tokenizer, turns) for turns in (1, 3, 5))
    except (InvalidRequest, TypeError) as error:
        log.debug("the chat template was not looked at: %s", error)
        return ""
    for number, before, after in ((1, one + TURNS[1], two), (2, two + TURNS[3], three)):
        if not after.startswith(before):
            same = next((i for i, (a, b) in enumerate(zip(before, after, strict=False)) if a != b), len(after))
            return (
                f"the chat template writes turn {number} in other words once the conversation goes on, from "
                f"{before[same : same + 30]!r} to {after[same : same + 30]!r}: what follows is computed again in each "
                "turn (`headrace why` shows it for requests of yours)"
            )
    return ""


def _written(tokenizer: Any, turns: int) -> str:
    roles = ("user", "assistant")
    messages = [{"role": roles[i % 2], "content": text} for i, text in enumerate(TURNS[:turns])]
    return str(tokenizer.render_chat(messages))
