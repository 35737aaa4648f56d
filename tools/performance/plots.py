"""The plots of bench/notes/zen5.md."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib
from matplotlib import pyplot as plt

Case = dict[str, Any]

matplotlib.use("svg")
STYLE = {"svg.hashsalt": "headrace", "font.size": 9, "axes.spines.top": False, "axes.spines.right": False}
matplotlib.rcParams.update(STYLE)


def save(figure: Any, path: Path) -> None:
    """Writes the figure and forgets it."""
    figure.savefig(path, metadata={"Date": None})
    plt.close(figure)


def limits(cases: list[Case], path: Path) -> None:
    """Each kernel as a share of the limit that binds it."""
    bars = []
    for case in cases:
        name = case["name"]
        if name.startswith(("prefill_", "linear_64x", "linear_256x", "linear_2048x")) or name.endswith("chunk_first"):
            bars.append((name, case["of_gemm"], "tab:orange"))
        elif name.startswith("linear_") or not name.startswith("decode_shared_"):
            bars.append((f"{name}, threads: {case['threads']}", case["of_bandwidth"], "tab:blue"))
    figure, axes = plt.subplots(figsize=(8, 0.22 * len(bars) + 1))
    axes.barh([bar[0] for bar in bars], [bar[1] for bar in bars], color=[bar[2] for bar in bars])
    axes.axvline(1, color="black", linewidth=0.8)
    axes.invert_yaxis()
    axes.set_xlabel("share of the plain read rate (blue) or of torch's bf16 GEMM (orange)")
    figure.tight_layout()
    save(figure, path)


def shared(cases: list[Case], path: Path) -> None:
    """What two-phase decoding gains, by the length of the shared prefix."""
    figure, panels = plt.subplots(1, 2, figsize=(8, 3.2))
    for axes, heads in zip(panels, ("mha", "gqa"), strict=True):
        head = f"decode_shared_{heads}_"
        mine = [case for case in cases if case["name"].startswith(head) and case.get("gain") is not None]
        lengths = [int(case["name"].removeprefix(head)) for case in mine]
        for key, label in (("unshared_ms", "own kernel, private copies"), ("pages_ms", "own kernel, shared pages"),
                           ("sdpa_ms", "torch sdpa")):  # fmt: skip
            axes.plot(lengths, [case[key] / case["ours_ms"] for case in mine], marker="o", label=label)
        axes.set_yscale("log")
        axes.set_title(heads.upper())
        axes.set_xlabel("shared tokens")
    panels[0].set_ylabel("time / two-phase time, 32 sequences")
    panels[0].legend()
    figure.tight_layout()
    save(figure, path)


def engines(cases: list[Case], path: Path) -> None:
    """Engines side by side: time to the first token, and decoding speed."""
    figure, panels = plt.subplots(2, 1, figsize=(8, 6))
    for axes, key, label in ((panels[0], "ttft_s", "time to the first token, s"),
                             (panels[1], "decode_tok_s", "decoding, tokens/s")):  # fmt: skip
        family = "W1" if key == "ttft_s" else ("W2", "W3", "W4", "W5")
        mine = [case for case in cases if case[key] is not None and case["workload"].startswith(family)]
        works = list(dict.fromkeys(f"{case['model']} {case['workload']}" for case in mine))
        names = list(dict.fromkeys(case["engine"] for case in mine))
        for index, name in enumerate(names):
            found = {f"{case['model']} {case['workload']}": case[key] for case in mine if case["engine"] == name}
            places = [i + 0.8 * index / len(names) for i, work in enumerate(works) if work in found]
            axes.bar(places, [found[w] for w in works if w in found], width=0.8 / len(names), label=name, align="edge")
        axes.set_xticks([i + 0.4 for i in range(len(works))], works, rotation=20)
        axes.set_yscale("log")
        axes.set_ylabel(label)
    handles, names = panels[1].get_legend_handles_labels()
    figure.legend(handles, names, ncols=4, loc="upper center", frameon=False)
    figure.tight_layout(rect=(0, 0, 1, 0.93))
    save(figure, path)
