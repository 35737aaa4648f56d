"""Links between the ranks of a prefill testbed: plain, limited in the ranks, or network namespaces limited by tc."""

from __future__ import annotations

import math
import os
import shutil
import subprocess
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass

import msgspec

from headrace.config import EngineConfig
from headrace.parallel import launch
from headrace.parallel.messages import RankStep, StepGroup, StepPart
from headrace.parallel.rate_limit import RateLimitedTransport
from headrace.parallel.supervisor import WorkerProcess
from headrace.parallel.transport import Transport
from headrace.planner.machine import Machine

LINK = -1
"""Number of the step that carries a link in the place of tokens."""

QUEUE_BYTES = 64 << 20
BURST_BYTES = 128 << 10
"""tbf passes at least so much at once, two of the 64 KiB pieces that TCP hands down; else a fifth of a millisecond."""


@dataclass(frozen=True, slots=True)
class RankLink:
    """bandwidth_gbps: 1e9 bytes a second each way between two ranks, None for as fast as it goes. latency_s, jitter,
    seed: see parallel.rate_limit.RateLimitedTransport. Raises ValueError naming the option."""

    bandwidth_gbps: float | None = None
    latency_s: float = 0.0
    jitter: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        if self.bandwidth_gbps is not None and not (0 < self.bandwidth_gbps < math.inf):
            raise ValueError(f"bandwidth must be above 0 GB/s, or 'none', got {self.bandwidth_gbps}")
        if not 0 <= self.latency_s < 60:
            raise ValueError(f"latency-ms must be from 0 to 60000, got {self.latency_s * 1e3:g}")
        if not 0 <= self.jitter < 1:
            raise ValueError(f"jitter must be in [0, 1), got {self.jitter}")

    @property
    def plain(self) -> bool:
        return self.bandwidth_gbps is None and not self.latency_s

    def __str__(self) -> str:
        parts = [] if self.bandwidth_gbps is None else [f"{self.bandwidth_gbps:g} GB/s"]
        parts += [f"{self.latency_s * 1e3:g} ms"] if self.latency_s else []
        parts += [f"jitter {self.jitter:g}"] if self.jitter else []
        return ", ".join(parts) or "unlimited"

    def profile(self, machine: Machine) -> Machine:
        """The machine's profile with this link in the place of its own."""
        limit = math.inf if self.bandwidth_gbps is None else self.bandwidth_gbps * 1e9
        return msgspec.structs.replace(
            machine, link_bytes_s=min(machine.link_bytes_s, limit), latency_s=machine.latency_s + self.latency_s
        )

    def imitable(self, own_bytes_s: float) -> bool:
        """Whether a transport of that rate can imitate the bandwidth, the fastest draw of the jitter included."""
        return self.bandwidth_gbps is None or own_bytes_s * (1 - self.jitter) >= self.bandwidth_gbps * 1e9

    def step(self, own_bytes_s: float) -> RankStep:
        """The step that tells a rank of this link; own_bytes_s: what the ranks' own transport carries."""
        own = own_bytes_s if self.bandwidth_gbps is not None and self.imitable(own_bytes_s) else 0
        told = (1e9 * (self.bandwidth_gbps or 0), 1e9 * self.latency_s, 1e6 * self.jitter, self.seed, own)
        return RankStep(LINK, [StepGroup("single", [StepPart([round(x) for x in told], 0, [], [], [])])])


def apply(step: RankStep, transport: Transport) -> Transport:
    """The transport behind the link that the step names."""
    bandwidth, latency, jitter, seed, own = step.groups[0].parts[0].tokens
    if not bandwidth and not latency:
        return transport
    return RateLimitedTransport(transport, bandwidth or math.inf, latency / 1e9, jitter / 1e6, seed, own or None)


class Namespaces:
    """A network namespace for each worker, on one bridge; the driver, rank 0, stays outside. Linux, as root.

    tc's tbf limits what each rank sends, to all others together. close() removes everything; the names carry this
    process's id. Raises ValueError where this cannot be.
    """

    def __init__(self, ranks: int) -> None:
        if os.geteuid() != 0 or not shutil.which("ip") or not shutil.which("tc"):
            raise ValueError("link netns needs root and the commands ip and tc: use --link limited")
        self.ranks, self.name = ranks, f"hr{os.getpid()}"
        self.network = f"10.213.{os.getpid() % 256}"
        try:
            self._make()
        except BaseException:
            self.close()
            raise

    @property
    def interface(self) -> str:
        """The driver's address."""
        return self._address(0)

    def start(self, config: EngineConfig, address: str, secret: str, met: ExitStack) -> Mapping[int, WorkerProcess]:
        """launch.Starter: each worker in its namespace."""
        return {
            rank: launch.ChildProcess(
                launch.spawn_one(rank, address, self._address(rank), secret, ["ip", "netns", "exec", self._space(rank)])
            )
            for rank in range(1, self.ranks)
        }

    def limit(self, link: RankLink) -> None:
        """From now on. Raises ValueError for latency or jitter, which tbf does not have."""
        if link.latency_s or link.jitter:
            raise ValueError("latency-ms and jitter need --link limited: tbf limits the bandwidth only")
        ends = [([], self.name), *((["-n", self._space(rank)], self._end(rank)) for rank in range(1, self.ranks))]
        for where, device in ends:
            if link.bandwidth_gbps is None:
                _run("tc", *where, "qdisc", "replace", "dev", device, "root", "pfifo", "limit", "1000")
                continue
            rate = round(8e9 * link.bandwidth_gbps)
            burst = max(BURST_BYTES, rate // 8 // 5000)
            _run(
                "tc", *where, "qdisc", "replace", "dev", device, "root", "tbf",
                "rate", f"{rate}bit", "burst", str(burst), "limit", str(QUEUE_BYTES),
            )  # fmt: skip

    def close(self) -> None:
        """A pair's outside end goes by name: a namespace's own end goes with it, but some time after `netns del`."""
        for rank in range(1, self.ranks):
            subprocess.run(["ip", "link", "del", self._outside(rank)], capture_output=True, check=False)
            subprocess.run(["ip", "netns", "del", self._space(rank)], capture_output=True, check=False)
        subprocess.run(["ip", "link", "del", self.name], capture_output=True, check=False)

    def _make(self) -> None:
        _run("ip", "link", "add", self.name, "type", "bridge")
        _run("ip", "addr", "add", f"{self._address(0)}/24", "dev", self.name)
        _run("ip", "link", "set", self.name, "up")
        for rank in range(1, self.ranks):
            space, end, outside = self._space(rank), self._end(rank), self._outside(rank)
            _run("ip", "netns", "add", space)
            _run("ip", "link", "add", outside, "type", "veth", "peer", "name", end, "netns", space)
            _run("ip", "link", "set", outside, "master", self.name, "up")
            _run("ip", "-n", space, "addr", "add", f"{self._address(rank)}/24", "dev", end)
            _run("ip", "-n", space, "link", "set", "lo", "up")
            _run("ip", "-n", space, "link", "set", end, "up")

    def _address(self, rank: int) -> str:
        return f"{self.network}.{rank + 1}"

    def _outside(self, rank: int) -> str:
        return f"{self.name}o{rank}"

    def _space(self, rank: int) -> str:
        return f"{self.name}-{rank}"

    def _end(self, rank: int) -> str:
        return f"{self.name}i{rank}"


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise ValueError(f"link netns: '{' '.join(command)}' failed ({done.stderr.strip()}): use --link limited")
