"""Builds the kernels with sanitizers and runs the kernel tests on them.

    python tools/sanitize/run.py [address] [thread] [-- pytest arguments]

address is AddressSanitizer together with UndefinedBehaviorSanitizer. Each build lies in build/sanitize. Deliberate
errors come before the tests: a sanitizer that does not report them does not look, and must not pass.
"""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
BUILD = ROOT / "build" / "sanitize"
CPU = ROOT / "tests" / "cpu"
TESTS = [str(path) for path in sorted(CPU.glob("test_kernels*.py"))]

PROLOGUE = """
import torch
from headrace.kernels import _cpu
x, out = torch.zeros(64, 2048), torch.zeros(64)
"""
OVERRUN = "_cpu.exp(x.data_ptr(), out.data_ptr(), 65)"
OVERFLOW = "_cpu.silu_mul(1, x.data_ptr(), x.data_ptr(), 2**62, 4, 1)"
# One thread writes what the other reads; many times, since a worker that comes late finds nothing left to do.
RACE = "for _ in range(1000): _cpu.silu_mul(1, x.data_ptr(), x.data_ptr(), 64, 1024, 2)"


@dataclass(frozen=True)
class Kind:
    """A build: its sanitizers, the libraries that must be in the process first, what deliberate errors report, and
    tests beside those of kernels."""

    sanitizers: str
    libraries: tuple[str, ...]
    options: dict[str, str]
    errors: dict[str, str]
    more: tuple[str, ...] = ()


# Leaks are not looked for: an interpreter that ends leaves much behind. The address sanitizer wants libstdc++, which
# python does not link, from the start, or it dies of the first exception. The thread sanitizer must not judge torch,
# whose threads meet through libgomp, on futexes that it does not see. A forked process may start threads of its own.
KINDS = {
    "address": Kind(
        "address,undefined",
        ("libasan.so", "libubsan.so", "libstdc++.so"),
        {"ASAN_OPTIONS": "detect_leaks=0", "UBSAN_OPTIONS": "print_stacktrace=1"},
        {"AddressSanitizer: heap-buffer-overflow": OVERRUN, "runtime error: signed integer overflow": OVERFLOW},
        more=("test_gemma4.py", "test_hybrid_layers.py"),  # layers as a whole, whose parts those of kernels have not
    ),
    "thread": Kind(
        "thread",
        ("libtsan.so", "libstdc++.so"),
        {"TSAN_OPTIONS": "ignore_noninstrumented_modules=1:die_after_fork=0"},
        {"ThreadSanitizer: data race": RACE},
    ),
}


def build(name: str) -> Path:
    """The folder with a headrace whose kernels have these sanitizers in."""
    package = BUILD / name / "package"
    command = f"{sys.executable} -m pip --disable-pip-version-check install --quiet --no-deps --upgrade".split()
    command += ["--target", str(package), f"--config-settings=build-dir={BUILD / name / 'cmake'}"]
    command += ["--config-settings=cmake.build-type=RelWithDebInfo"]  # Release would strip names and lines
    command += [f"--config-settings=cmake.define.HEADRACE_SANITIZE={KINDS[name].sanitizers}"]
    command += ["--config-settings=cmake.define.HEADRACE_ISA_BUILD=all"]
    if subprocess.run([*command, str(ROOT)]).returncode:
        sys.exit(f"{name}: the build failed")
    return package


def library(name: str) -> str:
    """Where the compiler has this library."""
    command = [os.environ.get("CXX", "c++"), f"-print-file-name={name}"]
    path = subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()
    return path if os.path.isabs(path) else sys.exit(f"{command[0]} has no {name}: GCC and its sanitizers are needed")


def environment(name: str, package: Path) -> dict[str, str]:
    """Variables for the interpreter behind .venv: unlike .venv's own it does not find the editable headrace first."""
    return {
        **os.environ,
        **KINDS[name].options,
        "LD_PRELOAD": ":".join(map(library, KINDS[name].libraries)),
        "PYTHONPATH": os.pathsep.join((str(package), sysconfig.get_path("purelib"))),
        "PYTHONDONTWRITEBYTECODE": "1",
        "OMP_WAIT_POLICY": "PASSIVE",
    }


def check_scratch() -> None:
    """Exits unless a write between two pieces of scratch memory is reported, and one inside a piece is not."""
    program = BUILD / "overrun"
    command = [os.environ.get("CXX", "c++"), "-std=c++20", "-O1", "-g", "-fsanitize=address", "-DHEADRACE_NS=host"]
    source = Path(__file__).with_name("overrun.cpp")
    subprocess.run([*command, f"-I{ROOT / 'csrc'}", str(source), "-o", str(program)], check=True)
    good, bad = (subprocess.run([program, *more], capture_output=True, text=True) for more in (["inside"], []))
    if good.returncode or bad.returncode == 0 or "use-after-poison" not in bad.stderr:
        sys.exit(f"address: overruns of scratch memory are not told apart: {good.stderr}{bad.stderr}")


def check_that_it_looks(name: str, python: str, variables: dict[str, str], package: Path) -> None:
    """Exits unless the sanitized kernels are the ones in use and each deliberate error is reported."""
    if name == "address":
        check_scratch()

    def run(code: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run([python, "-c", PROLOGUE + code], env=variables, capture_output=True, text=True)

    loaded = run("print(_cpu.__file__)")
    if loaded.returncode or not loaded.stdout.startswith(str(package)):
        sys.exit(f"{name}: the sanitized kernels do not load: {loaded.stdout}{loaded.stderr}")
    for report, code in KINDS[name].errors.items():
        done = run(code)
        if done.returncode == 0 or report not in done.stderr:
            sys.exit(f"{name}: a deliberate error was not reported as '{report}': {done.stdout}{done.stderr}")


def run(name: str, arguments: list[str]) -> bool:
    """Whether the tests pass with nothing reported."""
    started = time.monotonic()
    package, python = build(name), str(Path(sys.executable).resolve())
    variables = environment(name, package)
    check_that_it_looks(name, python, variables, package)
    print(f"{name}: built, reports deliberate errors ({time.monotonic() - started:.0f} s); tests:", flush=True)
    # Reports go to the stderr of the process; the signals belong to the sanitizer, not to faulthandler.
    command = [python, "-m", "pytest", "-q", "--capture=sys", "-p", "no:faulthandler", "-p", "no:cacheprovider"]
    tests = arguments or [*TESTS, *(str(CPU / file) for file in KINDS[name].more)]
    status = subprocess.run([*command, *tests], cwd=ROOT, env=variables).returncode
    verdict = "clean" if status == 0 else f"NOT clean (exit status {status})"
    print(f"{name}: {verdict}, {time.monotonic() - started:.0f} s", flush=True)
    return status == 0


def main() -> None:
    words = sys.argv[1:]
    cut = words.index("--") if "--" in words else len(words)
    names, arguments = words[:cut] or list(KINDS), words[cut + 1 :]
    if unknown := set(names) - set(KINDS):
        sys.exit(f"unknown: {', '.join(sorted(unknown))}; there are {', '.join(KINDS)}")
    if not all([run(name, arguments) for name in names]):  # a list, so that each of them runs
        sys.exit(1)


if __name__ == "__main__":
    main()
