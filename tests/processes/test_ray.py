"""The server with ranks on a Ray cluster of two nodes on this machine."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import psutil

from tests.processes.groups import runs
from tests.processes.test_server import process, until
from tests.processes.test_server_ranks import CHAIN, answers, right
from tests.processes.test_started_elsewhere import cluster

__all__ = ["cluster", "right"]


def workers() -> list[psutil.Process]:
    """The actors that serve as ranks, by what Ray calls their processes; this one started the cluster."""
    below = psutil.Process().children(recursive=True)
    return [p for p in below if p.is_running() and p.cmdline()[:1] == ["ray::Member.serve"]]


def test_answers_and_a_killed_actor(cluster: Any, tmp_path: Path, right: list[list[int]]) -> None:
    with process(tmp_path, "-cp", "2", "--distributed-backend", "ray", *CHAIN) as server:
        server.wait_ready()
        assert answers(server) == right
        assert server.metric("prefills_total", strategy="chain") > 0
        assert "started by ray" in server.log.read_text()
        (lost,) = workers()
        lost.send_signal(signal.SIGKILL)
        until(lambda: server.health() == 503)
        assert "rank 1 is gone: " in server.http.get("/health").text
        server.wait_ready()
        assert answers(server) == right
        (found,) = workers()
        assert server.stop() == 0
        until(lambda: not runs(found.pid))
