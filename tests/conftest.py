"""Tests are sorted by what they need: unit (no torch), cpu (torch, one process), processes (several), gpu (CUDA).

What several test files share lies in support.
"""

from __future__ import annotations

import os
import ssl
from collections import Counter
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

HERE = Path(__file__).parent
FOLDERS = ("unit", "cpu", "processes", "gpu")

# Their assertions tell values as those of test files do.
pytest.register_assert_rewrite(*(f"tests.support.{path.stem}" for path in HERE.glob("support/*.py")))

# No test fails because the machine is busy.
settings.register_profile("headrace", deadline=None)
settings.load_profile("headrace")

# Idle threads sleep instead of spinning: on a busy machine a spinning team takes the cores from whoever has work.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
# Servers that tests start keep nothing in the user's cache directory; tests of that say otherwise.
os.environ["HEADRACE_KV_OFFLOAD_PATH"] = "none"
# Without a GPU Triton's kernels run in its interpreter, which must be known before Triton is first imported.
if not Path("/dev/nvidiactl").exists():
    os.environ.setdefault("TRITON_INTERPRET", "1")


def _context_of() -> Any:
    """ssl.create_default_context, whose answer for a file of certificates is kept: httpx asks for the system's at each
    client and each request without one, which takes longer than most requests of these tests."""
    made = ssl.create_default_context
    kept = lru_cache(None)(made)
    return lambda *args, **more: kept(**more) if not args and more.keys() == {"cafile"} else made(*args, **more)


ssl.create_default_context = _context_of()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks each test by its folder. Tests of processes come first, since they take longest."""
    begin = len(str(HERE)) + 1
    for item in items:
        folder = str(item.path)[begin:].partition(os.sep)[0]  # relative_to takes a second for all of them
        if folder in FOLDERS:
            item.add_marker(folder)
    items.sort(key=lambda item: item.get_closest_marker("processes") is None)


def pytest_make_parametrize_id(val: Any, argname: str) -> str | None:
    from tests.support.case_ids import case_id

    return case_id(val, argname)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """How many tests of each folder passed: a folder that is not collected is missed by no other figure."""
    outcomes = {name: terminalreporter.stats.get(name, []) for name in ("passed", "failed", "error", "skipped")}
    counts = {name: Counter(report.nodeid.split("/")[1] for report in reports) for name, reports in outcomes.items()}
    for folder in FOLDERS:
        told = ", ".join(f"{count[folder]} {name}" for name, count in counts.items() if count[folder])
        if told:
            terminalreporter.write_line(f"tests/{folder}: {told}")
