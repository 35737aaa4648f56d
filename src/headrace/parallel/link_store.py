"""The store in which ranks leave their addresses for torch, kept by the driver and reached over the control links.

torch's own TCPStore would listen on a port where anybody may read, change and delete what the ranks leave, and fill the
driver's memory, for as long as the ranks run. This one has no port: who asks has proved to know the secret.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from datetime import timedelta

import torch.distributed as dist

from headrace.logs import shown
from headrace.parallel.control import FORM_S, StoreAdd, StoreAsk, StoreGet, StoreSet, StoreValue

MOST_KEYS = 1 << 14
MOST_KEY = 512
"""Characters."""
MOST_VALUE = 1 << 20
MOST_TOTAL = 64 << 20
"""Bytes of all values."""
Ask = Callable[[StoreAsk], StoreValue]


class StoreValues:
    """What the driver holds. May be asked by several threads."""

    def __init__(self) -> None:
        self._values: dict[str, bytes] = {}
        self._total = 0
        self._lock = threading.Lock()

    def answer(self, ask: StoreAsk) -> StoreValue:
        """Raises ValueError beyond the bounds, and for a sum with what is no number; nothing has changed then."""
        with self._lock:
            if isinstance(ask, StoreSet):
                self._keep(ask.key, ask.value)
            elif isinstance(ask, StoreAdd):
                self._keep(ask.key, b"%d" % (_number(self._values.get(ask.key, b"0")) + ask.amount))
            return StoreValue(self._values.get(ask.key))

    def _keep(self, key: str, value: bytes) -> None:
        total = self._total + len(value) - len(self._values.get(key, b""))
        if len(key) > MOST_KEY or len(value) > MOST_VALUE or total > MOST_TOTAL:
            raise ValueError(f"the ranks' store has no room for {len(value)} bytes as {shown(key)}")
        if key not in self._values and len(self._values) >= MOST_KEYS:
            raise ValueError(f"the ranks' store has {MOST_KEYS} keys and takes no more")
        self._values[key], self._total = value, total


def _number(value: bytes) -> int:
    if len(value) > 20:
        raise ValueError("the ranks' store adds to no value of more than 20 digits")
    return int(value)


class LinkStore(dist.Store):
    """torch's view of the driver's values: all that process groups of gloo and NCCL use.

    To be kept for as long as a process group that was made with it. left: the values that this rank has set.
    """

    def __init__(self, ask: Ask) -> None:
        super().__init__()
        self._ask = ask
        self.left: list[bytes] = []

    def set(self, key: str, value: str | bytes) -> None:
        value = value.encode() if isinstance(value, str) else bytes(value)
        self.left.append(value)
        self._ask(StoreSet(key, value))

    def get(self, key: str) -> bytes:
        """Waits for the value, FORM_S at most. Raises TimeoutError."""
        end, pause = time.monotonic() + FORM_S, 0.001
        while (value := self._ask(StoreGet(key)).value) is None:
            if time.monotonic() > end:
                raise TimeoutError(f"no rank left {key} in the store within {FORM_S:g} s")
            time.sleep(pause)
            pause = min(0.05, 1.5 * pause)
        return value

    def add(self, key: str, amount: int) -> int:
        return int(self._ask(StoreAdd(key, amount)).value or b"0")

    def check(self, keys: list[str]) -> bool:
        return all(self._ask(StoreGet(key)).value is not None for key in keys)

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        for key in keys:
            self.get(key)

    def set_timeout(self, timeout: timedelta) -> None:
        """Without effect: FORM_S holds."""
