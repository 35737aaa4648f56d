"""The examples of docs/ that are marked `served` do run, against a server on the shipped model, or on
one with a classifier's head."""

from __future__ import annotations

import contextlib
import io
import subprocess
import traceback
from collections.abc import Iterator
from pathlib import Path

import pytest

from headrace import assets
from tests.support.classifiers import classifier
from tests.support.docs_pages import ALL_BLOCKS, Block
from tests.support.server_process import ServerProcess, process

SERVED = [block for block in ALL_BLOCKS if block.served]
URL = "http://127.0.0.1:8000"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    folder = tmp_path_factory.mktemp("served")
    with process(folder, "--sessions-dir", str(folder / "sessions")) as started:
        started.wait_ready()
        yield started


@pytest.fixture(scope="module")
def reranker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    folder = tmp_path_factory.mktemp("reranker")
    model = classifier(Path(assets.__file__).parent / "tiny", folder / "model", 1)
    with process(folder, "--served-model-name", "reranker", model=str(model)) as started:
        started.wait_ready()
        yield started


FAILING = 'curl() { command curl --fail-with-body "$@"; }\n'
"""A status of 400 and more ends the example."""


def shell(text: str) -> str:
    done = subprocess.run(["bash", "-euc", FAILING + text], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def python(text: str, name: str) -> str:
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        try:
            exec(compile(text, name, "exec"), {"__name__": "__main__"})
        except BaseException:
            pytest.fail(traceback.format_exc())
    return out.getvalue()


@pytest.mark.parametrize("block", SERVED, ids=str)
def test_example_runs(block: Block, request: pytest.FixtureRequest) -> None:
    server: ServerProcess = request.getfixturevalue("reranker" if block.classified else "server")
    text = block.text.replace(URL, server.url)
    assert text != block.text, f"an example asks {URL}"
    told = shell(text) if block.language == "bash" else python(text, str(block))
    assert told.strip()


def test_every_route_has_both_examples() -> None:
    by_page: dict[str, set[str]] = {}
    for block in SERVED:
        by_page.setdefault(Path(block.page).name, set()).add(block.language)
    pages = {path.name for path in Path(__file__).parents[2].glob("docs/api/*.md")} - {"common.md"}
    assert [page for page in pages if by_page.get(page) != {"bash", "python"}] == []
