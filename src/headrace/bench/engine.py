"""`headrace bench engine`: whole engines on the same work, in turns, each in a process of its own."""

from __future__ import annotations

import json
import os
import signal
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from headrace.bench.neighbours import Neighbours
from headrace.bench.peers import ENGINES, Contender
from headrace.bench.protocol import figures
from headrace.bench.result import flat
from headrace.bench.shapes import SHAPES, write_checkpoint
from headrace.bench.workloads import Run, Workload, chosen

FOLDER = Path("build/bench")
"""Checkpoints, and what peers convert them to, are kept here."""

PATIENCE_S = 240.0
"""An engine that has spent this long on a case is not asked to repeat it."""

SETTLE_S = 0.5
"""A pause before each run: threads of the engine that ran before may spin for a while (200 ms with Intel's OpenMP)."""

Case = dict[str, Any]


class Failed(RuntimeError):
    """An engine could not be started or could not do a run; the message says why."""


def checkpoint(model: str) -> Path:
    """The folder of a random-weight shape, written on first use. Raises ValueError for an unknown shape."""
    if model not in SHAPES:
        raise ValueError(f"model must be one of {', '.join(SHAPES)}; got {model!r}")
    folder = FOLDER / model
    if not (folder / "config.json").exists():
        write_checkpoint(SHAPES[model], folder)
    return folder.resolve()


def run_all(
    workloads: list[str], models: list[str], engines: list[str], repeats: int, scale: int = 1, busy: bool = False
) -> Iterator[Case]:
    """One case per (model, workload, engine). `all` stands for every engine known. Raises ValueError for bad names.

    busy: each engine also runs beside a busy process on every core.
    """
    names = list(ENGINES) if engines == ["all"] else engines
    for name in names:
        if name not in ENGINES:
            raise ValueError(f"engine must be one of {', '.join(ENGINES)}; got {name!r}")
    work = chosen(workloads)
    contenders = [ENGINES[name] for name in names]
    with Neighbours() if busy else nullcontext() as neighbours:
        for model in models:
            folder = checkpoint(model)
            for family in dict.fromkeys(item.name.split("_")[0] for item in work):
                members = [item for item in work if item.name.split("_")[0] == family]
                yield from _family(members, model, folder, contenders, repeats, scale, neighbours)


def _family(
    members: list[Workload],
    model: str,
    folder: Path,
    engines: list[Contender],
    repeats: int,
    scale: int,
    neighbours: Neighbours | None = None,
) -> Iterator[Case]:
    """Fresh processes for the workloads of a family, all alive while they take turns."""
    racers: list[Racer] = []
    try:
        for engine in engines:  # those that are there end if the next is interrupted
            racers.append(Racer(engine, folder))
        for workload in members:
            for racer in racers:
                racer.reset()
            for draw, beside in turns(repeats, neighbours):
                for racer in racers:
                    racer.take(workload, workload.draw(draw, scale), beside)
            for racer in racers:
                yield {"workload": workload.name, "model": model, **racer.case(neighbours)}
    except KeyboardInterrupt:
        for racer in racers:
            racer.kill()
        raise
    finally:
        for racer in racers:
            racer.close()


def turns(repeats: int, neighbours: Neighbours | None) -> list[tuple[int, Neighbours | None]]:
    """(number of the draw, who is beside) of each round: with neighbours each repetition is two, in changing order."""
    if neighbours is None:
        return [(repetition, None) for repetition in range(repeats)]
    states = [None, neighbours, neighbours, None]
    return [(draw, states[draw % 4]) for draw in range(2 * repeats)]


def lines() -> Callable[[Case], str]:
    """A function that gives the line of a case, how its engine was set up above the first of each."""
    told: set[tuple[str, str]] = set()

    def line(case: Case) -> str:
        rest = {name: value for name, value in case.items() if name != "setup"}
        key = case["engine"], case["setup"]
        head = "" if key in told else f"{case['engine']}: {case['setup']}\n"
        told.add(key)
        return head + flat(rest)

    return line


