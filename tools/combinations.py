"""Writes docs/combinations.md: what goes with what, from the pairs by which settings are refused.

python tools/combinations.py            writes it
python tools/combinations.py --check    exit status 1 where it would be written otherwise
"""

from __future__ import annotations

import sys
from pathlib import Path

from headrace.config.combinations import EXCLUSIONS, FEATURES, PLACES, STREAMED, Exclusion, Feature

PAGE = Path(__file__).parents[1] / "docs" / "combinations.md"
HEAD = """# What goes with what

What is on this page goes together, with the bits of each alone, but for the pairs that the table marks. It is made of
the data by which settings are refused (`config/combinations.py`; `tools/combinations.py` writes it).

`+` goes together; `place`: the one is where the other keeps its KV; `not yet` would make sense and is not built; `no`
makes no sense; empty: the same setting, which activations are too, stored in tiers or streamed.

Each `+` and `place` is in a case of `tests/cpu/test_every_pair.py`: an engine that has both gives the bits of one rank
with nothing stored. Its cases are a covering array of this table and more (strategies, 1 to 4 ranks, what of a prompt
is stored, attention, preemption), counted by `tests/unit/test_feature_pairs.py`; `pytest -k "chain and disk"` runs
those of two values. Pairs with a GPU are tested on a fake device and in `tests/gpu/`;
which have run on a device: [gpu.md](gpu.md#what-has-run-on-a-device). Each `not yet` and `no` is refused in
`tests/unit/test_combinations.py`.
"""


def pair(one: Feature, other: Feature) -> Exclusion | None:
    """What keeps the two apart."""
    return next((each for each in EXCLUSIONS if {each.one, each.other} == {one.name, other.name}), None)


def cell(one: Feature, other: Feature) -> str:
    if one.remedy == other.remedy or ("activations" in (one.name, other.name) and {one.name, other.name} & {*STREAMED}):
        return ""
    if {one.name, other.name} <= {*PLACES, *STREAMED} and len({one.name, other.name} & set(STREAMED)) == 1:
        return "place"
    found = pair(one, other)
    return "+" if found is None else "not yet" if found.yet else "no"


def page() -> str:
    """The whole page."""
    labels = [feature.label for feature in FEATURES]
    lines = ["| | " + " | ".join(labels) + " |", "|---|" + ":-:|" * len(labels)]
    for number, one in enumerate(FEATURES):
        cells = [cell(one, other) if at < number else "" for at, other in enumerate(FEATURES)]
        lines.append(f"| {one.label} | " + " | ".join(cells) + " |")
    reasons = dict.fromkeys(each.why for each in EXCLUSIONS)
    told = []
    for why in reasons:
        names = dict.fromkeys(f"{_label(each.one)} with {_label(each.other)}" for each in EXCLUSIONS if each.why == why)
        told.append(f"- {why[0].upper()}{why[1:]}: {', '.join(names)}.")
    flags = [f"| {feature.label} | `{_flags(feature)}` |" for feature in FEATURES]
    return "\n".join(
        [HEAD, *lines, "", "## Why not", "", *told, "", "## Settings", "", "| feature | settings that ask for it |",
         "|---|---|", *flags, ""]
    )  # fmt: skip


def _label(name: str) -> str:
    return next(feature.label for feature in FEATURES if feature.name == name)


def _flags(feature: Feature) -> str:
    return ", ".join(f"{name}={value}" for name, value in feature.example.items())


def main(arguments: list[str]) -> int:
    text = page()
    if "--check" in arguments:
        return int(PAGE.read_text(encoding="utf-8") != text)
    PAGE.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
