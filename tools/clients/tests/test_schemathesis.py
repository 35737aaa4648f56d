"""Schemathesis: requests made from /openapi.json, right and wrong ones, to every route. None is a fault of the server,
and none hangs. SCHEMATHESIS_SECONDS (60) and SCHEMATHESIS_SEED (1) for a longer run or another one."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tools.clients.servers import Server, start

SECONDS = int(os.environ.get("SCHEMATHESIS_SECONDS", "60"))
SEED = os.environ.get("SCHEMATHESIS_SEED", "1")
ANSWER_S = 60
CHECKS = "not_a_server_error,status_code_conformance,content_type_conformance"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Of its own: answers are short, since requests without a limit are answered up to the end of the context."""
    started = start(tmp_path_factory.mktemp("schemathesis"), "real", "--max-model-len", "512")
    try:
        yield started.wait()
    finally:
        code = started.stop()
    assert code == 0, started.log.read_text()[-3000:]


@pytest.mark.timeout(SECONDS + 5 * ANSWER_S)
def test_schemathesis(server: Server, tmp_path: Path) -> None:
    command = [
        Path(sys.executable).with_name("st"), "run", f"{server.url}/openapi.json", "--url", server.url,
        "--checks", CHECKS, "--mode", "all", "--phases", "examples,coverage,fuzzing", "--seed", SEED,
        "--max-time", SECONDS, "--request-timeout", ANSWER_S, "--max-failures", 10, "--continue-on-failure",
        "--suppress-health-check", "all", "--generation-database", "none", "--warnings", "off", "--no-color",
    ]  # fmt: skip
    done = subprocess.run([str(word) for word in command], cwd=tmp_path, capture_output=True, text=True)
    print(done.stdout)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]


def test_the_server_goes_on_and_holds_nothing(server: Server) -> None:
    """After the requests above."""
    assert server.healthy()
    page = httpx.get(server.url + "/metrics").text
    held = [line for line in page.splitlines() if line.startswith(("headrace:kv_chunks_used{", "headrace:num_req"))]
    assert held and all(float(line.rsplit(" ", 1)[1]) == 0 for line in held), held


def test_the_document_has_all_routes(server: Server) -> None:
    paths = set(httpx.get(server.url + "/openapi.json").json()["paths"])
    routes = "chat/completions completions responses messages messages/count_tokens embeddings score models"
    wanted = routes.split()
    assert {f"/v1/{path}" for path in wanted} | {"/tokenize", "/detokenize", "/health", "/metrics"} <= paths
