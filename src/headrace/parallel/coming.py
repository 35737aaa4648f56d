"""Chunks that are still on their way into a rank's own pool: what a group waits for, and sends on when it is there.

Strategies see cached chunks of their rank; whether these lie in the pool or are being loaded from a tier is told here.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

from headrace.parallel.transport import Transfer


class PendingLayer(Protocol):
    """One layer of some chunks, on its way. error: why it will not come, as far as is known."""

    @property
    def error(self) -> BaseException | None: ...

    def wait(self) -> None:
        """Raises the error."""

    def then(self, call: Callable[[], None]) -> None:
        """Runs `call` as soon as it is there, on whichever thread; at once where it is."""


class Coming(Protocol):
    def pending(self, slots: Iterable[int], layer: int) -> Sequence[PendingLayer]:
        """What is to be waited for before this layer of these slots of the rank's pool may be read."""


class NothingComes(Coming):
    """All cached chunks lie in the pool."""

    def pending(self, slots: Iterable[int], layer: int) -> Sequence[PendingLayer]:
        return ()


class Loading:
    """A Transfer: cached chunks of this rank that go into a workspace once they are there, and from it to others.

    bring(): copies them from the pool.
    """

    def __init__(self, parts: Sequence[PendingLayer], bring: Callable[[], None]) -> None:
        self._bring, self._parts, self._left = bring, parts, len(parts)
        self._lock = threading.Lock()
        self._here = threading.Event()
        self._error: BaseException | None = None
        self._after: list[Callable[[], list[Transfer]]] = []
        self._sends: list[Transfer] = []
        for part in parts:
            part.then(self._one)

    def then(self, send: Callable[[], list[Transfer]]) -> None:
        """Has them sent when they are there; never if they cannot come, of which `wait` tells."""
        with self._lock:
            if not self._here.is_set():
                self._after.append(send)
                return
        if self._error is None:
            self._sends += send()

    @property
    def done(self) -> bool:
        """Raises as `wait` does."""
        here = self._here.is_set()
        if here:
            self.wait()
        return here

    def wait(self) -> None:
        """Raises what a send raised, RankLost, or why the chunks do not come."""
        self._here.wait()
        if self._error is not None:
            raise self._error

    def drain(self) -> None:
        self.wait()
        for send in self._sends:
            send.drain()

    def _one(self) -> None:
        with self._lock:
            self._left -= 1
            if self._left:
                return
        with self._lock:
            try:
                for error in filter(None, (part.error for part in self._parts)):
                    raise error
                self._bring()
                for send in self._after:
                    self._sends += send()
            except BaseException as error:  # whoever waits for the chunks gets it
                self._error = error
            self._here.set()
