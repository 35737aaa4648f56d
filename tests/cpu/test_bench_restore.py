"""The benchmark of restores: by a testbed that costs nothing, and the real one once, tiny."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from typer.testing import CliRunner

from headrace.bench import shapes
from headrace.bench.benchmark import Case
from headrace.bench.restore import COLUMNS, RestoreBench, link_rates
from headrace.bench.restore_report import plot
from headrace.bench.restore_splits import around, balance, grid, measured
from headrace.bench.restore_testbed import RestoreTestbed, SplitPoint, TimedRestore
from headrace.cli.main import app
from headrace.offload.restore.run_costs import StoredRun
from headrace.offload.restore.solver import Split, predict, restore_split
from headrace.planner.machine import PieceRate
from headrace.planner.profile import Profile
from tests.support.profiles import linked, profile_of


def known_profile(project_s: float, prefill: tuple[float, float, float], bytes_s: float | None) -> Profile:
    return linked(profile_of(8, prefill, {"host": PieceRate(0.125e-9, 20e-6)}, project_s), bytes_s)


X_BYTES = 64 * 1024 * 2 * 8
RUN = StoredRun(first=0, chunks=64, suffix=32, kv_bytes=2 * X_BYTES, x_bytes=X_BYTES, layers=8, tiers="host")
TINY = shapes.CheckpointShape(hidden=64, layers=2, heads=4, kv_heads=4, head_dim=32, mlp=128, vocab=2048)


@dataclass
class Imagined:
    """A testbed that takes `slow` times what the solver predicts; `drift` more with every restore."""

    run: StoredRun = RUN
    slow: float = 1.05
    drift: float = 0.0
    asked: list[SplitPoint] = field(default_factory=list)
    known: Profile = field(default_factory=lambda: known_profile(2e-6, (5e-3, 1e-4, 2e-9), 0.5e9))

    def time(self, at: SplitPoint) -> TimedRestore:
        self.asked.append(at)
        found = predict(self.run, self.known, at.tokens, at.x)
        seconds = found.seconds * self.slow * (1 + self.drift * len(self.asked))
        return TimedRestore(seconds, seconds + 1e-3, found.link_s, found.waited_s, found)

    def choice(self) -> tuple[StoredRun, Split]:
        return self.run, restore_split(self.run, self.known)

    def rates(self) -> dict[str, float]:
        return {"host_bytes_s": 0.5e9}

    def close(self) -> None:
        pass


@pytest.mark.parametrize("drift", [0.0, 0.001])
def test_a_case(drift: float) -> None:
    testbed = Imagined(drift=drift)
    case = measured(testbed, stride=8, repeats=3)
    split = restore_split(RUN, testbed.known)
    assert (case["tokens"], case["x"], case["load"]) == split[:3]
    assert case["to_best"] == pytest.approx(1.0, abs=0.01)
    assert case["best_s"] <= case["chosen_s"]
    assert case["gain"] > 1
    assert case["measured_to_predicted"] == pytest.approx(1.05 * (1 + drift * len(testbed.asked)), rel=0.02)
    assert case["to_load_all"] < 1 and case["to_recompute_all"] < 1
    predicted = predict(RUN, testbed.known, split.tokens, split.x)
    assert case["overlap"] == pytest.approx(1.0 - predicted.waited_s / predicted.link_s)
    for at in (SplitPoint(split.tokens, split.x), SplitPoint(0, 0), SplitPoint(64, 0)):
        assert testbed.asked.count(at) >= 3
    json.dumps(case)


def test_without_activations_none_are_projected() -> None:
    testbed = Imagined(StoredRun(0, 64, 32, RUN.kv_bytes / 4, None, 8, "host"))
    assert measured(testbed, 8, 5)["x"] == 0
    assert all(at.x == 0 for at in testbed.asked)


def test_where_all_is_recomputed() -> None:
    """Nothing is loaded: there is no overlap to tell of."""
    testbed = Imagined(known=known_profile(2e-3, (0, 1e-4, 2e-9), 1e6))
    case = measured(testbed, stride=8, repeats=1)
    assert (case["tokens"], case["overlap"], case["gain"]) == (64, None, pytest.approx(1.0))
    assert [column.text(case) for column in COLUMNS if column.head == "overlap"] == ["-"]


def test_grids() -> None:
    assert grid(RUN, 32) == [(0, 0), (0, 32), (0, 64), (32, 0), (32, 32), (64, 0)]
    odd = grid(StoredRun(0, 5, 1, 1.0, None, 1, "host"), 2)
    assert odd == [(0, 0), (2, 0), (4, 0), (5, 0)]
    assert len(grid(RUN, 1)) == 65 * 66 // 2
    near = around(RUN, SplitPoint(64, 0), 4)
    assert near == [(60, 0), (60, 4)]
    assert all(at.tokens + at.x <= 64 for at in near)


def made() -> list[Case]:
    found = []
    for model in ("S2", "S1"):
        for gbps in (0.1, 1.0, 10.0):
            known = known_profile(2e-6, (5e-3, 1e-4, 2e-9), gbps * 1e9)
            case = measured(Imagined(known=known), stride=8, repeats=1)
            found.append({"model": model, "link_gbps": gbps, "latency_ms": 0.0} | case)
    return found


def test_the_link_of_balance() -> None:
    """Over it, both ends take about as long, and doing some of each gains the more."""

    def opened(gbps: float | None) -> Imagined:
        known = known_profile(2e-6, (5e-3, 1e-4, 2e-9), None if gbps is None else gbps * 1e9)
        return Imagined(known=known)

    case = measured(opened(balance(opened)), stride=8, repeats=1)
    assert case["balance"] == pytest.approx(1.0, abs=0.1)
    assert case["gain"] > 1.5


@pytest.mark.matrix
def test_columns_and_plot(tmp_path: Path) -> None:
    found = made()
    assert all(column.text(case) != "-" for case in found for column in COLUMNS)
    assert [column.limit_text(found[0]) for column in COLUMNS if column.limit is not None] == ["<= 1.030"]
    plot(found, tmp_path / "plot.png")
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"models": ("S9",)}, "models"), ({"tokens": 100}, "tokens"), ({"links": ()}, "links"),
        ({"links": (0.0,)}, "links"), ({"stride": 0}, "stride"), ({"repeats": 0}, "repeats"), ({"suffix": 0}, "suffix"),
    ],
)  # fmt: skip
def test_plan_refuses(given: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        RestoreBench(**given)  # type: ignore[arg-type]


def test_links() -> None:
    assert link_rates("links", "0.1,30,balance") == (0.1, 30.0, None)
    with pytest.raises(ValueError, match="links"):
        link_rates("links", "fast")


def test_a_real_testbed(tmp_path: Path) -> None:
    """Every way of coming back, timed; the counters tell which it was."""
    testbed = RestoreTestbed(TINY, tmp_path / "tiny", 0.5, chunks=4, suffix=5, threads=1, max_batch_tokens=128)
    try:
        counters = testbed.offload.counters
        for at in (SplitPoint(0, 0), SplitPoint(2, 0), SplitPoint(0, 3), SplitPoint(1, 2), SplitPoint(4, 0)):
            before = counters.loaded_tokens, counters.projected_tokens
            timed = testbed.time(at)
            assert 0 < timed.seconds <= timed.ttft_s
            assert timed.predicted.seconds > 0
            assert counters.projected_tokens - before[1] == 64 * at.x
            assert counters.loaded_tokens - before[0] == 64 * (4 - at.tokens - at.x)
            assert (timed.link_s > 0) == (at.tokens < 4)
            assert timed.waited_s >= 0
        run, split = testbed.choice()
        assert (run.first, run.chunks, run.suffix, run.layers) == (0, 4, 5, 2)
        assert sum(split[:3]) == 4
        assert testbed.rates()["host_observed"] >= 4
    finally:
        testbed.close()
    with pytest.raises(ValueError, match="chunk"):
        RestoreTestbed(TINY, tmp_path / "tiny", 0.5, chunks=0, suffix=1)


def test_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(shapes.SHAPES, "S2", TINY)
    file, image = tmp_path / "r.json", tmp_path / "r.png"
    command = ["bench", "restore", "--models", "S2", "--links", "0.1,10,balance", "--tokens", "256", "--stride", "4"]
    more = ["--repeats", "1", "--threads", "1", "--json", str(file), "--plot", str(image)]
    done = CliRunner().invoke(app, command + more)
    assert done.exit_code == 0, done.output
    found = json.loads(file.read_text())["cases"]
    assert [case["link_gbps"] for case in found[:2]] == [0.1, 10.0]
    assert [case["balanced"] for case in found] == [False, False, True]
    assert all(case["tokens"] + case["x"] + case["load"] == 4 for case in found)
    assert image.exists()
