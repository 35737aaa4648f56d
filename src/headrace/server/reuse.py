"""Why a prompt came from the cache, or did not: what it shares with the caller's own recent requests.

A caller is a tenant; where there are none, those who send the same cache_salt: nobody learns of another's prompts.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from headrace.types import CHUNK

Ids = NDArray[np.int32]

MOST_CALLERS, MOST_REQUESTS, MOST_TOKENS = 256, 16, 4 << 20
"""Callers that are remembered, requests of each, and tokens of all together (4 bytes each)."""

Cause = Literal["first", "continued", "text", "tokens", "salt", "computing", "scored", "evicted"]

ALIKE = 16
"""Tokens that are looked at to see whether two prompts go on with the same text."""

SEND_BACK = "send an answer's token_ids back with its message, or serve with --replay-answers"
REWRITTEN = "; the chat template writes an earlier answer in other words than the model"

MISSING: dict[Cause, str] = {
    "salt": "lies under another cache_salt",
    "computing": "was still being computed",
    "scored": "is computed anew for prompt_logprobs",
    "evicted": "is no longer kept",
}


@dataclass(slots=True, eq=False)
class Seen:
    """A request of a caller. ids: its prompt, int32, with its answer behind it once that is whole, if there is one
    answer alone."""

    request_id: str
    salt: str | None
    ids: Ids
    running: bool = True
    answers: int = 1


class Nearest(NamedTuple):
    """Of the caller's recent requests the one that begins like a prompt for longest: for `common` tokens. missing: why
    these would not be in the cache. text, other_text: of the tokens behind them, empty for none. message: in which of
    the prompt's messages that is, from 0. same_text: both go on with the same text, in other tokens."""

    seen: Seen
    common: int
    missing: Cause
    text: str = ""
    other_text: str = ""
    message: int | None = None
    same_text: bool = False


@dataclass(frozen=True, slots=True)
class Reuse:
    """cached: tokens of the prompt that came from the cache; of `tokens` in all. replayed, rewritten: see Replay."""

    tokens: int
    cached: int
    nearest: Nearest | None
    replayed: int = 0
    rewritten: int = 0

    @property
    def cause(self) -> Cause:
        """Why no more came from the cache."""
        near = self.nearest
        if near is None or near.common < CHUNK:
            return "first"
        # The last token is always computed, and whole chunks are sure to be found.
        due = min(near.common, self.tokens - 1, len(near.seen.ids) - 1) // CHUNK * CHUNK
        if self.cached >= due:
            if near.common == min(self.tokens, len(near.seen.ids)):
                return "continued"
            return "tokens" if near.same_text else "text"
        return near.missing

    @property
    def told(self) -> str:
        """One line."""
        return self.told_of("" if self.nearest is None else self.nearest.seen.request_id)

    def told_of(self, name: str) -> str:
        """One line, with this name for the other request."""
        near, cause = self.nearest, self.cause
        if near is None or cause == "first":
            return "no recent request of this caller begins alike" + (f" for {CHUNK} tokens" if self.cached else "")
        common = f"{near.common:,}"
        if cause == "continued":
            return f"begins like {name}, all of the shorter one's {common} tokens"
        if cause == "text":
            where = "" if near.message is None else f" in message {near.message}"
            wrote = REWRITTEN if self.rewritten else ""
            return f"differs from {name} at token {common}{where}: {near.text!r} here, {near.other_text!r} there{wrote}"
        if cause == "tokens":
            return f"says the same as {name} in other tokens from token {common} on: {SEND_BACK}"
        return f"begins like {name} for {common} tokens, but what lies behind {self.cached:,} {MISSING[cause]}"

    def asdict(self) -> dict[str, Any]:
        """As replies tell it."""
        near = self.nearest
        known = near is not None and self.cause != "first"
        differs = near is not None and self.cause in ("text", "tokens")
        return {
            "cause": self.cause,
            "told": self.told,
            "request_id": near.seen.request_id if near is not None and known else None,
            "common_tokens": near.common if near is not None and known else 0,
            "text": near.text if near is not None and differs else None,
            "other_text": near.other_text if near is not None and differs else None,
            "message": near.message if near is not None and differs else None,
            "replayed": self.replayed,
        }


