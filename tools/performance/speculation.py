"""The tables and the plot of docs/speculation.md, from results of `headrace bench speculation`:

python tools/performance/speculation.py            # writes both
python tools/performance/speculation.py --check    # exit code 1 if the tables are not what the results say
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs/speculation.md"
PICTURE = ROOT / "docs/performance/speculation.svg"
RESULTS = sorted((ROOT / "bench/results").glob("2026-11-26-speculation-*.json"))
METHODS = ("ngram", "suffix")

Case = dict[str, Any]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing")
    check = parser.parse_args().check
    results: list[list[Case]] = [json.loads(file.read_text())["cases"] for file in RESULTS]
    beside = [case for cases in results if any("ahead" in case for case in cases) for case in cases]
    cases = [case for cases in results for case in cases if case not in beside]
    text = PAGE.read_text()
    made = replaced(replaced(text, "gains", gains(cases)), "peers", peers(beside))
    if check:
        sys.exit(f"{PAGE.name} is not what the results say: run {sys.argv[0]}" if made != text else 0)
    PAGE.write_text(made)
    plot(cases)


def gains(cases: list[Case]) -> str:
    """Times as fast as without drafts, by text, method and sequences together."""
    found = {(c["text"], c["method"], c["sequences"]): c for c in cases if c["method"] in METHODS}
    counts = sorted({count for _, _, count in found})
    rows = [
        [text, method, *(_times(found.get((text, method, count))) for count in counts)]
        for text, method in dict.fromkeys((text, method) for text, method, _ in found)
    ]
    heads = [f"{count} together" if count > 1 else "one sequence" for count in counts]
    return table(["text", "drafts", *heads], rows)


def _times(case: Case | None) -> str:
    return "-" if case is None else f"{case['times']:.2f}"


def peers(cases: list[Case]) -> str:
    """Tokens a second of one sequence beside another engine."""
    rows = []
    for case in cases:
        if case["method"] == "vllm-cpu-ngram" and case["decode_tok_s"] is not None:
            theirs, ahead = case["decode_tok_s"], case["ahead"]
            rows.append([case["text"], f"{ours(cases, case)['decode_tok_s']:.0f}", f"{theirs:.0f}", f"{ahead:.2f}"])
    return table(["text", "Headrace, tokens/s", "vLLM, tokens/s", "times"], rows)


def ours(cases: list[Case], theirs: Case) -> Case:
    """What stands before another engine's case in its result."""
    before = cases[: cases.index(theirs)]
    return next(case for case in reversed(before) if case["method"] == "ngram" and case["text"] == theirs["text"])


def table(heads: list[str], rows: list[list[str]]) -> str:
    lines = [heads, ["---" if index == 0 else "---:" for index in range(len(heads))], *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def replaced(text: str, name: str, content: str) -> str:
    """The text with this between the marker of the name and the next end."""
    begin = text.index(f"<!-- {name} -->") + len(f"<!-- {name} -->")
    return text[:begin] + "\n\n" + content + "\n\n" + text[text.index("<!-- end -->", begin) :]


def plot(cases: list[Case]) -> None:
    """Times as fast as without drafts, by the share of drafted tokens that are right and sequences together."""
    from plots import plt, save

    mine = [case for case in cases if case["method"].startswith("right ")]
    figure, axes = plt.subplots(figsize=(6, 3.2))
    for count in sorted({case["sequences"] for case in mine}):
        points = sorted((float(c["method"].split()[1]), c["times"]) for c in mine if c["sequences"] == count)
        axes.plot(*zip(*points, strict=True), marker="o", label=f"{count} together" if count > 1 else "one sequence")
    axes.axhline(1, color="gray", linewidth=0.8)
    axes.set_yscale("log", base=2)
    axes.set_yticks([1, 1.5, 2, 3, 4, 6], ["1", "1.5", "2", "3", "4", "6"])
    axes.set_xlabel("share of drafted tokens that are right")
    axes.set_ylabel("times as fast as without drafts")
    axes.legend(frameon=False)
    figure.tight_layout()
    save(figure, PICTURE)


if __name__ == "__main__":
    main()
