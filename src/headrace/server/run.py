"""A job under way in the engine: from its queue to the one account that is given of it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable

from headrace.server.errors import ClientGone
from headrace.server.job import Event, Job, aclose, cancel
from headrace.server.state import CLIENT_GONE, REFUSED, ServerState
from headrace.types import InvalidRequest, Overloaded


class JobRun:
    """Starts the job. `end` must follow, however the job went."""

    def __init__(self, state: ServerState, job: Job) -> None:
        self.job, self.engine = job, state.engine
        self._state = state
        self.rest = job.events(self.engine, state.metrics.note_peak)
        self._first = asyncio.ensure_future(_next(self.rest))
        self._pinning: asyncio.Future[None] | None = None
        self._ended = False

    async def queued(self) -> None:
        """Returns once the job waits for its turn. Raises what the engine refuses it with before that."""
        waiting = asyncio.ensure_future(self.job.queued.wait())
        await asyncio.wait((self._first, waiting), return_when=asyncio.FIRST_COMPLETED)
        await cancel(waiting)
        if self._first.done():
            self._first.result()
        if any(asked.id for asked in self.job.prompts[0].pins):  # its chunks are held as they are computed
            self._pin()

    async def first(self) -> Event | None:
        """The first event; `rest` has the others. Giving up the wait leaves the engine at work until `end`."""
        event = await asyncio.shield(self._first)
        if self.job.prompts[0].pins:  # which is in the cache now
            self._pin()
        return event

    def _pin(self) -> None:
        if self._pinning is None:
            self._pinning = asyncio.ensure_future(self._state.prompt_pins.take(self.engine, self.job))

    async def pinned(self) -> None:
        """Waits for what the job asks to stay in the cache. Raises InvalidRequest where it must, and cannot."""
        if self._pinning is not None:
            await self._pinning

    async def drain(self, take: Callable[[Event], None]) -> None:
        """Hands on all events, until the end of the job. Raises InvalidRequest as `pinned` does, at once."""
        if self._pinning is not None:
            await asyncio.wait((self._first, self._pinning), return_when=asyncio.FIRST_COMPLETED)
            if self._pinning.done():
                self._pinning.result()
        if (first := await self.first()) is not None:
            take(first)
        async for event in self.rest:
            take(event)
        await self.pinned()

    @property
    def reading(self) -> bool:
        """Whether the engine computes a prompt of which no answer has begun."""
        own = {self.job.prompt_id(p) for p in range(len(self.job.prompts))}
        return any(each.request_id in own for each in self.engine.prefills)

    async def end(self, outcome: str) -> None:
        """Aborts what still runs, and gives account. A client that has left (CLIENT_GONE) may leave its prefill to go
        on. Without effect if it has ended already."""
        if self._ended:
            return
        self._ended = True
        if outcome != CLIENT_GONE or not self._state.abandoned.take(self):
            await self.close(outcome)

    async def close(self, outcome: str) -> None:
        """`end` for good."""
        await cancel(self._first, *([self._pinning] if self._pinning is not None else []))
        await aclose(self.rest)
        self._state.finish(self.job, outcome)


def outcome_of(error: BaseException) -> str:
    """How a job ended that ended by this."""
    if isinstance(error, Overloaded | InvalidRequest):
        return REFUSED
    return CLIENT_GONE if isinstance(error, ClientGone) else f"failed ({type(error).__name__})"


async def _next(events: AsyncIterator[Event]) -> Event | None:
    return await anext(events, None)
