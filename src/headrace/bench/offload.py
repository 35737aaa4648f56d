"""`headrace bench offload`: decoding on KV behind a slow link, loading all of it or projecting a part from X."""

from __future__ import annotations

import random
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from headrace.bench.limits import alternate
from headrace.bench.shapes import SHAPES, write_checkpoint
from headrace.console import err

Case = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Form:
    """An engine under test: how it streams, and how many sequences of how many tokens it decodes."""

    name: str
    settings: dict[str, Any]
    sequences: int
    context: int


@dataclass(slots=True)
class OffloadBench:
    """Decode steps of one engine after another, the ways to decode in turn within each.

    rates: GB/s of the emulated link, each way. shares: further fixed shares of chunks to project, to see how near the
    best the solver comes. repeats: rounds of `steps` decode steps for each way.
    """

    shape: str = "S2"
    rates: Sequence[float] = (0.25, 0.5, 1.0, 2.0)
    shares: Sequence[float] = ()
    sequences: int = 16
    context: int = 1024
    batches: int = 4
    repeats: int = 5
    steps: int = 2
    threads: int | None = None
    latency_ms: float = 0.0
    schedules: Sequence[str] = ("row", "column")
    machine: dict[str, Any] = field(default_factory=dict)

    def forms(self) -> list[Form]:
        """Row: weights and X at hand. Column: weights and X cross the link like K and V."""
        row = {"offload_schedule": "row", "offload_x_resident": True}
        column = {"offload_schedule": "column", "weight_offload": True, "offload_batches": self.batches}
        known = {"row": row, "column": column}
        return [Form(name, known[name], self.sequences, self.context) for name in self.schedules]

    def cases(self) -> Iterator[Case]:
        for form in self.forms():
            with tempfile.TemporaryDirectory() as folder:
                model = self.shape
                if model in SHAPES:
                    model = str(write_checkpoint(SHAPES[self.shape], Path(folder) / self.shape))
                bed = Bed(model, form, self)
            try:
                for rate in self.rates:
                    yield self._case(bed, form, rate)
            finally:
                bed.close()

    def ways(self, form: Form) -> dict[str, dict[str, Any]]:
        """Name -> options of the streamer."""
        ways: dict[str, dict[str, Any]] = {"load all": {"share": 0.0}, "solver": {}}
        ways |= {f"share {share:g}": {"share": share} for share in self.shares}
        if form.name == "column":
            # Orders of weights are compared at one split: the solver's own varies from run to run.
            ways |= {"half, fine": {"share": 0.5}, "half, coarse": {"share": 0.5, "fine": False}}
        return ways

    def _case(self, bed: Bed, form: Form, rate: float) -> Case:
        err.print(f"{form.name}, {rate:g} GB/s", style="dim")
        bed.set_link(rate, self.latency_ms / 1e3)
        results: dict[str, list[Run]] = {}

        def way(name: str, options: dict[str, Any]) -> Callable[[], object]:
            return lambda: results.setdefault(name, []).append(bed.run(options, self.steps))

        alternate({name: way(name, options) for name, options in self.ways(form).items()}, self.repeats)
        kept = {name: runs[1:] for name, runs in results.items()}  # the first warms up, and shows the rates
        tokens = {name: statistics.median(run.tokens_s for run in runs) for name, runs in kept.items()}
        solved = kept["solver"]
        case = {
            "name": form.name, "shape": self.shape, "gbps": rate, "latency_ms": self.latency_ms,
            "sequences": form.sequences, "context": form.context,
            "batches": self.batches if form.name == "column" else 1, "tokens_s": tokens,
            "gain": tokens["solver"] / tokens["load all"],
            "projected_share": statistics.median(run.share for run in solved),
            "predicted_over_measured": {
                name: statistics.median(run.predicted_s / run.seconds for run in runs) for name, runs in kept.items()
            },
            "link_busy": {name: statistics.median(run.busy for run in runs) for name, runs in kept.items()},
            "runs": {name: [round(run.tokens_s, 3) for run in runs] for name, runs in kept.items()},
        }  # fmt: skip
        if form.name == "column":
            case["fine_over_coarse"] = tokens["half, fine"] / tokens["half, coarse"]
        best = max((name for name in tokens if name.startswith("share ") or name in ("load all", "solver")),
                   key=tokens.__getitem__)  # fmt: skip
        return case | {"best": best, "solver_over_best": tokens["solver"] / tokens[best]}


