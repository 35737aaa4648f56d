"""A part of the large matrices in which every pair of values is met: `pytest -p tests.support.sampling` (`make test`).

A function with many cases in three parameters or more keeps some of them: each two values of two parameters stand
together in one at least (pairwise cover). With two parameters each value is met. Before that, of parameters in SPREAD a
function keeps some values, others than the next function does. The draw is seeded: HEADRACE_TEST_SEED, or 1. A case
marked `matrix`, one that differs from others in little and takes long, is not kept either, and a function of the files
in SLOW keeps one case alone. Of what is then left of the slow functions of a file (slow_tests) every eighth case is
kept. With --matrices rest (`make test-matrix`) exactly the cases run that the sample leaves out. Without this plugin
everything does.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from itertools import combinations
from random import Random

import pytest

from tests.support.slow_tests import slow_tests

FEW = 6
"""Functions with no more cases than this keep them all."""

SPREAD = {"isa": 1, "kind": 3, "model": 4}
"""Parameter -> values that a function keeps: instruction sets and families of models stand in many functions, which
together meet them all."""

SLOW = frozenset(
    {
        "cpu/test_device_sampler.py",
        "cpu/test_draft_model.py",
        "cpu/test_gguf_experts.py",
        "cpu/test_gpu_weights.py",
        "cpu/test_offload_damage.py",
        "cpu/test_ranked_remote.py",
        "cpu/test_ranked_stream.py",
        "cpu/test_ranked_tiers.py",
        "cpu/test_stream.py",
        "cpu/test_stream_order_decoding.py",
        "cpu/test_tensor_tiers.py",
        "cpu/test_triton.py",
        "cpu/test_triton_layers.py",
    }
)
"""Files whose cases take seconds each, and of a function do much the same."""

EVERY = 8
"""Of so many slow cases of a file one is kept."""

Case = dict[str, str]


def pytest_addoption(parser: pytest.Parser) -> None:
    told = "sample: part of the cases of large matrices; rest: the others, and nothing else"
    parser.addoption("--matrices", choices=("sample", "rest"), default="sample", help=told)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    functions: dict[str, list[pytest.Function]] = {}
    for item in items:
        if isinstance(item, pytest.Function) and hasattr(item, "callspec") and not marked(item):
            functions.setdefault(item.nodeid.split("[")[0], []).append(item)
    left_out = {item.nodeid for item in items if marked(item)}
    for name, cases in functions.items():
        random = Random(f"{seed()}/{name}")
        drawn = {random.randrange(len(cases))} if is_slow(name) else draw([values(case) for case in cases], random)
        left_out |= {case.nodeid for number, case in enumerate(cases) if number not in drawn}
    left_out |= thinned([item.nodeid for item in items if item.nodeid not in left_out])
    if config.getoption("matrices") == "rest":
        left_out = {item.nodeid for item in items} - left_out
    config.hook.pytest_deselected(items=[item for item in items if item.nodeid in left_out])
    items[:] = [item for item in items if item.nodeid not in left_out]


def thinned(nodeids: Sequence[str]) -> set[str]:
    """Slow ones that are left out: of each file all but every eighth, of which one is the first that is drawn."""
    slow = slow_tests()
    files: dict[str, list[str]] = {}
    for nodeid in nodeids:
        name = nodeid.split("[")[0].removeprefix("tests/")
        if name in slow:
            files.setdefault(name.split("::")[0], []).append(nodeid)
    first = {file: Random(f"{seed()}/{file}").randrange(min(EVERY, len(cases))) for file, cases in files.items()}
    placed = ((file, place, each) for file, cases in files.items() for place, each in enumerate(cases))
    return {each for file, place, each in placed if place % EVERY != first[file]}


def pytest_report_header(config: pytest.Config) -> str:
    if config.getoption("matrices") == "rest":
        return f"matrices: what the sample of seed {seed()} (HEADRACE_TEST_SEED) leaves out"
    return f"matrices: a pairwise sample, seed {seed()} (HEADRACE_TEST_SEED); the rest: make test-matrix"


def marked(item: pytest.Item) -> bool:
    return item.get_closest_marker("matrix") is not None


def is_slow(nodeid: str) -> bool:
    """Whether a test is of a file in SLOW."""
    return nodeid.split("::")[0].removeprefix("tests/") in SLOW


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
    left = {number: set(met(cases[number])) for number in order}
    missing = set().union(*left.values())
    kept: set[int] = set()
    while missing:
        best = max(left, key=lambda number: len(left[number] & missing))
        kept.add(best)
        missing -= left.pop(best)
    return kept


def spread(cases: Sequence[Case], random: Random) -> list[int]:
    """Numbers of the cases with the values that are drawn of each parameter in SPREAD."""
    left = list(range(len(cases)))
    for name, count in SPREAD.items():
        known = sorted({cases[number][name] for number in left if name in cases[number]})
        kept = set(random.sample(known, min(count, len(known))))
        left = [number for number in left if cases[number].get(name) in kept or name not in cases[number]]
    return left


def met(case: Case) -> Iterable[tuple[tuple[str, str], ...]]:
    """Pairs of values; single values where there are but two parameters."""
    return combinations(sorted(case.items()), 2 if len(case) > 2 else 1)
