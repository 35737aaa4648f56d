"""A part of the large matrices in which every pair of values is met: `pytest -p tests.support.sampling` (`make test`).

A function with many cases in three parameters or more keeps some of them: each two values of two parameters stand
together in one at least (pairwise cover). With two parameters each value is met. Before that, of parameters in SPREAD a
function keeps some values, others than the next function does. The draw is seeded: HEADRACE_TEST_SEED, or 1. A case
marked `matrix`, one that differs from others in little and takes long, is not kept either.

With --matrices rest (`make test-matrix`) run the cases that the sample leaves out: all of them, or, of a function with
more than MANY cases in four parameters or more, so many that with the sample's each three values of three parameters
stand together in one. Without this plugin everything runs.

Where a test of Hypothesis says nothing else, it draws half as much with the sample as otherwise.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from heapq import heapify, heappop, heappush
from itertools import combinations
from random import Random

import pytest
from hypothesis import settings

FEW = 6
"""Functions with no more cases than this keep them all."""
MANY = 60
"""Of functions with more cases than this some run nowhere but without this plugin."""

EXAMPLES = 50
"""What Hypothesis tries with the sample, where a test says nothing else."""

SPREAD = {"isa": 1, "kind": 3, "model": 4}
"""Parameter -> values that a function keeps: instruction sets and families of models stand in many functions, which
together meet them all."""

Case = dict[str, str]


def pytest_addoption(parser: pytest.Parser) -> None:
    told = "sample: part of the cases of large matrices; rest: the others, and nothing else"
    parser.addoption("--matrices", choices=("sample", "rest"), default="sample", help=told)


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("matrices") == "sample":
        settings.register_profile("headrace-sample", settings.default, max_examples=EXAMPLES)
        settings.load_profile("headrace-sample")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    functions: dict[str, list[pytest.Function]] = {}
    for item in items:
        if isinstance(item, pytest.Function) and hasattr(item, "callspec") and not marked(item):
            functions.setdefault(item.nodeid.split("[")[0], []).append(item)
    rest = config.getoption("matrices") == "rest"
    left_out = {item.nodeid for item in items if marked(item) != rest}
    for name, cases in functions.items():
        told, random = [values(case) for case in cases], Random(f"{seed()}/{name}")
        drawn = draw(told, random)
        kept = others(told, drawn, random) if rest else drawn
        left_out -= {case.nodeid for case in cases}
        left_out |= {case.nodeid for number, case in enumerate(cases) if number not in kept}
    config.hook.pytest_deselected(items=[item for item in items if item.nodeid in left_out])
    items[:] = [item for item in items if item.nodeid not in left_out]


def pytest_report_header(config: pytest.Config) -> str:
    if config.getoption("matrices") == "rest":
        return f"matrices: what the sample of seed {seed()} (HEADRACE_TEST_SEED) leaves out"
    return f"matrices: a pairwise sample, seed {seed()} (HEADRACE_TEST_SEED); the rest: make test-matrix"


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
    """Numbers of the cases that are kept, few of them: all that is met in those of `spread` is met in them."""
    order = spread(cases, random)
    if len(order) <= FEW:
        return set(order)
    random.shuffle(order)
    return cover(cases, order, 2)


def others(cases: Sequence[Case], drawn: set[int], random: Random) -> set[int]:
    """Numbers of the cases that run where the drawn ones do not."""
    left = set(range(len(cases))) - drawn
    if len(cases) <= MANY or len(cases[0]) < 4:
        return left
    return cover(cases, random.sample(sorted(left), len(left)), 3, drawn)


def cover(cases: Sequence[Case], order: Sequence[int], size: int, before: Iterable[int] = ()) -> set[int]:
    """Of the numbers in `order` few, in whose cases and in those `before` all is met that is met in any: one after the
    other what has most that is missing, the first of several."""
    left = {number: set(met(cases[number], size)) for number in order}
    missing = set().union(*left.values()).difference(*(met(cases[number], size) for number in before))
    gains = [(-len(left[number]), place, number) for place, number in enumerate(order)]
    heapify(gains)
    kept: set[int] = set()
    while missing:  # gains only shrink: one that is still what it was is the greatest
        gain, place, number = heappop(gains)
        if (now := -len(left[number] & missing)) != gain:
            heappush(gains, (now, place, number))
            continue
        kept.add(number)
        missing -= left[number]
    return kept


def spread(cases: Sequence[Case], random: Random) -> list[int]:
    """Numbers of the cases with the values that are drawn of each parameter in SPREAD."""
    left = list(range(len(cases)))
    for name, count in SPREAD.items():
        known = sorted({cases[number][name] for number in left if name in cases[number]})
        kept = set(random.sample(known, min(count, len(known))))
        left = [number for number in left if cases[number].get(name) in kept or name not in cases[number]]
    return left


def met(case: Case, size: int = 2) -> Iterable[tuple[tuple[str, str], ...]]:
    """So many values together; single values where there are no more parameters than that."""
    return combinations(sorted(case.items()), size if len(case) > size else 1)
