"""A pytest plugin for tests/gpu: what has not passed on a device yet comes first, and each outcome is kept at once.

--passed FILE: tests that it names as passed are left out. --part K/N: every N-th test function alone, from the K-th on;
of these --ended FILE leaves out all that it names. --outcomes FILE: gets a line for each test that begins ('unended')
and one for each that ends: outcome and name; what failures say goes into a file beside it. A test that takes SECONDS
ends the process, and so does one behind which the device computes nothing more (an illegal access of memory): the tests
behind it would fail for nothing, and run in another process (tools.gpu.device_tests).
"""

from __future__ import annotations

import faulthandler
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tools.gpu.outcomes import FAILED, LOST, failures_beside, outcomes_in

RESULTS = Path("bench/results")
ENDED = ("test_cuda_copy_streams.py", "test_gpu_sampling.py", "test_triton_rows.py")
"""Files all of whose tests passed on an H200 before outcomes were kept."""
FIRST = (
    "test_gpu_launching.py", "test_gpu_layer_check.py", "test_gpu_graphs.py", "test_gpu_changes.py",
    "test_cuda_adapters.py", "test_cuda_latents.py", "test_triton_hybrid.py", "test_gpu_gemma4.py",
    "test_cuda_drafts.py", "test_cuda_ranks.py", "test_triton_rounded.py", "test_triton_weights.py",
)  # fmt: skip
"""Files that ask for what has never run on a device (docs/gpu-check.md): before others, which take as long."""
SECONDS = 90.0
"""For one test and its fixtures, kernels compiled."""
LONGEST = 3000
"""Characters kept of what a failure says."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--passed", type=Path, help="leave out what passed according to this file")
    parser.addoption("--ended", type=Path, help="leave out what this file names")
    parser.addoption("--outcomes", type=Path, help="append the outcome of each test to this file")
    parser.addoption("--part", default="0/1", help="K/N: every N-th test function, from the K-th on")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Orders the tests, those last that failed in this run, and keeps those of the part."""
    tried, before = outcomes_in(config.getoption("passed")), passed_before(RESULTS)
    left = [item for item in items if tried.get(item.nodeid) != "passed"]
    left.sort(key=lambda item: FIRST.index(item.path.name) if item.path.name in FIRST else len(FIRST))
    left.sort(key=lambda item: item.nodeid in before if before else item.path.name in ENDED)
    left.sort(key=lambda item: item.nodeid in tried)
    part, parts = map(int, str(config.getoption("part")).split("/"))
    functions = list(dict.fromkeys(function_of(item.nodeid) for item in left))
    mine = set(functions[part::parts])
    ended = outcomes_in(config.getoption("ended"))
    kept = [item for item in left if function_of(item.nodeid) in mine and item.nodeid not in ended]
    config.hook.pytest_deselected(items=[item for item in items if item not in kept])
    items[:] = kept


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """Says which test is under way, before it can end the process."""
    file: Path | None = item.config.getoption("outcomes")
    if file is None:
        return (yield)
    _append(file, f"unended {item.nodeid}\n")
    with failures_beside(file).open("a") as told:
        faulthandler.dump_traceback_later(SECONDS, exit=True, file=told)
        try:
            return (yield)
        finally:
            faulthandler.cancel_dump_traceback_later()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Iterator[None]:
    report: pytest.TestReport = yield  # type: ignore[assignment]
    file: Path | None = item.config.getoption("outcomes")
    if file is not None and (report.when == "call" or not report.passed):
        _append(file, f"{report.outcome} {item.nodeid}\n")
        if report.failed:
            _append(failures_beside(file), f"{item.nodeid}\n{report.longreprtext[-LONGEST:]}\n\n")
            if _lost():
                os._exit(LOST)
    return report  # type: ignore[return-value]


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    if session.config.getoption("outcomes") is not None and session.exitstatus == pytest.ExitCode.TESTS_FAILED:
        session.exitstatus = FAILED


def _append(file: Path, text: str) -> None:
    with file.open("a") as lines:
        lines.write(text)


def _lost() -> bool:
    """Whether this process computes nothing more on its device."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return False
    try:
        torch.cuda.synchronize()
    except Exception:
        return True
    return False


def function_of(name: str) -> str:
    """The name of a test without its parameters."""
    return name.partition("[")[0]


def passed_in(file: Path | None) -> set[str]:
    return {name for name, outcome in outcomes_in(file).items() if outcome == "passed"}


def passed_before(results: Path) -> set[str]:
    """What passed by the newest result that says so of tests."""
    for file in sorted(results.glob("*gpu-check*.json"), reverse=True):
        tests: dict[str, str] = json.loads(file.read_text()).get("tests", {})
        if tests:
            return {name for name, outcome in tests.items() if outcome == "passed"}
    return set()
