"""Tables and plots of bench/notes/zen5.md from results of `headrace bench` (summary.py writes docs/performance.md):

    python tools/performance/report.py RESULT.json...

Attention and engine results are told apart by their cases. Of an attention case measured twice the later file counts.
Text between the markers `<!-- NAME -->` and `<!-- end -->` is replaced, the rest is written by hand.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import plots

PAGE = Path("bench/notes/zen5.md")
FOLDER = Path("docs/performance")

LIMITS = {
    "read_gbps_1": "read GB/s, 1 thread",
    "read_gbps": "all",
    "gemm_gflops_1": "GEMM GFLOP/s, 1 thread",
    "gemm_gflops": "all",
    "peak_gflops_1": "peak GFLOP/s, 1 thread",
    "peak_gflops": "all",
    "handover_ns": "core to core, ns",
}
SHARES = {"of_bandwidth": "of the read rate", "of_gemm": "of torch's GEMM", "of_peak": "of the peak"}

Case = dict[str, Any]
Result = dict[str, Any]


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path, nargs="+", metavar="RESULT.json", help="what `headrace bench` wrote")
    results = [json.loads(file.read_text()) for file in parser.parse_args(arguments).results]
    attention = [result for result in results if "name" in result["cases"][0]]
    engines = [result for result in results if "workload" in result["cases"][0]]
    cases = latest(attention)
    races = [case for result in engines for case in result["cases"]]
    FOLDER.mkdir(exist_ok=True)
    sections: dict[str, Callable[[], str]] = {
        "machine": lambda: machine(attention + engines),
        "decode": lambda: attention_table(cases, plain_decode, of="of_bandwidth"),
        "shared": lambda: shared_table(cases),
        "chunk-first": lambda: attention_table(cases, lambda name: name.endswith("chunk_first"), of="of_peak"),
        "prefill": lambda: attention_table(cases, lambda name: name.startswith("prefill_"), of="of_gemm"),
        "linear": lambda: linear_table(cases),
        "engines": lambda: "\n\n".join(race(result) for result in engines),
    }
    text = PAGE.read_text()
    for name, make in sections.items():
        text = replaced(text, name, make())
    PAGE.write_text(text)
    plots.limits(cases, FOLDER / "limits.svg")
    plots.shared(cases, FOLDER / "shared.svg")
    plots.engines(races, FOLDER / "engines.svg")


def latest(results: list[Result]) -> list[Case]:
    """All cases, in order; one that comes again replaces the earlier."""
    found = {(case["name"], case["threads"]): case for result in results for case in result["cases"]}
    return list(found.values())


def plain_decode(name: str) -> bool:
    return name.startswith("decode_") and not name.startswith("decode_shared_")


def replaced(text: str, name: str, section: str) -> str:
    """`text` with what stands between the markers of `name` replaced. Raises ValueError where there are none."""
    pattern = re.compile(rf"(<!-- {name} -->\n).*?(<!-- end -->)", re.DOTALL)
    if not pattern.search(text):
        raise ValueError(f"{PAGE} has no markers for {name}")
    return pattern.sub(lambda match: f"{match[1]}\n{section}\n\n{match[2]}", text)


def table(head: list[str], rows: list[list[Any]]) -> str:
    """A Markdown table; None is a dash."""
    lines = [head, ["---"] + ["---:"] * (len(head) - 1), *rows]
    return "\n".join("| " + " | ".join("-" if cell is None else str(cell) for cell in line) + " |" for line in lines)


def machine(results: list[Result]) -> str:
    """Where and when each result was measured, and the limits of that moment."""
    rows = []
    for result in results:
        facts = result["machine"]
        limits = [facts.get(key) for key in LIMITS]
        rows.append([result["date"], f"{facts['processor']}, {facts['cores']} cores", facts.get("torch"), *limits])
    return table(["date (UTC)", "machine", "torch", *LIMITS.values()], rows)


def attention_table(cases: list[Case], chosen: Callable[[str], bool], of: str) -> str:
    """Cases with their share of one limit."""
    rows = [
        [
            case["name"], case["threads"], number(case["ours_ms"]), number(case["sdpa_ms"]), number(case["gbps"]),
            number(case["gflops"]), case[of],
        ]
        for case in cases
        if chosen(case["name"])
    ]  # fmt: skip
    return table(["case", "threads", "ours ms", "torch sdpa ms", "GB/s", "GFLOP/s", SHARES[of]], rows)


def shared_table(cases: list[Case]) -> str:
    """Two-phase decode against the three ways of not sharing."""
    rows = []
    for case in cases:
        if case.get("gain") is None:
            continue
        ours = case["ours_ms"]
        ratios = [f"{case[key] / ours:.2f}" for key in ("unshared_ms", "pages_ms", "sdpa_ms")]
        rows.append([case["name"], number(ours), *ratios, case["predicted_gain"], case["of_model"]])
    head = ["case", "ours ms", "x private copies", "x shared pages", "x torch sdpa", "predicted x", "of prediction"]
    return table(head, rows)


def linear_table(cases: list[Case]) -> str:
    """Products with one weight, beside torch's."""
    rows = [
        [
            case["name"], number(case["ours_ms"]), number(case["torch_ms"]), number(case["gbps"]),
            number(case["gflops"]), case["of_bandwidth"], case["of_gemm"],
        ]
        for case in cases
        if case["name"].startswith("linear_")
    ]  # fmt: skip
    head = ["case", "ours ms", "torch ms", "GB/s", "GFLOP/s", "of the read rate", "of torch's GEMM"]
    return table(head, rows)


def race(result: Result) -> str:
    """The tables of one result: engines are compared within it, never across."""
    return f"### Measured {result['date']}\n\n" + engine_tables(result["cases"])


def engine_tables(races: list[Case]) -> str:
    """One table per model: engines as rows, workloads as columns; then what could not be run, with the reason."""
    parts = []
    for model in dict.fromkeys(case["model"] for case in races):
        mine = [case for case in races if case["model"] == model]
        for key, title, digits in (
            ("ttft_s", "time to the first token, s", 3),
            ("decode_tok_s", "decoding, tokens/s", 1),
            ("wall_s", "wall time, s", 2),
            ("peak_rss_mb", "peak resident memory, MB", 0),
        ):
            parts.append(f"**{model}, {title}**\n\n" + race_table(mine, key, digits))
    reasons = sorted({f"- {case['engine']}, {case['model']} {case['workload']}: {case['error']}" for case in races
                      if case.get("error")})  # fmt: skip
    return "\n\n".join([*parts, *(["Not run:\n\n" + "\n".join(reasons)] if reasons else [])])


def race_table(cases: list[Case], key: str, digits: int) -> str:
    works = [work for work in dict.fromkeys(case["workload"] for case in cases)
             if any(case[key] is not None for case in cases if case["workload"] == work)]  # fmt: skip
    found = {(case["engine"], case["workload"]): case[key] for case in cases}
    names = dict.fromkeys((case["engine"], case["precision"]) for case in cases)
    rows = []
    for name, precision in names:
        values = [found.get((name, work)) for work in works]
        rows.append([f"{name} ({precision})", *(None if v is None else f"{v:.{digits}f}" for v in values)])
    return table(["engine", *works], rows)


def number(value: float | None) -> str | None:
    """Three digits that matter."""
    if value is None:
        return None
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


if __name__ == "__main__":
    main()
