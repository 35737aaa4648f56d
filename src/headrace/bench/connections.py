"""What silent connections cost those who ask: 64 clients with a key, with and without strangers that hold connections.

The server may have 1,024 file descriptors, the strangers hold more connections than that. Rounds without them, with
them silent, and with those that open another at once for each that the server closes take turns.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
import selectors
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from headrace.bench.benchmark import Benchmark, Case, option
from headrace.bench.load import ask_all, first_error, new_client, quantile
from headrace.bench.server_process import ServerProcess
from headrace.bench.table import Column
from headrace.console import working
from headrace.host import python_module

DESCRIPTORS = 1024
KEY = "a key of the bench"
READY_S = 120.0
PROMPT = "The code of the harbour is 4821. The code of the mill is 1093. What is the code of the harbour? "


@dataclass
class ConnectionsBench(Benchmark):
    """Time to first token beside a crowd of silent connections.

    There are more of them than the server has file descriptors (1,024).
    """

    name = "connections"
    idle: int = option("Silent connections that strangers hold.", 1100, min=1)
    clients: int = option("Clients with a key that ask at once.", 64, min=1)
    each: int = option("Requests of each in a round.", 8, min=1)
    repeats: int = option("Rounds without and with the strangers, in turns.", 5, min=1)

    def cases(self) -> Iterator[Case]:
        """Rounds in turns, and the ratio of their medians last."""
        ways = {"none": (0, False), "silent": (self.idle, False), "again": (self.idle, True)}
        p99: dict[str, list[float]] = {way: [] for way in ways}
        with serving() as (port, pid, log):
            with working("warming up"):
                asyncio.run(_round(port, self.clients, 1))
            for repeat in range(self.repeats):
                for way, (count, again) in ways.items():
                    self.progress(f"{way}, round {repeat + 1} of {self.repeats}")
                    case = _measured(port, pid, log, count, again, self.clients, self.each)
                    p99[way].append(case["p99_ttft_ms"])
                    yield {"name": way, "repeat": repeat, "idle": count, "clients": self.clients} | case
        medians = {way: statistics.median(values) for way, values in p99.items()}
        none = medians.pop("none")
        for way, ms in medians.items():
            yield {"name": f"{way}_ratio", "p99_ttft_ratio": round(ms / none, 3), "without_ms": none, "with_ms": ms}

    def case_count(self) -> int:
        return 3 * self.repeats

    def columns(self) -> tuple[Column, ...]:
        return (
            Column("strangers", "name", width=len("silent_ratio")),
            Column("round", lambda case: case.get("repeat", -1) + 1 or None, form="d", width=5),
            Column("first token", "p50_ttft_ms", "p50, ms", ",.1f"),
            Column("first token", lambda case: case.get("p99_ttft_ms", case.get("with_ms")), "p99, ms", ",.1f"),
            Column("of none", "p99_ttft_ratio", "times", ".2f"),
            Column("requests", form=",", optional=True),
            Column("server's CPU", "server_cpu_share", "%", ",.0f", 100, optional=True),
            Column("log", "log_bytes", "KB", ",.1f", 1e-3, optional=True),
            Column("/health", "health_ms", "ms", ",.1f"),
        )


@contextmanager
def serving() -> Iterator[tuple[int, int, Path]]:
    """A server of the shipped model with few descriptors: its port, process and log."""
    limit = "import resource, runpy, sys; resource.setrlimit(resource.RLIMIT_NOFILE, ({0}, {0})); "
    code = limit.format(DESCRIPTORS) + "runpy.run_module('headrace.cli.main', run_name='__main__', alter_sys=True)"
    with ServerProcess(
        ("tiny", "--threads", "1", "--kv-offload-path", "none"),
        os.environ | {"HEADRACE_API_KEY": KEY},
        ("-P", "-c", code),
    ) as server:
        with working("starting a server"):
            server.wait_ready(READY_S)
        yield server.port, server.process.pid, server.log


@contextmanager
def strangers(port: int, count: int, again: bool) -> Iterator[None]:
    """A process that holds so many silent connections; it has opened each once when this returns."""
    command = python_module(__name__, str(port), str(count), str(int(again)))
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        if not process.stdout.readline():
            raise RuntimeError("the strangers did not start")
        try:
            yield
        finally:
            process.kill()


def hold(port: int, count: int, again: bool) -> None:
    """Runs as that process: opens connections, and `again` another for each that the server closes."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    held = selectors.DefaultSelector()

    def open_one() -> None:
        link = socket.socket()
        link.setblocking(False)
        link.connect_ex(("127.0.0.1", port))
        held.register(link, selectors.EVENT_READ)

    for number in range(count):
        open_one()
        if number % 64 == 63:
            time.sleep(0.02)
    print("all open", flush=True)
    while True:
        for key, _ in held.select():
            held.unregister(key.fileobj)
            key.fileobj.close()  # type: ignore[union-attr]
            if again:
                open_one()
        time.sleep(0.01)


def _measured(port: int, pid: int, log: Path, count: int, again: bool, clients: int, each: int) -> Case:
    import httpx

    with strangers(port, count, again) if count else contextlib.nullcontext():
        time.sleep(1)
        written, used, began = log.stat().st_size, _cpu_s(pid), time.monotonic()
        health = time.monotonic()
        httpx.get(f"http://127.0.0.1:{port}/health", timeout=30).raise_for_status()
        health = time.monotonic() - health
        times = asyncio.run(_round(port, clients, each))
        seconds = time.monotonic() - began
        return {
            "p99_ttft_ms": round(quantile(times, 0.99) * 1e3, 1),
            "p50_ttft_ms": round(statistics.median(times) * 1e3, 1),
            "requests": len(times),
            "seconds": round(seconds, 2),
            "server_cpu_share": round((_cpu_s(pid) - used) / seconds, 3),
            "log_bytes": log.stat().st_size - written,
            "health_ms": round(health * 1e3, 1),
        }


def _cpu_s(pid: int) -> float:
    """Processor time of the server's process; the engine, a process of its own, is not in it."""
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


async def _round(port: int, clients: int, each: int) -> list[float]:
    """Seconds to the first token of `clients` that ask at once, `each` times."""
    conversations = [[{"role": "user", "content": PROMPT * 2 + f"({n})"}] for n in range(clients * each)]
    async with new_client(f"http://127.0.0.1:{port}/v1", KEY) as client:
        try:
            samples = await ask_all(client, "tiny", conversations, clients, max_tokens=8)
        except BaseExceptionGroup as group:
            raise RuntimeError(f"a request failed: {first_error(group)!r}") from None
    return [sample.ttft_s for sample in samples]


if __name__ == "__main__":
    hold(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3] == "1")
