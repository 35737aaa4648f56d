"""A pytest plugin for tests/gpu: what has not passed on a device yet comes first, and each outcome is kept at once.

--passed FILE: tests that it names as passed are left out. --outcomes FILE: gets a line for each test that ends: outcome
and name. --part K/N: every N-th test function alone, from the K-th on.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

RESULTS = Path("bench/results")
ENDED = ("test_cuda_copy_streams.py", "test_gpu_graphs.py", "test_gpu_sampling.py", "test_triton_rows.py")
"""Files all of whose tests passed on an H200 before outcomes were kept."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--passed", type=Path, help="leave out what passed according to this file")
    parser.addoption("--outcomes", type=Path, help="append the outcome of each test to this file")
    parser.addoption("--part", default="0/1", help="K/N: every N-th test function, from the K-th on")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Orders the tests, and keeps those of the part."""
    passed, before = passed_in(config.getoption("passed")), passed_before(RESULTS)
    left = [item for item in items if item.nodeid not in passed]
    left.sort(key=lambda item: item.nodeid in before if before else item.path.name in ENDED)
    part, parts = map(int, str(config.getoption("part")).split("/"))
    functions = list(dict.fromkeys(function_of(item.nodeid) for item in left))
    mine = set(functions[part::parts])
    kept = [item for item in left if function_of(item.nodeid) in mine]
    config.hook.pytest_deselected(items=[item for item in items if item not in kept])
    items[:] = kept


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> object:
    report: pytest.TestReport = yield  # type: ignore[misc]
    file: Path | None = item.config.getoption("outcomes")
    if file is not None and (report.when == "call" or not report.passed):
        with file.open("a") as lines:
            lines.write(f"{report.outcome} {item.nodeid}\n")
    return report


def function_of(name: str) -> str:
    """The name of a test without its parameters."""
    return name.partition("[")[0]


def outcomes_in(file: Path | None) -> dict[str, str]:
    """The last outcome of each test that a file has."""
    lines = file.read_text().splitlines() if file is not None and file.exists() else []
    return {name: outcome for outcome, _, name in (line.partition(" ") for line in lines)}


def passed_in(file: Path | None) -> set[str]:
    return {name for name, outcome in outcomes_in(file).items() if outcome == "passed"}


def passed_before(results: Path) -> set[str]:
    """What passed by the newest result that says so of tests."""
    for file in sorted(results.glob("*gpu-check*.json"), reverse=True):
        tests: dict[str, str] = json.loads(file.read_text()).get("tests", {})
        if tests:
            return {name for name, outcome in tests.items() if outcome == "passed"}
    return set()