class Racer:
    """One engine's process during a family of workloads, and its figures of the workload under way."""

    def __init__(self, engine: Contender, folder: Path) -> None:
        self.engine = engine
        self.error = engine.obstacle()
        self.found: dict[str, str] = {}
        self.process: Process | None = None
        self.reset()
        if self.error is None:
            try:
                self.process = Process(engine, folder)
                self.found = self.process.setup
            except Failed as error:
                self.error = str(error)

    def reset(self) -> None:
        """Forgets the figures. runs and spent: by themselves, and beside neighbours."""
        self.runs: dict[bool, list[dict[str, float | None]]] = {False: [], True: []}
        self.spent = {False: 0.0, True: 0.0}
        self.peak = 0.0
        if self.process is not None:
            self.process.forget_peak()

    def take(self, workload: Workload, run: Run, neighbours: Neighbours | None = None) -> None:
        """Does a run, beside these, unless the engine has failed or has had its time."""
        busy = neighbours is not None
        if self.process is None or self.spent[busy] > PATIENCE_S:
            return
        with nullcontext() if neighbours is None else neighbours.busy():
            time.sleep(SETTLE_S)
            began = time.perf_counter()
            try:
                self.runs[busy].append(self._do(self.process, workload, run))
            except Failed as error:
                self.error, self.process = str(error), None
                return
            self.spent[busy] += time.perf_counter() - began
        self.peak = self.process.peak_mb()

    def _do(self, process: Process, workload: Workload, run: Run) -> dict[str, float | None]:
        prime_s = process.ask([run.prime], [1])[0][-1] if run.prime else 0.0
        return figures(process.ask(run.prompts, run.max_tokens), prime_s, workload.overall)

    def case(self, neighbours: Neighbours | None = None) -> Case:
        """Medians of what was done, or the reason for nothing. Beside neighbours: names that begin with busy."""
        case: Case = {"engine": self.engine.name, "precision": self.engine.precision}
        case |= dict.fromkeys(("ttft_s", "decode_tok_s", "wall_s", "peak_rss_mb"))
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
        return case | {"setup": self.engine.setup(self.found)}

    def kill(self) -> None:
        if self.process is not None:
            self.process.kill()

    def close(self) -> None:
        if self.process is not None:
            self.process.close()


def _medians(runs: list[dict[str, float | None]]) -> dict[str, float | None]:
    return {name: _median([run[name] for run in runs]) for name in ("ttft_s", "decode_tok_s", "wall_s")}


def _median(values: list[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return round(statistics.median(known), 4) if known else None


@dataclass(slots=True)
class Process:
    """The engine's process: started and ready when made. Raises Failed with its reason, the end of its log included."""

    engine: Contender
    folder: Path
    popen: subprocess.Popen[str] = field(init=False)
    log: IO[bytes] = field(init=False)
    setup: dict[str, str] = field(init=False)
    """What the process says of itself: versions, libraries, threads."""

    def __post_init__(self) -> None:
        self.log = tempfile.TemporaryFile()  # noqa: SIM115
        self.popen = subprocess.Popen(
            [*self.engine.command(), str(self.folder), json.dumps(self.engine.options)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self.log, text=True,
            env=os.environ | self.engine.environment(),
        )  # fmt: skip
        try:
            self.setup = self._answer().get("setup", {})
        except KeyboardInterrupt:
            self.kill()
            raise

    def ask(self, prompts: list[list[int]], max_tokens: list[int]) -> list[list[float]]:
        assert self.popen.stdin is not None
        self.popen.stdin.write(json.dumps({"prompts": prompts, "max_tokens": max_tokens}) + "\n")
        self.popen.stdin.flush()
        times: list[list[float]] = self._answer()["times"]
        for row, limit in zip(times, max_tokens, strict=True):
            if len(row) != limit:
                self.close()
                raise Failed(f"{len(row)} tokens where {limit} were asked for")
        return times

    def _answer(self) -> dict[str, Any]:
        assert self.popen.stdout is not None
        line = self.popen.stdout.readline()
        if not line:
            self.popen.wait()
            raise Failed(f"the process ended with {self.popen.returncode}: {self._last_words()}")
        message: dict[str, Any] = json.loads(line)
        if "error" in message:
            self.close()
            raise Failed(str(message["error"]))
        return message

    def _last_words(self) -> str:
        self.log.seek(0)
        lines = self.log.read().decode(errors="replace").strip().splitlines()
        return lines[-1] if lines else "it said nothing"

    def peak_mb(self) -> float:
        """Greatest resident size since forget_peak, the process and its children together."""
        return sum(_peak_kib(pid) for pid in _tree(self.popen.pid)) / 1024

    def forget_peak(self) -> None:
        for pid in _tree(self.popen.pid):
            try:
                Path(f"/proc/{pid}/clear_refs").write_text("5")
            except OSError:
                continue  # the peak of the whole life is reported then

    def kill(self) -> None:
        """Ends the process and its children at once; close() then finds it ended."""
        for pid in _tree(self.popen.pid):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def close(self) -> None:
        """Ends the process by ending its input; by force where that is not enough."""
        if self.popen.stdin is not None:
            self.popen.stdin.close()
        try:
            self.popen.wait(timeout=20)
        except subprocess.TimeoutExpired:
            self.popen.kill()
            self.popen.wait()
        self.log.close()


def _tree(pid: int) -> list[int]:
    """A process and its descendants."""
    try:
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except OSError:
        return [pid]
    return [pid, *(each for child in children for each in _tree(int(child)))]


def _peak_kib(pid: int) -> int:
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith("VmHWM")), 0)
