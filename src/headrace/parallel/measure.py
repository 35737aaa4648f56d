"""The profile of a group: what a rank attains while all of them are at work, and what the links carry.

Takes a second or less. All ranks take part at the same time, since cores share memory and clock.
"""

from __future__ import annotations

import hashlib
import platform
import statistics
import time
from collections.abc import Callable, Iterable
from datetime import date
from pathlib import Path

import torch
from torch import Tensor

from headrace.kernels import dispatch, ops
from headrace.parallel.merging import Kernels
from headrace.parallel.rank import Rank
from headrace.parallel.transport import Tag
from headrace.parallel.workspace import LayerBuffer
from headrace.planner.machine import Machine
from headrace.types import CHUNK

KEYS = 2048
ROWS = (16, 128, 1024)
LINEAR_ROWS = 512
MESSAGE = 8 << 20
LINK_CPU_S_PER_BYTE = 0.2e-9
"""What gloo takes from a core on each side where ranks share a host. It runs on a thread beside the computation, on the
same cores: a rank's threads meet after every product, so that one which gives its core away holds up the others. Not
measured here, since nothing is computed while the link is."""

GROUP = 510
"""In place of a group's number in the tags."""


def take_part(rank: Rank) -> tuple[dict[str, float], list[tuple[int, float]]]:
    """Measures; every rank of the group calls it once. Returns figures of Machine, and attention's rates by rows."""
    _meet(rank)
    with torch.inference_mode():
        figures = _linear(rank)
        attention = [(rows, _attention(rank, rows)) for rows in ROWS]
        figures["attention_call_s"] = _seconds(_attend_once(rank, 1, CHUNK))
    figures |= _link(rank)
    figures["link_cpu_s_per_byte"] = LINK_CPU_S_PER_BYTE if _shares_host(rank) else 0.0
    return figures, attention


def machine(figures: dict[str, float], attention: list[tuple[int, float]]) -> Machine:
    isa = str(dispatch.reasons().get("attend", "reference"))
    return Machine(
        name=_cpu(), cores=torch.get_num_threads(), isa=isa.split(" (")[0], date=date.today().isoformat(),
        attention_flops_s=tuple(attention), **figures,
    )  # fmt: skip


def describe(machine: Machine) -> str:
    """The profile in one line."""
    best = machine.attention_flops_s[-1][1]
    return (
        f"linear {machine.linear_flops_s / 1e9:.0f} and attention {best / 1e9:.0f} GFLOP/s a rank, link "
        f"{machine.link_bytes_s / 1e9:.1f} GB/s and {machine.latency_s * 1e3:.2f} ms"
    )


def _cpu() -> str:
    """The processor's name."""
    try:
        with open("/proc/cpuinfo") as lines:
            return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return "unknown processor"


def _seconds(work: Callable[[], object], repeats: int = 3) -> float:
    """Median time of a call, after one that is not counted."""
    work()
    times = []
    for _ in range(repeats):
        began = time.perf_counter()
        work()
        times.append(time.perf_counter() - began)
    return statistics.median(times)


def _linear(rank: Rank) -> dict[str, float]:
    """Rates of the first layer's matrices: at many rows, and for one row as bytes read."""
    matrices = [w for name, w in rank.decoder.matrices.items() if name.startswith("layers.0.")]

    def products(rows: int) -> Callable[[], object]:
        inputs = [torch.ones(rows, w.shape[1], dtype=rank.decoder.dtype) for w in matrices]
        return lambda: [ops.linear(x, w) for x, w in zip(inputs, matrices, strict=True)]

    elements = sum(w.shape[0] * w.shape[1] for w in matrices)
    many, one = _seconds(products(LINEAR_ROWS)), _seconds(products(1))
    return {
        "linear_flops_s": 2 * LINEAR_ROWS * elements / many,
        "memory_bytes_s": elements * rank.decoder.dtype.itemsize / one,
    }


def _attend_once(rank: Rank, rows: int, keys: int) -> Callable[[], object]:
    spec, kernels = rank.kernels.spec, rank.kernels
    chunks = keys // CHUNK
    buffer = LayerBuffer(spec, chunks, rank.storage.dtype)
    q = torch.ones(rows, spec.heads, spec.head_dim, dtype=rank.decoder.dtype)
    items = torch.tensor([[chunk, chunk * CHUNK, 0, rows] for chunk in range(chunks)], dtype=torch.int32)
    positions = torch.full((rows,), keys - 1, dtype=torch.int64)
    bias = kernels.bias
    if bias is not None and bias.shape[1] < keys:
        kernels = Kernels(kernels.backend, spec, torch.zeros(spec.heads, keys))
    return lambda: kernels.attend(0, q, buffer.pool, items, positions)


def _attention(rank: Rank, rows: int) -> float:
    """Operations a second of both products."""
    spec = rank.kernels.spec
    window = spec.windows[0]
    keys = KEYS if window is None else min(KEYS, max(CHUNK, window // CHUNK * CHUNK))
    return 4 * spec.heads * spec.head_dim * rows * keys / _seconds(_attend_once(rank, rows, keys))


def _link(rank: Rank) -> dict[str, float]:
    """Round the ring 0 -> 1 -> .. -> 0, all ranks at once."""
    small, large = torch.zeros(8, dtype=torch.uint8), torch.zeros(MESSAGE, dtype=torch.uint8)
    _meet(rank)
    latency = min(_exchange_all(rank, small, range(1, 6)))
    seconds = min(_exchange_all(rank, large, range(6, 9)))
    return {"latency_s": latency, "link_bytes_s": MESSAGE / max(seconds - latency, 1e-9)}


def _meet(rank: Rank) -> None:
    """Waits for the others: twice round, so that nobody leaves before all have come."""
    for piece in range(2 * rank.transport.size):
        _exchange(rank, torch.zeros(8, dtype=torch.uint8), 100 + piece)


def _exchange_all(rank: Rank, x: Tensor, pieces: Iterable[int]) -> list[float]:
    return [_exchange(rank, x, piece) for piece in pieces]


def _exchange(rank: Rank, x: Tensor, piece: int) -> float:
    """Sends x on and receives as much: seconds."""
    if rank.transport.size == 1:
        return 1e-6
    began = time.perf_counter()
    _passed_on(rank, x, piece)
    return time.perf_counter() - began


def _passed_on(rank: Rank, x: Tensor, piece: int) -> Tensor:
    """Sends x to the next rank; what came from the one before."""
    transport, tag, there = rank.transport, Tag(GROUP, 0, piece), torch.empty_like(x)
    works = [
        transport.irecv(there, (transport.rank - 1) % transport.size, tag),
        transport.isend(x, (transport.rank + 1) % transport.size, tag),
    ]
    for work in works:
        work.wait()
    return there


def _shares_host(rank: Rank) -> bool:
    """Whether another rank runs on this rank's host: its name goes round the ring."""
    mine = torch.frombuffer(bytearray(_host()), dtype=torch.uint8)
    passing, found = mine, False
    for piece in range(rank.transport.size - 1):
        passing = _passed_on(rank, passing, 200 + piece)
        found |= torch.equal(passing, mine)
    return found


def _host() -> bytes:
    """16 bytes that are the same for all processes of a running system, in whatever container or network."""
    try:
        name = Path("/proc/sys/kernel/random/boot_id").read_text()
    except OSError:
        name = platform.node()
    return hashlib.blake2b(name.encode(), digest_size=16).digest()
