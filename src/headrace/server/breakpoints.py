"""`cache_control` on parts of a conversation: up to where a prompt is to stay in the cache, and how long.

Where a breakpoint lies among the prompt's tokens is found by rendering the conversation once more with a mark behind
the part: up to there both texts are the same, whatever the template makes of messages.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Protocol

from headrace.server.engine import ServedTokenizer
from headrace.server.errors import invalid
from headrace.server.public import common
from headrace.server.strict import Strict
from headrace.server.turn import Turn

MOST = 4
"""Breakpoints of a request, as Anthropic has it."""

MARK = "\N{SECTION SIGN}\N{SECTION SIGN}"
"""Follows a marked part; a text that goes on with it moves the breakpoint by as much."""

TTL_S = {"5m": 300.0, "1h": 3600.0}


class CacheControl(Strict):
    """A breakpoint behind the part that has it: the prompt up to there is pinned for `ttl`, 5 minutes without one."""

    type: Literal["ephemeral"]
    ttl: Literal["5m", "1h"] | None = None

    @property
    def ttl_s(self) -> float:
        return TTL_S[self.ttl or "5m"]


class Breakpoint(NamedTuple):
    """marked: the conversation with a mark behind the part."""

    marked: Turn
    ttl_s: float


class AskedPin(NamedTuple):
    """So many tokens at the beginning of a prompt are to stay for a time. id: empty for a breakpoint's, which gives way
    to newer ones and may fail; a prefix that is pinned by name must not."""

    tokens: int
    ttl_s: float
    id: str = ""


@dataclass(slots=True)
class Pinned:
    """What has become of a job's pins: tokens that stay, for how long, and why not more."""

    tokens: int = 0
    expires_in_s: float = 0.0
    refused: str | None = None
    prefix: dict[str, Any] | None = None

    def asdict(self) -> dict[str, Any]:
        return {"tokens": self.tokens, "expires_in_s": round(self.expires_in_s, 3), "refused": self.refused}


class Markable(Protocol):
    @property
    def cache_control(self) -> CacheControl | None: ...

    def marked(self) -> Any:
        """A copy with MARK as the end of its text."""
        ...


class Part(NamedTuple):
    """A part of a body, by its place in a list. follows: what stands behind it instead of a mark within, for a tool."""

    held: list[Any]
    place: int
    control: CacheControl
    follows: Any = None


def parts_of(held: list[Any] | None, follows: Callable[[Any], Any] | None = None) -> Iterator[Part]:
    """The parts of a list that have a breakpoint."""
    for place, each in enumerate(held or ()):
        control = getattr(each, "cache_control", None)
        if control is not None:
            yield Part(held or [], place, control, None if follows is None else follows(each))


def breakpoints(parts: Iterable[Part], turn: Callable[[], Turn]) -> list[Breakpoint]:
    """Of parts in the order of the prompt. turn: what the body becomes as it stands. Of each time to live the last one
    counts, since a pin holds all before it. Raises ApiError for too many."""
    listed = list(parts)
    if len(listed) > MOST:
        raise invalid(f"cache_control: at most {MOST} breakpoints, got {len(listed)}", "cache_control")
    found = []
    for part in {part.control.ttl_s: part for part in listed}.values():
        with _mark_at(part):
            found.append(Breakpoint(turn(), part.control.ttl_s))
    return found


@contextmanager
def _mark_at(part: Part) -> Iterator[None]:
    """The body with a mark behind the part; afterwards it is as it was."""
    before = list(part.held)
    if part.follows is None:
        part.held[part.place] = part.held[part.place].marked()
    else:
        part.held.insert(part.place + 1, part.follows)
    try:
        yield
    finally:
        part.held[:] = before


def tokens_before(tokenizer: ServedTokenizer, ids: Sequence[int], text: str, marked: str) -> int:
    """How many whole tokens of `ids`, which are those of `text`, lie before the mark of `marked`. A tokenizer that
    changes texts (case, say) may move it by a few tokens."""
    left = len(text[: common(text, marked)].encode())
    for count, token in enumerate(ids):
        left -= len(tokenizer.token_bytes(token))
        if left < 0:
            return count
    return len(ids)
