"""Calls to an engine process that wait for their answers."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable

from headrace.engine.calls import Answer, EngineCall
from headrace.engine.messages import Call, CallAnswer
from headrace.errors import EngineDead


class PendingCalls:
    """send: hands a message to the engine."""

    def __init__(self, send: Callable[[Call], None]) -> None:
        self._send = send
        self._numbers = itertools.count()
        self._waiting: dict[int, asyncio.Future[Answer]] = {}

    async def ask(self, call: EngineCall) -> Answer:
        """The answer. Raises InvalidRequest for what cannot be, EngineDead."""
        number, waiting = next(self._numbers), asyncio.get_running_loop().create_future()
        self._waiting[number] = waiting
        self._send(Call(number, call))
        try:
            return await waiting
        finally:
            self._waiting.pop(number, None)

    def take(self, message: CallAnswer) -> None:
        """Hands an answer to whoever asked, unless they have left."""
        waiting, refused = self._waiting.get(message.number), message.refused
        if waiting is None or waiting.done():
            return
        if refused is None:
            waiting.set_result(message.answer)
        else:
            waiting.set_exception(refused.error)

    def fail(self, reason: str) -> None:
        """There will be no answers any more."""
        for waiting in self._waiting.values():
            if not waiting.done():
                waiting.set_exception(EngineDead(reason))
