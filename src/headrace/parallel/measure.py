"""The profile of a group: what a rank attains while all of them are at work, what the first one attains by itself with
all cores, and what the links carry.

Takes a second or less. All ranks take part at the same time, since cores share memory and clock.
"""

from __future__ import annotations

import hashlib
import platform
import time
from collections.abc import Callable, Iterable, Sequence
from datetime import date
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from headrace import host
from headrace.kernels import dispatch, ops
from headrace.parallel.merging import Kept, Kernels
from headrace.parallel.probe import Probe, by_clock, by_events, least, meet, passed_on, settle
from headrace.parallel.rank import Rank
from headrace.parallel.workspace import LayerBuffer
from headrace.planner.machine import ComputeRates, Machine, count_of
from headrace.types import CHUNK

KEYS = 2048
ROWS = (16, 128, 1024)
MESSAGE = 8 << 20
LINK_CPU_S_PER_BYTE = 0.2e-9
"""What gloo takes from a core on each side where ranks share a host. It runs on a thread beside the computation, on the
same cores: a rank's threads meet after every product, so that one which gives its core away holds up the others. Not
measured here, since nothing is computed while the link is."""


TENSOR_REPEATS = 2
"""Prefills of a tensor rank: all ranks of its group compute each together, so none may go by its own time."""


def take_part(rank: Rank, tensor: int = 1) -> Machine:
    """Measures; every rank of the group calls it once. The whole profile is known on the first context rank alone.

    tensor: the number of tensor ranks.
    """
    meet(rank)
    crowding = 1.0 if rank.threads is None else rank.threads.crowding
    with torch.inference_mode():
        rates = _rates(rank, crowding)
        link_bytes_s, latency_s = _link(rank)
        one = _one_engine(rank)
    device, capabilities = rank.device, rank.kernels.backend.capabilities
    isa = str(dispatch.reasons().get("attend", "reference")) if device is None else capabilities.name
    name = host.processor_name() if device is None else device.name
    shares = device is None and _shares_host(rank)  # copies of a device's tensors take nothing from its computation
    plain = Machine(
        name=name, cores=rates.cores, isa=isa.split(" (")[0], date=date.today().isoformat(),
        linear_flops_s=rates.linear_flops_s, attention_flops_s=rates.attention_flops_s,
        attention_call_s=rates.attention_call_s, memory_bytes_s=rates.memory_bytes_s, link_bytes_s=link_bytes_s,
        latency_s=latency_s, link_cpu_s_per_byte=LINK_CPU_S_PER_BYTE if shares else 0.0, one_engine=one,
        fold_tokens=capabilities.block_chunks * CHUNK,
    )  # fmt: skip
    return Probe(rank, TENSOR_REPEATS if tensor > 1 else None).refined(plain)


def _one_engine(rank: Rank) -> ComputeRates | None:
    """The rates of the first rank with all cores, while the others wait."""
    found, threads = None, rank.threads
    if threads is not None and threads.widens and rank.transport.rank == 0:
        threads.use(whole=True)
        found = _rates(rank)
        threads.use(whole=False)
    meet(rank)
    return found


def _rates(rank: Rank, crowding: float = 1.0) -> ComputeRates:
    """What this rank attains now. With more threads than cores each has its turns on a core: what it attains in them,
    over `crowding`. The linear layers' rate stands for that of the memory, until prefills are measured."""
    device, clock = rank.device, time.perf_counter if crowding == 1.0 else time.thread_time
    seconds = partial(least, timed=by_clock(clock) if device is None else by_events(device))
    matrices = [w for name, w in rank.decoder.matrices.items() if name.startswith("layers.0.")]
    size = sum(w.shape[0] * w.shape[1] for w in matrices) * rank.decoder.dtype.itemsize
    read = size / seconds(_products(rank, matrices)) / crowding
    return ComputeRates(
        cores=torch.get_num_threads(),
        linear_flops_s=read,
        attention_flops_s=tuple((rows, _attention(rank, rows, seconds) / crowding) for rows in ROWS),
        memory_bytes_s=read,
        attention_call_s=seconds(_attend_once(rank, 1, CHUNK)) * crowding,
    )


