"""The split of a restore against a simulation event by event, and against trying every split."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.offload.restore.run_costs import CostTables, Prediction, StoredRun, prefill
from headrace.offload.restore.solver import EXACT, Split, _searched, predict, restore_split
from headrace.planner.estimators import FloatArray
from headrace.planner.strategy_rates import Closing
from headrace.types import CHUNK


@dataclass
class Fixed:
    """Costs by constant rates. tiers: name -> (bytes a second, seconds of each transfer, seconds taken by a byte)."""

    tiers: dict[str, tuple[float, float, float]]
    project_s: float
    prefill_s: float
    attend_s: float
    step_s: float = 0.0
    lost: tuple[float, float] = (0.0, 0.0)
    together: dict[str, float] = field(default_factory=dict)

    def contention(self, loading: bool) -> float:
        return self.lost[loading]

    def transfer(self, tier: str, size: FloatArray, pieces: FloatArray) -> FloatArray:
        rate, latency, _ = self.tiers[tier]
        return size / rate + (pieces > 0) * latency

    def cpu_s_per_byte(self, tier: str) -> float:
        return self.tiers[tier][2]

    def project(self, tokens: FloatArray) -> FloatArray:
        return tokens * self.project_s

    def together_s_per_byte(self, tier: str) -> float:
        return self.together.get(tier, 0.0)

    def closings(self, opening: int, end: int, lies: Sequence[float], loads: Collection[int]) -> list[Closing]:
        seconds = float(self.prefill(np.array(float(end)), np.array(float(opening))))
        return [Closing("", seconds)]

    def prefill(self, start: FloatArray, count: FloatArray) -> FloatArray:
        return count * self.prefill_s + count * (start + count / 2) * self.attend_s + (count > 0) * self.step_s


def load_all(run: StoredRun, costs: Fixed) -> Prediction:
    """Every chunk loaded as K and V."""
    return predict(run, costs, 0, 0)


def recompute_all(run: StoredRun, costs: Fixed) -> Prediction:
    """Every chunk recomputed from tokens, together with the suffix."""
    return predict(run, costs, run.chunks, 0)


def steps(costs: Fixed, start: int, count: int, most: int) -> float:
    """A prefill in steps."""
    seconds = 0.0
    while count > 0:
        now = min(count, most)
        seconds += float(costs.prefill(np.array(float(start)), np.array(float(now))))
        start, count = start + now, count - now
    return seconds


def simulate(run: StoredRun, costs: Fixed, tokens: int, x: int, most: int) -> tuple[float, float, float]:
    """Seconds, the copy stream's and the waited ones, event by event: the copy stream by itself, then the engine."""
    if tokens == run.chunks:
        return steps(costs, run.first * CHUNK, run.chunks * CHUNK + run.suffix, most), 0.0, 0.0
    of = [run.tiers] * run.chunks if isinstance(run.tiers, str) else list(run.tiers)
    busy_s, moved, events = 0.0, 0.0, []
    for _ in range(run.layers):
        for chunks, size in ((of[tokens : tokens + x], run.x_bytes or 0.0), (of[tokens + x :], run.kv_bytes)):
            for tier in dict.fromkeys(chunks):
                rate, latency, cpu = costs.tiers[tier]
                bytes_ = chunks.count(tier) * size / run.layers
                busy_s, moved = busy_s + bytes_ / rate + latency, moved + bytes_ * cpu
            events.append(busy_s)
    free = 1.0 - min(0.95, moved / busy_s)
    clock = waited = 0.0

    def work(seconds: float) -> None:
        nonlocal clock
        slow = min(seconds, max(0.0, busy_s - clock) * free)
        clock += slow / free + (seconds - slow)

    def wait(until: float) -> None:
        nonlocal clock, waited
        waited += max(0.0, until - clock)
        clock = max(clock, until)

    end = (run.first + run.chunks) * CHUNK
    opening = min(run.suffix, most)
    suffix = float(costs.prefill(np.array(float(end)), np.array(float(opening)))) / run.layers
    work(steps(costs, run.first * CHUNK, tokens * CHUNK, most))
    for layer in range(run.layers):
        wait(events[2 * layer])
        work(x * CHUNK * costs.project_s)
        wait(events[2 * layer + 1])
        work(suffix)
    return clock + steps(costs, end + opening, run.suffix - opening, most), busy_s, waited


