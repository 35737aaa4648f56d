"""The blocks of README and docs/ that are marked `run` do run, on the shipped model."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.unit.docs_pages import ALL_BLOCKS, Block

pytestmark = pytest.mark.cpu

RUN = [block for block in ALL_BLOCKS if block.runs]


@pytest.mark.parametrize("block", RUN, ids=str)
def test_block_runs(block: Block, tmp_path: Path) -> None:
    assert block.language == "python", "only Python is run here"
    script = tmp_path / "block.py"
    script.write_text(block.text)
    done = subprocess.run(
        [sys.executable, str(script)],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "HEADRACE_KV_CACHE_TOKENS": "4096", "HEADRACE_THREADS": "1"},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()
    if "code of Lisbon" in block.text:
        assert "4821" in done.stdout and "9035" in done.stdout


def test_some_run() -> None:
    assert len(RUN) >= 3
