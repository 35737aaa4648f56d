"""What a soak calls growth (tools/soak/watch.py): medians of the first and last third after the warm-up."""

from __future__ import annotations

from typing import Any

import pytest

from tools.soak.watch import Sample, checks

pytestmark = pytest.mark.unit


def samples(memory: Any, descriptors: Any = lambda n: 20.0, count: int = 60) -> list[Sample]:
    return [{"engine": {"memory_mib": memory(n), "descriptors": descriptors(n), "threads": 8.0}} for n in range(count)]


def grown(given: list[Sample]) -> list[str]:
    return [check.name for check in checks(given) if not check.ok]


def test_flat_is_flat() -> None:
    assert grown(samples(lambda n: 300.0)) == []


def test_a_warm_up_and_noise_are_no_growth() -> None:
    assert grown(samples(lambda n: 300.0 if n < 15 else 400.0 + n % 7)) == []
    assert grown(samples(lambda n: 900.0 if n == 50 else 400.0, lambda n: 60.0 if n == 55 else 20.0)) == []


def test_growth_is_told() -> None:
    assert grown(samples(lambda n: 300.0 + n)) == ["engine memory_mib"]
    assert grown(samples(lambda n: 300.0, lambda n: 20.0 + n // 2)) == ["engine descriptors"]


def test_a_process_that_comes_later_counts() -> None:
    given = samples(lambda n: 300.0)
    for sample in given[40:]:
        sample["others"] = {"memory_mib": 100.0, "descriptors": 20.0, "threads": 4.0}
    assert set(grown(given)) == {"others memory_mib", "others descriptors", "others threads"}


def test_too_few_are_an_error() -> None:
    with pytest.raises(ValueError, match="too few"):
        checks(samples(lambda n: 1.0, count=11))
