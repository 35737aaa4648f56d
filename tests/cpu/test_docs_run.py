"""The blocks of README and docs/ that are marked `run` do run, on the shipped model."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys

import pytest

from tests.support.docs_pages import ALL_BLOCKS, SHOWN, Block

pytestmark = pytest.mark.cpu

RUN = [block for block in ALL_BLOCKS if block.runs]

ALL = """
import contextlib, io, json, sys, traceback
for script, goes_on in json.loads(sys.argv[1]):
    out, error = io.StringIO(), ""
    names = names if goes_on else {"__name__": "__main__"}
    with contextlib.redirect_stdout(out):
        try:
            exec(compile(open(script).read(), script, "exec"), names)
        except BaseException:
            error = traceback.format_exc()
    print(json.dumps([out.getvalue(), error]), flush=True)
"""


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> dict[Block, tuple[str, str]]:
    """What each printed, and how it failed. One process runs them all, which has to import torch but once."""
    folder = tmp_path_factory.mktemp("blocks")
    scripts = [folder / f"block{number}.py" for number in range(len(RUN))]
    for script, block in zip(scripts, RUN, strict=True):
        script.write_text(block.text)
    done = subprocess.run(
        [sys.executable, "-c", ALL, json.dumps([(str(s), b.goes_on) for s, b in zip(scripts, RUN, strict=True)])],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=240,
        env={**os.environ, "HEADRACE_KV_CACHE_TOKENS": "4096", "HEADRACE_THREADS": "1"},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    told = [json.loads(line) for line in done.stdout.splitlines()]
    return {block: (out, error) for block, (out, error) in zip(RUN, told, strict=True)}


@pytest.mark.parametrize("block", RUN, ids=str)
def test_block_runs(block: Block, ran: dict[Block, tuple[str, str]]) -> None:
    assert block.language == "python", "only Python is run here"
    out, error = ran[block]
    assert not error and out.strip(), error
    if block in SHOWN:
        assert out == SHOWN[block]
    elif "code of Lisbon" in block.text:
        assert "4821" in out and "9035" in out


def test_some_run() -> None:
    assert len(RUN) >= 8
    assert SHOWN.keys() <= set(RUN)


def test_readme_shows_a_shared_prefix() -> None:
    shown = [text for block, text in SHOWN.items() if block.page == "README.md"]
    assert [int(number) for number in re.findall(r"(\d+) of \d+ prompt tokens were cached", shown[0])] == [0, 299]
