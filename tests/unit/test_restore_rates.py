"""Rates: what is learnt from observations, and that the split of a restore follows them."""

from __future__ import annotations

import random
from collections.abc import Callable
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.offload.restore import timing
from headrace.offload.restore.run_costs import StoredRun
from headrace.offload.restore.solver import predict, restore_split
from headrace.planner.estimators import FloatArray, LinearRate, PrefillRate, Smoothed, size_class
from headrace.planner.machine import Machine, ModelShape, PieceRate
from headrace.planner.profile import Profile
from headrace.types import CHUNK
from tests.support.profiles import linked, profile_of


def only(found: FloatArray) -> float:
    return float(found)


def test_smoothed_passes_over_an_outlier() -> None:
    figure = Smoothed(1.0)
    for value in (1.0, 1000.0, 1.0, 1e-3, 1.0):
        figure.observe(value)
        assert figure.value == pytest.approx(1.0)


@pytest.mark.parametrize("change", [0.1, 10.0])
def test_smoothed_follows_a_change(change: float) -> None:
    figure, seen = Smoothed(1.0), []
    for _ in range(6):
        figure.observe(change)
        seen.append(figure.value)
    assert seen[3] == pytest.approx(change, rel=0.5)
    assert seen[5] == pytest.approx(change, rel=0.1)


def test_size_classes() -> None:
    assert size_class(np.array([0.0, 1.0, 3.0, 4.0, 15.0, 16.0, 4.0**40])).tolist() == [0, 0, 0, 1, 1, 2, 31]


def test_line_of_nothing() -> None:
    line = LinearRate(PieceRate(1e-9, 1e-3, 1e-6))
    assert line.seconds(np.array([0.0, 1e6]), np.array([0.0, 10.0])).tolist() == [
        0.0,
        pytest.approx(1e-3 + 1e-5 + 1e-3),
    ]
    line.observe(0, 1.0)
    line.observe(1e6, 0.0)
    assert line.observed == 0


def test_line_learns_both_of_its_figures() -> None:
    """Latency 2 ms and 0.5 GB/s, guessed 0.1 ms and 5 GB/s; sizes as they come, 5% noise, an outlier now and then."""
    rng, line = random.Random(0), LinearRate(PieceRate(0.2e-9, 1e-4))
    for step in range(80):
        size = 4 ** rng.uniform(8, 13)
        noise = 20.0 if step % 9 == 8 else rng.uniform(0.95, 1.05)
        line.observe(size, (2e-3 + size * 2e-9) * noise)
    for size in (1e5, 1e6, 1e7, 6e7):
        assert only(line.seconds(np.array(size))) == pytest.approx(2e-3 + size * 2e-9, rel=0.25)


def test_line_keeps_what_a_size_has_of_its_own() -> None:
    """Small reads at half the rate of large ones; then the whole link gets ten times slower."""
    line = LinearRate(PieceRate(1e-9))
    for _ in range(60):
        line.observe(1e5, 2e-4)
        line.observe(1e7, 1e-2)
    small, large = (only(line.seconds(np.array(size))) for size in (1e5, 1e7))
    assert small == pytest.approx(2e-4, rel=0.25)
    assert large == pytest.approx(1e-2, rel=0.25)
    for _ in range(5):
        line.observe(1e7, 1e-1)
    assert only(line.seconds(np.array(1e5))) > 4 * small


@pytest.mark.parametrize("wrong", [(0.0, 0.0, 0.0), (1.0, -1.0, 0.0), (1.0, 0.0, float("nan"))])
def test_a_rate_refuses(wrong: tuple[float, float, float]) -> None:
    with pytest.raises(ValueError, match="unit_s"):
        PieceRate(*wrong)


SHAPE = ModelShape(layers=8, hidden=1024, heads=8, kv_heads=8, head_dim=128, mlp=2816, vocab=32000)


def test_prefill_of_few_tokens_reads_the_weights() -> None:
    machine = Machine(
        name="one", cores=1, isa="any", date="", linear_flops_s=8e11, attention_flops_s=((1, 6.4e11),),
        memory_bytes_s=40e9, link_bytes_s=1e9,
    )  # fmt: skip
    rate = PrefillRate.of(machine, SHAPE)
    assert only(rate.seconds(np.array(0), np.array(1))) == pytest.approx(rate.floor_s, rel=0.01)
    assert only(rate.seconds(np.array(0), np.array(0))) == 0
    assert only(rate.seconds(np.array(0), np.array(512))) == pytest.approx(512 * SHAPE.linear_flops / 8e11, rel=0.1)


def truth(start: float, count: float, slow: float = 1.0) -> float:
    return slow * (3e-5 * count + 2e-9 * count * (start + count / 2))


STEPS = [(0, 2048), (2048, 2048), (4096, 1500), (0, 700), (12288, 300), (8192, 2048)]


