"""Every pair of features is taken by the settings, or refused for the reason that docs/combinations.md gives."""

from __future__ import annotations

from itertools import combinations

import pytest

from headrace.config import EngineConfig
from headrace.config.combinations import EXCLUSIONS, FEATURES, PLACES, Feature
from tools.combinations import PAGE, page, pair

pytestmark = pytest.mark.unit

PAIRS = [(one, other) for one, other in combinations(FEATURES, 2) if one.remedy != other.remedy]


@pytest.mark.parametrize(("one", "other"), PAIRS, ids=lambda feature: feature.name)
def test_a_pair(one: Feature, other: Feature) -> None:
    given = {**one.example, **other.example}
    found = pair(one, other)
    if found is None and not any({each.one, each.other} <= _on(given) for each in EXCLUSIONS):
        EngineConfig(**given)
        return
    with pytest.raises(ValueError, match="exclude each other") as error:
        EngineConfig(**given)
    if found is not None:
        assert str(error.value).endswith((f"or {one.remedy}", f"or {other.remedy}")) or found.why in str(error.value)


def _on(given: dict[str, object]) -> set[str]:
    """Features that the settings ask for, whatever else they are an example of."""
    on = {each.name for each in FEATURES if all(given.get(name) == value for name, value in each.example.items())}
    return on - {*PLACES, "activations"} if "offload_schedule" in given else on


@pytest.mark.parametrize("feature", FEATURES, ids=lambda feature: feature.name)
def test_alone(feature: Feature) -> None:
    EngineConfig(**feature.example)


def test_the_page_is_the_data() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(), "python tools/combinations.py writes it anew"