@dataclass(slots=True)
class RecentRequests:
    """What callers have asked lately, the least recent forgotten first."""

    tokens: int = 0
    _callers: OrderedDict[Hashable, deque[Seen]] = field(default_factory=OrderedDict)

    def nearest(self, caller: Hashable, ids: Ids, salt: str | None) -> Nearest | None:
        """Of equals the latest, one with the same salt before others."""
        best: Nearest | None = None
        for seen in sorted(reversed(self._callers.get(caller, ())), key=lambda seen: seen.salt != salt):
            common = common_tokens(seen.ids, ids)
            if best is None or common > best.common:
                missing: Cause = "salt" if seen.salt != salt else "computing" if seen.running else "evicted"
                best = Nearest(seen, common, missing)
        return best

    def find(self, caller: Hashable, request_id: str) -> Seen | None:
        """The caller's request of that id."""
        return next((seen for seen in self._callers.get(caller, ()) if seen.request_id == request_id), None)

    def add(self, caller: Hashable, request_id: str, salt: str | None, ids: Ids) -> Seen:
        seen = Seen(request_id, salt, ids)
        own = self._callers.setdefault(caller, deque())
        self._callers.move_to_end(caller)
        own.append(seen)
        self.tokens += len(ids)
        if len(own) > MOST_REQUESTS:
            self._forget(own)
        while self.tokens > MOST_TOKENS or len(self._callers) > MOST_CALLERS:
            name, oldest = next(iter(self._callers.items()))
            self._forget(oldest)
            if not oldest:
                del self._callers[name]
        return seen

    def answered(self, caller: Hashable, seen: Seen, answers: Sequence[Sequence[int]]) -> None:
        """The request has ended. answers: the tokens of each."""
        seen.running, seen.answers = False, len(answers)
        answer = answers[0] if len(answers) == 1 else ()
        if any(each is seen for each in self._callers.get(caller, ())):
            seen.ids = np.concatenate((seen.ids, np.array(answer, np.int32)))
            self.tokens += len(answer)

    def _forget(self, own: deque[Seen]) -> None:
        self.tokens -= len(own.popleft().ids)


def common_tokens(one: Ids, other: Ids) -> int:
    """How many tokens both begin with."""
    length = min(len(one), len(other))
    differ = one[:length] != other[:length]
    return int(differ.argmax()) if differ.any() else length


def message_at(messages: Sequence[Mapping[str, Any]], before: str) -> int | None:
    """In which message a prompt goes on behind the text `before`, its beginning; None where that is not to be seen:
    templates may write messages in other words."""
    at = 0
    for number, message in enumerate(messages):
        content = message.get("content")
        if not isinstance(content, str):
            return None
        said = content.strip()  # as most templates do
        found = before.find(said, at)
        if found < 0:
            return number
        at = found + len(said)
    return None


Decode = Callable[[list[int]], str]


def described(
    near: Nearest, ids: Ids, messages: Sequence[Mapping[str, Any]], decode: Decode, least: int = CHUNK
) -> Nearest:
    """With the text behind what both have, where both go on, of prompts that have so many tokens in common at least."""
    at, other = near.common, near.seen.ids
    if at < least or at in (len(ids), len(other)):
        return near
    message = message_at(messages, decode(ids[:at].tolist())) if messages else None
    text, other_text = (decode(tokens[at : at + 1].tolist()) for tokens in (ids, other))
    here, there = (decode(tokens[at : at + ALIKE].tolist()) for tokens in (ids, other))
    length = min(len(here), len(there))
    same = length >= max(len(text), len(other_text)) and here[:length] == there[:length]
    return near._replace(text=text, other_text=other_text, message=message, same_text=same)
