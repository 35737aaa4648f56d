"""A part of the large matrices in which every pair of values is met: `pytest -p tests.support.sampling` (`make test`).

A function with many cases in three parameters or more keeps some of them: each two values of two parameters stand
together in one at least (pairwise cover). With two parameters each value is met. The draw is seeded:
HEADRACE_TEST_SEED, or 1. A case marked `matrix`, one that differs from others in little and takes long, is not kept
either. With --matrices whole (`make test-matrix`) those functions alone run, with all their cases. Without this plugin
everything does.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from itertools import combinations
from random import Random

import pytest

FEW = 6
"""Functions with no more cases than this keep them all."""

Case = dict[str, str]


def pytest_addoption(parser: pytest.Parser) -> None:
    told = "sample: part of the cases of large matrices; whole: all of them, and nothing else"
    parser.addoption("--matrices", choices=("sample", "whole"), default="sample", help=told)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    functions: dict[str, list[pytest.Function]] = {}
    for item in items:
        if isinstance(item, pytest.Function) and hasattr(item, "callspec") and not marked(item):
            functions.setdefault(item.nodeid.split("[")[0], []).append(item)
    left_out = {item.nodeid for item in items if marked(item)}
    sampled = set(left_out)
    for name, cases in functions.items():
        drawn = draw([values(case) for case in cases], Random(f"{seed()}/{name}"))
        if len(drawn) < len(cases):
            sampled |= {case.nodeid for case in cases}
            left_out |= {case.nodeid for number, case in enumerate(cases) if number not in drawn}
    if config.getoption("matrices") == "whole":
        left_out = {item.nodeid for item in items} - sampled
    config.hook.pytest_deselected(items=[item for item in items if item.nodeid in left_out])
    items[:] = [item for item in items if item.nodeid not in left_out]


def pytest_report_header(config: pytest.Config) -> str:
    if config.getoption("matrices") == "whole":
        return "matrices: all cases of those that make test draws from"
    return f"matrices: a pairwise sample, seed {seed()} (HEADRACE_TEST_SEED); every case: make test-matrix"


def marked(item: pytest.Item) -> bool:
    return item.get_closest_marker("matrix") is not None


def seed() -> str:
    return os.environ.get("HEADRACE_TEST_SEED", "1")


def _word(value: object) -> str:
    """The value's repr; of one nested too deeply for that, its type."""
    try:
        return repr(value)
    except RecursionError:
        return type(value).__name__


def values(item: pytest.Function) -> Case:
    """What each parameter is, in words that are the same in every process."""
    spec = item.callspec
    words = {name: _word(value) for name, value in spec.params.items()}
    return {name: word if " at 0x" not in word else str(spec.indices[name]) for name, word in words.items()}


def draw(cases: Sequence[Case], random: Random) -> set[int]:
    """Numbers of the cases that are kept, few of them, in which all is met that is met in `cases`."""
    if len(cases) <= FEW:
        return set(range(len(cases)))
    order = list(range(len(cases)))
    random.shuffle(order)
    left = {number: set(met(cases[number])) for number in order}
    missing = set().union(*left.values())
    kept: set[int] = set()
    while missing:
        best = max(left, key=lambda number: len(left[number] & missing))
        kept.add(best)
        missing -= left.pop(best)
    return kept


def met(case: Case) -> Iterable[tuple[tuple[str, str], ...]]:
    """Pairs of values; single values where there are but two parameters."""
    return combinations(sorted(case.items()), 2 if len(case) > 2 else 1)
