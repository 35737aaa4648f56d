"""Ranks as threads on a device that is none (tests.support.fake_device), the Triton kernels in their interpreter."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from triton.runtime import interpreter

from headrace import device
from headrace.device import Device


@contextmanager
def ranks_on(made: Device, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Threads may launch kernels on the device: the interpreter takes one launch at a time."""
    launch, lock = interpreter.GridExecutor.__call__, threading.RLock()

    def alone(self: Any, *args: Any, **more: Any) -> Any:
        with lock:
            return launch(self, *args, **more)

    monkeypatch.setattr(interpreter.GridExecutor, "__call__", alone)
    with device.use(made):
        yield
