"""The file of outcomes that tools.gpu.pytest_outcomes writes: 'outcome name' of each test. Read without pytest."""

from __future__ import annotations

from pathlib import Path

FAILED, LOST = 64, 65
"""Exit status where tests failed, and where the device is lost: pytest's own 1 is that of a process that hung."""


def failures_beside(outcomes: Path) -> Path:
    """The file of what failures say, beside the one of outcomes."""
    return outcomes.with_suffix(".failures.txt")


def outcomes_in(file: Path | None) -> dict[str, str]:
    """The last outcome of each test that a file has."""
    lines = file.read_text().splitlines() if file is not None and file.exists() else []
    return {name: outcome for outcome, _, name in (line.partition(" ") for line in lines)}
