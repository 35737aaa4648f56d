"""What `headrace bench prefill` found, for people: a table of ratios and a plot."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from headrace.bench.benchmark import Case
from headrace.bench.prefill_grid import CELL
from headrace.bench.report import plotter
from headrace.bench.table import Column


def ratios(cases: Sequence[Case]) -> tuple[tuple[Column, ...], list[Case]]:
    """Columns and rows: each cell's time to the first token, and of each strategy how many times faster than single."""
    names = list(dict.fromkeys(case["strategy"] for case in cases))
    cells: dict[tuple[Any, ...], dict[str, Case]] = {}
    for case in cases:
        ranks, where = case["ranks"], (case["bandwidth_gbps"], case["tokens"], case["cached"])
        name = case["strategy"] if ranks == 1 else f"{case['strategy']} x{ranks}"
        cells.setdefault(where, {})[name] = case
    found = list(dict.fromkeys(name for cell in cells.values() for name in cell))
    found.sort(key=lambda column: (names.index(column.split(" x")[0]), column))
    strategies = [Column(name, unit="s (times)", width=max(len(name), len("0.1234 s (1.23x)"))) for name in found]
    rows = [_row(where, cell, found) for where, cell in cells.items()]
    return (*CELL[1:], *strategies), rows


def _row(where: tuple[Any, ...], cell: dict[str, Case], names: Sequence[str]) -> Case:
    gbps, tokens, cached = where
    shown = {name: _shown(cell.get(name), cell.get("single")) for name in names}
    return {"bandwidth_gbps": gbps, "tokens": tokens, "cached": cached, **shown}


def _shown(case: Case | None, base: Case | None) -> str:
    if case is None:
        return "-"
    seconds = f"{case['ttft_s']:.4g} s"
    return seconds if base is None or case is base else f"{seconds} ({base['ttft_s'] / case['ttft_s']:.2f}x)"


def plot(cases: Sequence[Case], path: Path) -> None:
    """PNG: time to the first token over bandwidth where several were measured, a panel for each (tokens, cached), else
    over tokens. Raises ValueError without matplotlib."""
    pyplot = plotter()
    over_link = len({case["bandwidth_gbps"] for case in cases}) > 1
    panels = sorted({(case["tokens"], case["cached"]) if over_link else (0, case["cached"]) for case in cases})
    across = min(3, len(panels))
    down = math.ceil(len(panels) / across)
    figure, axes = pyplot.subplots(down, across, squeeze=False, figsize=(5 * across, 4 * down))
    for axis, (tokens, cached) in zip(axes.flat, panels, strict=False):
        here = [case for case in cases if case["cached"] == cached and (not over_link or case["tokens"] == tokens)]
        _panel(axis, here, "bandwidth_gbps" if over_link else "tokens")
        title = [f"{tokens} tokens"] * over_link + [f"on {cached} cached"] * (cached > 0)
        axis.set_title(" ".join(title))
    for axis in list(axes.flat)[len(panels) :]:
        axis.remove()
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def _panel(axis: Any, cases: Sequence[Case], key: str) -> None:
    unlimited = 2 * max((case[key] for case in cases if case[key] is not None), default=1)
    for name, ranks in dict.fromkeys((case["strategy"], case["ranks"]) for case in cases):
        line = [case for case in cases if (case["strategy"], case["ranks"]) == (name, ranks)]
        points = sorted((unlimited if case[key] is None else case[key], case["ttft_s"]) for case in line)
        axis.plot(*zip(*points, strict=True), marker="o", label=name if ranks == 1 else f"{name} x{ranks}")
    axis.set(xscale="log", yscale="log", ylabel="time to first token, s")
    last = " (last: unlimited)" if any(case[key] is None for case in cases) else ""
    axis.set_xlabel("tokens" if key == "tokens" else f"bandwidth, GB/s{last}")
    axis.legend(fontsize=7)
