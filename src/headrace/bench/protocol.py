"""What the driver of `headrace bench engine` and the process of each engine say to each other. Standard library only:
the peers' processes import this from environments of their own.

A process is started with a checkpoint folder and options (JSON). It answers {"ready": true, "setup": {name: text}}, the
setup being what it found to be so of itself, or {"error": reason}. Then it takes one line per run, {"prompts":
[[token id]], "max_tokens": [n]}, and answers {"times": [[seconds]]}: when each token of each answer arrived, counted
from the moment the run was taken up. All requests of a run arrive at once.
"""

from __future__ import annotations

import ctypes
import json
import os
import statistics
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol, TextIO

Times = list[list[float]]


class EngineUnderTest(Protocol):
    """An engine under test, greedy, never ending an answer early. One with more to say of itself has `facts`."""

    def run(self, prompts: list[list[int]], max_tokens: list[int]) -> Times: ...


def serve(load: Callable[[Path, dict[str, Any]], EngineUnderTest], *packages: str) -> None:
    """The main function of an engine's process: load(checkpoint, options), then runs until standard input ends.

    packages: those whose versions are told.
    """
    answers = _own_stdout()
    cores = len(os.sched_getaffinity(0))  # engines bind threads, this one too
    try:
        preloaded = _preloaded()
        engine = load(Path(sys.argv[1]), json.loads(sys.argv[2]))
        engine.run([[5, 6, 7, 8] * 16], [4])
        openmp = _openmp() if "torch" in packages else ""
        found = {"versions": _versions(packages), "preloaded": preloaded, "openmp": openmp, "cores": str(cores)}
    except Exception as error:
        _say(answers, {"error": f"{type(error).__name__}: {error}"})
        return
    _say(answers, {"ready": True, "setup": found | getattr(engine, "facts", {})})
    for line in sys.stdin:
        try:
            _say(answers, {"times": engine.run(**json.loads(line))})
        except Exception as error:
            _say(answers, {"error": f"{type(error).__name__}: {error}"})
            return


def _versions(packages: tuple[str, ...]) -> str:
    """Those of the packages that are installed."""
    from importlib.metadata import PackageNotFoundError, version

    found = []
    for package in packages:
        with suppress(PackageNotFoundError):
            found.append(f"{package} {version(package)}")
    return ", ".join(found)


def _preloaded() -> str:
    """Names of the libraries in LD_PRELOAD. Raises where one is not in this process: the loader only warns."""
    wanted = [path for path in os.environ.get("LD_PRELOAD", "").split(":") if path]
    maps = Path("/proc/self/maps").read_text().splitlines() if wanted else []
    there = {os.path.realpath(line.split()[-1]) for line in maps if "/" in line}
    for path in wanted:
        if os.path.realpath(path) not in there:
            raise RuntimeError(f"{path} is in LD_PRELOAD but was not loaded")
    return " ".join(os.path.basename(path) for path in wanted)


class _Place(ctypes.Structure):
    """What dladdr finds: file and address of a library, name and address of a symbol."""

    _fields_ = [
        ("file", ctypes.c_char_p),
        ("base", ctypes.c_void_p),
        ("name", ctypes.c_char_p),
        ("at", ctypes.c_void_p),
    ]


def _openmp() -> str:
    """The library whose GOMP_parallel the loader gives to libraries that GCC compiled, torch's among them."""
    place = _Place()
    try:
        program = ctypes.CDLL(None)
        found = program.dladdr(ctypes.cast(program.GOMP_parallel, ctypes.c_void_p), ctypes.byref(place))
    except (AttributeError, OSError):
        return ""
    return os.path.basename(os.fsdecode(place.file)) if found and place.file else ""


def _own_stdout() -> TextIO:
    """Standard output for answers alone: whatever libraries print goes to standard error."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    return answers


def _say(answers: TextIO, message: dict[str, Any]) -> None:
    answers.write(json.dumps(message) + "\n")
    answers.flush()


def figures(times: Times, prime_s: float, overall: bool) -> dict[str, float | None]:
    """What a run comes to. Times to the first token are the median over its requests.

    decode_tok_s counts the tokens that arrive after every request has its first one; overall: all tokens over the
    whole time, for requests that come and go. prime_s: of answering what was asked before; wall_s includes it.
    """
    began = max(row[0] for row in times)
    end = max(row[-1] for row in times)
    later = sum(1 for row in times for moment in row if moment > began)
    rate = sum(map(len, times)) / end if overall else later / (end - began) if later else None
    return {
        "ttft_s": statistics.median(row[0] for row in times),
        "decode_tok_s": rate,
        "prime_s": prime_s or None,
        "wall_s": prime_s + end,
    }
