"""Breaks the code in many small ways, one after another, and expects the tests named for each breakage to fail.

    python -m tools.mutants.run [NAME ...] [--room kv] [--list] [--at-once 2]

The mutants are in tools/mutants/*.toml. Each is applied in a copy of the checkout, never in the checkout itself. First
of all the named tests run on the unbroken copy and must pass. Mutants of C++ files are compiled for this processor;
without CMake, Ninja and a compiler they are skipped. Exit status: 1 if a mutant survived or could not be judged.
"""

from __future__ import annotations

import argparse
import os
import queue
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from tools.mutants import ROOT, Mutant, mutants

COPIED = ("CMakeLists.txt", "csrc", "pyproject.toml", "src", "tests", "tools")
KERNELS = Path("src/headrace/kernels")
EXTENSION = "_cpu.abi3.so"
TEST_S = 60
"""A single test that takes longer has failed: a mutant may wait for what never comes."""
RUN_S = 120
"""The same for all tests of a mutant, where not even pytest's own limit ends them."""

Fails = re.compile(r"^(?:FAILED|ERROR) (tests/.+?)(?: - .*)?$", re.MULTILINE)


class Verdict(NamedTuple):
    """outcome: killed, SURVIVED, FAULT (the definition is wrong) or skipped; told: by what, or why."""

    outcome: str
    told: str

    @property
    def good(self) -> bool:
        return self.outcome in ("killed", "skipped")


