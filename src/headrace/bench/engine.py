"""`headrace bench engine`: whole engines on the same work, in turns, each in a process of its own."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from headrace import cores
from headrace.bench.benchmark import MODELS_FLAGS, Benchmark, Case, CaseProgress, option, words
from headrace.bench.contender_process import ContenderFailed, ContenderProcess
from headrace.bench.neighbours import Neighbours
from headrace.bench.peers import ENGINES, FILE_READERS, Contender, ahead_goal, read_goal, second_turn_goal
from headrace.bench.protocol import figures
from headrace.bench.shapes import SHAPES, checkpoint
from headrace.bench.table import Column
from headrace.bench.workloads import VOCABULARY, Workload, WorkloadRun, chosen
from headrace.console import out, working
from headrace.engine.folders import model_folder
from headrace.models.config import read_config
from headrace.models.files import is_gguf

PATIENCE_S = 240.0
"""An engine that has spent this long on a case is not asked to repeat it."""

QUICK_SCALE = 32
"""What lengths are divided by in a quick run."""

SETTLE_S = 0.5
"""A pause before each run: threads of the engine that ran before may spin for a while (200 ms with Intel's OpenMP)."""


@dataclass
class EngineBench(Benchmark):
    """Whole engines on the same work: first token, speed, memory.

    Each runs in a process of its own.
    """

    name = "engine"
    workloads: tuple[str, ...] = option(
        "Workloads, by commas: W1 to W7, or one case of them: W1_8192.", "W1,W2,W3,W4,W5", parse=words
    )
    models: tuple[str, ...] = option(
        "By commas: random-weight shapes, S1 to S5 (S4 with experts, S5 a hybrid), GGUF files, folders of a model, or "
        "names of pulled ones.",
        "S1",
        parse=words,
        flags=MODELS_FLAGS,
    )
    engines: tuple[str, ...] = option(
        "Engines, by commas, or 'all': peers need `make bench-peers`.", "headrace", parse=words, flags=("--engine",)
    )
    repeats: int = option("Repetitions of each case, the engines in turn.", 5, min=1)
    quick: bool = option("Tiny lengths, one repetition: shows that it runs.", False)
    busy_neighbour: bool = option(
        "Run with one busy process per core beside the engines, and once without: how much slower each becomes.",
        False,
        flags=("--busy-neighbour",),
    )
    _told: set[tuple[str, str]] = field(default_factory=set, init=False)
    _ours: dict[tuple[str, str, str], Case] = field(default_factory=dict, init=False)

    def cases(self) -> Iterator[Case]:
        from headrace.bench.limits import Limits

        counts = sorted({1, cores.usable()})
        limits = Limits(1 << 20, 128) if self.quick else Limits()
        repeats, scale = (1, QUICK_SCALE) if self.quick else (self.repeats, 1)
        work = (self.workloads, self.models, self.engines, repeats, scale)
        read = partial(limits.read_rate, counts[-1])
        found = run_all(*work, busy=self.busy_neighbour, progress=self.progress, read=read)  # what is wrong is told now
        with working("measuring the machine"):
            self.machine |= limits.figures(counts, 1 if self.quick else 5)
        self.progress.steps = len(self.models) * len(chosen(self.workloads))
        for case in found:
            with self.progress.hidden():
                self._tell_setup(case)
            yield case | {"headrace_ahead": self._ahead(case)}

    def quick_lengths(self) -> dict[int, int]:
        usual = sorted({workload.longest(1) for workload in chosen(self.workloads)}) if self.quick else []
        return {length: max(length // QUICK_SCALE, 1) for length in usual}

    def columns(self) -> tuple[Column, ...]:
        goal = None if self.quick or (len(self.engines) == 1 and self.engines != ("all",)) else ahead_goal
        beside = (
            Column("beside", "busy_wall_s", "others, s", ",.3f"),
            Column("slowdown", unit="times", form=",.2f"),
        )
        return (
            Column("workload", width=len("W3_8192_cold")),
            Column("model", width=max(len("model"), *(len(_short(model)) for model in self.models))),
            Column("prompt", "longest_prompt", "tokens", ",", optional=True),
            Column("engine", width=len("openvino-genai-default") if goal is not None else len("headrace-triton")),
            Column("first token", "ttft_s", "s", ",.3f"),
            Column("decoding", "decode_tok_s", "tokens/s", ",.1f"),
            Column("all", "wall_s", "s", ",.3f", optional=True),
            Column("memory", "peak_rss_mb", "MB", ",.0f", optional=True),
            *self._shares(),
            *(beside if self.busy_neighbour else ()),
            *((Column("Headrace", "headrace_ahead", "times", ".2f", limit=goal),) if goal is not None else ()),
        )

    def _shares(self) -> tuple[Column, ...]:
        """Columns of the workloads that have something of their own to be held against."""
        families = {workload.name.split("_")[0] for workload in chosen(self.workloads)}
        read = Column(
            "weights", "of_read", "of the read rate", ".2f", optional=True, limit=None if self.quick else read_goal
        )
        goal = None if self.quick else second_turn_goal
        turn = Column("turn", "of_first_turn", "of the first", ".3f", limit=goal, optional=True, bound="at most")
        return (*((read,) if "W2" in families else ()), *((turn,) if "W6" in families else ()))

    def _tell_setup(self, case: Case) -> None:
        """Above the first case of each engine, how it was set up; of a case that failed, why."""
        key = case["engine"], case["setup"]
        if key not in self._told:
            out.print(f"{case['engine']}: {case['setup']}", style="dim", markup=False)
        self._told.add(key)
        if "error" in case:
            out.print(f"{case['engine']}: {case['error']}", style="yellow", markup=False)

    def _ahead(self, case: Case) -> float | None:
        """How many times as fast Headrace was at the same work, in the same weights where it ran in them, if it was
        measured before: at the first token of W1, W6 and W7, at decoding of the others."""
        key = case["model"], case["workload"]
        if case["engine"].startswith("headrace"):
            self._ours[*key, case["engine"]] = case
            return None
        ours = self._ours.get((*key, ENGINES[case["engine"]].beside)) or self._ours.get((*key, "headrace"), {})
        if case["workload"].startswith(("W1", "W6", "W7")):
            return _ratio(case["ttft_s"], ours.get("ttft_s"))
        return _ratio(ours.get("decode_tok_s"), case["decode_tok_s"])


def _ratio(value: float | None, to: float | None) -> float | None:
    return round(value / to, 3) if value and to else None


def run_all(
    workloads: Sequence[str],
    models: Sequence[str],
    engines: Sequence[str],
    repeats: int,
    scale: int,
    *,
    busy: bool,
    progress: CaseProgress | None = None,
    read: Callable[[], float] | None = None,
) -> Iterator[Case]:
    """One case per (model, workload, engine). `all` stands for every engine known. Raises ValueError for bad names.

    busy: each engine also runs beside a busy process on every core. read: samples the machine's read rate, GB/s, once
    in each round, so that decoding can be held against it.
    """
    for name in engines:
        if name not in ENGINES and list(engines) != ["all"]:
            raise ValueError(f"engine must be one of {', '.join(ENGINES)}; got {name!r}")
    work, folders = chosen(workloads), {model: _folder(model) for model in models}
    contenders_of = {model: _contenders(engines, model, folders[model]) for model in models}

    def run() -> Iterator[Case]:
        with Neighbours() if busy else nullcontext() as neighbours:
            for model, contenders in contenders_of.items():
                folder = folders[model] or checkpoint(model)
                for family in dict.fromkeys(item.name.split("_")[0] for item in work):
                    members = [item for item in work if item.name.split("_")[0] == family]
                    yield from _family(members, model, folder, contenders, repeats, scale, neighbours, progress, read)

    return run()


def _short(model: str) -> str:
    return Path(model).name


def _folder(model: str) -> Path | None:
    """A GGUF file or a folder, pulled ones by their names too; None of a shape. Raises ValueError for what is none."""
    if model in SHAPES:
        return None
    path = Path(model).expanduser()
    try:
        return path.resolve() if path.exists() else model_folder(model).resolve()
    except ValueError:
        known = f"{', '.join(SHAPES)}, a GGUF file, a folder or what was pulled"
        raise ValueError(f"model must be one of {known}; got {model!r}") from None


def _contenders(engines: Sequence[str], model: str, path: Path | None) -> list[Contender]:
    """The engines as they are measured on a shape, or on a file or folder. Raises ValueError for a small vocabulary,
    and for an engine that is not measured so."""
    every = list(engines) == ["all"]
    if path is None:
        return [ENGINES[name] for name in (ENGINES if every else engines)]
    if (size := read_config(path).vocab_size) < VOCABULARY:
        raise ValueError(
            f"{model} has {size:,} tokens; prompts are drawn from the first {VOCABULARY:,}: "
            f"name a larger model, or one of {', '.join(SHAPES)}"
        )
    if is_gguf(path):
        return [ENGINES[name].of_file(path) for name in (FILE_READERS if every else engines)]
    if every:
        engines = [name for name, engine in ENGINES.items() if engine.gguf is None]
    if converted := [name for name in engines if ENGINES[name].gguf is not None]:
        raise ValueError(
            f"{converted[0]} reads GGUF, and {model} is a folder: name a file, or one of {', '.join(SHAPES)}"
        )
    return [ENGINES[name] for name in engines]


def _family(
    members: list[Workload],
    model: str,
    folder: Path,
    engines: list[Contender],
    repeats: int,
    scale: int,
    neighbours: Neighbours | None = None,
    progress: CaseProgress | None = None,
    read: Callable[[], float] | None = None,
) -> Iterator[Case]:
    """Fresh processes for the workloads of a family, all alive while they take turns."""
    racers: list[Racer] = []
    progress = progress or CaseProgress()
    try:
        for workload in members:
            progress(f"{workload.name} {_short(model)}")
            for engine in engines[len(racers) :]:  # those that are there end if the next is interrupted
                progress.detail(f"starting {engine.name}")
                racers.append(Racer(engine, folder))
            for racer in racers:
                racer.reset()
            rounds = turns(repeats, neighbours)
            rates: list[float | None] = []
            for number, (draw, beside) in enumerate(rounds, 1):
                if read is not None:
                    time.sleep(SETTLE_S)
                    rates.append(read())
                for racer in racers:
                    progress.detail(f"run {number} of {len(rounds)}, {racer.engine.name}")
                    racer.take(workload, workload.draw(draw, scale), beside)
            longest = workload.longest(scale)
            for racer in racers:
                case = {
                    "workload": workload.name,
                    "model": _short(model),
                    **racer.case(neighbours),
                    "longest_prompt": longest,
                }
                yield case | _shares(case, _median(rates))
    except KeyboardInterrupt:
        for racer in racers:
            racer.kill()
        raise
    finally:
        for racer in racers:
            racer.close()


def _shares(case: Case, read_gbps: float | None) -> Case:
    """What a case is as a share of something: decoding one sequence, of reading its weights plainly; a second turn, of
    the first."""
    step, rate, first = case.pop("step_bytes", None), case["decode_tok_s"], case["prime_s"]
    found: Case = {}
    if case["workload"].startswith("W2") and step and rate and read_gbps:
        found = {"step_bytes": step, "read_gbps": read_gbps, "of_read": _ratio(step * rate / 1e9, read_gbps)}
    if case["workload"].startswith("W6"):
        found["of_first_turn"] = _ratio(case["ttft_s"], first)
    return found


def turns(repeats: int, neighbours: Neighbours | None) -> list[tuple[int, Neighbours | None]]:
    """(number of the draw, who is beside) of each round: with neighbours each repetition is two, in changing order."""
    if neighbours is None:
        return [(repetition, None) for repetition in range(repeats)]
    states = [None, neighbours, neighbours, None]
    return [(draw, states[draw % 4]) for draw in range(2 * repeats)]


FIGURES = ("ttft_s", "decode_tok_s", "prime_s", "wall_s")


class Racer:
    """One engine's process during a family of workloads, and its figures of the workload under way."""

    def __init__(self, engine: Contender, folder: Path) -> None:
        self.engine = engine
        self.error = engine.obstacle()
        self.found: dict[str, str] = {}
        self.process: ContenderProcess | None = None
        self.reset()
        if self.error is None:
            try:
                self.process = ContenderProcess(engine, folder)
                self.found = self.process.setup
            except ContenderFailed as error:
                self.error = str(error)

    def reset(self) -> None:
        """Forgets the figures. runs and spent: by themselves, and beside neighbours."""
        self.runs: dict[bool, list[dict[str, float | None]]] = {False: [], True: []}
        self.spent = {False: 0.0, True: 0.0}
        self.peak = 0.0
        if self.process is not None:
            self.process.forget_peak()

    def take(self, workload: Workload, run: WorkloadRun, neighbours: Neighbours | None = None) -> None:
        """Does a run, beside these, unless the engine has failed or has had its time."""
        busy = neighbours is not None
        if self.process is None or self.spent[busy] > PATIENCE_S:
            return
        with nullcontext() if neighbours is None else neighbours.busy():
            time.sleep(SETTLE_S)
            began = time.perf_counter()
            try:
                self.runs[busy].append(self._do(self.process, workload, run))
            except ContenderFailed as error:
                self.error, self.process = str(error), None
                return
            self.spent[busy] += time.perf_counter() - began
        self.peak = self.process.peak_mb()

    def _do(self, process: ContenderProcess, workload: Workload, run: WorkloadRun) -> dict[str, float | None]:
        prime_s = process.ask([run.prime], [1])[0][-1] if run.prime else 0.0
        return figures(process.ask(run.prompts, run.max_tokens), prime_s, workload.overall)

    def case(self, neighbours: Neighbours | None = None) -> Case:
        """Medians of the runs, or why there are none. Names of figures beside neighbours begin with busy."""
        case: Case = {"engine": self.engine.name, "precision": self.engine.precision}
        case |= dict.fromkeys((*FIGURES, "peak_rss_mb"))
        if self.runs[False]:
            case |= _medians(self.runs[False]) | {"peak_rss_mb": round(self.peak), "runs": len(self.runs[False])}
        if neighbours is not None:
            beside = _medians(self.runs[True])
            case |= {f"busy_{name}": value for name, value in beside.items()}
            case |= {"busy_runs": len(self.runs[True]), "neighbours": len(neighbours.cores), "slowdown": None}
            if case["wall_s"] and beside["wall_s"]:
                case["slowdown"] = round(beside["wall_s"] / case["wall_s"], 3)
        if self.error is not None:
            case["error"] = self.error
        if step := self.found.get("step_bytes"):
            case["step_bytes"] = int(step)
        return case | {"setup": self.engine.setup(self.found)}

    def kill(self) -> None:
        if self.process is not None:
            self.process.kill()

    def close(self) -> None:
        if self.process is not None:
            self.process.close()


def _medians(runs: list[dict[str, float | None]]) -> dict[str, float | None]:
    return {name: _median([run[name] for run in runs]) for name in FIGURES}


def _median(values: list[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return round(statistics.median(known), 4) if known else None
