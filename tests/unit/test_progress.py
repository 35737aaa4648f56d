"""How far long work is: the sentences, and what is known of prompts being read."""

from __future__ import annotations

import pytest

from headrace.progress import (
    Answering,
    LoadPhase,
    PhaseTimes,
    Prefill,
    PrefillClock,
    duration,
    percent,
    reading,
    share_read,
    sized,
    sizes,
    summary,
)
from headrace.types import Delta, Metrics

pytestmark = pytest.mark.unit


class Seconds:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def test_prompts_being_read_step_by_step() -> None:
    """Within a step the rate so far is believed, but never beyond what the step computes."""
    clock = Seconds()
    prefills = PrefillClock(clock)
    prefills.begin([Prefill("a", 1024, 1024, 5000, 2048), Prefill("b", 0, 0, 100, 100)])
    clock.now = 1.0
    assert prefills.prefills[0].done == 1024, "no rate is known in the first step"
    clock.now = 2.0
    prefills.end(["b"])
    assert (prefills.rate, prefills.prefills) == (1074.0, [Prefill("a", 3072, 1024, 5000, 0)])
    prefills.begin([Prefill("a", 3072, 1024, 5000, 1928)])
    clock.now = 3.0
    assert prefills.prefills == [Prefill("a", 3072 + 1074, 1024, 5000, 1928 - 1074)]
    clock.now = 20.0
    assert 4980 < prefills.prefills[0].done < 5000, "a step that takes ten times as long is almost done, never quite"
    assert prefills.rate == pytest.approx(1928 / 18), "and the rate cannot be better than this"
    prefills.end(["a"])
    assert prefills.prefills == []
    assert prefills.rate == (1074 + 1928 / 18) / 2, "it is remembered, and the last step counts half"


def test_a_step_of_several_prompts_is_shared() -> None:
    clock = Seconds()
    prefills = PrefillClock(clock)
    prefills.begin([Prefill("c", 0, 0, 100, 100)])
    clock.now = 1.0
    prefills.end(["c"])
    prefills.begin([Prefill("a", 0, 0, 400, 300), Prefill("b", 0, 0, 100, 100)])
    clock.now = 3.0
    assert [each.done for each in prefills.prefills] == [150, 50]
    prefills.drop("a")
    assert [each.request_id for each in prefills.prefills] == ["b"]


def test_a_first_step_goes_by_what_was_expected() -> None:
    """Several ranks compute a whole prompt in one step, whose time the planner predicts; later the clock knows."""
    clock = Seconds()
    prefills = PrefillClock(clock)
    prefills.begin([Prefill("a", 0, 0, 16_384, 16_384)], 8.0)
    clock.now = 2.0
    assert (prefills.rate, prefills.prefills[0].done) == (2048.0, 4096)
    clock.now = 16.0
    assert 15_000 < prefills.prefills[0].done < 16_000
    prefills.end(["a"])
    prefills.begin([Prefill("b", 0, 0, 16_384, 16_384)], 8.0)
    assert prefills.rate == 1024.0


def test_a_step_that_waits_for_restored_chunks_says_nothing_of_the_rate() -> None:
    """Ten seconds for 100 tokens, most of them on a link, must not be believed of the next prompt."""
    clock = Seconds()
    prefills = PrefillClock(clock)
    prefills.begin([Prefill("a", 0, 0, 1000, 1000)])
    clock.now = 1.0
    prefills.end(["a"])
    restoring = [Prefill("b", 0, 0, 4155, 59, coming=4096)]
    prefills.begin(restoring)
    clock.now = 6.0
    assert prefills.prefills == restoring
    told = "reading 0 of 4,155 tokens (4,096 being restored), 5 s so far"
    assert reading(prefills.prefills, prefills.rate, 5.0) == told
    clock.now = 11.0
    prefills.end()
    assert (prefills.prefills, prefills.rate) == ([Prefill("b", 4155, 0, 4155)], 1000.0)


def test_decode_steps_say_nothing_of_prefills() -> None:
    """A step that was not told, between two that were, changes neither rate nor counts."""
    clock = Seconds()
    prefills = PrefillClock(clock)
    prefills.begin([Prefill("a", 0, 0, 400, 300)])
    clock.now = 1.0
    prefills.end()
    clock.now = 50.0
    prefills.end(["other"])
    assert (prefills.rate, prefills.prefills) == (300.0, [Prefill("a", 300, 0, 400)])


