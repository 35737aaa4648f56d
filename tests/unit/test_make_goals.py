"""Goals of one call of make share one installation, also where they run at the same time (make -j)."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

pytestmark = [
    pytest.mark.unit,
    pytest.mark.skipif(shutil.which("make") is None, reason="no make on the PATH"),
]

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("goals", "extras"),
    [
        ("demo", "--extra demo"),
        ("demo test", "--extra dev --isas runnable"),
        ("lint demo", "--extra dev --isas runnable"),
        ("demo test docs", "--extra dev --extra docs --extra ray --isas all"),
    ],
)
def test_one_call_installs_once(goals: str, extras: str, tmp_path: Path) -> None:
    told = ["make", "--dry-run", "--jobs=2", f"VENV={tmp_path / 'venv'}", *goals.split()]
    env = {name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "MFLAGS"))}
    done = subprocess.run(told, cwd=ROOT, env=env, capture_output=True, text=True, check=True)
    installs = [line for line in done.stdout.splitlines() if "tools/install.py" in line]
    assert [line.partition("tools/install.py ")[2] for line in installs] == [extras]