rate = st.floats(0.1, 10)
fixed = st.builds(
    Fixed,
    tiers=st.fixed_dictionaries(
        {
            "host": st.tuples(rate, st.just(0.0) | rate, st.just(0.0) | st.floats(0, 2)),
            "disk": st.tuples(rate, rate, st.just(0.0)),
        }
    ),
    project_s=st.floats(1e-4, 0.1),
    prefill_s=st.floats(1e-3, 1.0),
    attend_s=st.just(0.0) | st.floats(1e-6, 1e-3),
    step_s=st.just(0.0) | rate,
)


@st.composite
def runs(draw: st.DrawFn, most: int = 12) -> StoredRun:
    chunks = draw(st.integers(1, most))
    tiers = draw(st.just("host") | st.tuples(*[st.sampled_from(["host", "disk"])] * chunks))
    has_x = draw(st.just(()) | st.tuples(*[st.booleans()] * chunks))
    return StoredRun(
        first=draw(st.integers(0, 5)),
        chunks=chunks,
        suffix=draw(st.integers(0, 300)),
        kv_bytes=draw(st.floats(1, 100)),
        x_bytes=draw(st.none() | st.floats(1, 100)),
        layers=draw(st.integers(1, 6)),
        tiers=tiers,
        has_x=has_x,
    )


def splits(run: StoredRun) -> list[tuple[int, int]]:
    """Only chunks that have activations can be projected."""
    has_x = run.has_x or (True,) * run.chunks
    most = run.chunks if run.x_bytes is not None else 0
    every = ((t, x) for t in range(run.chunks + 1) for x in range(min(most, run.chunks - t) + 1))
    return [(t, x) for t, x in every if all(has_x[t : t + x])]


@given(runs(), fixed, st.sampled_from([64, 100, 256, 2048]), st.data())
def test_prediction_is_the_simulation(run: StoredRun, costs: Fixed, most: int, data: st.DataObject) -> None:
    tokens, x = data.draw(st.sampled_from(splits(run)))
    seconds, busy_s, waited = simulate(run, costs, tokens, x, most)
    found = predict(run, costs, tokens, x, most)
    assert found.seconds == pytest.approx(seconds)
    assert found.link_s == pytest.approx(busy_s)
    assert found.waited_s == pytest.approx(waited, abs=1e-9 * seconds)
    assert 0 <= found.waited_s <= found.link_s


@settings(max_examples=60)
@given(runs(), fixed, st.sampled_from([64, 256, 2048]))
def test_split_is_the_best(run: StoredRun, costs: Fixed, most: int) -> None:
    found = restore_split(run, costs, most, least_gain=0.0, caution=0.0)
    times = {split: simulate(run, costs, *split, most)[0] for split in splits(run)}
    assert found.tokens + found.x + found.load == run.chunks
    assert found.predicted_s == pytest.approx(times[found.tokens, found.x])
    assert found.predicted_s == pytest.approx(min(times.values()))


COSTS = Fixed({"host": (1e9, 50e-6, 0.0)}, project_s=2e-6, prefill_s=100e-6, attend_s=2e-9)
X_BYTES = 64 * 1024 * 2 * 8
MHA = StoredRun(first=0, chunks=64, suffix=1, kv_bytes=2 * X_BYTES, x_bytes=X_BYTES, layers=8, tiers="host")
"""8 layers, hidden 1,024, 8 KV heads of 128, bf16: 32 KiB a token."""
GQA = replace(MHA, kv_bytes=2 * 64 * 256 * 2 * 8)


def at(gigabytes_s: float, costs: Fixed = COSTS) -> Fixed:
    return replace(costs, tiers={"host": (gigabytes_s * 1e9, 50e-6, 0.0)})


def test_slow_links_recompute_and_fast_ones_load() -> None:
    run = replace(MHA, x_bytes=None)
    recomputed = [restore_split(run, at(rate)).tokens for rate in (0.05, 0.2, 1, 5, 2000)]
    assert recomputed == sorted(recomputed, reverse=True)
    assert recomputed[0] > 32
    assert recomputed[-1] == 0


@pytest.mark.parametrize("rate", [0.1, 0.3, 1, 3, 10, 30])
def test_never_worse_than_either_end(rate: float) -> None:
    for run in (MHA, GQA, replace(MHA, x_bytes=None)):
        found = restore_split(run, at(rate))
        ends = load_all(run, at(rate)).seconds, recompute_all(run, at(rate)).seconds
        assert found.predicted_s <= min(ends)