def test_prefill_is_learnt() -> None:
    """From a guess that is wrong by 3 in both figures and in their ratio, through noise and outliers."""
    rng, rate = random.Random(1), PrefillRate(1e-4, 1e-4, 1e-9)
    for turn in range(5):
        for start, count in STEPS:
            odd = 8.0 if (turn, start) == (3, 2048) else rng.uniform(0.97, 1.03)
            rate.observe(start, count, truth(start, count) * odd)
    for start, count in (*STEPS, (16384, 300), (6000, 1000)):
        assert only(rate.seconds(np.array(start), np.array(count))) == pytest.approx(truth(start, count), rel=0.1)


def test_prefill_follows_a_slower_clock() -> None:
    rate = PrefillRate(1e-4, 3e-5, 2e-9)
    for slow in (1.0, 2.5):
        for start, count in STEPS:
            rate.observe(start, count, truth(start, count, slow))
        found = only(rate.seconds(np.array(4096), np.array(2048)))
        assert found == pytest.approx(truth(4096, 2048, slow), rel=0.15)


def test_prefill_seen_at_one_place_only() -> None:
    """The first guess, scaled, says the rest."""
    rate = PrefillRate(0.0, 6e-5, 4e-9)
    for _ in range(10):
        rate.observe(0, 512, truth(0, 512))
    assert only(rate.seconds(np.array(16384), np.array(512))) == pytest.approx(truth(16384, 512), rel=0.1)


def test_small_steps_move_their_own_size_alone() -> None:
    rate = PrefillRate(1e-2, 1e-4, 2e-9)
    for _ in range(12):
        rate.observe(100, 1, 5e-2)
        rate.observe(4096, 32, 4e-2)
    assert only(rate.seconds(np.array(0), np.array(1))) == pytest.approx(5e-2, rel=0.1)
    assert only(rate.seconds(np.array(4096), np.array(32))) == pytest.approx(4e-2, rel=0.1)
    assert only(rate.seconds(np.array(0), np.array(8))) == pytest.approx(1e-2, rel=0.1)
    assert (rate.token_s, rate.pair_s) == (1e-4, pytest.approx(2e-9))


def test_a_scaled_guess_gives_way() -> None:
    """The first step of a cold process took twice as long as any after it."""
    rate = PrefillRate(1e-3, 3e-5, 2e-9)
    rate.scale(0, 512, 2 * truth(0, 512))
    rate.scale(480, 32, 5e-3)
    assert only(rate.seconds(np.array(0), np.array(512))) == pytest.approx(2 * truth(0, 512))
    assert only(rate.seconds(np.array(480), np.array(32))) == pytest.approx(5e-3)
    for _ in range(3):
        rate.observe(0, 2048, truth(0, 2048))
        rate.observe(2048, 2048, truth(2048, 2048))
    assert only(rate.seconds(np.array(0), np.array(512))) == pytest.approx(truth(0, 512), rel=0.1)


def made(link_s: float) -> Profile:
    return profile_of(8, (5e-3, 100e-6, 2e-9), {"host": PieceRate(1 / link_s, 50e-6)}, 2e-6)


X_BYTES = 64 * 1024 * 2 * 8
RUN = StoredRun(first=0, chunks=64, suffix=1, kv_bytes=2 * X_BYTES, x_bytes=X_BYTES, layers=8, tiers="host")


@pytest.mark.parametrize(("before", "after"), [(2e9, 0.2e9), (0.2e9, 2e9)])
def test_split_follows_the_link(before: float, after: float) -> None:
    """Within six transfers of a link that became ten times slower, or faster, the split is nearly that of who knew."""
    known, learnt = made(after), made(before)
    at_first = restore_split(RUN, learnt)
    best = restore_split(RUN, known)
    stale = predict(RUN, known, at_first.tokens, at_first.x).seconds
    assert stale > 1.1 * best.predicted_s
    for _ in range(6):
        learnt.observe_load("host", 2e6, 8, 50e-6 + 2e6 / after)
    found = restore_split(RUN, learnt)
    assert found.predicted_s == pytest.approx(best.predicted_s, rel=0.1)
    assert predict(RUN, known, found.tokens, found.x).seconds <= 1.03 * best.predicted_s


def test_split_follows_the_cores() -> None:
    learnt = made(0.5e9)
    before = restore_split(RUN, learnt)
    for _ in range(6):
        learnt.observe_prefill(0, 2048, 4 * only(made(1.0).prefill(0, 2048)))
        learnt.observe_project(2048, 4 * 2048 * 2e-6)
    after = restore_split(RUN, learnt)
    assert after.tokens < before.tokens
    assert only(learnt.project(100)) == pytest.approx(4 * 100 * 2e-6, rel=0.1)


def test_split_follows_the_cores_that_loading_takes() -> None:
    learnt = made(0.5e9)
    before = predict(RUN, learnt, 0, 0).seconds
    assert learnt.cpu_s_per_byte("host") == 0
    for _ in range(4):
        learnt.observe_load("host", 2e6, 8, 2e6 / 0.5e9, cpu_s=2e6 * 1e-9)
    assert learnt.cpu_s_per_byte("host") == pytest.approx(1e-9)
    assert predict(RUN, learnt, 32, 0).seconds > predict(RUN, made(0.5e9), 32, 0).seconds
    assert predict(RUN, learnt, 0, 0).seconds >= 0.98 * before


