"""Attacks every door with seeded nonsense: no crash, no hang, no wrong bit, memory within the door's bound.

    python -m tools.fuzz.run [--seconds 300] [--seed 1] [--door NAME ...] [--at-once 2]
    python -m tools.fuzz.run --door NAME --seed 1 --case 17      # one case again, with its traceback

Each door runs in a process of its own, which this one watches; a failure names the command that repeats it.
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import importlib
import json
import pkgutil
import random
import struct
import subprocess
import sys
import tempfile
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil

from tools.fuzz import doors
from tools.fuzz.doors import Door

NUMBER = struct.Struct("<q")
OPEN_S = 120
"""So long a door may take to open: a model may have to load first."""


def door_names() -> list[str]:
    return sorted(info.name for info in pkgutil.iter_modules(doors.__path__) if not info.name.startswith("_"))


def made(name: str) -> Door:
    door: Door = importlib.import_module(f"tools.fuzz.doors.{name}").door()
    return door


def attack(name: str, seed: int, seconds: float, only: int | None, progress: Path) -> dict[str, Any]:
    """Runs in the door's own process: cases in order until the time is over. A hang ends the process."""
    door, told, longest, number = made(name), Counter[str](), 0.0, 0
    with tempfile.TemporaryDirectory() as folder, progress.open("r+b", buffering=0) as file:
        faulthandler.dump_traceback_later(OPEN_S, exit=True)
        door.open(Path(folder))
        end = time.monotonic() + seconds
        try:
            for number in range(10**9) if only is None else [only]:
                file.seek(0)
                file.write(NUMBER.pack(number))
                began = time.monotonic()
                if began > end and only is None:
                    break
                faulthandler.dump_traceback_later(door.case_s, exit=True)
                told[door.case(random.Random(f"{seed}/{name}/{number}"))] += 1
                longest = max(longest, time.monotonic() - began)
        finally:
            faulthandler.dump_traceback_later(OPEN_S, exit=True)
            door.close()
            faulthandler.cancel_dump_traceback_later()
    return {"cases": sum(told.values()), "outcomes": dict(told), "longest_s": round(longest, 3)}


def watched(name: str, seed: int, seconds: float) -> tuple[bool, str]:
    """Attacks a door in a process of its own. Whether it held, and what is to be said."""
    with tempfile.NamedTemporaryFile() as progress, tempfile.TemporaryFile() as errors:
        progress.write(NUMBER.pack(-1))
        progress.flush()
        command = [sys.executable, "-m", "tools.fuzz.run", "--door", name, "--seed", str(seed), "--seconds",
                   str(seconds), "--inside", progress.name]  # fmt: skip
        child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors)
        bound = made(name).memory_mib * 2**20
        grown = _watch(child, Path(progress.name), bound)
        out = child.communicate()[0]
        number = _number(Path(progress.name))
        errors.seek(0)
        said = errors.read().decode(errors="replace")
    if child.returncode == 0 and grown <= bound:
        facts = json.loads(out.splitlines()[-1])
        outcomes = ", ".join(f"{what} {count}" for what, count in sorted(facts["outcomes"].items()))
        return True, (
            f"{name}: {facts['cases']} cases in {seconds:.0f} s, memory +{grown >> 20} of {bound >> 20} MiB, "
            f"longest {facts['longest_s']} s; {outcomes}"
        )
    why = f"memory grew by more than {bound >> 20} MiB" if grown > bound else f"exit status {child.returncode}"
    again = f"{sys.executable} -m tools.fuzz.run --door {name} --seed {seed} --case {number}"
    return False, f"{name}: FAILED at case {number} ({why}); again with\n    {again}\n{said[-6000:]}"


def _watch(child: subprocess.Popen[bytes], progress: Path, bound: int) -> int:
    """How much memory the process and its children grew by after the first case began; ends them beyond the bound."""
    first, most = 0, 0
    while child.poll() is None:
        now = _resident(child.pid)
        if _number(progress) >= 0:
            first = first or now
            most = max(most, now - first)
        if most > bound:
            for process in reversed(_family(child.pid)):
                with contextlib.suppress(psutil.Error):
                    process.kill()
        time.sleep(0.02)
    return most


def _family(pid: int) -> list[psutil.Process]:
    try:
        parent = psutil.Process(pid)
        return [parent, *parent.children(recursive=True)]
    except psutil.Error:
        return []


def _resident(pid: int) -> int:
    total = 0
    for process in _family(pid):
        with contextlib.suppress(psutil.Error):
            total += process.memory_info().rss
    return total


def _number(progress: Path) -> int:
    return int(NUMBER.unpack(progress.read_bytes()[: NUMBER.size])[0])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=300, help="for all doors together")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--door", action="append", choices=door_names(), help="only these; may be repeated")
    parser.add_argument("--case", type=int, help="only this case of the one door, in this process")
    parser.add_argument("--at-once", type=int, default=2, help="doors attacked at the same time")
    parser.add_argument("--inside", type=Path, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    names = asked.door or door_names()
    if asked.inside or asked.case is not None:
        if len(names) != 1:
            parser.error("--case needs one --door")
        with tempfile.NamedTemporaryFile() as progress:
            path = asked.inside or Path(progress.name)
            print(json.dumps(attack(names[0], asked.seed, asked.seconds, asked.case, path)))
        return 0
    each = asked.seconds * min(asked.at_once, len(names)) / len(names)
    with ThreadPoolExecutor(asked.at_once) as pool:
        held = True
        for good, told in pool.map(lambda name: watched(name, asked.seed, each), names):
            print(told, flush=True)
            held &= good
    how = "all held" if held else "FAILED"
    print(f"{len(names)} doors attacked for {asked.seconds:.0f} s, seed {asked.seed}: {how}")
    return 0 if held else 1


if __name__ == "__main__":
    sys.exit(main())