class Copy:
    """A copy of the checkout, in which mutants are applied one after another. Raises RuntimeError if its unbroken
    kernels do not compile. nanobind: the CMake folder of that package where kernels are to be compiled, else None.

    Mutants of C++ files run on kernels compiled here for this processor alone; the others on those of the checkout."""

    def __init__(self, root: Path, nanobind: str | None) -> None:
        self.root, self.build = root, root / "build"
        for name in COPIED:
            if (ROOT / name).is_dir():
                shutil.copytree(ROOT / name, root / name, ignore=shutil.ignore_patterns("__pycache__"))
            else:
                shutil.copy(ROOT / name, root / name)
        self.builds = nanobind is not None
        if self.builds:
            self._configure(str(nanobind))
            if reason := self._built():
                raise RuntimeError(f"the unbroken kernels do not compile:\n{reason}")

    def _configure(self, nanobind: str) -> None:
        command = ["cmake", "-S", self.root, "-B", self.build, "-G", "Ninja", "-DCMAKE_BUILD_TYPE=Release",
                   f"-Dnanobind_DIR={nanobind}", f"-DPython_EXECUTABLE={sys.executable}", "-DSKBUILD_STATE=wheel",
                   "-DHEADRACE_ISA_BUILD=native"]  # fmt: skip
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        if done.returncode:
            raise RuntimeError(f"CMake cannot configure the kernels:\n{done.stdout[-4000:]}")

    def _built(self) -> str | None:
        """Compiles what has changed and puts the kernels in their place; what the compiler said if it failed."""
        command = ["cmake", "--build", self.build]
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        if done.returncode:
            return done.stdout[-4000:]
        shutil.copy(self.build / "csrc" / EXTENSION, self.root / KERNELS / EXTENSION)
        return None

    def use_own_kernels(self) -> None:
        """Those of the checkout, if it has any, in place of those compiled here."""
        own = ROOT / KERNELS / EXTENSION
        if own.exists():
            shutil.copy(own, self.root / KERNELS / EXTENSION)

    def test(self, tests: list[str], *options: str) -> tuple[int | None, str]:
        """Exit status of pytest on these tests, None where it did not end in time, and its output."""
        first = self.root / "tools" / "mutants" / "first"
        path = os.pathsep.join([str(first), str(self.root / "src")])
        command = [sys.executable, "-m", "pytest", "-q", "-rfE", "--tb=line", "-p", "no:cacheprovider",
                   "--hypothesis-seed=0", f"--timeout={TEST_S}", *options, *tests]  # fmt: skip
        process = subprocess.Popen(
            command, cwd=self.root, env={**os.environ, "PYTHONPATH": path}, start_new_session=True,
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace",
        )  # fmt: skip
        try:
            output, _ = process.communicate(timeout=RUN_S * max(1, len(tests) // 4))
            return process.returncode, output
        except subprocess.TimeoutExpired:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, 9)
            return None, process.communicate()[0]

    def judge(self, mutant: Mutant) -> Verdict:
        """Applies a mutant, runs its tests, and takes it back."""
        if mutant.native and not self.builds:
            return Verdict("skipped", "CMake, Ninja and a C++ compiler are needed")
        path = self.root / mutant.file
        text = path.read_text()
        try:
            self._write(path, mutant.applied(text))
            if mutant.native and (reason := self._built()):
                return Verdict("FAULT", f"does not compile:\n{reason}")
            return verdict(*self.test(list(mutant.tests), "-x"))
        except ValueError as error:
            return Verdict("FAULT", str(error))
        finally:
            self._write(path, text)

    @staticmethod
    def _write(path: Path, text: str) -> None:
        """Python compares a compiled file with its source by size and second: the compiled one must not outlast it."""
        path.write_text(text)
        for compiled in (path.parent / "__pycache__").glob(f"{path.stem}.*.pyc"):
            compiled.unlink()


def verdict(status: int | None, output: str) -> Verdict:
    """What pytest's exit status and output say of a mutant."""
    failed = Fails.search(output)
    if status is None or (status == 1 and failed is None and "Timeout" in output):
        return Verdict("killed", "tests that do not end")
    if status == 1 and failed is not None:
        return Verdict("killed", failed[1])
    if status == 0:
        return Verdict("SURVIVED", "its tests passed")
    return Verdict("FAULT", f"pytest ended with exit status {status}:\n{output[-2000:]}")


def nanobind_folder() -> str | None:
    """Where CMake finds nanobind; None where nothing can be compiled."""
    if None in (shutil.which("cmake"), shutil.which("ninja"), shutil.which(os.environ.get("CXX", "c++"))):
        return None
    import nanobind

    return str(nanobind.cmake_dir())


def unbroken(copy: Copy, group: list[Mutant]) -> bool:
    """Whether the tests of these mutants pass without any of them."""
    tests, began = sorted({test for mutant in group for test in mutant.tests}), time.monotonic()
    status, output = copy.test(tests) if tests else (0, "")
    if status == 0:
        print(f"unbroken: {len(tests)} parts of the tests pass, {time.monotonic() - began:.0f} s", flush=True)
    else:
        print(f"the tests fail on the unbroken code already (exit status {status}):\n{output[-6000:]}")
    return status == 0


def run(chosen: list[Mutant], at_once: int) -> bool:
    """Whether all mutants were killed, or skipped."""
    began = time.monotonic()
    nanobind = nanobind_folder() if any(mutant.native for mutant in chosen) else None
    with tempfile.TemporaryDirectory(prefix="headrace-mutants-") as folder, ThreadPoolExecutor(at_once) as pool:
        places = [Path(folder) / str(number) for number in range(at_once)]
        for place in places:
            place.mkdir()
        copies: queue.SimpleQueue[Copy] = queue.SimpleQueue()
        made = list(pool.map(lambda place: Copy(place, nanobind), places))
        for copy in made:
            copies.put(copy)

        def judged(mutant: Mutant) -> Verdict:
            copy, start = copies.get(), time.monotonic()
            found = copy.judge(mutant)
            copies.put(copy)
            print(f"{mutant.room}: {mutant.name}: {found.outcome}, {found.told}, {time.monotonic() - start:.0f} s",
                  flush=True)  # fmt: skip
            return found

        verdicts: list[Verdict] = []
        for native in (True, False):
            if not native:
                for copy in made:
                    copy.use_own_kernels()
            group = [mutant for mutant in chosen if mutant.native == native]
            if (not native or nanobind) and not unbroken(made[0], group):
                return False
            verdicts += pool.map(judged, group)
    counts = Counter(found.outcome for found in verdicts)
    told = ", ".join(f"{count} {outcome}" for outcome, count in sorted(counts.items()))
    print(f"{len(verdicts)} mutants: {told}; {time.monotonic() - began:.0f} s")
    return all(found.good for found in verdicts)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    known = mutants()
    parser.add_argument("names", nargs="*", metavar="NAME", help="only these mutants")
    parser.add_argument("--room", choices=sorted({mutant.room for mutant in known}), help="only those of a room")
    parser.add_argument("--list", action="store_true", help="say what each breaks and run nothing")
    parser.add_argument("--at-once", type=int, default=1, help="mutants that are run at the same time")
    asked = parser.parse_args()
    if unknown := set(asked.names) - {mutant.name for mutant in known}:
        parser.error(f"no such mutant: {', '.join(sorted(unknown))}")
    chosen = [
        mutant
        for mutant in known
        if (not asked.names or mutant.name in asked.names) and asked.room in (None, mutant.room)
    ]
    if asked.list:
        for mutant in chosen:
            print(f"{mutant.room}: {mutant.name}: {mutant.breaks}")
        return 0
    if not chosen:
        parser.error(f"none of these mutants is of the room {asked.room}")
    return 0 if run(chosen, asked.at_once) else 1


if __name__ == "__main__":
    sys.exit(main())
