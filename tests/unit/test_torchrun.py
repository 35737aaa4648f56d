"""What torchrun says in the environment, and what follows. Serving as a worker: tests/processes/test_server_ranks."""

from __future__ import annotations

import signal
from collections.abc import Iterator

import pytest

from headrace.config import EngineConfig
from headrace.engine import torchrun
from headrace.parallel.torchrun_environment import VARIABLES, started_this

pytestmark = pytest.mark.unit

ENVIRONMENT = {"WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
FOUR = EngineConfig(context_parallel_size=2, tensor_parallel_size=2)


@pytest.fixture(autouse=True)
def signals(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """As they were; and a torchrun that started these tests is not seen."""
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def started(monkeypatch: pytest.MonkeyPatch, rank: int) -> None:
    for name, value in {**ENVIRONMENT, "RANK": str(rank)}.items():
        monkeypatch.setenv(name, value)


def test_without_torchrun_nothing_happens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")  # others set this too
    before = signal.getsignal(signal.SIGTERM)
    torchrun.serve_if_worker(FOUR)
    torchrun.leave_signals_to_rank_0()
    assert not started_this() and signal.getsignal(signal.SIGTERM) is before != signal.SIG_IGN


def test_rank_0_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    started(monkeypatch, 0)
    torchrun.serve_if_worker(FOUR)
    assert started_this()


@pytest.mark.parametrize("rank", [0, 3])
def test_another_number_of_processes_is_refused_on_every_rank(monkeypatch: pytest.MonkeyPatch, rank: int) -> None:
    started(monkeypatch, rank)
    with pytest.raises(ValueError, match=r"torchrun started 4 processes, .* is 3: make them equal"):
        torchrun.serve_if_worker(EngineConfig(context_parallel_size=3))


def test_a_worker_leaves_signals_to_rank_0(monkeypatch: pytest.MonkeyPatch) -> None:
    started(monkeypatch, 2)
    torchrun.leave_signals_to_rank_0()
    assert signal.getsignal(signal.SIGTERM) == signal.getsignal(signal.SIGINT) == signal.SIG_IGN
