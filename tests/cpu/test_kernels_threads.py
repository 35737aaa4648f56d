"""The kernels' own threads (csrc/common/threads.cpp): whom they belong to, and that none is missed or left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from threading import Thread

import pytest
import torch

from headrace.kernels import cpu

pytestmark = pytest.mark.skipif(not cpu.available(), reason=f"no C++ kernels: {cpu.unavailable_reason()}")

MANY = 200_000
"""Elements that are shared out among threads."""


@pytest.fixture(autouse=True)
def three_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(before)


def workers() -> list[Path]:
    """Of this process: the folders of the kernels' threads."""
    tasks = Path("/proc/self/task").iterdir()
    return [task for task in tasks if _name(task) == "kernels"]


def _name(task: Path) -> str:
    try:
        return (task / "comm").read_text().strip()
    except (FileNotFoundError, ProcessLookupError):  # it has ended since it was listed
        return ""


def in_thread(function: object) -> None:
    thread = Thread(target=function)
    thread.start()
    thread.join()


def test_workers_end_with_the_thread_that_called() -> None:
    before, during = len(workers()), []

    def call() -> None:
        cpu.gelu(torch.randn(MANY))
        during.append(len(workers()))

    in_thread(call)
    assert during == [before + 2]
    while len(workers()) > before:  # the system's thread ends after Python's
        time.sleep(0.01)


def test_a_team_has_as_many_as_are_asked_for() -> None:
    counts = []

    def call() -> None:
        for threads in (4, 2, 1, 2):
            torch.set_num_threads(threads)
            cpu.gelu(torch.randn(MANY))
            counts.append(len(workers()) - before)

    before = len(workers())
    in_thread(call)
    assert counts == [3, 1, 1, 1]  # one thread needs no team, and leaves the one that there is


def test_signals_are_left_to_the_program() -> None:
    def call() -> None:
        cpu.gelu(torch.randn(MANY))
        for worker in workers():
            with suppress(FileNotFoundError, ProcessLookupError):  # another caller's, which has ended since
                line = next(x for x in (worker / "status").read_text().splitlines() if x.startswith("SigBlk"))
                blocked.append(int(line.split()[1], 16))

    blocked: list[int] = []
    in_thread(call)
    assert len(blocked) >= 2
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
        assert all(mask >> (number - 1) & 1 for mask in blocked)


def test_every_task_is_done_whatever_the_numbers() -> None:
    """Fewer tasks than threads, a few more, many; from several callers at once, so that workers come late."""
    sizes = [16_400, 20_000, 65_537, MANY]
    inputs = [torch.randn(size) for size in sizes]
    torch.set_num_threads(1)
    expected = [cpu.gelu(x) for x in inputs]
    torch.set_num_threads(7)

    def call(_: int) -> bool:
        return all(torch.equal(cpu.gelu(x), y) for x, y in zip(inputs, expected, strict=True) for _ in range(50))

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(call, range(4)))


def run(code: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, timeout=60, env={**os.environ}
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_a_fork_makes_workers_of_its_own() -> None:
    """A child process has none of its parent's threads: waiting for them would last for ever."""
    told = run("""
        import os, torch
        from headrace.kernels import cpu
        torch.set_num_threads(2)
        x = torch.randn(200_000)
        expected = cpu.gelu(x)
        child = os.fork()
        if child == 0:
            got = cpu.gelu(x)
            names = [open(f"/proc/self/task/{task}/comm").read() for task in os.listdir("/proc/self/task")]
            torch.set_num_threads(1)
            os._exit(0 if names.count("kernels\\n") == 1 and torch.equal(got, expected) else 1)
        print(os.waitpid(child, 0)[1], torch.equal(cpu.gelu(x), expected))
    """)
    assert told == "0 True"


def test_works_where_the_system_gives_no_thread() -> None:
    """Fewer threads, and the same result, where a limit forbids more."""
    told = run("""
        import os, resource, torch
        from headrace.kernels import cpu
        torch.set_num_threads(2)
        x = torch.randn(200_000)
        torch.set_num_threads(1)
        expected = cpu.gelu(x)
        torch.set_num_threads(64)
        used = int(open("/proc/self/statm").read().split()[0]) * os.sysconf("SC_PAGE_SIZE")
        resource.setrlimit(resource.RLIMIT_AS, (used + (20 << 20),) * 2)  # stacks of two threads
        got = cpu.gelu(x)
        torch.set_num_threads(1)
        mine = [t for t in os.listdir("/proc/self/task") if open(f"/proc/self/task/{t}/comm").read() == "kernels\\n"]
        print(torch.equal(got, expected), len(mine) < 63)
    """)
    assert told == "True True"