@dataclass(frozen=True, slots=True)
class Run:
    """Some decode steps: tokens a second, seconds of the layers, those predicted, the share of chunks projected, and
    the share of the time in which bytes crossed the link in, at its rate."""

    tokens_s: float
    seconds: float
    predicted_s: float
    share: float
    busy: float


class Bed:
    """An engine with all its sequences prefilled, ready to decode."""

    def __init__(self, model: str, form: Form, bench: OffloadBench) -> None:
        from headrace.engine.llm import LLM

        rounds = (bench.repeats + 1) * bench.steps * (4 + len(bench.shares)) * len(bench.rates)
        length = form.context + rounds + 16
        self.llm = LLM(
            model, dtype="bfloat16", threads=bench.threads, max_model_len=length, max_sequences=form.sequences,
            enable_prefix_caching=False, kv_offloading_size=16.0, offload_staging_mb=2048, **form.settings,
        )  # fmt: skip
        self.streamer: Any = self.llm.engine.loaded.runner.streamer  # type: ignore[union-attr]
        self._prefill(form, rounds + 8)

    def _prefill(self, form: Form, tokens: int) -> None:
        from headrace.types import Request, SamplingParams

        rng = random.Random(0)
        engine = self.llm.engine
        params = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
        for index in range(form.sequences):
            prompt = [rng.randrange(10, self.llm.capacity.vocab_size) for _ in range(form.context)]
            engine.add(Request(str(index), prompt, params, arrival_s=time.monotonic()))
        while engine.scheduler.waiting or any(each.remaining > 1 for each in engine.scheduler.running):
            engine.step()

    def set_link(self, rate: float, latency_s: float) -> None:
        """GB/s of both copy streams from now on; the throughput is learnt anew."""
        for stream in self.streamer.transfers.streams:
            stream.link.bytes_s, stream.link.latency_s = rate * 1e9, latency_s
        self.rate = rate
        self.streamer.transfers.throughput.link.forget()
        self.streamer.transfers.throughput.link.observe(1 / (rate * 1e9))

    def run(self, options: dict[str, Any], steps: int) -> Run:
        """Decode steps under these options of the streamer."""
        engine, streamer = self.llm.engine, self.streamer
        before = streamer.options
        streamer.options = before.with_changes(**options)
        totals = streamer.transfers.totals.copy()
        tokens = 0
        began = time.perf_counter()
        for _ in range(steps):
            tokens += len(engine.step())
        streamer.transfers.settle()
        seconds = time.perf_counter() - began
        streamer.options, after = before, streamer.transfers.totals
        loaded, projected = after.loaded - totals.loaded, after.projected - totals.projected
        busy = (after.bytes_in - totals.bytes_in) / (self.rate * 1e9) / seconds
        layers, predicted = after.seconds - totals.seconds, after.predicted_s - totals.predicted_s
        return Run(tokens / seconds, layers, predicted, projected / max(1, loaded + projected), busy)

    def close(self) -> None:
        """Ends the requests and the copy streams."""
        for request in list(self.llm.engine._active):
            self.llm.engine.abort(request)
        self.llm.close()


def line(case: Case) -> str:
    """A case for people."""
    speeds = ", ".join(f"{name} {value:.2f}" for name, value in case["tokens_s"].items())
    fine = f", fine order {case['fine_over_coarse']:.3f} of coarse" if "fine_over_coarse" in case else ""
    return (
        f"  {case['name']} at {case['gbps']:g} GB/s: {case['gain']:.2f} times load all, "
        f"{100 * case['projected_share']:.0f}% projected{fine}  ({speeds} tokens/s; predicted "
        f"{case['predicted_over_measured']['solver']:.2f} of measured)"
    )