def test_behind_a_link() -> None:
    """What was observed before counts."""
    for bytes_s, latency_s, seconds in ((0.1e9, 1e-3, 1.1e-2), (None, 0.0, 1e-3), (9e9, 0.0, 1e-3)):
        found = linked(made(1e9), bytes_s, latency_s)
        assert only(found.transfer("host", 1e6)) == pytest.approx(50e-6 + seconds)
    seen = made(1e9)
    for _ in range(6):
        seen.observe_load("host", 1e8, 1, 1.0)
    assert only(linked(seen, 1e9).transfer("host", 1e8)) == pytest.approx(1.0, rel=0.1)


def test_an_unknown_tier() -> None:
    with pytest.raises(ValueError, match="tape"):
        made(1e9).transfer("tape", 1.0)
    with pytest.raises(ValueError, match="tape"):
        made(1e9).observe_load("tape", 1.0, 1, 1.0)


class Clock:
    """Time that passes only where something is done."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = self.cpu = 0.0
        here = SimpleNamespace(perf_counter=lambda: self.now, thread_time=lambda: self.cpu)
        monkeypatch.setattr(timing, "time", here)

    def takes(self, seconds: Callable[[int], float], cpu: float = 0.0) -> Callable[[int], None]:
        def work(count: int) -> None:
            self.now += seconds(count)
            self.cpu += seconds(count) * cpu

        return work


def test_measured_at_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    product = 4 * SHAPE.hidden * SHAPE.hidden / 5e11
    project = timing.projection_rate(clock.takes(lambda tokens: 20e-6 + tokens * product))
    assert only(LinearRate(project).seconds(np.array(500.0))) == pytest.approx(20e-6 + 500 * product)
    disk = timing.read_rate("disk", clock.takes(lambda size: 1e-3 + size / 2e9, cpu=0.25))
    assert only(LinearRate(disk.rate).seconds(np.array(4e6))) == pytest.approx(1e-3 + 4e6 / 2e9)
    assert disk.cpu_s_per_byte == pytest.approx(0.25 * (1e-3 / (1 << 23) + 1 / 2e9))
    assert clock.now < 1
    found = made(1e9)
    found.complete([disk], project)
    assert found.machine.tiers == (disk,) and found.machine.project == project
    assert found.cpu_s_per_byte("host") == found.cpu_s_per_byte("disk") == disk.cpu_s_per_byte
    assert found.as_dict()["disk_bytes_s"] == pytest.approx(2e9)


def test_slow_calls_are_made_once(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, calls = Clock(monkeypatch), []

    def read(size: int) -> None:
        calls.append(size)
        clock.now += size / 1e7

    timing.read_rate("disk", read)
    assert len(calls) <= 6


def test_figures_for_logs() -> None:
    found = made(1e9)
    assert "host_bytes_s" not in found.as_dict()
    found.observe_load("host", 1e6, 1, 1e-3)
    found.observe_prefill(0, CHUNK, 1e-2)
    assert found.as_dict()["host_observed"] == 1
    assert found.as_dict()["prefill_observed"] == 1


seen = st.tuples(st.floats(1, 1e9), st.floats(1e-7, 1e3))


@given(st.lists(seen, max_size=40))
def test_rates_stay_usable(observations: list[tuple[float, float]]) -> None:
    """Whatever is observed, times are finite, above 0, and of large steps no smaller for more tokens."""
    found = made(1e9)
    for size, seconds in observations:
        found.observe_load("host", size, 1, seconds)
        found.observe_project(size, seconds)
        found.observe_prefill(size, min(size, 2048), seconds)
    tokens = np.array([1.0, 64.0, 2048.0, 1e5])
    for times in (found.project(tokens), found.prefill(0.0, tokens), found.transfer("host", tokens, 1.0)):
        assert np.isfinite(times).all()
        assert (times > 0).all()
    assert (np.diff(found.prefill(0.0, np.array([256.0, 2048.0, 1e5]))) >= 0).all()


@pytest.mark.parametrize("loading", [False, True])
def test_contention_follows_what_was_mispredicted(loading: bool) -> None:
    """An engine whose restores take half a second longer per second of sharing; then one outlier; then none longer.
    Loading everything is not blamed for what splits lose; a split is never thought to lose less than loading all."""
    rates = profile_of(2, (0.0, 1e-5, 0.0), {})

    def observe(seconds: float) -> None:
        rates.observe_restore(seconds, 1.0 + rates.contention(loading) * 0.2, 0.2, loading)

    for _ in range(8):
        observe(1.0 + 0.5 * 0.2)
    assert rates.contention(loading) == pytest.approx(0.5, abs=0.02)
    observe(9.0)
    assert rates.contention(loading) == pytest.approx(0.5, abs=0.02), "one outlier counts"
    assert rates.contention(not loading) == (rates.contention(loading) if loading else 0.0)
    for _ in range(8):
        observe(0.9)
    assert 0 <= rates.contention(loading) < 0.05
    for _ in range(4):
        rates.observe_restore(1.1, 1.0, 0.02, loading)
    assert rates.contention(loading) < 0.05, "blamed on what is too little to tell"
