"""Chunks that are still on their way into a rank's own pool: what a step waits for, and sends on when it is there.

Strategies see cached chunks of their rank; whether these lie in the pool, are loaded from a tier or are projected is
told here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

import torch
from torch import Tensor

from headrace.arrival import Arrival
from headrace.config import AttentionSpec
from headrace.device import Device
from headrace.kernels.backend import Attend
from headrace.kernels.indexer import IndexQueries


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
        self._wait(layer)
        return self.attend(layer, q, k, v, rows)

    def sparse(
        self,
        layer: int,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        index: IndexQueries | None,
        rows: Tensor | None = None,
    ) -> Tensor:
        self._wait(layer)
        return self.attend.sparse(layer, q, k, v, index, rows)

    def _wait(self, layer: int) -> None:
        for each in self.coming.pending(self.slots, self.spec.source(layer)):
            each.wait()


class SideStream:
    """A stream of a device on which a rank copies what has come, and sends it on, beside the one that computes."""

    def __init__(self, device: Device) -> None:
        self.device, self.stream = device, device.stream()


class CachedPiece(Arrival):
    """Cached chunks of this rank on their way into a workspace, from which they go on to others: see `then`.

    parts: what must have come before. copy(): takes them from the pool. side: of a pool on a device, where the host
    waits for nothing but that the parts were handed over to streams: the copy follows them there, and the memory's last
    use before this was made; what is sent on follows the copy.
    """

    __slots__ = ("_copy", "_left", "_over", "_parts", "_ready", "_side")

    def __init__(self, parts: Sequence[Arrival], copy: Callable[[], None], side: SideStream | None = None) -> None:
        super().__init__()
        self._copy, self._parts, self._left, self._side = copy, parts, len(parts), side
        if side is not None:
            self._ready, self._over = side.device.current_stream().record_event(), side.device.event()
        for part in parts:
            part.handed.then(self._one)

    def then(self, call: Callable[[], None]) -> None:
        """As Arrival.then, but never for what cannot come, of which `wait` tells. On a device the side stream is the
        current one of the call."""

        def if_here() -> None:
            if self.error is None:
                with self._beside():
                    call()

        super().then(if_here)

    @property
    def done(self) -> bool:
        """Raises as `wait` does."""
        here = super().done
        if here:
            self._raise()
        return here and (self._side is None or self._over.query())

    def wait(self) -> None:
        """Raises why the chunks do not come, or what a call given to `then` raised: RankLost."""
        for part in self._parts:
            part.wait()
        self._ended.wait()
        self._raise()
        if self._side is not None:
            self._side.device.current_stream().wait_event(self._over)

    drain = wait

    def _raise(self) -> None:
        error = next((each.error for each in (*self._parts, self) if each.error is not None), None)
        if error is not None:
            raise error

    def _beside(self) -> AbstractContextManager[object]:
        return nullcontext() if self._side is None else self._side.device.on(self._side.stream)

    def _one(self) -> None:
        with self._lock:
            self._left -= 1
            if self._left:
                return
        error = next((part.error for part in self._parts if part.error is not None), None)
        try:
            if error is None:
                self._take()
        except BaseException as raised:  # whoever waits for the chunks gets it
            error = raised
        self.end(error)

    def _take(self) -> None:
        if self._side is None:
            self._copy()
            return
        stream = self._side.stream
        with torch.inference_mode(), self._beside():
            stream.wait_event(self._ready)
            for part in self._parts:
                part.follow()
            self._copy()
            self._over.record(stream)
