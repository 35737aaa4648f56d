"""Process groups of NCCL, each a direction between two ranks: how torch treats them, and how they are given up.

What waits for a rank that is gone never ends by itself: its kernel holds up the streams behind it, and the host that
waits for those. To abort a communicator ends its kernels (ncclCommAbort). Abort then frees memory, for which the driver
waits for the whole device, so also for kernels of other communicators that wait for the same rank: all are aborted at
the same time (pytorch issue 119797, NVIDIA/nccl issue 1013). torch waits for an abort as long as the group's timeout.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch.distributed as dist

SETTINGS = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    "TORCH_NCCL_RETHROW_CUDA_ERRORS": "0",
    "TORCH_NCCL_ENABLE_MONITORING": "0",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
    "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "0",
}
"""torch's own watchdog would end the process after an error of NCCL, which may be a user's: the supervisor sees to lost
ranks here. The last two: nor does it poll the store for others' errors, or sleep after one, for which `close` waits."""

MOST_CTAS = 16
"""Of a direction: more carry no more over one link."""


def ask_for_no_watchdog() -> None:
    """Has groups that are made from now on leave errors to their owner. What the environment says holds."""
    for name, value in SETTINGS.items():
        os.environ.setdefault(name, value)


def nccl_options(ctas: int, timeout: timedelta) -> Any:
    """Of a group: so many processors of the device at most, before what computes on them. Its stream is one of high
    priority, of which torch has as many again."""
    made = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
    made._timeout = timeout
    made.config.max_ctas = ctas
    return made


class NcclGroups:
    """Those that this rank has an end of. Calls may come from several threads."""

    def __init__(self) -> None:
        self._groups: list[Any] = []
        self._aborts: list[threading.Thread] = []
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._groups)

    def add(self, group: Any) -> None:
        self._groups.append(group)

    def abort(self) -> None:
        """Begins to give all of them up, and what waits in them, and returns. May be called again."""
        with self._lock:
            self._aborts += [_begun(group.abort) for group in self._groups[len(self._aborts) :]]

    def aborted(self, seconds: float) -> bool:
        """Waits for the aborts that have begun, if any; whether they ended in that time."""
        end = time.monotonic() + seconds
        for thread in self._aborts:
            thread.join(max(0.0, end - time.monotonic()))
        return not any(thread.is_alive() for thread in self._aborts)

    def keep(self) -> None:
        """Has them outlive the interpreter: where an abort does not end, their destructors would wait for it."""
        for group in self._groups:
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))


def ends(call: Callable[[], object], seconds: float) -> bool:
    """Whether call(), on a thread of its own, ends in that time. A thread that does not is a daemon, left in torch."""
    thread = _begun(call)
    thread.join(seconds)
    return not thread.is_alive()


def _begun(call: Callable[[], object]) -> threading.Thread:
    def run() -> None:
        with contextlib.suppress(RuntimeError):  # torch's: a communicator that has failed before
            call()

    thread = threading.Thread(target=run, name="headrace-abort", daemon=True)
    thread.start()
    return thread
