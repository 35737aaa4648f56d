"""Chunks that are still on their way into a rank's own pool: what a step waits for, and sends on when it is there.

Strategies see cached chunks of their rank; whether these lie in the pool, are loaded from a tier or are projected is
told here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

from torch import Tensor

from headrace.arrival import Arrival
from headrace.config import AttentionSpec
from headrace.kernels.backend import Attend


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


NOTHING = NothingComes()


def wait_for_all(coming: Coming, slots: Sequence[int], spec: AttentionSpec) -> None:
    """Waits for all layers of what is on its way into these slots, the first layer first. On a GPU the current stream
    waits, and the host for little more than that the transfers are handed over."""
    for layer in range(spec.layers):
        for each in coming.pending(slots, spec.source(layer)):
            each.wait()


class WaitingAttend(Attend):
    """Attention over a pool, some of whose chunks, in these slots, are still on their way."""

    def __init__(self, attend: Attend, coming: Coming, slots: Sequence[int], spec: AttentionSpec) -> None:
        self.attend, self.coming, self.slots, self.spec = attend, coming, slots, spec

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor, rows: Tensor | None = None) -> Tensor:
        for each in self.coming.pending(self.slots, self.spec.source(layer)):
            each.wait()
        return self.attend(layer, q, k, v, rows)


class CachedPiece(Arrival):
    """Cached chunks of this rank on their way into a workspace, from which they go on to others: see `then`.

    parts: what must have come before. copy(): takes them from the pool.
    """

    __slots__ = ("_copy", "_left", "_parts")

    def __init__(self, parts: Sequence[Arrival], copy: Callable[[], None]) -> None:
        super().__init__()
        self._copy, self._parts, self._left = copy, parts, len(parts)
        for part in parts:
            part.then(self._one)

    def then(self, call: Callable[[], None]) -> None:
        """As Arrival.then, but never for what cannot come, of which `wait` tells."""

        def if_here() -> None:
            if self.error is None:
                call()

        super().then(if_here)

    @property
    def done(self) -> bool:
        """Raises as `wait` does."""
        here = super().done
        if here:
            self.wait()
        return here

    def wait(self) -> None:
        """Raises why the chunks do not come, or what a call given to `then` raised: RankLost."""
        for part in self._parts:
            part.wait()
        super().wait()

    drain = wait

    def _one(self) -> None:
        with self._lock:
            self._left -= 1
            if self._left:
                return
        error = next((part.error for part in self._parts if part.error is not None), None)
        try:
            if error is None:
                self._copy()
        except BaseException as raised:  # whoever waits for the chunks gets it
            error = raised
        self.end(error)
