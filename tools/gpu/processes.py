"""Processes that a check starts: none outlives it and keeps the device from what comes next."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from typing import Any


def end_by_signal() -> None:
    """SIGTERM, by which `timeout` ends a command, raises SystemExit here: what ends the processes runs."""
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))


def started(command: Sequence[str], **given: Any) -> subprocess.Popen[Any]:
    """A process with all that it will start in one group. Of a session of its own it would be left running where the
    whole session of this one is ended at once."""
    return subprocess.Popen(command, process_group=0, **given)


def ended(process: subprocess.Popen[Any]) -> int:
    """Ends a process of `started` and what it has started, if any of them runs. Returns its exit status."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    return process.wait()
