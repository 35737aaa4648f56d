"""The registry of strategies: what is made of it, and that it names what there is."""

from __future__ import annotations

from pathlib import Path
from typing import get_args, get_type_hints

import pytest

from headrace.config import SETTINGS, EngineConfig
from headrace.config.ranks import RankSettings
from headrace.planner.choice import COST, SHARDS
from headrace.strategies import FALLBACK, KEEPS_ALL, OFFERED, STRATEGIES, known

pytestmark = pytest.mark.unit

DOCS = Path(__file__).parents[2] / "docs" / "parallel.md"


def test_lists_are_made_of_the_entries() -> None:
    assert tuple(STRATEGIES) == ("single", "gather", "gather-full", "chain", "ring-kv", "ring-q")
    assert OFFERED == ("single", "gather", "chain", "ring-kv", "ring-q") and KEEPS_ALL == ("single", "chain")
    assert get_args(get_type_hints(RankSettings)[SETTINGS["prefill_strategy"].field]) == ("auto", *OFFERED)
    assert SHARDS.keys() == COST.keys() == STRATEGIES.keys()
    with pytest.raises(ValueError, match="prefill_strategy must be one of auto, single"):
        EngineConfig(prefill_strategy="gather-full")


def test_the_fallback_can_always_be_used() -> None:
    assert FALLBACK in OFFERED and not known(FALLBACK).keeps_all and not known(FALLBACK).needs_cached


def test_docs_have_a_line_for_each_that_is_offered() -> None:
    lines = DOCS.read_text().splitlines()
    for name in OFFERED:
        assert sum(line.startswith(f"| `{name}` |") for line in lines) == 1


def test_unknown_names_are_refused() -> None:
    with pytest.raises(ValueError, match="unknown strategy 'ring': one of single, gather"):
        known("ring")