def test_reading() -> None:
    assert (reading([], 5.0), share_read([])) == ("", None)
    assert share_read([Prefill("a", 100, 0, 200), Prefill("b", 20, 0, 40)]) == 0.5
    assert reading([Prefill("a", 2048, 0, 5957)], 1570.0) == "reading 2,048 of 5,957 tokens, 1,570/s, 2 s left"
    two = [Prefill("a", 2048, 1024, 5957), Prefill("b", 0, 0, 1000)]
    assert reading(two, 0.0) == "reading 2,048 of 6,957 tokens (1,024 cached)"
    assert reading(two[1:], 0.0, 12.0) == "reading 0 of 1,000 tokens, 12 s so far"
    assert reading([Prefill("a", 5957, 0, 5957)], 1570.0).endswith("0.1 s left")


def metrics(prompt: int, cached: int, output: int) -> Metrics:
    return Metrics(0.1, 1.0, 0.0, prompt, cached, output)


def test_summary_of_many_prompts() -> None:
    many = [metrics(1503, 1413, 16)] * 31 + [metrics(1520, 1423, 16)]
    assert summary(many, 4.2) == (
        "answered 32 prompts in 4.2 s: 48,113 prompt tokens (94 % cached, 2,887 computed), 512 tokens written, "
        "121.9 tokens/s, 7.6 prompts/s"
    )
    assert summary([metrics(10, 0, 3)], 2.0, failed=2) == (
        "answered 1 of 3 prompts in 2.0 s: 10 prompt tokens (0 % cached, 10 computed), 3 tokens written, "
        "1.5 tokens/s, 0.5 prompts/s"
    )
    assert summary([], 0.0).startswith("answered 0 prompts in 0.0 s: 0 prompt tokens (0 % cached, 0 computed)")


def test_prompts_being_answered() -> None:
    clock = Seconds()
    answering = Answering(20, clock)
    prefills = [Prefill("a", 2048, 0, 5957)]
    assert (answering.text(), answering.share()) == ("0 of 20 prompts", 0.0)
    assert answering.text(prefills, 1570.0) == "0 of 20 prompts, reading 2,048 of 5,957 tokens, 1,570/s, 2 s left"
    clock.now = 2.0
    answering.note(Delta("a", 0, token_ids=[1, 2]))
    assert answering.text() == "0 of 20 prompts, output 1/s"
    answering.note(Delta("a", 0, token_ids=[3], finish_reason="stop", metrics=metrics(4000, 3000, 3)))
    answering.note(Delta("b", 0, finish_reason="abort", metrics=metrics(100, 0, 0)))
    assert answering.share() == 0.1
    assert answering.text(prefills) == (
        "2 of 20 prompts, input 2,000/s, output 2/s, 75 % cached, reading 2,048 of 5,957 tokens, 2 s so far"
    )
    assert answering.summary().startswith("answered 1 of 2 prompts in 2.0 s: 4,000 prompt tokens (75 % cached, 1,000 ")


def test_phases_are_timed() -> None:
    clock = Seconds()
    ended = []
    times = PhaseTimes(ended.append, clock)
    for at, phase in (
        (1, LoadPhase("a")),
        (3.5, LoadPhase("weights", 1, 3 << 30)),
        (4, LoadPhase("weights", 9, 3 << 30)),
    ):
        clock.now = at
        times(phase)
    assert times.now == LoadPhase("weights", 9, 3 << 30)
    clock.now = 6.0
    times.close()
    times.close()
    assert [phase.text for phase in ended] == ["a: 2.5 s", "weights: 3.0 GiB in 2.5 s"]
    assert times.all == ended and times.now is None


def test_quantities() -> None:
    assert [duration(s) for s in (0.04, 0.95, 41.4, 89, 90, 5950, 7500)] == [
        "0.0 s", "1 s", "41 s", "89 s", "2 min", "99 min", "2 h 05 min",
    ]  # fmt: skip
    assert (percent(999, 1000), percent(5, 5), percent(0, 0), percent(1, 3)) == ("99 %", "100 %", "0 %", "33 %")
    assert (sized(3 << 30), sized(5 << 20), sizes(1 << 29, 3 << 30)) == ("3.0 GiB", "5.0 MiB", "0.5 of 3.0 GiB")
