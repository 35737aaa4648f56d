"""`headrace bench restore`: the solver's split of a restore beside all others, over links from slow to fast.

A prompt is stored behind an emulated link and comes back by every split of a grid, by loading all of it, by recomputing
all of it, and by the split that the solver takes. The best of the grid, its neighbours, the solver's and the two ends
are then measured again in turns, so that none wins by luck and all meet the same drift of the machine.
"""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from headrace.bench.restore_testbed import At, RestoreBed, Timed
from headrace.bench.shapes import SHAPES
from headrace.console import err
from headrace.offload.restore.solver import Split, StoredRun
from headrace.types import CHUNK

FINALISTS = 4
"""So many splits of the grid are measured again."""
WARM = 3
"""Restores of each kind before the solver is asked: its rates follow what it sees."""

Case = dict[str, Any]


class Bed(Protocol):
    """What the benchmark drives: restore_bed.RestoreBed, or in tests something that costs nothing."""

    def time(self, at: At) -> Timed: ...
    def choice(self) -> tuple[StoredRun, Split]: ...
    def rates(self) -> dict[str, float]: ...
    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Plan:
    """What is measured. links: GB/s; None: where loading all takes as long as recomputing all. stride: chunks between
    two splits of the grid. Raises ValueError naming the option."""

    models: tuple[str, ...] = ("S2", "S1")
    links: tuple[float | None, ...] = (0.1, 0.3, 1.0, 3.0, 10.0, 30.0, None)
    tokens: int = 4096
    suffix: int = 32
    latency_ms: float = 0.0
    stride: int = 8
    repeats: int = 5
    threads: int | None = None

    def __post_init__(self) -> None:
        for name in self.models:
            if name not in SHAPES:
                raise ValueError(f"models must be of {', '.join(SHAPES)}, got {name!r}")
        if self.tokens < CHUNK or self.tokens % CHUNK:
            raise ValueError(f"tokens must be a multiple of {CHUNK}, got {self.tokens}")
        if not self.links or any(gbps is not None and not gbps > 0 for gbps in self.links):
            raise ValueError(f"links must be GB/s above 0 or 'balance', by commas, got {list(self.links)}")
        for name in ("suffix", "stride", "repeats"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")


def links_of(text: str) -> tuple[float | None, ...]:
    """GB/s by commas, 'balance' as None. Raises ValueError."""
    try:
        return tuple(None if part == "balance" else float(part) for part in text.split(","))
    except ValueError:
        raise ValueError(f"links must be GB/s above 0 or 'balance', by commas, got {text!r}") from None


def cases(plan: Plan) -> Iterator[Case]:
    """A case per model and link."""
    with tempfile.TemporaryDirectory() as folder:
        for model in plan.models:

            def opened(gbps: float | None, model: str = model) -> RestoreBed:
                where = Path(folder) / model
                chunks = plan.tokens // CHUNK
                return RestoreBed(SHAPES[model], where, gbps, chunks, plan.suffix, plan.latency_ms, plan.threads)

            for asked in plan.links:
                gbps = balance(opened) if asked is None else asked
                err.print(f"{model}, {plan.tokens} tokens, link {gbps:.3g} GB/s", style="dim")
                bed = opened(gbps)
                try:
                    where = {"model": model, "link_gbps": gbps, "balanced": asked is None}
                    yield where | {"latency_ms": plan.latency_ms} | measured(bed, plan)
                finally:
                    bed.close()


def balance(opened: Callable[[float | None], Bed]) -> float:
    """GB/s of the link over which loading everything takes as long as recomputing everything."""
    bed = opened(None)
    try:
        run, _ = bed.choice()
        recomputed = statistics.median(bed.time(At(run.chunks, 0)).seconds for _ in range(WARM))
        closing = statistics.median(bed.time(At(0, 0)).seconds for _ in range(WARM))
        return run.chunks * run.kv_bytes / max(recomputed - closing, 0.1 * recomputed) / 1e9
    finally:
        bed.close()


def measured(bed: Bed, plan: Plan) -> Case:
    """One case: warm up, let the solver choose, sweep, measure what matters again."""
    run, split = _warmed(bed)
    chosen, loading, recomputing = At(split.tokens, split.x), At(0, 0), At(run.chunks, 0)
    swept = {at: bed.time(at).seconds for at in grid(run, plan.stride)}
    first = sorted(swept, key=swept.__getitem__)[:FINALISTS]
    near = around(run, first[0], max(1, plan.stride // 2))
    swept |= {at: bed.time(at).seconds for at in near if at not in swept}
    finalists = sorted(swept, key=swept.__getitem__)[:FINALISTS]
    found = in_turns(bed.time, [*finalists, chosen, loading, recomputing], plan.repeats)
    middle = {at: statistics.median(timed.seconds for timed in runs) for at, runs in found.items()}
    best = min(middle, key=middle.__getitem__)
    return report(run, split, found[chosen], middle[loading], middle[recomputing], best, middle[best]) | {
        "swept": len(swept), "repeats": plan.repeats, **bed.rates(),
    }  # fmt: skip


def _warmed(bed: Bed) -> tuple[StoredRun, Split]:
    """The run, and the solver's split once the rates have seen this link and this machine."""
    run, _ = bed.choice()
    half = At(run.chunks // 2, 0)
    ways = [At(0, 0), half, At(run.chunks, 0)]
    if run.x_bytes is not None:
        ways += [At(0, run.chunks), At(0, run.chunks // 2)]
    for _ in range(WARM):
        for at in ways:
            bed.time(at)
    return bed.choice()


def grid(run: StoredRun, stride: int) -> list[At]:
    """Splits `stride` chunks apart, ends included."""
    steps = sorted({*range(0, run.chunks + 1, stride), run.chunks})
    other = steps if run.x_bytes is not None else [0]
    pairs = {At(tokens, min(x, run.chunks - tokens)) for tokens in steps for x in other}
    return sorted(pairs)


def around(run: StoredRun, at: At, reach: int) -> list[At]:
    """Neighbours of a split."""
    some = [At(at.tokens + dt, at.x + dx) for dt in (-reach, 0, reach) for dx in (-reach, 0, reach)]
    return [
        near for near in some
        if min(near) >= 0 and sum(near) <= run.chunks and (not near.x or run.x_bytes is not None) and near != at
    ]  # fmt: skip


def in_turns(measure: Callable[[At], Timed], splits: Sequence[At], repeats: int) -> dict[At, list[Timed]]:
    """A B C A B C ..: what drifts meets all alike."""
    found: dict[At, list[Timed]] = {at: [] for at in splits}
    for _ in range(repeats):
        for at in found:
            found[at].append(measure(at))
    return found


def report(
    run: StoredRun, split: Split, chosen: Sequence[Timed], load_s: float, recompute_s: float, best: At, best_s: float
) -> Case:
    """Flat: seconds are medians. to_best: chosen over best of all; gain: the better end over chosen."""
    seconds, predicted, link, waited, ttft = (
        statistics.median(figures)
        for figures in zip(*((t.seconds, t.predicted.seconds, t.link_s, t.waited_s, t.ttft_s) for t in chosen),
                           strict=True)
    )  # fmt: skip
    return {
        "chunks": run.chunks, "suffix": run.suffix, "kv_bytes": run.kv_bytes, "x_bytes": run.x_bytes,
        "tokens": split.tokens, "x": split.x, "load": split.load, "reason": split.reason,
        "chosen_s": seconds, "ttft_s": ttft, "predicted_s": predicted, "measured_to_predicted": seconds / predicted,
        "load_all_s": load_s, "recompute_all_s": recompute_s, "best_s": best_s, "best_tokens": best.tokens,
        "best_x": best.x, "to_best": seconds / best_s, "to_load_all": seconds / load_s,
        "to_recompute_all": seconds / recompute_s, "gain": min(load_s, recompute_s) / seconds,
        "balance": load_s / recompute_s, "link_s": link, "waited_s": waited,
        "overlap": 1.0 - waited / link if link else None, "chosen_times": [timed.seconds for timed in chosen],
    }  # fmt: skip


def line(case: Case) -> str:
    """A case for people."""
    overlap = "-" if case["overlap"] is None else f"{case['overlap']:.2f}"
    return (
        f"  {case['link_gbps']:>6.3g} GB/s  recompute {case['tokens']}, project {case['x']}, load {case['load']}"
        f"  {case['chosen_s']:.4f} s (predicted {case['predicted_s']:.4f})  best {case['best_s']:.4f}"
        f"  load all {case['load_all_s']:.4f}  recompute all {case['recompute_all_s']:.4f}"
        f"  gain {case['gain']:.2f}  overlap {overlap}"
    )


def table(found: Sequence[Case]) -> str:
    """Markdown."""
    lines = [
        "| model | GB/s | recompute / project / load | chosen, s | predicted, s | best, s | load all, s "
        "| recompute all, s | to best | gain | overlap |",
        "|---" * 11 + "|",
    ]
    for case in found:
        overlap = "-" if case["overlap"] is None else f"{case['overlap']:.2f}"
        lines.append(
            f"| {case['model']} | {case['link_gbps']:.3g} | {case['tokens']} / {case['x']} / {case['load']} "
            f"| {case['chosen_s']:.4f} | {case['predicted_s']:.4f} | {case['best_s']:.4f} | {case['load_all_s']:.4f} "
            f"| {case['recompute_all_s']:.4f} | {case['to_best']:.3f} | {case['gain']:.2f} | {overlap} |"
        )
    return "\n".join(lines)


def plot(found: Sequence[Case], path: Path) -> None:
    """PNG: for each model the times over the link, and below them what the solver did with the run. Raises ValueError
    without matplotlib."""
    from headrace.bench.prefill_report import plotter

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
