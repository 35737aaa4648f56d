"""The device of a rank, and how its tensors reach the other ranks."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch
import torch.distributed as dist

from headrace.config.ranks import RankTransport
from headrace.device import Device, current
from headrace.parallel.group import NO_TIMEOUT, Group, each_says
from headrace.parallel.interfaces import interface_name
from headrace.parallel.nccl_groups import MOST_CTAS, ask_for_no_watchdog, nccl_options
from headrace.parallel.nccl_transport import STREAMS as TRANSPORT_STREAMS
from headrace.parallel.nccl_transport import Direction, NcclTransport
from headrace.parallel.staged_transport import StagedTransport
from headrace.parallel.torchrun_environment import started_this
from headrace.parallel.transport import Links

log = logging.getLogger(__name__)

QUEUES, FEWEST = 32, 8
"""Of the driver for streams: those that are asked for, as many as torch has streams of a device, and those that it
gives unasked. More streams than queues share some, and wait for each other."""
STREAMS = 7
"""Of a rank beside those of its links: the computation's, that of what is passed on, those of copies in and out, two by
which chunks are stored, and that on which choices of tokens are recorded, which waits for the computation then."""
CONNECTIONS = "CUDA_DEVICE_MAX_CONNECTIONS"


def ask_for_queues() -> None:
    """Has this process, and those that it starts, get QUEUES, unless the environment says otherwise. To be called
    before the driver is first used."""
    os.environ.setdefault(CONNECTIONS, str(QUEUES))


def _queues() -> int:
    """Those that this process has."""
    said = os.environ.get(CONNECTIONS, "")
    return min(QUEUES, int(said)) if said.isdecimal() else FEWEST


def claim(rank: int) -> None:
    """Has this process compute on the device of its number on this host. To be called before anything lies on one."""
    device, local = current(), int(os.environ.get("LOCAL_RANK", rank)) if started_this() else rank
    device.claim(local % device.count)


def connect(group: Group, asked: RankTransport, interface: str) -> str:
    """Puts links for tensors of the device in the place of the group's: by NCCL where it can be, otherwise through the
    host. Returns what they are. Every rank calls it with the same `asked`, and then knows how many share its device.

    Raises ValueError for NCCL where ranks share a device, are too many, or torch has none, and for ranks whose bits
    would differ.
    """
    device = current()
    every = _share(group, device)
    _check_alike(group, device)
    missing = _obstacle(group, every)
    if asked == "nccl" and missing is not None:
        raise ValueError(f"rank_transport nccl: {missing}; use 'host' or 'auto'")
    if asked == "auto" and missing is not None and group.rank == 0:
        log.info("tensors of ranks go through the host: %s", missing)
    if asked == "host" or missing is not None:
        group.context, group.tensor = StagedTransport(group.context, device), StagedTransport(group.tensor, device)
        return "pinned memory"
    os.environ.setdefault("NCCL_SOCKET_IFNAME", f"={interface_name(interface)}")
    ask_for_no_watchdog()
    by_nccl = _Nccl(group, device)
    group.context, group.tensor = by_nccl.links(group.context, "context"), by_nccl.links(group.tensor, "tensor")
    return "NCCL"


def _share(group: Group, device: Device) -> list[str]:
    """The devices of all ranks, by what names them everywhere: processes may each see one alone, as number 0. Tells
    the device how many share it."""
    every = each_says(group, "device", device.identity)
    device.sharers = every.count(device.identity)
    told = "alone" if device.sharers == 1 else f"with others: {device.sharers} ranks share it"
    level = logging.DEBUG if device.sharers == 1 else logging.INFO
    log.log(level, "rank %d computes on %s (%s), %s", group.rank, device.place, device.identity, told)
    return every


def _obstacle(group: Group, devices: Sequence[str]) -> str | None:
    """Why the ranks cannot have NCCL; None if they can."""
    if len(set(devices)) < len(devices):
        return "ranks share a device"
    others = group.mesh.size(0) - 1 + group.mesh.size(1) - 1
    queues = min(map(int, each_says(group, "queues", str(_queues()))))
    most = max(0, (queues - STREAMS - 2 * TRANSPORT_STREAMS) // 2)
    if others > most:
        told = "" if queues == QUEUES else f" by {queues} queues ({CONNECTIONS})"
        return f"each rank exchanges with {others} others, and a GPU carries the streams of {most} side by side{told}"
    return None if dist.is_nccl_available() else "this torch has no NCCL"


def _check_alike(group: Group, device: Device) -> None:
    """Raises ValueError on every rank if some compute on another GPU, or by another Triton: bits would depend on who
    computes, and stored chunks are named by those of rank 0 (offload.identity)."""
    first, *others = each_says(group, "computes", f"{device.name}, Triton {_triton()}")
    for rank, other in enumerate(others, 1):
        if other != first:
            raise ValueError(
                f"rank {rank} computes on {other}, rank 0 on {first}: bits would differ; use GPUs of one kind, and one "
                f"version of Triton"
            )


def _triton() -> str:
    try:
        return version("triton")
    except PackageNotFoundError:
        return "none"


class _Nccl:
    """Communicators of every direction between ranks of a context group or a tensor group. torch makes them one after
    another, all ranks in the same order, those that a communicator leaves out too.

    Kernels of all of them may run at the same time, each waiting for another rank's: so they get half of the device at
    most, and each is used once before anything is computed. NCCL connects two ranks at their first message, for which
    the driver may wait for the whole device.
    """

    def __init__(self, group: Group, device: Device) -> None:
        self.group, self.device = group, device
        context, tensor = group.mesh.size(0), group.mesh.size(1)
        lines = {
            "context": [[c * tensor + t for c in range(context)] for t in range(tensor)],
            "tensor": [[c * tensor + t for t in range(tensor)] for c in range(context)],
        }
        directions = 2 * (context - 1 + tensor - 1)
        self._ctas = max(1, min(MOST_CTAS, device.processors // 2 // max(1, directions)))
        self._made = {name: self._all_of(each) for name, each in lines.items()}
        for name, each in lines.items():
            for line in each:
                self._use(line, self._made[name])

    def _all_of(self, lines: Sequence[Sequence[int]]) -> dict[tuple[int, int], Any]:
        """By (from, to), as numbered in this rank's line: those that this rank has an end of."""
        found = {}
        for line in lines:
            for begin in line:
                for end in line:
                    if begin == end:
                        continue
                    options = nccl_options(self._ctas, NO_TIMEOUT)
                    made = dist.new_group([begin, end], timeout=NO_TIMEOUT, backend="nccl", pg_options=options)
                    if self.group.rank in (begin, end):
                        found[line.index(begin), line.index(end)] = made
                        self.group.nccl.add(made)
        return found

    def _use(self, line: Sequence[int], made: dict[tuple[int, int], Any]) -> None:
        """Sends a byte in each direction of the line, all ranks in the same order: disjoint pairs beside each other."""
        count, byte = len(line), torch.zeros(1, dtype=torch.uint8, device=self.device.place)
        pairs = [(i, (i + step) % count, step) for step in range(1, count) for i in range(count)]
        for begin, end, _ in sorted(pairs, key=lambda pair: (pair[2], pair[0] // pair[2] % 2)):
            if self.group.rank == line[begin]:
                made[begin, end].send([byte], int(line[end] > line[begin]), 0).wait()
            elif self.group.rank == line[end]:
                made[begin, end].recv([byte], int(line[begin] > line[end]), 0).wait()
            else:
                continue
            self.device.synchronize()

    def links(self, host: Links, name: str) -> NcclTransport:
        """Ranks in a communicator are numbered in their order in the world."""
        me, made = host.rank, self._made[name]
        to = {end: Direction(each, int(end > me)) for (begin, end), each in made.items() if begin == me}
        source = {begin: Direction(each, int(begin > me)) for (begin, end), each in made.items() if end == me}
        return NcclTransport(host, self.device, to, source)
