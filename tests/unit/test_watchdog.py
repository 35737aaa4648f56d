"""When an engine counts as hung: after so many ticks without a word, and later while it loads."""

from __future__ import annotations

import asyncio

import pytest

from headrace.config import EngineConfig
from headrace.engine import watchdog
from headrace.engine.watchdog import GPU_STEP_S, StepWatch, Watchdog

pytestmark = pytest.mark.unit


@pytest.mark.parametrize(("loading", "pings"), [(False, 4), (True, 8)])
def test_an_engine_hangs_after_so_much_silence(loading: bool, pings: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watchdog, "LOADING_S", 2 / 64)
    asked: list[int] = []
    watched = Watchdog(1 / 64)
    watched.loading = loading

    def ping() -> None:
        asked.append(1)
        if len(asked) == 3:
            watched.heard()  # what it says begins the count anew

    told = asyncio.run(watched.until_hung(ping))
    assert len(asked) == 2 + pings and told.startswith("the engine process hung: no sign of life for 0.0")


def test_an_engine_hangs_in_a_step_of_so_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not in several that take as long together, nor between them."""
    now, told = [100.0], list[str]()
    monkeypatch.setattr(watchdog.time, "monotonic", lambda: now[0])
    steps = StepWatch(2.0, told.append)
    for _ in range(3):
        with steps:
            now[0] += 1.5
            steps.look()
        now[0] += 5
        steps.look()
    assert not told
    with steps:
        now[0] += 2.1
        steps.look()
    assert told == ["the engine hung: a step has taken more than 2 s (step_timeout_s)"]


def test_how_long_a_step_may_take() -> None:
    limits = [
        StepWatch.of(EngineConfig(**given), print).limit_s
        for given in ({}, {"attention_backend": "triton"}, {"step_timeout_s": 5.0, "attention_backend": "triton"})
    ]
    assert limits == [None, GPU_STEP_S, 5.0]
    with pytest.raises(ValueError, match="step_timeout_s"):
        EngineConfig(step_timeout_s=0)
