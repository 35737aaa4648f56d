"""The registry of strategies: what is made of it, and that it names what there is."""

from __future__ import annotations

import re
from pathlib import Path
from typing import get_args

import pytest

from headrace.config import SETTINGS, EngineConfig
from headrace.planner.choice import COST, SHARDS
from headrace.strategies import FALLBACK, KEEPS_ALL, OFFERED, STRATEGIES, known

pytestmark = pytest.mark.unit

DOCS = Path(__file__).parents[2] / "docs" / "parallel.md"


def test_lists_are_made_of_the_entries() -> None:
    assert tuple(STRATEGIES) == ("single", "gather", "gather-full", "chain", "ring-kv", "ring-q")
    assert OFFERED == ("single", "gather", "chain", "ring-kv", "ring-q") and KEEPS_ALL == ("single", "chain")
    assert get_args(SETTINGS["prefill_strategy"].kind) == ("auto", *OFFERED)
    assert SHARDS.keys() == COST.keys() == STRATEGIES.keys()
    with pytest.raises(ValueError, match="prefill_strategy must be one of auto, single"):
        EngineConfig(prefill_strategy="gather-full")


def test_the_fallback_can_always_be_used() -> None:
    assert FALLBACK in OFFERED and not known(FALLBACK).keeps_all and not known(FALLBACK).needs_cached


def test_help_and_docs_say_what_the_entries_say() -> None:
    """Each that is offered stands in the help of --prefill-strategy; docs/parallel.md names no other."""
    told = SETTINGS["prefill_strategy"].help
    assert all(f"{name} ({STRATEGIES[name].summary})" in told for name in OFFERED)
    rows = re.findall(r"^\| `([a-z-]+)` \| ([^|]+) \|", DOCS.read_text().partition("### Tuning")[0], re.MULTILINE)
    assert len(rows) == len(dict(rows)) >= 5
    assert {name: STRATEGIES[name].summary for name in OFFERED if name in dict(rows)} == dict(rows)


def test_unknown_names_are_refused() -> None:
    with pytest.raises(ValueError, match="unknown strategy 'ring': one of single, gather"):
        known("ring")
