"""What `headrace bench restore` found, as a plot."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from headrace.bench.benchmark import Case
from headrace.bench.report import plotter
from headrace.types import CHUNK


def plot(found: Sequence[Case], path: Path) -> None:
    """PNG: for each model the times over the link, and below them what the solver did with the run. Raises ValueError
    without matplotlib."""
    pyplot = plotter()
    models = list(dict.fromkeys(case["model"] for case in found))
    figure, axes = pyplot.subplots(
        2, len(models), squeeze=False, figsize=(5.5 * len(models), 6.5), height_ratios=(3, 1), sharex="col"
    )
    for column, model in enumerate(models):
        here = sorted((case for case in found if case["model"] == model), key=lambda case: case["link_gbps"])
        _times(axes[0][column], here)
        _shares(axes[1][column], here)
        axes[0][column].set_title(f"{model}: {here[0]['chunks'] * CHUNK} tokens")
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def _times(axis: Any, here: Sequence[Case]) -> None:
    links = [case["link_gbps"] for case in here]
    styles = {
        "load_all_s": ("load all", "--"), "recompute_all_s": ("recompute all", "--"),
        "best_s": ("best of the sweep", ""), "chosen_s": ("the solver's split", "-"), "predicted_s": ("predicted", ":"),
    }  # fmt: skip
    for name, (label, style) in styles.items():
        marker = "x" if name == "best_s" else "o" if name == "chosen_s" else ""
        axis.plot(links, [case[name] for case in here], linestyle=style or "none", marker=marker, label=label)
    axis.set(xscale="log", yscale="log", ylabel="time to the first token, s")
    axis.legend(fontsize=7)


def _shares(axis: Any, here: Sequence[Case]) -> None:
    links = [case["link_gbps"] for case in here]
    shares = [[case[name] / case["chunks"] for case in here] for name in ("tokens", "x", "load")]
    axis.stackplot(links, shares, labels=("recomputed", "projected", "loaded"), alpha=0.7)
    axis.set(xscale="log", ylim=(0, 1), xlabel="link, GB/s", ylabel="share")
    axis.legend(fontsize=7, loc="center left")