def describe(machine: Machine) -> str:
    """The profile in one line."""
    one = ""
    if machine.one_engine is not None:
        cores = count_of(machine.one_engine.cores, "core")
        one = f" (one engine with all {cores}: {_attained(machine.alone)})"
    link = f"link {machine.link_bytes_s / 1e9:.1f} GB/s and {machine.latency_s * 1e3:.2f} ms"
    return f"{_attained(machine)} GFLOP/s a rank{one}, {link}"


def _attained(machine: Machine) -> str:
    return f"linear {machine.linear_flops_s / 1e9:.0f} and attention {machine.attention_flops_s[-1][1] / 1e9:.0f}"


def _products(rank: Rank, matrices: Sequence[ops.Weight]) -> Callable[[], object]:
    """The matrices of a layer, each multiplied by one row: they are read."""
    inputs = [torch.ones(1, w.shape[1], dtype=rank.decoder.dtype, device=rank.decoder.device) for w in matrices]
    return lambda: [ops.linear(x, w) for x, w in zip(inputs, matrices, strict=True)]


def _attend_once(rank: Rank, rows: int, keys: int) -> Callable[[], object]:
    spec, kernels = rank.kernels.spec, rank.kernels
    chunks = keys // CHUNK
    buffer = LayerBuffer(spec.shape(0), chunks, rank.storage.dtype, rank.decoder.device)
    q = torch.ones(rows, spec.heads, spec.shape(0)[1], dtype=rank.decoder.dtype, device=rank.decoder.device)
    items = torch.tensor([[chunk, chunk * CHUNK, 0, rows] for chunk in range(chunks)], dtype=torch.int32)
    positions = torch.full((rows,), keys - 1, dtype=torch.int64)
    bias = kernels.bias
    if bias is not None and bias.shape[1] < keys:
        kernels = Kernels(kernels.backend, spec, bias.new_zeros(spec.heads, keys), kernels.sinks)
    kept: Kept = {}  # as the layers of a step
    return lambda: kernels.attend(0, q, buffer.pool, items, positions, kept)


def _attention(rank: Rank, rows: int, seconds: Callable[[Callable[[], object]], float]) -> float:
    """Operations a second of both products."""
    spec = rank.kernels.spec
    window = spec.windows[0]
    keys = KEYS if window is None else min(KEYS, max(CHUNK, abs(window) // CHUNK * CHUNK))
    return 4 * spec.heads * spec.shape(0)[1] * rows * keys / seconds(_attend_once(rank, rows, keys))


def _link(rank: Rank) -> tuple[float, float]:
    """Bytes a second and latency, round the ring 0 -> 1 -> .. -> 0, all ranks at once."""
    small, large = (torch.zeros(n, dtype=torch.uint8, device=rank.decoder.device) for n in (8, MESSAGE))
    meet(rank)
    latency = min(_exchange_all(rank, small, range(1, 6)))
    seconds = min(_exchange_all(rank, large, range(6, 9)))
    return MESSAGE / max(seconds - latency, 1e-9), latency


def _exchange_all(rank: Rank, x: Tensor, pieces: Iterable[int]) -> list[float]:
    return [_exchange(rank, x, piece) for piece in pieces]


def _exchange(rank: Rank, x: Tensor, piece: int) -> float:
    """Sends x on and receives as much: seconds."""
    if rank.transport.size == 1:
        return 1e-6
    began = time.perf_counter()
    passed_on(rank, x, piece)
    settle(rank)
    return time.perf_counter() - began


def _shares_host(rank: Rank) -> bool:
    """Whether another rank runs on this rank's host: its name goes round the ring."""
    mine = torch.frombuffer(bytearray(_host()), dtype=torch.uint8)
    passing, found = mine, False
    for piece in range(rank.transport.size - 1):
        passing = passed_on(rank, passing, 200 + piece)
        found |= torch.equal(passing, mine)
    return found


def _host() -> bytes:
    """16 bytes that are the same for all processes of a running system, in whatever container or network."""
    try:
        name = Path("/proc/sys/kernel/random/boot_id").read_text()
    except OSError:
        name = platform.node()
    return hashlib.blake2b(name.encode(), digest_size=16).digest()
