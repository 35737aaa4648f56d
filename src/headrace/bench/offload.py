"""`headrace bench offload`: decoding on KV behind a slow link, loading all of it or projecting a part from X."""

from __future__ import annotations

import math
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

from headrace.bench.benchmark import MODEL_HELP, Benchmark, Case, a_model, one_of, option, shares
from headrace.bench.shapes import SHAPES, write_checkpoint
from headrace.bench.table import Column


@dataclass(frozen=True, slots=True)
class OffloadSetup:
    """An engine under test: how it streams, and how many sequences of how many tokens it decodes."""

    name: str
    settings: dict[str, Any]
    sequences: int
    context: int


def numbers(name: str, text: str) -> tuple[float, ...]:
    """Numbers above 0, by commas. Raises ValueError naming the option."""
    try:
        found = tuple(float(part) for part in text.split(","))
    except ValueError:
        found = (math.nan,)
    if not all(0 < each < math.inf for each in found):
        raise ValueError(f"{name} must be numbers above 0 by commas, got {text!r}")
    return found


def schedules(name: str, text: str) -> tuple[str, ...]:
    """Schedules by commas."""
    return tuple(one_of("row", "column")(name, part) for part in text.split(","))


@dataclass
class OffloadBench(Benchmark):
    """Decode on KV behind an emulated link, by schedule.

    What the solver projects beside loading everything, row and column.
    """

    name = "offload"
    model: str = option(MODEL_HELP, "S2", argument=True, parse=a_model)
    rates: tuple[float, ...] = option("GB/s of the emulated link each way, by commas.", "0.25,0.5,1,2", parse=numbers)
    shares: tuple[float, ...] = option("Further shares of chunks to project, by commas.", "", parse=shares)
    schedules: tuple[str, ...] = option("Schedules, by commas: row, column.", "row,column", parse=schedules)
    sequences: int = option("Sequences decoded together.", 16, min=1)
    context: int = option("Tokens of each before the first step.", 1024, min=1)
    batches: int = option("Batches of the column schedule.", 4, min=1)
    repeats: int = option("Rounds, the ways to decode in turn.", 5, min=1)
    steps: int = option("Decode steps of each way in a round.", 2, min=1)
    threads: int | None = option("Threads. Default: all cores.", None, min=1)
    latency_ms: float = option("Milliseconds that each transfer takes longer.", 0.0, min=0.0)
    ranks: int = option("Context ranks, on the cores of this machine, beside one rank.", 1, min=1)

    def case_count(self) -> int:
        return len(self.schedules) * len(self.rates) * (2 if self.ranks > 1 else 1)

    def columns(self) -> tuple[Column, ...]:
        if self.ranks > 1:
            from headrace.bench.ranked_offload import COLUMNS

            return COLUMNS
        return (
            Column("schedule", "name"),
            Column("link", "gbps", "GB/s", ",g", width=5),
            Column("load all", lambda case: case["tokens_s"]["load all"], "tokens/s", ",.2f"),
            Column("solver", lambda case: case["tokens_s"]["solver"], "tokens/s", ",.2f"),
            Column("gain", unit="times", form=",.2f"),
            Column("projected", "projected_share", "%", ",.0f", 100),
            Column("best way", "best", width=len("share 0.25")),
            Column("of best", "solver_over_best", "times", ",.2f", optional=True),
            Column("predicted", lambda case: case["predicted_over_measured"]["solver"], "times", ",.2f", optional=True),
            Column("fine order", "fine_over_coarse", "times", ",.3f", optional=True),
        )

    def setups(self) -> list[OffloadSetup]:
        """Row: weights and X at hand. Column: weights and X cross the link like K and V."""
        row = {"offload_schedule": "row", "offload_x_resident": True}
        column = {"offload_schedule": "column", "weight_offload": True, "offload_batches": self.batches}
        known = {"row": row, "column": column}
        return [OffloadSetup(name, known[name], self.sequences, self.context) for name in self.schedules]

    def _ranked(self) -> Iterator[Case]:
        """Ranks keep X if asked to; one rank does where that is smaller than K and V."""
        from headrace import cores
        from headrace.bench.ranked_offload import PLACED, Decoding, StreamingEngine, measured

        threads = self.threads or cores.usable()
        rounds = (self.repeats + 1) * len(PLACED)
        with tempfile.TemporaryDirectory() as folder:
            decoding = Decoding(self._written(Path(folder)), self.sequences, self.context, rounds, self.steps)
            for name, rate in product(self.schedules, self.rates):
                where = {"name": name, "shape": self.model, "gbps": rate, "latency_ms": self.latency_ms}
                settings = {
                    "offload_schedule": name, "weight_offload": name == "column", "kv_link_gbps": rate,
                    "kv_link_latency_ms": self.latency_ms,
                }  # fmt: skip
                with StreamingEngine(decoding, settings, threads) as one:
                    for spread in PLACED:
                        self.progress(f"{name}, {rate:g} GB/s, {spread} on {self.ranks} ranks")
                        yield where | measured(one, self.ranks, spread, self.repeats)

    def _written(self, folder: Path) -> str:
        """The folder of the model; of a shape, written there."""
        return str(write_checkpoint(SHAPES[self.model], folder / self.model)) if self.model in SHAPES else self.model

    def cases(self) -> Iterator[Case]:
        if self.ranks > 1:
            yield from self._ranked()
            return
        for setup in self.setups():
            with tempfile.TemporaryDirectory() as folder:
                testbed = OffloadTestbed(self._written(Path(folder)), setup, self)
            try:
                for rate in self.rates:
                    self.progress(f"{setup.name}, {rate:g} GB/s")
                    testbed.set_link(rate, self.latency_ms / 1e3)
                    yield self._case(setup, rate, self._measured(testbed, setup))
            finally:
                testbed.close()

    def ways(self, setup: OffloadSetup) -> dict[str, dict[str, Any]]:
        """Name -> options of the streamer."""
        ways: dict[str, dict[str, Any]] = {"load all": {"share": 0.0}, "solver": {}}
        ways |= {f"share {share:g}": {"share": share} for share in self.shares}
        if setup.name == "column":
            # Orders of weights are compared at one split: the solver's own varies from run to run.
            ways |= {"half, fine": {"share": 0.5}, "half, coarse": {"share": 0.5, "fine": False}}
        return ways

    def _measured(self, testbed: OffloadTestbed, setup: OffloadSetup) -> dict[str, list[DecodeRun]]:
        """Each way's rounds; the round that warms up, and shows the rates, is left out."""
        from headrace.bench.limits import alternate

        results: dict[str, list[DecodeRun]] = {}

        def way(name: str, options: dict[str, Any]) -> Callable[[], object]:
            return lambda: results.setdefault(name, []).append(testbed.run(options, self.steps))

        alternate({name: way(name, options) for name, options in self.ways(setup).items()}, self.repeats)
        return {name: runs[1:] for name, runs in results.items()}

    def _case(self, setup: OffloadSetup, rate: float, kept: dict[str, list[DecodeRun]]) -> Case:
        tokens = {name: statistics.median(run.tokens_s for run in runs) for name, runs in kept.items()}
        solved = kept["solver"]
        case = {
            "name": setup.name, "shape": self.model, "gbps": rate, "latency_ms": self.latency_ms,
            "sequences": setup.sequences, "context": setup.context,
            "batches": self.batches if setup.name == "column" else 1, "tokens_s": tokens,
            "gain": tokens["solver"] / tokens["load all"],
            "projected_share": statistics.median(run.share for run in solved),
            "predicted_over_measured": {
                name: statistics.median(run.predicted_s / run.seconds for run in runs) for name, runs in kept.items()
            },
            "link_busy": {name: statistics.median(run.busy for run in runs) for name, runs in kept.items()},
            "runs": {name: [round(run.tokens_s, 3) for run in runs] for name, runs in kept.items()},
        }  # fmt: skip
        if setup.name == "column":
            case["fine_over_coarse"] = tokens["half, fine"] / tokens["half, coarse"]
        best = max((name for name in tokens if name.startswith("share ") or name in ("load all", "solver")),
                   key=tokens.__getitem__)  # fmt: skip
        return case | {"best": best, "solver_over_best": tokens["solver"] / tokens[best]}


