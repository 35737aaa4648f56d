"""What an engine may be made of, as the parameters of a covering array; what goes together with what is
config.combinations' word. A pair that is no longer excluded there is among the cases from then on.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache, partial
from typing import Any

from headrace.config.combinations import EXCLUSIONS, PLACES, Exclusion
from tests.support.pairwise import Case, Coverage

TIERS = {"none": (), "host": ("host",), "disk": ("disk",), "remote": ("remote",), "stack": ("host", "disk", "remote")}

PARAMETERS: dict[str, tuple[str, ...]] = {
    "strategy": ("single", "chain", "ring-kv", "ring-q", "gather"),
    "ranks": ("1", "2", "3", "4"),
    "tensor": ("1", "2"),
    "tier": tuple(TIERS),
    "source": ("new", "cached", "stored", "half", "half+cached", "projected", "streamed-x"),
    "stored_by": ("same", "one"),
    "kv": ("auto", "int8"),
    "weights": ("none", "int8", "int4", "w8a8"),
    "schedule": ("off", "row", "column"),
    "outside": ("none", "weights"),
    "attention": ("gqa", "mha", "window", "alibi"),
    "preempted": ("no", "yes"),
    "prefixes": ("shared", "private"),
    "drafts": ("no", "yes", "model"),
    "adapters": ("no", "yes"),
}
"""source: of the main prompt. Its first chunk is in the pool (cached), all of it or its first half in a tier (stored,
half), both (half+cached), or it is stored with activations, from which a part is projected; streamed-x: as it is
streamed. stored_by: context ranks of the engine that stored it. prefixes: private is prefix caching switched off.
drafts: speculation, part of it wrong; model: by the model itself, as a draft model. adapters: prompts have several, one
of which begins inside its prompt, and some none."""

STORED = ("stored", "half", "half+cached", "projected")
PROJECTED = ("projected", "streamed-x")
STREAMED = ("row", "column")
OUTLIVING = ("disk", "remote", "stack")

NEEDS: tuple[tuple[str, tuple[str, ...], str, tuple[str, ...]], ...] = (
    ("ranks", ("1",), "strategy", ("single",)),
    ("source", STORED, "schedule", ("off",)),
    ("source", ("streamed-x",), "schedule", STREAMED),
    ("source", STORED, "tier", tuple(TIERS)[1:]),
    ("source", ("cached", "stored", "half", "half+cached"), "prefixes", ("shared",)),
    ("schedule", STREAMED, "tier", PLACES),
    ("outside", ("weights",), "schedule", STREAMED),
    ("stored_by", ("one",), "source", STORED),
    ("stored_by", ("one",), "ranks", ("2", "3", "4")),
    ("stored_by", ("one",), "tier", OUTLIVING),
)
"""Where a parameter has one of these values, another must have one of those: by nature, whatever is built."""


def possible(case: Case, exclusions: Sequence[Exclusion] = EXCLUSIONS) -> bool:
    """Whether nothing keeps the values of a partial case apart."""
    for name, values, other, needed in NEEDS:
        if case.get(name) in values and case.get(other, needed[0]) not in needed:
            return False
    on = features(case)
    return not any(each.one in on and each.other in on for each in exclusions)


def features(case: Case) -> set[str]:
    """Names of config.combinations.FEATURES that a partial case has for sure. Streamed KV has a place, and no tier."""
    schedule = case.get("schedule")
    here = {
        "context": case.get("ranks", "1") != "1",
        "tensor": case.get("tensor") == "2",
        "activations": case.get("source") == "projected",
        "x": case.get("source") == "streamed-x",
        "weights": case.get("outside") == "weights",
        "row": schedule == "row",
        "column": schedule == "column",
        "int8_kv": case.get("kv") == "int8",
        "quantised": case.get("weights", "none") != "none",
        "speculation": case.get("drafts", "no") != "no",
        "draft": case.get("drafts") == "model",
        "adapters": case.get("adapters") == "yes",
        "private": case.get("prefixes") == "private",
        **dict.fromkeys(TIERS[case.get("tier", "none")], schedule == "off"),
    }
    return {name for name, on in here.items() if on}


@cache
def coverage(exclusions: Sequence[Exclusion] = EXCLUSIONS) -> Coverage:
    return Coverage(PARAMETERS, partial(possible, exclusions=exclusions))


@cache
def cases() -> tuple[Case, ...]:
    """The array of what is not excluded today."""
    return tuple(coverage().cases())


def id_of(case: Case) -> str:
    """All values but those that stand for nothing."""
    plain: dict[str, Any] = {"tensor": "1", "tier": "none", "stored_by": "same", "kv": "auto", "weights": "none",
                             "schedule": "off", "outside": "none", "preempted": "no", "prefixes": "shared",
                             "drafts": "no", "adapters": "no"}  # fmt: skip
    words = {"ranks": "ranks", "tensor": "tensor", "kv": "kv-", "weights": "w-", "stored_by": "by-",
             "drafts": "drafts-"}  # fmt: skip
    told = {"outside": "weights-outside", "preempted": "preempted", "adapters": "adapters"}
    return "-".join(
        told.get(name, f"{words.get(name, '')}{value}") for name, value in case.items() if value != plain.get(name)
    )
