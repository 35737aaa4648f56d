"""What `make test` leaves out of a matrix: never a pair of values. And what runs first, on how many threads."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from itertools import combinations, product
from pathlib import Path
from random import Random
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.sampling import EVERY, FEW, SLOW, SPREAD, Case, draw, met, thinned
from tests.support.scheduling import LONGEST, place, share_the_cores
from tests.support.slow_tests import slow_tests, told

ROOT = Path(__file__).parents[2]


@settings(deadline=None, max_examples=30)
@given(st.lists(st.integers(1, 5), min_size=1, max_size=4), st.integers(0, 9))
def test_every_pair_is_met(sizes: list[int], seed: int) -> None:
    cases = [dict(zip("abcde", map(str, each), strict=False)) for each in product(*map(range, sizes))]
    kept = [cases[number] for number in draw(cases, Random(seed))]
    if len(sizes) > 2:
        pairs = {pair for case in cases for pair in combinations(sorted(case.items()), 2)}
        assert pairs == {pair for case in kept for pair in combinations(sorted(case.items()), 2)}
    assert {each for case in cases for each in case.items()} == {each for case in kept for each in case.items()}


def test_much_is_left_out() -> None:
    cases: list[Case] = [dict(zip("abcd", map(str, each), strict=True)) for each in product(range(4), repeat=4)]
    assert len(draw(cases, Random(1))) < 40 < len(cases) == 256


def test_few_cases_are_kept_whole_and_the_draw_is_repeatable() -> None:
    cases: list[Case] = [dict(zip("ab", map(str, each), strict=True)) for each in product(range(2), repeat=2)]
    assert len(cases) < FEW and draw(cases, Random(3)) == set(range(4))
    many = [{**case, "d": str(number)} for case in cases for number in range(5)]
    assert draw(many, Random(3)) == draw(many, Random(3))


def test_one_parameter_keeps_every_value() -> None:
    cases: list[Case] = [{"name": str(number)} for number in range(50)]
    assert draw(cases, Random(1)) == set(range(50))
    assert list(met(cases[0])) == [(("name", "0"),)]


def test_functions_share_the_values_of_a_spread_parameter() -> None:
    cases: list[Case] = [{"kind": str(kind), "a": str(a)} for kind in range(20) for a in range(3)]
    drawn = [[cases[number] for number in draw(cases, Random(f"1/{name}"))] for name in range(60)]
    assert all(len({case["kind"] for case in kept}) == SPREAD["kind"] for kept in drawn)
    assert all({case["a"] for case in kept} == {"0", "1", "2"} for kept in drawn)
    assert {case["kind"] for kept in drawn for case in kept} == set(map(str, range(20)))
    without: list[Case] = [{"a": "0"}, {"a": "1"}]
    assert draw(without, Random(1)) == {0, 1}


CASES = """
import pytest
@pytest.mark.parametrize("x", [1, pytest.param(2, marks=pytest.mark.matrix)])
def test_marked(x): pass
@pytest.mark.parametrize("x", range(30))
@pytest.mark.parametrize("y", range(2))
def test_drawn(x, y): pass
def test_plain(): pass
"""


@pytest.mark.parametrize(
    ("matrices", "others", "of_slow"),
    [("sample", {"test_marked[1]", "test_plain"}, 1), ("rest", {"test_marked[2]"}, 59)],
)
def test_every_case_is_in_one_of_both(matrices: str, others: set[str], of_slow: int, tmp_path: Path) -> None:
    """Of 60 cases half, and of a function of a slow file one case."""
    (tmp_path / "test_cases.py").write_text(CASES)
    slow = tmp_path / "tests" / min(SLOW)
    slow.parent.mkdir(parents=True)
    slow.write_text(CASES)
    kept = collected(tmp_path, matrices)
    names = [name for file, name in kept if file == "test_cases.py"]
    assert sum(name.startswith("test_drawn") for name in names) == 30, names
    assert {name for name in names if not name.startswith("test_drawn")} == others
    assert sum(file == f"tests/{min(SLOW)}" and name.startswith("test_drawn") for file, name in kept) == of_slow, kept


def collected(folder: Path, matrices: str) -> list[tuple[str, str]]:
    """Files and names of the cases that pytest would run in a folder."""
    options = ["--collect-only", "-q", "-p", "tests.support.sampling", "-p", "no:cacheprovider", "--matrices", matrices]
    command = [
        sys.executable,
        "-m",
        "pytest",
        *options,
        "--rootdir",
        str(folder),
        "-c",
        str(ROOT / "pyproject.toml"),
        str(folder),
    ]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    found = (line.split("::") for line in done.stdout.splitlines() if "::" in line)
    return [(file, name) for file, name in found]


def test_of_slow_tests_a_file_keeps_one_in_eight(monkeypatch: pytest.MonkeyPatch) -> None:
    """One at least, others with another seed, and none that is not slow is left out."""
    monkeypatch.setattr("tests.support.sampling.slow_tests", lambda: {"cpu/test_x.py::test_a", "cpu/test_y.py::test_b"})
    cases = [f"tests/cpu/test_x.py::test_a[{case}]" for case in range(40)]
    others = ["tests/cpu/test_x.py::test_b", "tests/cpu/test_z.py::test_a"]
    kept = {}
    for seed in map(str, range(20)):
        monkeypatch.setenv("HEADRACE_TEST_SEED", seed)
        left_out = thinned([*cases, *others, "tests/cpu/test_y.py::test_b"])
        kept[seed] = [case for case in cases if case not in left_out]
        assert len(left_out) == 35 and len(kept[seed]) == 40 // EVERY and left_out < set(cases)
    assert sorted({case for each in kept.values() for case in each}) == sorted(cases)


def test_slow_tests_are_there_and_are_read_from_what_pytest_prints() -> None:
    gone = [each for each in slow_tests() if not _is_there(each)]
    assert len(slow_tests()) > 500 and not gone, f"mend tests/support/slow_tests.txt: {gone}"
    log = """
0.28s call     tests/unit/test_a.py::test_b[1::2]
0.03s setup    tests/unit/test_a.py::test_b[1::2]
0.29s call     tests/unit/test_a.py::test_c
9.00s call     tests/unit/test_a.py::TestD::runTest
"""
    assert told(log) == {"unit/test_a.py": ["TestD::runTest", "test_b"]}


def _is_there(name: str) -> bool:
    """Whether the test stands in its file; of a state machine its class."""
    file, *_, name = name.replace("::runTest", "").split("::")
    path = ROOT / "tests" / file
    return path.exists() and re.search(rf"\b{name}\b", path.read_text()) is not None


def test_the_longest_files_are_there_and_come_first() -> None:
    assert all((ROOT / "tests" / name).exists() for name in (*LONGEST, *SLOW))
    names = ["unit/test_cut.py::a", "cpu/test_kernels.py::b[x]", "processes/test_links.py::c", f"{LONGEST[0]}::d"]
    assert sorted((f"tests/{name}" for name in names), key=place) == [f"tests/{name}" for name in reversed(names)]


@pytest.mark.parametrize(("worker", "threads"), [("gw0", []), ("gw1", [1])])
def test_one_worker_alone_has_all_threads(worker: str, threads: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """And what a worker starts has as many as it."""
    asked: list[int] = []
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(set_num_threads=asked.append))
    share_the_cores(worker)
    assert asked == threads and os.environ["OMP_NUM_THREADS"] == str([*threads, 7][0])