@dataclass(frozen=True, slots=True)
class DecodeRun:
    """Some decode steps: tokens a second, seconds of the layers, those predicted, the share of chunks projected, and
    the share of the time in which bytes crossed the link in, at its rate."""

    tokens_s: float
    seconds: float
    predicted_s: float
    share: float
    busy: float


class OffloadTestbed:
    """An engine with all its sequences prefilled, ready to decode."""

    def __init__(self, model: str, setup: OffloadSetup, bench: OffloadBench) -> None:
        from headrace.engine.llm import LLM

        rounds = (bench.repeats + 1) * bench.steps * (4 + len(bench.shares)) * len(bench.rates)
        length = setup.context + rounds + 16
        self.llm = LLM(
            model, dtype="bfloat16", threads=bench.threads, max_model_len=length, max_sequences=setup.sequences,
            enable_prefix_caching=False, kv_offloading_size=16.0, offload_staging_mb=2048, **setup.settings,
        )  # fmt: skip
        self.streamer: Any = self.llm.engine.loaded.executor.streamer  # type: ignore[attr-defined]
        self._prefill(setup, rounds + 8)

    def _prefill(self, setup: OffloadSetup, tokens: int) -> None:
        from headrace.types import Request, SamplingParams

        rng = random.Random(0)
        engine = self.llm.engine
        params = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
        for index in range(setup.sequences):
            prompt = [rng.randrange(10, self.llm.capacity.vocab_size) for _ in range(setup.context)]
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

    def run(self, options: dict[str, Any], steps: int) -> DecodeRun:
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
        return DecodeRun(tokens / seconds, layers, predicted, projected / max(1, loaded + projected), busy)

    def close(self) -> None:
        """Ends the requests and the copy streams."""
        for request in list(self.llm.engine._active):
            self.llm.engine.abort(request)
        self.llm.close()
