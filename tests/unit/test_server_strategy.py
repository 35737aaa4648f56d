"""How the prefill was computed is told: in the reply, in the log line, in /metrics, across restarts."""

from __future__ import annotations

import json
import logging

import pytest

from headrace.cli.engine import figures
from headrace.stats import EngineStats, KVStats, RankStats, SchedulerStats
from headrace.types import Metrics
from tests.support.fake_engine import FakeEngine
from tests.support.fake_server import TEXT, serving, text, until

pytestmark = pytest.mark.unit


def by_number(number: int, engine: FakeEngine) -> None:
    engine.strategy, engine.strategy_reason = ("chain", "new prompt") if number == 0 else ("ring-q", "long cache")


def told(reply: str) -> tuple[str | None, str | None]:
    """(strategy, reason) of a whole reply or of a stream."""
    chunks = [
        json.loads(line.removeprefix("data: ")) for line in reply.splitlines() if line.startswith(("data: {", "{"))
    ]
    (given,) = [chunk["headrace"] for chunk in chunks if "headrace" in chunk]
    return given["strategy"], given["strategy_reason"]


@pytest.mark.parametrize("stream", [False, True])
def test_reply_and_log_line(stream: bool, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "headrace.server")
    with serving(prepare=by_number) as running:
        assert told(running.http.post(TEXT, json=text(stream=stream)).text) == ("chain", "new prompt")
        until(lambda: "prefill by chain (new prompt)" in caplog.text)


def test_several_prompts_tell_each_strategy_once() -> None:
    with serving(prepare=by_number) as running:
        assert told(running.http.post(TEXT, json=text(["a", "b"])).text) == ("chain", "new prompt")
        assert running.metric("prefills_total", strategy="chain", model_name="fake") == 2


def test_one_rank_has_none(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "headrace.server")
    with serving() as running:
        assert told(running.http.post(TEXT, json=text()).text) == (None, None)
        until(lambda: "length    prompt" in caplog.text)
        assert "prefill by" not in caplog.text
        assert "prefills_total{" not in running.http.get("/metrics").text


def test_prefills_are_counted_across_restarts() -> None:
    with serving(prepare=by_number) as running:
        for _ in range(2):
            running.http.post(TEXT, json=text())
        running.engine.die("lost")
        until(lambda: len(running.given.engines) == 2)
        running.wait(200)
        running.http.post(TEXT, json=text())
        assert running.metric("prefills_total", strategy="chain") == 2
        assert running.metric("prefills_total", strategy="ring-q") == 1


def test_line_of_the_command_line() -> None:
    line = figures(
        Metrics(ttft_s=1, e2e_s=2, prompt_tokens=3, output_tokens=2, strategy="chain", strategy_reason="new")
    )
    assert line.endswith("prefill by chain (new)")
    assert "prefill" not in figures(Metrics())


def test_sum_of_two_engines() -> None:
    earlier = EngineStats(
        SchedulerStats(running=3, steps=5, step_s=0.5), kv=KVStats(9), ranks=RankStats({"chain": 1, "single": 2})
    )
    own = EngineStats(
        SchedulerStats(running=1, steps=2, step_s=0.25), kv=KVStats(7), ranks=RankStats({"chain": 4, "ring-kv": 1})
    )
    both = own.after(earlier)
    told = both.scheduler
    assert (told.running, both.kv.chunks_total, told.steps, told.step_s) == (1, 7, 7, 0.75)
    assert both.ranks.prefills == {"chain": 5, "single": 2, "ring-kv": 1}
    assert own.ranks.prefills == {"chain": 4, "ring-kv": 1} and earlier.ranks.prefills == {"chain": 1, "single": 2}


async def test_status_lines_leave_the_strategies_out() -> None:
    copied = EngineStats(ranks=RankStats({"chain": 1})).flat()
    assert "scheduler.steps" in copied and "ranks.prefills" not in copied
