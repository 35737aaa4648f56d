"""Answers of an engine process on their way to whoever iterates over them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from headrace.types import Delta, InvalidRequest, Overloaded

Item = Delta | Exception
Stream = asyncio.Queue[Item]

MOST_UNREAD = 1 << 18
"""Items of all requests that wait for whoever iterates; with 20 logprobs each takes some 4.5 KB."""


class AnswerStreams:
    """By request id. abort: ends a request in the engine."""

    def __init__(self, abort: Callable[[str], None]) -> None:
        self._abort = abort
        self._open: dict[str, Stream] = {}

    def __contains__(self, name: str) -> bool:
        return name in self._open

    def open(self, name: str) -> Stream:
        stream = self._open[name] = asyncio.Queue()
        return stream

    def check_free(self, name: str) -> None:
        """Raises InvalidRequest for an id in use."""
        if name in self._open:
            raise InvalidRequest(f"request id {name!r} is in use", "request_id")

    def close(self, name: str, stream: Stream) -> bool:
        """Whether it was open: one that was ended unread is not, and its id may be another's by now."""
        if self._open.get(name) is not stream:
            return False
        del self._open[name]
        return True

    def put(self, name: str, item: Item) -> None:
        """Without effect for one that is not open."""
        if name in self._open:
            self._open[name].put_nowait(item)

    def fail(self, error: Exception) -> None:
        """The last item of all."""
        for stream in self._open.values():
            stream.put_nowait(error)

    def bound(self) -> None:
        """Where more than MOST_UNREAD items wait, ends the request of which most do: nobody reads its answer, or a
        client that takes next to nothing."""
        if sum(stream.qsize() for stream in self._open.values()) <= MOST_UNREAD:
            return
        name, unread = max(self._open.items(), key=lambda each: each[1].qsize())
        told = f"{unread.qsize():,} steps of this answer were not read, and those of all requests take too much memory"
        while not unread.empty():
            unread.get_nowait()
        unread.put_nowait(Overloaded(told, 1.0))
        del self._open[name]
        self._abort(name)
