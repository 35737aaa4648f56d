"""The tuned table: saved whole, refused where it does not fit, interpolated between its entries."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec
import pytest

from headrace.planner.machine import ComputeRates
from headrace.planner.partition import Bounds
from headrace.planner.partition_search import PartitionSearch
from headrace.planner.tuned_table import TableEntry, TableStamp, TunedTable, load_table
from tests.support.planner_oracles import GQA, MACHINE, PRINTED, S2, Toy

pytestmark = pytest.mark.unit

STAMP = TableStamp(
    machine=MACHINE.fingerprint, model="s2", shape=S2, ranks=2, link="gloo, lo", version="0.1.0", date="2025-01-01"
)


def tuned() -> TunedTable:
    return TunedTable(
        stamp=STAMP,
        machine=MACHINE,
        entries={8192: TableEntry((0.6, 0.4), 1.0), 16384: TableEntry((0.64, 0.36), 3.0)},
        heuristic=PRINTED,
        corrections={"chain": 1.1},
    )


def test_saved_and_loaded(tmp_path: Path) -> None:
    path = tmp_path / "new" / "table.json"
    table = tuned()
    table.keep(4096, {(0, 2048, 4096): 0.5})
    table.save(path)
    assert load_table(path) == table
    assert os.listdir(path.parent) == ["table.json"]


def test_one_engine_is_an_optional_part_of_a_profile(tmp_path: Path) -> None:
    """Tables from before it was measured load; its figures are checked as the others are."""
    path, table = tmp_path / "table.json", tuned()
    rates = ComputeRates(cores=4, linear_flops_s=1e12, attention_flops_s=((16, 8e11),), memory_bytes_s=5e10)
    table.machine = msgspec.structs.replace(MACHINE, one_engine=rates, exchange_s=(("chain", 0.001),))
    table.save(path)
    assert load_table(path) == table
    assert table.machine.alone.cores == 4 and table.machine.alone.link_bytes_s == MACHINE.link_bytes_s
    assert table.machine.fingerprint == MACHINE.fingerprint
    old = msgspec.json.decode(path.read_bytes())
    del old["machine"]["one_engine"], old["machine"]["exchange_s"]
    path.write_bytes(msgspec.json.encode(old))
    assert load_table(path) == tuned()
    with pytest.raises(ValueError, match="linear_flops_s must be above 0"):
        msgspec.structs.replace(MACHINE, one_engine=msgspec.structs.replace(rates, linear_flops_s=0.0))


def test_an_interrupted_save_leaves_the_old_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "table.json"
    tuned().save(path)
    changed = tuned()
    changed.entries.clear()

    def fail(*_: object) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(OSError, match="disk full"):
        changed.save(path)
    assert load_table(path) == tuned() and os.listdir(tmp_path) == ["table.json"]


@pytest.mark.parametrize("body", ["", "{}", "[1", '{"stamp": 3}'])
def test_broken_files(tmp_path: Path, body: str) -> None:
    path = tmp_path / "table.json"
    with pytest.raises(ValueError, match="headrace tune"):
        load_table(path)
    path.write_text(body)
    with pytest.raises(ValueError, match="headrace tune"):
        load_table(path)


@pytest.mark.parametrize("fractions", [(1.0,), (0.6, 0.6), (1.5, -0.5)])
def test_unsound_entries(tmp_path: Path, fractions: tuple[float, ...]) -> None:
    table = tuned()
    table.entries[100] = TableEntry(fractions, 1.0)
    table.save(tmp_path / "table.json")
    with pytest.raises(ValueError, match="entry for 100 tokens"):
        load_table(tmp_path / "table.json")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"machine": "other, 2 cores, avx2"}, "machine: tuned for 'test box, 2 cores, avx512bf16'"),
        ({"model": "s1"}, "model: tuned for 's2', used with 's1'"),
        ({"shape": GQA}, "shape: tuned for layers 8, .* used with layers 16"),
        ({"ranks": 3}, "ranks: tuned for 2, used with 3"),
        ({"link": "nccl"}, "link"),
        ({"version": "0.2.0"}, "headrace version"),
    ],
)
def test_refused_elsewhere(change: dict, said: str) -> None:
    with pytest.raises(ValueError, match=said) as error:
        tuned().check(msgspec.structs.replace(STAMP, **change))
    assert "headrace tune" in str(error.value)


def test_accepted_where_it_fits() -> None:
    tuned().check(msgspec.structs.replace(STAMP, date="2026-01-01", version="0.1.7"))


def test_lookup() -> None:
    assert tuned().lookup(8192) == (0, 4915, 8192)
    assert tuned().lookup(12288) == (0, 7619, 12288)  # 0.62
    assert tuned().lookup(12288, unit=64) == (0, 7616, 12288)
    assert tuned().lookup(12288, start=128, unit=2048) == (128, 8192, 12416)
    assert tuned().lookup(100) == (0, 60, 100)
    with pytest.raises(ValueError, match="headrace tune"):
        TunedTable(stamp=STAMP, machine=MACHINE).lookup(100)


def test_a_search_resumed_from_a_file(tmp_path: Path) -> None:
    path, calls = tmp_path / "table.json", list[Bounds]()

    def measure(bounds: Bounds) -> float:
        calls.append(bounds)
        return Toy().chain(bounds)

    table = tuned()
    points = table.points(4096)
    for progress in PartitionSearch(4096, 2, measure, measured=points):
        table.keep(4096, points)
        table.save(path)
        if progress.measured == 4:
            break
    resumed = load_table(path)
    search = PartitionSearch(4096, 2, measure, measured=resumed.points(4096))
    resumed.finish(4096, search.run(), search.best_s)
    assert len(set(calls)) == len(calls)
    assert resumed.lookup(4096) == PartitionSearch(4096, 2, Toy().chain).run()
    assert 4096 not in resumed.measured and resumed.entries[4096].ttft_s == search.best_s
