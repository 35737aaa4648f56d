"""Every pair of values that may stand together is met by a case of tests/cpu/test_every_pair.py: counted, pair by pair.

Run with -s to see how many cases that takes.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import combinations, product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.config.combinations import EXCLUSIONS, FEATURES, Exclusion
from tests.support.feature_pairs import PARAMETERS, cases, coverage, features, id_of, possible
from tests.support.pairwise import Case, Coverage, every_value
from tools.combinations import cell

pytestmark = pytest.mark.unit

BY_NATURE = tuple(each for each in EXCLUSIONS if not each.yet)


@pytest.mark.parametrize("exclusions", [EXCLUSIONS, BY_NATURE], ids=["today", "when all is built"])
def test_every_pair_of_values_is_met(exclusions: Sequence[Exclusion]) -> None:
    """Or is in no case that breaks no constraint, of all combinations of the parameters that have some."""
    array = coverage(exclusions).cases()
    met = {frozenset(each) for case in array for each in combinations(case.items(), 2)}
    allowed = partial(possible, exclusions=exclusions)
    assert all(allowed(case) and case.keys() == PARAMETERS.keys() for case in array)
    refused = 0
    for one, other in combinations(PARAMETERS, 2):
        for x, y in product(PARAMETERS[one], PARAMETERS[other]):
            if frozenset({(one, x), (other, y)}) not in met:
                refused += 1
                assert not any(map(allowed, with_all({one: x, other: y}))), f"{one} {x} with {other} {y} is in no case"
    print(f"{len(array)} cases, {len(met)} pairs, {refused} refused")
    assert len(array) <= 80


def with_all(case: Case) -> Sequence[Case]:
    """The case with every combination of the values that most constraints are about, some of them possible if any full
    case is."""
    bound = [
        name for name in ("ranks", "tensor", "tier", "source", "schedule", "outside", "prefixes") if name not in case
    ]
    return [{**dict(zip(bound, each, strict=True)), **case} for each in product(*(PARAMETERS[n] for n in bound))]


def test_every_cell_of_the_table_is_a_case() -> None:
    """But for the GPU's, which are tested in tests/gpu."""
    on = [features(case) | ({case["tier"]} if case["schedule"] != "off" else set()) for case in cases()]
    for one, other in combinations(FEATURES, 2):
        if "gpu" not in (one.name, other.name) and cell(one, other) in ("+", "place"):
            assert any({one.name, other.name} <= each for each in on), f"{one.label} with {other.label}"


def test_ids_tell_cases_apart() -> None:
    ids = [id_of(case) for case in cases()]
    assert len(set(ids)) == len(ids)


def test_few_cases_have_every_value() -> None:
    few = every_value(cases())
    assert len(few) < len(cases()) / 3
    assert {item for case in few for item in case.items()} == {item for case in cases() for item in case.items()}


@settings(max_examples=40)
@given(
    st.lists(st.integers(1, 4), min_size=2, max_size=4),
    st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3), st.integers(0, 3), st.integers(0, 3)), max_size=6),
    st.integers(0, 3),
)
def test_any_constraints(sizes: list[int], forbidden: list[tuple[int, int, int, int]], seed: int) -> None:
    """forbidden: (parameter, its value, another, its value)."""
    parameters = {name: [str(n) for n in range(size)] for name, size in zip("abcd", sizes, strict=False)}

    def possible(case: Case) -> bool:
        return not any(
            p != q and case.get("abcd"[p]) == str(x) and case.get("abcd"[q]) == str(y) for p, x, q, y in forbidden
        )

    every = [dict(zip(parameters, each, strict=True)) for each in product(*parameters.values())]
    pairs = {frozenset(two) for case in filter(possible, every) for two in combinations(case.items(), 2)}
    array = Coverage(parameters, possible).cases(seed)
    assert array == Coverage(parameters, possible).cases(seed)
    assert all(map(possible, array))
    assert pairs == {frozenset(two) for case in array for two in combinations(case.items(), 2)}
