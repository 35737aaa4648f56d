"""Soaks a server: mixed traffic of all routes for an hour, after which nothing is held and nothing has grown.

    python -m tools.soak.run [--seconds 3600] [--seed 1] [--clients 6] [--json FILE]

The server is `headrace serve` on the shipped model, a process of its own. The run fails if an answer was wrong or
missing, if a chunk of the cache is still in use when all is quiet, or if descriptors, threads or memory of the server,
its engine or its other processes grew: the medians of the first and last third after a warm-up are compared
(tools/soak/watch.py).
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
import threading
import time
import traceback
from collections import Counter
from pathlib import Path
from typing import Any

import httpx
import psutil

from tools.clients.servers import Server, start
from tools.soak import watch
from tools.soak.traffic import KINDS, PROBES, Client

OPTIONS = ["--max-model-len", "8192", "--kv-cache-tokens", "32768", "--kv-cache-prefault"]
OPTIONS += ["--response-store-mb", "1", "--log-level", "warning"]
"""Of the server. Its caches have all their memory, or are full, soon, so that this does not count as growth."""

QUIET_S = 60
MOST_FAILURES = 20
"""After so many the run ends."""


class Soak:
    """Clients in threads, a sampler in this one. `failures`: texts, the first of a kind with its traceback."""

    def __init__(self, server: Server, seconds: float, seed: int, clients: int) -> None:
        self.server, self.seconds = server, seconds
        self.process = psutil.Process(server.process.pid)
        self.counts: Counter[str] = Counter()
        self.statuses: Counter[int] = Counter()
        self.failures: list[str] = []
        self.samples: list[watch.Sample] = []
        self._end = time.monotonic() + seconds
        self._kinds, self.left_out = self._available()
        self._threads = [
            threading.Thread(target=self._client, args=(seed * 1000 + number,), daemon=True)
            for number in range(clients)
        ]

    def _available(self) -> tuple[dict[Any, float], list[str]]:
        """Kinds whose routes the server has, and names of the others."""
        missing = [
            kind for kind, path in PROBES.items() if httpx.post(self.server.url + path, json={}).status_code == 404
        ]
        return {kind: weight for kind, weight in KINDS.items() if kind not in missing}, [k.__name__ for k in missing]

    @property
    def over(self) -> bool:
        return time.monotonic() > self._end or len(self.failures) >= MOST_FAILURES

    def _client(self, seed: int) -> None:
        rng, client = random.Random(seed), Client(self.server.url, seed)
        while not self.over:
            kind = rng.choices(list(self._kinds), list(self._kinds.values()))[0]
            self.counts[kind.__name__] += 1
            try:
                self.statuses[kind(client)] += 1
            except (AssertionError, httpx.HTTPError, OSError, ValueError, KeyError) as error:
                self.failures.append(f"{kind.__name__}: {type(error).__name__}: {error}\n{traceback.format_exc()}")
        client.http.close()

    def run(self) -> None:
        began, told = time.monotonic(), 0.0
        every = min(5.0, max(0.5, self.seconds / 200))
        for thread in self._threads:
            thread.start()
        while not self.over and self.server.process.poll() is None:
            time.sleep(every)
            self.samples.append(watch.sampled(self.process))
            passed = time.monotonic() - began
            if passed - told >= min(60.0, self.seconds / 20):
                told = passed
                print(self._line(passed), flush=True)
        for thread in self._threads:
            thread.join(180)
            if thread.is_alive():
                self.failures.append("a client hangs: its request got no answer within 180 s")

    def _line(self, passed: float) -> str:
        processes = "; ".join(
            f"{role} {of['memory_mib']:.0f} MiB, {of['descriptors']:.0f} fds, {of['threads']:.0f} threads"
            for role, of in sorted(self.samples[-1].items())
        )
        return f"{passed:6.0f} s  {self.counts.total():7,} requests, {len(self.failures)} failed; {processes}"

    def quiet(self) -> dict[str, float]:
        """Gauges that must fall to 0, once they have or after a minute."""
        names = ("num_requests_running", "num_requests_waiting", "kv_chunks_used")
        end = time.monotonic() + QUIET_S
        while True:
            page = httpx.get(self.server.url + "/metrics", timeout=30).text.splitlines()
            values = {
                name: float(line.rsplit(" ", 1)[1])
                for name in names
                for line in page
                if line.startswith(f"headrace:{name}{{")
            }
            if (len(values) == len(names) and not any(values.values())) or time.monotonic() > end:
                return values
            time.sleep(0.5)


def soaked(seconds: float, seed: int, clients: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        server = start(Path(folder), "real", *OPTIONS).wait()
        try:
            soak = Soak(server, seconds, seed, clients)
            if soak.left_out:
                print(f"left out, the server has no such routes: {', '.join(soak.left_out)}", flush=True)
            soak.run()
            alive = server.process.poll() is None
            held = soak.quiet() if alive else {}
        finally:
            code = server.stop()
        log = server.log.read_text()
    return result(soak, held, alive, code, log, seconds, seed)


def result(
    soak: Soak, held: dict[str, float], alive: bool, code: int, log: str, seconds: float, seed: int
) -> dict[str, Any]:
    failures = list(soak.failures)
    if not alive or code != 0:
        failures.append(f"the server ended with code {code}:\n{log[-3000:]}")
    failures += [f"{name} is {value:g} when all is quiet" for name, value in held.items() if value]
    if "Traceback" in log:
        failures.append(f"the log has a traceback:\n{log[log.index('Traceback') - 500 :][:3000]}")
    compared = watch.checks(soak.samples) if alive else []
    failures += [f"{check.name} grows: {check.early:.1f} -> {check.late:.1f}" for check in compared if not check.ok]
    for check in compared:
        print("  " + check.told())
    return {
        "seconds": seconds, "seed": seed, "requests": dict(soak.counts), "left_out": soak.left_out,
        "statuses": {str(status): count for status, count in sorted(soak.statuses.items())}, "held": held,
        "checks": [check.record() for check in compared], "failures": failures, "ok": not failures,
    }  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=3600)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--clients", type=int, default=6, help="at the same time")
    parser.add_argument("--json", type=Path, help="file for the result")
    args = parser.parse_args()
    told = soaked(args.seconds, args.seed, args.clients)
    if args.json:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps(told, indent=1) + "\n")
    for failure in told["failures"]:
        print(failure)
    total = sum(told["requests"].values())
    print(f"{total:,} requests in {args.seconds:.0f} s, seed {args.seed}: {'ok' if told['ok'] else 'FAILED'}")
    return 0 if told["ok"] else 1


if __name__ == "__main__":
    sys.exit(main())
