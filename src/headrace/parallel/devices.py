"""The device of a rank, and how its tensors reach the other ranks."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch.distributed as dist

from headrace.config.ranks import RankTransport
from headrace.device import Device, current
from headrace.parallel.group import NO_TIMEOUT, Group
from headrace.parallel.interfaces import interface_name
from headrace.parallel.nccl_groups import ask_for_no_watchdog
from headrace.parallel.nccl_transport import Direction, NcclTransport
from headrace.parallel.staged_transport import StagedTransport
from headrace.parallel.torchrun_environment import started_this
from headrace.parallel.transport import Links

log = logging.getLogger(__name__)

QUEUES = "32"
"""Of the driver for streams: each direction has some, and a stream that waits holds up those in its queue."""


def ask_for_queues() -> None:
    """Has this process, and those that it starts, get QUEUES. To be called before the driver is first used."""
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", QUEUES)


def claim(rank: int, here: int) -> bool:
    """Has this process compute on the device of its number on this host, one of `here` ranks; whether it shares it with
    none of them. To be called before anything lies on a device."""
    device, local = current(), int(os.environ.get("LOCAL_RANK", rank)) if started_this() else rank
    device.claim(local % device.count)
    shared = here > device.count
    told = f"with others: {here} ranks here have {device.count}" if shared else "alone"
    log.log(logging.INFO if shared else logging.DEBUG, "rank %d computes on %s, %s", rank, device.place, told)
    return not shared


def connect(group: Group, asked: RankTransport, alone: bool, interface: str) -> str:
    """Puts links for tensors of the device in the place of the group's: by NCCL where all ranks have devices to
    themselves, otherwise through the host. Returns what they are. Every rank calls it with the same `asked`.

    Raises ValueError for NCCL where ranks share a device, or torch has none, and for ranks whose bits would differ.
    """
    device, every = current(), _all_alone(group, alone)
    _check_alike(group, device)
    missing = "ranks share a device" if not every else None if dist.is_nccl_available() else "this torch has no NCCL"
    if asked == "nccl" and missing is not None:
        raise ValueError(f"rank_transport nccl: {missing}; use 'host' or 'auto'")
    if asked == "host" or missing is not None:
        group.context, group.tensor = StagedTransport(group.context, device), StagedTransport(group.tensor, device)
        return "pinned memory"
    os.environ.setdefault("NCCL_SOCKET_IFNAME", f"={interface_name(interface)}")
    ask_for_no_watchdog()
    by_nccl = _Nccl(group, device)
    group.context, group.tensor = by_nccl.links(group.context, "context"), by_nccl.links(group.tensor, "tensor")
    return "NCCL"


def _all_alone(group: Group, alone: bool) -> bool:
    """What all ranks say."""
    names = [f"headrace/alone/{rank}" for rank in range(group.size)]
    group.store.set(names[group.rank], str(int(alone)))
    return all(int(group.store.get(name)) for name in names)


def _check_alike(group: Group, device: Device) -> None:
    """Raises ValueError on every rank if some compute on another GPU, or by another Triton: bits would depend on who
    computes, and stored chunks are named by those of rank 0 (offload.identity)."""
    names = [f"headrace/computes/{rank}" for rank in range(group.size)]
    group.store.set(names[group.rank], f"{device.name}, Triton {_triton()}")
    first, *others = (group.store.get(name).decode() for name in names)
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
    another, all ranks in the same order, those that a communicator leaves out too."""

    def __init__(self, group: Group, device: Device) -> None:
        self.group, self.device = group, device
        context, tensor = group.mesh.size(0), group.mesh.size(1)
        lines = {
            "context": [[c * tensor + t for c in range(context)] for t in range(tensor)],
            "tensor": [[c * tensor + t for t in range(tensor)] for c in range(context)],
        }
        self._made = {name: self._all_of(each) for name, each in lines.items()}

    def _all_of(self, lines: Sequence[Sequence[int]]) -> dict[tuple[int, int], Any]:
        """By (from, to), as numbered in this rank's line: those that this rank has an end of."""
        found = {}
        for line in lines:
            for begin in line:
                for end in line:
                    if begin == end:
                        continue
                    made = dist.new_group([begin, end], timeout=NO_TIMEOUT, backend="nccl")
                    if self.group.rank in (begin, end):
                        found[line.index(begin), line.index(end)] = made
                        self.group.nccl.add(made)
        return found

    def links(self, host: Links, name: str) -> NcclTransport:
        """Ranks in a communicator are numbered in their order in the world."""
        me, made = host.rank, self._made[name]
        to = {end: Direction(each, int(end > me)) for (begin, end), each in made.items() if begin == me}
        source = {begin: Direction(each, int(begin > me)) for (begin, end), each in made.items() if end == me}
        return NcclTransport(host, self.device, to, source)
