"""The benchmark of streamed decoding, once, tiny: what it writes, and that the ways it compares are what it says."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from headrace.bench import ranked_offload, shapes
from headrace.bench.offload import OffloadBench, OffloadTestbed
from headrace.bench.ranked_offload import Decoding
from headrace.cli.main import app

TINY = shapes.CheckpointShape(hidden=64, layers=3, heads=4, kv_heads=4, head_dim=16, mlp=128, vocab=512)


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(shapes.SHAPES, "S2", TINY)


@pytest.mark.usefixtures("small", "one_thread")
def test_it_runs_and_says_what_it_found(tmp_path: Path) -> None:
    path = tmp_path / "offload.json"
    arguments = ["bench", "offload", "--rates", "0.5", "--shares", "0.5", "--sequences", "3", "--context", "200",
                 "--repeats", "2", "--steps", "1", "--batches", "2", "--json", str(path)]  # fmt: skip
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 0, done.output
    row, column = json.loads(path.read_text())["cases"]
    assert set(row["tokens_s"]) == {"load all", "solver", "share 0.5"}
    assert set(column["tokens_s"]) == {*row["tokens_s"], "half, fine", "half, coarse"}
    for case in (row, column):
        assert case["gain"] == case["tokens_s"]["solver"] / case["tokens_s"]["load all"]
        assert all(len(runs) == 2 for runs in case["runs"].values()), "one round more, to warm up"
        assert case["solver_over_best"] <= 1.0 and case["tokens_s"][case["best"]] >= case["tokens_s"]["load all"]
        assert all(column.text(case) != "-" for column in OffloadBench().columns() if column.head != "fine order")


@pytest.mark.usefixtures("small", "one_thread")
@pytest.mark.parametrize("schedule", ["row", "column"])
def test_the_ways_differ_in_what_crosses_the_link(schedule: str, tmp_path: Path) -> None:
    bench = OffloadBench(sequences=2, context=256, batches=2, repeats=2, schedules=(schedule,), rates=(1.0,))
    (setup,) = bench.setups()
    testbed = OffloadTestbed(str(shapes.write_checkpoint(TINY, tmp_path)), setup, bench)
    testbed.set_link(100.0, 0.0)
    testbed.run({}, 1)  # begins a fifth chunk

    def bytes_in(**options: Any) -> int:
        before = testbed.streamer.transfers.totals.bytes_in
        run = testbed.run(options, 1)
        assert run.share == pytest.approx(options.get("share", 0.0), abs=0.2)
        return int(testbed.streamer.transfers.totals.bytes_in - before)

    everything, projected = bytes_in(share=0.0), bytes_in(share=1.0)
    x_bytes = 0 if schedule == "row" else testbed.streamer.transfers.store.x_bytes
    # Three layers, two sequences, of each four whole chunks, and one that is loaded either way.
    assert everything - projected == 3 * 2 * 4 * (testbed.streamer.transfers.store.chunk_bytes - x_bytes)
    if schedule == "column":
        assert bytes_in(share=0.0, fine=False) == everything
    testbed.close()


def test_it_refuses_a_schedule_that_does_not_exist() -> None:
    done = CliRunner().invoke(app, ["bench", "offload", "--schedules", "diagonal"])
    assert done.exit_code != 0 and "schedules must be one of row, column" in done.output


class Engine:
    """One rank decodes two tokens a second, several ranks four."""

    def __init__(self, decoding: Decoding, settings: dict[str, Any], threads: int) -> None:
        self.decoding, self.settings, self.threads, self.runs = decoding, settings, threads, list[float]()
        self.waited_s, self.largest_share = 0.0, 0.5

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def decode(self) -> None:
        self.runs.append(4.0 if "prefill_strategy" in self.settings else 2.0)
        self.waited_s += 0.25


@pytest.mark.usefixtures("small")
def test_ranks_beside_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is compared, by engines that only say how fast they were; real ones: tests/processes."""
    monkeypatch.setattr(ranked_offload, "StreamingEngine", Engine)
    bench = OffloadBench(ranks=2, rates=(0.5, 1.0), repeats=3, sequences=2, steps=1)
    cases = list(bench.cases())
    assert len(cases) == bench.case_count() == 8
    assert {(case["name"], case["gbps"], case["spread"]) for case in cases} == set(
        itertools.product(("row", "column"), (0.5, 1.0), ("sequences", "blocks"))
    )
    for case in cases:
        assert (case["one_tokens_s"], case["tokens_s"], case["gain"], case["waited_share"]) == (2.0, 4.0, 2.0, 0.5)
        assert len(case["runs"]) == len(case["one_runs"]) == 3, "and one more round, to warm up"
        assert all(column.text(case) != "-" for column in bench.columns())
