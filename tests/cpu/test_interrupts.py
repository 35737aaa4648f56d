"""Ctrl-c in the middle of a step of several ranks: the step is ended first, and the next call finds them in turn."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from headrace import LLM, SamplingParams
from headrace.parallel.interrupts import held_back
from headrace.parallel.rank import Rank
from headrace.parallel.transport import RankLost
from tests.support.thread_group import ranks_as_threads

pytestmark = pytest.mark.usefixtures("one_thread")

FEW = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
PROMPT = [5, 6, 7] * 30
RANKS = [{"tensor_parallel_size": 2}, {"context_parallel_size": 2}]


@pytest.fixture(autouse=True)
def threads_for_ranks() -> Iterator[None]:
    with ranks_as_threads():
        yield


@pytest.fixture(autouse=True)
def interruptible() -> Iterator[None]:
    """As on a terminal: of jobs in the background SIGINT is ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture
def interrupted(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """interrupted(times): rank 0 gets so many ctrl-c in its next step, once."""
    left: list[int] = []
    run = Rank._run

    def in_the_middle(self: Rank, step: Any) -> Any:
        if self.transport.rank == 0 and self.decoder.share is not None and self.decoder.share.rank > 0:
            return run(self, step)
        for _ in range(left.pop() if left and self.transport.rank == 0 else 0):
            signal.raise_signal(signal.SIGINT)
        return run(self, step)

    monkeypatch.setattr(Rank, "_run", in_the_middle)
    return left.append


@pytest.mark.parametrize("ranks", RANKS, ids=str)
def test_the_next_call_is_answered(ranks: dict[str, int], interrupted: Callable[[int], None]) -> None:
    with LLM("tiny", threads=1, kv_cache_tokens=2048, **ranks) as llm:
        [truth] = llm.generate([PROMPT], FEW)
        interrupted(1)
        with pytest.raises(KeyboardInterrupt):
            llm.generate([PROMPT], FEW)
        [again] = llm.generate([PROMPT], FEW)
        assert again.token_ids == truth.token_ids
        assert llm.engine.cache.used == 0


def test_a_second_one_is_obeyed_at_once(interrupted: Callable[[int], None]) -> None:
    """And the ranks are not asked again."""
    with LLM("tiny", threads=1, kv_cache_tokens=2048, tensor_parallel_size=2) as llm:
        interrupted(2)
        with pytest.raises(KeyboardInterrupt):
            llm.generate([PROMPT], FEW)
        with pytest.raises(
            RankLost, match="a step was interrupted, and the ranks are no longer in turn: make a new LLM"
        ):
            llm.generate([PROMPT], FEW)


def test_what_is_held_back_comes_afterwards() -> None:
    done = []
    with pytest.raises(KeyboardInterrupt), held_back():
        signal.raise_signal(signal.SIGINT)
        done.append("to its end")
    assert done and signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_an_ignored_one_stays_ignored() -> None:
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with held_back():
            signal.raise_signal(signal.SIGINT)
            assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)
