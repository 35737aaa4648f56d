"""Chunks that are still on their way into a rank's own pool: what a step waits for, and sends on when it is there.

Strategies see cached chunks of their rank; whether these lie in the pool, are loaded from a tier or are projected is
told here.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

from torch import Tensor

from headrace.arrival import Arrival
from headrace.kernels.backend import Attend
from headrace.parallel.transport import Transfer


class Coming(Protocol):
    """Chunks on their way into a pool, from wherever."""

    def __bool__(self) -> bool:
        """Whether there are any."""

    def pending(self, slots: Iterable[int], layer: int) -> Sequence[Arrival]:
        """What is to be waited for, in this order and by the thread that computes, before this layer of these slots may
        be read."""


class NothingComes(Coming):
    """All cached chunks lie in the pool."""

    def __bool__(self) -> bool:
        return False

    def pending(self, slots: Iterable[int], layer: int) -> Sequence[Arrival]:
        return ()


class WaitingAttend(Attend):
    """Attention over a pool, some of whose chunks, in these slots, are still on their way."""

    def __init__(self, attend: Attend, coming: Coming, slots: Sequence[int]) -> None:
        self.attend, self.coming, self.slots = attend, coming, slots

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor, rows: Tensor | None = None) -> Tensor:
        for each in self.coming.pending(self.slots, layer):
            each.wait()
        return self.attend(layer, q, k, v, rows)


class Loading:
    """A Transfer: cached chunks of this rank that go into a workspace once they are there, and from it to others.

    bring(): copies them from the pool.
    """

    def __init__(self, parts: Sequence[Arrival], bring: Callable[[], None]) -> None:
        self._bring, self._parts, self._left = bring, parts, len(parts)
        self._lock = threading.Lock()
        self._here = threading.Event()
        self._error: BaseException | None = None
        self._after: list[Callable[[], list[Transfer]]] = []
        self._sends: list[Transfer] = []
        for part in parts:
            part.then(self._one)

    def then(self, send: Callable[[], list[Transfer]]) -> None:
        """Has them sent when they are there."""
        with self._lock:
            if not self._here.is_set():
                self._after.append(send)
                return
        self._sends += send()

    @property
    def done(self) -> bool:
        return self._here.is_set()

    def wait(self) -> None:
        """Raises what a send raised: RankLost."""
        for part in self._parts:
            part.wait()
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
                self._bring()
                for send in self._after:
                    self._sends += send()
            except BaseException as error:  # whoever waits for the chunks gets it
                self._error = error
            self._here.set()
