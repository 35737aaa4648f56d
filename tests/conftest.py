"""Tests are sorted by what they need: unit (no torch), cpu (torch, one process), processes (several), gpu (CUDA)."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

# Idle threads sleep instead of spinning: on a busy machine a spinning team takes the cores from whoever has work.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
# Without a GPU Triton's kernels run in its interpreter, which must be known before Triton is first imported.
if not Path("/dev/nvidiactl").exists():
    os.environ.setdefault("TRITON_INTERPRET", "1")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks each test by its folder."""
    here = Path(__file__).parent
    for item in items:
        folder = item.path.relative_to(here).parts[0]
        if folder in ("unit", "cpu", "processes", "gpu"):
            item.add_marker(folder)
