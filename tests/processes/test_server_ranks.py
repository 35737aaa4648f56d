"""The server over several ranks: the answers of one, and what happens when a rank is killed or hangs."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from typing import Any

import httpx
import psutil
import pytest

from headrace import LLM
from tests.support.fake_server import check_refusal, until
from tests.support.rank_answers import CHAIN, LONG, answers
from tests.support.rank_groups import runs
from tests.support.server_process import TEXT, ServerProcess, process, text

PROMISED_S = 10
"""Requests under way end with an error within this time of a failure."""
FAST = ("--rank-timeout-s", "2", "--engine-timeout-s", "2")


class UnderWay:
    """A request on a thread, and how it ended."""

    def __init__(self, server: ServerProcess, phase: str) -> None:
        self.phase, self.error = phase, ""
        if phase == "prefill":  # many steps of prompts, and nothing else
            body = text([[i, *LONG, *LONG] for i in range(10, 26)], max_tokens=1)
        else:
            body = text(max_tokens=12_000, ignore_eos=True)
        self._thread = threading.Thread(target=self._send, args=(server.url + TEXT, body))
        if phase != "idle":
            self._thread.start()
            until(lambda: server.metric("num_requests_running") > 0 or bool(self.error), 60)
            assert not self.error

    def _send(self, url: str, body: dict[str, Any]) -> None:
        try:
            reply = httpx.post(url, json=body, timeout=120)
            self.error = f"{reply.status_code}: {reply.text}"
        except httpx.TransportError as error:
            self.error = f"no reply: {error}"

    def check(self, killed_s: float) -> None:
        if self.phase != "idle":
            self._thread.join(60)
            assert time.monotonic() - killed_s < PROMISED_S
            assert self.error.startswith("503") and "engine_dead" in self.error, self.error


def gone(family: Iterable[psutil.Process]) -> bool:
    return not any(runs(p.pid) for p in family if p.is_running())


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    with process(tmp_path_factory.mktemp("ranks"), "-cp", "2", *FAST, *CHAIN) as started:
        started.wait_ready()
        yield started
        family = started.family()
        assert started.stop() == 0 and gone(family.values()), started.log.read_text()


def test_answers_are_those_of_one_rank(server: ServerProcess, right: list[list[int]]) -> None:
    assert answers(server) == right
    assert server.metric("prefills_total", strategy="chain") > 0
    log = server.log.read_text()
    assert "2 ranks (2 context x 1 tensor) started by mp" in log and "lo (127.0.0.1)" in log and "GFLOP/s a rank" in log


def test_scores_and_embeddings_are_those_of_one_rank(server: ServerProcess) -> None:
    llm, options = LLM("tiny", kv_cache_tokens=16384), [[7], [8, 9, 10]]
    reply = server.http.post("/v1/score", json={"text": LONG, "options": options}).json()
    for told, score in zip(reply["data"], llm.score(LONG, options), strict=True):
        assert told["token_logprobs"] == score.token_logprobs
    reply = server.http.post("/v1/embeddings", json={"input": [LONG[1:], [5]]}).json()
    assert [each["embedding"] for each in reply["data"]] == llm.embed([LONG[1:], [5]]).tolist()
    assert "chain" in reply["headrace"]["strategy"]


OTHERS = [
    *((signal.SIGKILL, *each) for each in (("prefill", "0"), ("decode", "0"), ("idle", "0"))),
    (signal.SIGSTOP, "decode", "1"),
]
LOST = [(signal.SIGKILL, "prefill", "1"), *(pytest.param(*each, marks=pytest.mark.matrix) for each in OTHERS)]
"""`make test` sees a worker killed in mid-prefill, `make test-matrix` each signal, and each rank while it computes."""


@pytest.mark.parametrize(("number", "phase", "rank"), LOST)
def test_lost_rank(
    server: ServerProcess, right: list[list[int]], number: signal.Signals, phase: str, rank: str
) -> None:
    until(server.idle)
    restarts, family = server.metric("engine_restarts_total"), server.family()
    assert sorted(family) == ["0", "1"]
    under_way = UnderWay(server, phase)
    began = time.monotonic()
    family[rank].send_signal(number)
    until(lambda: server.health() == 503, PROMISED_S)
    refused = server.http.post(TEXT, json=text())
    check_refusal(refused, 503, None)
    told = server.http.get("/health").text
    if rank != "0":
        killed, hung = f"rank {rank} is gone: its process {family[rank].pid} was ended by SIGKILL", "does not answer"
        assert (killed if number == signal.SIGKILL else hung) in told
    under_way.check(began)
    server.wait_ready()
    assert answers(server) == right
    assert server.metric("engine_restarts_total") == restarts + 1 and gone(family.values())


@pytest.mark.matrix
def test_without_restart_the_server_ends(tmp_path: Any, right: list[list[int]]) -> None:
    """Three ranks, the one in the middle."""
    as_json = ("--log-format", "json", "--log-level", "debug")
    with process(tmp_path, "-cp", "3", "--no-restart", *FAST, *CHAIN, *as_json) as doomed:
        doomed.wait_ready()
        assert answers(doomed) == right
        family, under_way = doomed.family(), UnderWay(doomed, "prefill")
        assert sorted(family) == ["0", "1", "2"]
        began = time.monotonic()
        os.kill(family["1"].pid, signal.SIGKILL)
        assert doomed.process.wait(30) == 1
        under_way.check(began)
        lines = [json.loads(line) for line in doomed.log.read_text().splitlines() if line.startswith("{")]
        assert any("rank 1 is gone: its process" in line["message"] for line in lines)
        assert {family[rank].pid for rank in family} < {line["pid"] for line in lines}, "all ranks follow the settings"
        until(lambda: gone(family.values()))


TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nnodes", "1", "--nproc-per-node", "2")


@pytest.mark.matrix
def test_under_torchrun(tmp_path: Any, right: list[list[int]]) -> None:
    with process(tmp_path, "-cp", "2", *CHAIN, launcher=TORCHRUN) as server:
        server.wait_ready()
        family = psutil.Process(server.process.pid).children(recursive=True)
        assert answers(server) == right
        assert server.metric("prefills_total", strategy="chain") > 0
        log = server.log.read_text()
        assert "--no-restart holds" in log and "started by torchrun" in log
        first = next(p for p in family if p.ppid() == server.process.pid and p.environ()["RANK"] == "0")
        first.send_signal(signal.SIGTERM)
        assert server.process.wait(60) == 0, server.log.read_text()
        until(lambda: gone(family))


SCRIPT = """
from headrace import LLM, SamplingParams
from tests.support.rank_answers import LONG
llm = LLM("tiny", context_parallel_size=2, kv_cache_tokens=16384)
out = llm.generate([LONG], SamplingParams(temperature=0, max_tokens=16, ignore_eos=True))[0]
print("seen", out.outputs[0].token_ids, out.metrics.strategy)
"""


@pytest.mark.matrix
def test_a_script_under_torchrun(tmp_path: Any, right: list[list[int]]) -> None:
    """Rank 1 never comes back from LLM()."""
    file = tmp_path / "script.py"
    file.write_text(SCRIPT)
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([os.getcwd(), *filter(None, [os.getenv("PYTHONPATH")])])}
    done = subprocess.run(
        [sys.executable, *TORCHRUN, str(file)], capture_output=True, text=True, env=environment, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("seen") == 1 and f"seen {right[1]}" in done.stdout, done.stdout
