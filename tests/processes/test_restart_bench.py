"""`headrace bench restart`, small: a server stores, is killed, and servers of as many ranks and of more restore."""

from __future__ import annotations

import signal
from pathlib import Path

import psutil
import pytest

from headrace.bench import restart
from headrace.bench.restart import RestartBench
from headrace.bench.server_process import ServerProcess
from headrace.types import CHUNK
from tests.support.fake_server import until

TOKENS = 700


@pytest.mark.matrix
def test_other_ranks_restore(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(restart, "ENDS", {"kill -9": signal.SIGKILL})
    bench = RestartBench(model="tiny", tokens=TOKENS, repeats=1, directory=tmp_path, ranks=1, again=(1, 2))
    cases = list(bench.cases())
    assert [(case["ranks"], case["again_ranks"], case["same"]) for case in cases] == [(1, 1, True), (1, 2, True)]
    assert {case["restored_tokens"] for case in cases} == {(TOKENS - 1) // CHUNK * CHUNK}
    assert not list(tmp_path.iterdir())


def test_a_model_is_a_folder_or_a_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    monkeypatch.setattr(restart, "checkpoint", lambda model: Path("shapes") / model)
    monkeypatch.setattr(restart, "_Run", lambda model, *_: asked.append(model))
    for model in ("S1", "models/mine", "tiny"):
        assert not list(RestartBench(model=model, repeats=0).cases())
    assert asked == ["shapes/S1", "models/mine", "tiny"]


def test_counts_of_ranks() -> None:
    with pytest.raises(ValueError, match=r"--again must be at least 1 each, got '1,0'"):
        restart.rank_counts("--again", "1,0")
    assert restart.rank_counts("--again", "1,3") == (1, 3) and restart.rank_counts("--again", "") == ()


def test_killed_with_all_that_it_started() -> None:
    child = "[sys.executable, '-c', 'import time; time.sleep(60)']"
    code = f"import subprocess, sys; subprocess.Popen({child}).wait()"
    with ServerProcess((), program=("-c", code)) as server:
        until(lambda: bool(psutil.Process(server.process.pid).children()))
        (sleeper,) = psutil.Process(server.process.pid).children()
        assert server.end(signal.SIGKILL) == -signal.SIGKILL
        until(lambda: not sleeper.is_running() or sleeper.status() == psutil.STATUS_ZOMBIE)
