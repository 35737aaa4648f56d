"""A tier is left alone after a failure, for longer each time, and tried by one caller at a time."""

from __future__ import annotations

import logging

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.offload.tiers.breaker import Breaker

pytestmark = pytest.mark.unit


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def test_closed_lets_all_through(clock: Clock) -> None:
    breaker = Breaker(1.0, clock=clock)
    assert all(breaker.allows() for _ in range(3))
    breaker.succeeded()
    assert not breaker.degraded and breaker.reason == ""


def test_failure_trial_recovery(clock: Clock) -> None:
    breaker = Breaker(1.0, clock=clock)
    breaker.failed("gone")
    assert breaker.degraded and breaker.reason == "gone"
    clock.now += 0.99
    assert not breaker.allows()
    clock.now += 0.02
    assert [breaker.allows() for _ in range(3)] == [True, False, False]
    assert breaker.degraded
    breaker.succeeded()
    assert not breaker.degraded and breaker.reason == ""
    assert [breaker.allows() for _ in range(2)] == [True, True]


def test_cooldown_doubles_up_to_its_bound_and_starts_anew(clock: Clock) -> None:
    breaker = Breaker(1.0, longest_s=5.0, clock=clock)
    breaker.failed("0")
    for turn, cooldown in enumerate((1.0, 2.0, 4.0, 5.0, 5.0)):
        clock.now += cooldown - 0.01
        assert not breaker.allows()
        clock.now += 0.02
        assert breaker.allows()
        breaker.failed(f"{turn + 1}")
        assert breaker.reason == f"{turn + 1}"
    clock.now += 5.0
    assert breaker.allows()
    breaker.succeeded()
    breaker.failed("again")
    clock.now += 1.0
    assert breaker.allows()


def test_late_reports_change_nothing(clock: Clock) -> None:
    """Calls that began before it opened end while it is open."""
    breaker = Breaker(1.0, clock=clock)
    breaker.failed("first")
    breaker.succeeded()
    breaker.failed("second")
    assert breaker.degraded and breaker.reason == "first"
    clock.now += 1.0
    assert breaker.allows()


def test_trial_without_report(clock: Clock) -> None:
    breaker = Breaker(1.0, clock=clock)
    breaker.failed("gone")
    clock.now += 1.0
    assert breaker.allows() and not breaker.allows()
    clock.now += 1.0
    assert breaker.allows()


def test_one_log_line_per_change_of_state(clock: Clock, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    breaker = Breaker(1.0, "the store", clock=clock)
    breaker.failed("gone")
    for _ in range(3):
        clock.now += 60.0
        assert breaker.allows()
        breaker.failed("still gone")
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "the store" in caplog.text and "gone" in caplog.text
    clock.now += 60.0
    assert breaker.allows()
    breaker.succeeded()
    breaker.succeeded()
    assert [record.levelname for record in caplog.records] == ["WARNING", "INFO"]


@pytest.mark.parametrize("cooldown", [0.0, -1.0, float("inf"), float("nan")])
def test_cooldown_refused(cooldown: float) -> None:
    with pytest.raises(ValueError, match="cooldown"):
        Breaker(cooldown)


@given(st.lists(st.sampled_from(["ok", "bad", "ask", "wait"]), max_size=60))
def test_never_shut_for_longer_than_its_bound(steps: list[str]) -> None:
    clock = Clock()
    breaker = Breaker(1.0, longest_s=8.0, clock=clock)
    for step in steps:
        if step == "ask":
            assert breaker.allows() or breaker.degraded
        elif step == "wait":
            clock.now += 0.5
        else:
            breaker.succeeded() if step == "ok" else breaker.failed("bad")
    clock.now += 8.0
    assert breaker.allows()