def test_balanced_ends_gain() -> None:
    """Where loading and recomputing all take about as long, doing half of each takes about half."""
    costs = at(0.32)
    run = replace(MHA, x_bytes=None)
    ends = load_all(run, costs).seconds, recompute_all(run, costs).seconds
    assert ends[0] == pytest.approx(ends[1], rel=0.1)
    assert min(ends) > 1.8 * restore_split(run, costs).predicted_s


def test_wide_activations_are_not_sent() -> None:
    """With four query heads per KV head X is twice as wide as K and V together."""
    assert all(restore_split(GQA, at(rate)).x == 0 for rate in (0.1, 0.3, 1, 3, 10, 30))
    assert any(restore_split(MHA, at(rate)).x > 0 for rate in (0.1, 0.3, 1, 3, 10, 30))


def test_quantised_keys_and_values_are_preferred_to_activations() -> None:
    """int4 K and V are narrower than raw X."""
    narrow = replace(MHA, kv_bytes=MHA.kv_bytes * 36 / 128)
    assert all(restore_split(narrow, at(rate)).x == 0 for rate in (0.1, 1, 10))


def test_a_restore_that_gains_nothing_is_left() -> None:
    slow = at(1e-3)
    found, all_s = restore_split(MHA, slow), recompute_all(MHA, slow).seconds
    assert found == Split(64, 0, 0, all_s, found.reason, all_s=all_s)
    assert restore_split(MHA, slow).reason.startswith("recompute all 64 chunks")
    assert restore_split(MHA, at(3)).load > 0
    assert restore_split(MHA, at(3), least_gain=0.99).load == 0


def test_a_split_that_gains_nothing_is_left() -> None:
    """On a fast link a chunk less to load saves a little: not worth the cores."""
    fast = at(20)
    best = restore_split(MHA, fast, least_gain=0.0, caution=0.0)
    assert (best.tokens + best.x) > 0
    assert restore_split(MHA, fast, least_gain=0.2)[:3] == (0, 0, 64)
    assert restore_split(MHA, fast, least_gain=0.2).predicted_s == load_all(MHA, fast).seconds
    for rate in (0.1, 0.3, 1, 3, 10, 30):
        found, exact = restore_split(MHA, at(rate)), restore_split(MHA, at(rate), least_gain=0.0, caution=0.0)
        assert found.predicted_s <= exact.predicted_s / 0.98


def test_busy_cores_shift_the_split() -> None:
    """Where moving bytes takes the cores, less of the run is loaded while it is recomputed."""
    taken = replace(COSTS, tiers={"host": (1e9, 50e-6, 0.7e-9)})
    assert predict(MHA, taken, 20, 0).seconds > predict(MHA, COSTS, 20, 0).seconds
    assert restore_split(MHA, taken).predicted_s > restore_split(MHA, COSTS).predicted_s


def test_a_slow_tier_is_seen() -> None:
    costs = replace(COSTS, tiers={"host": (4e9, 0.0, 0.0), "disk": (0.2e9, 0.0, 0.0)})
    run = replace(MHA, x_bytes=None, tiers=("disk",) * 16 + ("host",) * 48)
    assert 1 <= restore_split(run, costs).tokens <= 16
    assert restore_split(replace(run, tiers="host"), costs).tokens < restore_split(run, costs).tokens


@pytest.mark.parametrize("chunks", [300, 1000])
@pytest.mark.parametrize("rate", [0.1, 1.0, 10.0])
def test_long_runs_coarse_to_fine(chunks: int, rate: float) -> None:
    run = replace(MHA, chunks=chunks, first=10, suffix=100)
    assert chunks > EXACT
    tables = CostTables(run, at(rate), 2048)
    t, x = np.meshgrid(np.arange(chunks + 1), np.arange(chunks + 1), indexing="ij")
    fits = t + x <= chunks
    best = tables.predict(tables.splits(t[fits], x[fits]))[0].min()
    assert restore_split(run, at(rate)).predicted_s <= best * 1.001


def test_an_empty_run() -> None:
    found = restore_split(replace(MHA, chunks=0, suffix=10), COSTS)
    assert found[:3] == (0, 0, 0)
    assert found.predicted_s == steps(COSTS, 0, 10, 2048)


