"""How calls are answered, by the thread that steps: those that take long a piece between any two steps."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator
from typing import Any, NamedTuple

from headrace.engine.cache_tree import tree_page
from headrace.engine.calls import (
    Answer,
    EngineCall,
    ListPrefixes,
    PinPrefix,
    Refused,
    ReleasePrefix,
    ResetPrefixCache,
    TreePage,
)
from headrace.engine.core import EngineCore
from headrace.engine.pin_handlers import list_prefixes, pin_prefix, release_prefix
from headrace.engine.session_calls import SESSION_HANDLERS
from headrace.types import InvalidRequest

Pieces = Generator[None, None, Answer]
"""What takes longer than about a millisecond gives way to a step at each `yield`, and returns the answer."""

Handler = Callable[[EngineCore, Any], Answer | Pieces]
"""Raises InvalidRequest for what cannot be."""


def reset_prefix_cache(core: EngineCore, call: ResetPrefixCache) -> Answer:
    before = len(core.cache.tree.nodes)
    core.cache.tree.clear()
    return before - len(core.cache.tree.nodes)


HANDLERS: dict[type, Handler] = {
    ResetPrefixCache: reset_prefix_cache,
    TreePage: tree_page,
    PinPrefix: pin_prefix,
    ReleasePrefix: release_prefix,
    ListPrefixes: list_prefixes,
    **SESSION_HANDLERS,
}


class Answered(NamedTuple):
    """number: of the call."""

    number: int
    answer: Answer = None
    refused: Refused | None = None


class CallHandlers:
    """The calls of one engine that are under way; they take turns, since one may wait for a request to end."""

    def __init__(self, core: EngineCore) -> None:
        self._core = core
        self._under_way: deque[tuple[int, Pieces]] = deque()

    @property
    def pending(self) -> bool:
        return bool(self._under_way)

    def begin(self, number: int, call: EngineCall) -> list[Answered]:
        """Takes a call in; its answer, if it has one at once."""
        try:
            answer = HANDLERS[type(call)](self._core, call)
        except InvalidRequest as error:
            return [_refusal(number, error)]
        if not isinstance(answer, Generator):
            return [Answered(number, answer)]
        self._under_way.append((number, answer))
        return []

    def advance(self) -> list[Answered]:
        """Computes one piece of the call whose turn it is; its answer, if that was the last one."""
        if not self._under_way:
            return []
        number, pieces = self._under_way.popleft()
        try:
            next(pieces)
        except StopIteration as end:
            answered = Answered(number, end.value)
        except InvalidRequest as error:
            answered = _refusal(number, error)
        else:
            self._under_way.append((number, pieces))
            return []
        return [answered]

    def ask(self, call: EngineCall) -> Answer:
        """The answer to a call, for whoever steps the engine itself; raises InvalidRequest. Calls that were begun
        before are answered to nobody."""
        answers = self.begin(-1, call)
        while not answers or answers[0].number != -1:
            answers = self.advance()
        if (refused := answers[0].refused) is not None:
            raise refused.error
        return answers[0].answer


def _refusal(number: int, error: InvalidRequest) -> Answered:
    return Answered(number, refused=Refused.by(error))