def test_prefill_in_steps() -> None:
    counts = np.array([0.0, 1.0, 64.0, 100.0, 101.0, 300.0, 1000.0])
    costs = replace(COSTS, step_s=0.5)
    assert prefill(costs, 640, counts, 100).tolist() == pytest.approx([steps(costs, 640, int(n), 100) for n in counts])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"chunks": -1}, "at least 0"),
        ({"layers": 0}, "layers"),
        ({"kv_bytes": 0.0}, "kv_bytes"),
        ({"x_bytes": 0.0}, "x_bytes"),
        ({"tiers": ("host",)}, "64 chunks"),
        ({"has_x": (True,)}, "64 chunks"),
        ({"ranks": (0,)}, "64 chunks"),
    ],
)
def test_run_refuses(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        replace(MHA, **changes)


PART = replace(MHA, has_x=(True,) * 3 + (False,) * 61)


def test_a_long_run_projects_what_has_activations() -> None:
    """Longer than is searched exactly: of 1,024 chunks the first 600 have activations."""
    run = replace(MHA, chunks=1024, has_x=(True,) * 600 + (False,) * 424)
    slow = replace(COSTS, tiers={"host": (3e8, 50e-6, 0.0)})
    found = restore_split(run, slow)
    assert found.x > 0 and found.tokens + found.x <= 600


def test_split_refuses() -> None:
    with pytest.raises(ValueError, match="max_batch_tokens"):
        restore_split(MHA, COSTS, 0)
    for run, tokens, x in ((MHA, 60, 5), (MHA, -1, 0), (replace(MHA, x_bytes=None), 0, 1), (PART, 0, 4)):
        with pytest.raises(ValueError, match="no such split"):
            predict(run, COSTS, tokens, x)


def test_contention_counts_where_copies_and_engine_share_the_cores() -> None:
    """Twice or three times the seconds that the smaller of both is at work; nothing where everything is recomputed."""
    run = StoredRun(first=0, chunks=32, suffix=40, kv_bytes=1e6, x_bytes=None, layers=4, tiers="host")
    calm = Fixed({"host": (1e9, 0.0, 2e-10)}, project_s=0.0, prefill_s=1e-5, attend_s=0.0)
    busy = replace(calm, lost=(2.0, 3.0))
    for tokens, lost in ((0, 3), (8, 2)):
        before, after = predict(run, calm, tokens, 0), predict(run, busy, tokens, 0)
        compute = (tokens * CHUNK + 40) * 1e-5
        assert before.shared_s == pytest.approx(min((32 - tokens) * 1e6 * 2e-10, compute))
        assert after.seconds == pytest.approx(before.seconds + lost * before.shared_s)
    assert recompute_all(run, busy).seconds == recompute_all(run, calm).seconds


def test_caution_where_the_copy_stream_takes_the_cores() -> None:
    """Loading 1 GB/s of which a core works 0.4 s: whatever gains less than 0.4 x 0.4 over loading all is left."""
    calm, busy = (replace(COSTS, tiers={"host": (1e9, 0.0, taken)}) for taken in (0.0, 0.4e-9))
    shares = [_searched(CostTables(MHA, costs, 2048))[0].taken_share for costs in (busy, calm)]
    assert shares == [pytest.approx(0.4), 0]
    best = restore_split(MHA, busy, caution=0.0)
    gain = 1 - best.predicted_s / load_all(MHA, busy).seconds
    assert best.load < 64 and gain > 0.02
    assert restore_split(MHA, busy, caution=gain / 0.4 * 0.99)[:3] == best[:3]
    assert restore_split(MHA, busy, caution=gain / 0.4 * 1.01)[:3] == (0, 0, 64)


def test_tensor_ranks_take_turns_to_bring_activations() -> None:
    """Of two ranks each brings X of every second chunk: the one that begins has one more of an odd number."""
    costs = Fixed({"disk": (1e6, 0.0, 1e-7)}, project_s=1e-5, prefill_s=1e-2, attend_s=0.0)
    turns, half, whole = (
        StoredRun(0, 10, 8, kv_bytes=1e5, x_bytes=size, layers=4, tiers="disk", x_turns=ranks)
        for size, ranks in ((1e5, 2), (0.5e5, 1), (1e5, 1))
    )
    for x in range(0, 11, 2):
        assert predict(turns, costs, 0, x) == predict(half, costs, 0, x)
    assert predict(turns, costs, 9, 1) == predict(whole, costs, 9, 1)
    assert restore_split(turns, costs).x == 10 > restore_split(whole, costs).x
    with pytest.raises(ValueError, match="x_turns"):
        replace(turns, x_turns=0)
