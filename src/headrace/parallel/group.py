"""A rank's place among the others: the mesh, the links to its context group and to its tensor group."""

from __future__ import annotations

import hmac
import logging
import os
import secrets
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from headrace.device import current
from headrace.parallel.control import Refused, proof
from headrace.parallel.interfaces import interface_name
from headrace.parallel.link_store import LinkStore
from headrace.parallel.listeners import stop_accepting
from headrace.parallel.nccl_groups import NcclGroups, ends
from headrace.parallel.supervisor import WorkerSupervisor
from headrace.parallel.torch_transport import TorchTransport
from headrace.parallel.transport import Apart, Links, Tag, Transport

log = logging.getLogger(__name__)

NO_TIMEOUT = timedelta(days=365)
"""Of the process groups: one timeout there closes every link, and a wait may be as long as a prompt."""
ABORT_S = 10.0
"""So long what waits for a rank that is gone may take to be given up."""
HELD_UP = (
    "the GPU waits for a rank that is gone, and NCCL does not give that up: end this process (it may take SIGKILL) and "
    "start another"
)


@dataclass
class Group:
    """What a rank knows of the others.

    World rank = context rank * tensor size + tensor rank. `context` links the ranks of equal tensor rank, and numbers
    them by context rank; `tensor` the other way round; `tensor_group` is the latter for torch's collectives.
    workers: on the driver, rank 0; None elsewhere. store: torch calls it for as long as the process groups live.
    nccl: its process groups, if tensors of a GPU go by it (parallel.devices). closed: torch's groups are destroyed.
    """

    rank: int
    size: int
    mesh: DeviceMesh
    context: Links
    tensor: Links
    store: LinkStore
    workers: WorkerSupervisor | None = None
    nccl: NcclGroups = field(default_factory=NcclGroups)
    closed: bool = False

    @property
    def tensor_group(self) -> dist.ProcessGroup:
        return self.mesh.get_group("tensor")

    def fail(self, why: str) -> None:
        """Wakes whoever waits for another rank, with RankLost(why). What then comes from a device may be anything."""
        self.context.fail(why)
        self.tensor.fail(why)
        self.nccl.abort()

    def released(self) -> bool:
        """Whether nothing waits on the device for a rank that is known to be gone. If NCCL has not given that up within
        ABORT_S the device is lost to this process."""
        if not len(self.nccl):
            return True
        if current().lost is None and not self.nccl.aborted(ABORT_S):
            self._lose_device()
        return current().lost is None

    def close(self) -> bool:
        """Ends the workers, if this is the driver, and the links. May be called again. False where the device is lost.

        To be called before the interpreter ends: threads that wait in torch then would abort the process.
        """
        if self.workers is not None:
            self.workers.close()
        self.nccl.abort()
        released = self.released()
        for name, transport in (("context", self.context), ("tensor", self.tensor)):
            if not transport.close() and released:
                log.warning("threads of the %s links still wait for ranks that did not end", name)
        if released and not self.closed:  # else torch's groups may be another engine's by now
            current().sharers = None
            self._leave_torch()
            self.closed = True
        return self.released()

    def _leave_torch(self) -> None:
        """Destroys torch's process groups. Where one of NCCL does not end in time the device is lost."""
        if dist.is_initialized() and not len(self.nccl):
            dist.destroy_process_group()
        elif dist.is_initialized() and not ends(dist.destroy_process_group, ABORT_S):
            self._lose_device()

    def _lose_device(self) -> None:
        current().lost = HELD_UP
        self.nccl.keep()
        log.error("%s", HELD_UP)


def each_says(group: Group, what: str, value: str) -> list[str]:
    """What each rank says of itself: all call it with the same `what`, once. In the order of ranks."""
    names = [f"headrace/{what}/{rank}" for rank in range(group.size)]
    group.store.set(names[group.rank], value)
    return [group.store.get(name).decode() for name in names]


def form(rank: int, context: int, tensor: int, store: LinkStore, interface: str, secret: str) -> Group:
    """Meets the other ranks at the store; returns once each has proved to each on every link that it knows the secret.

    The links listen on `interface` only, and no longer than that. Raises ValueError for an address that is not this
    host's, Refused, RankLost, or RuntimeError or TimeoutError where ranks are missing.
    """
    size = context * tensor
    with gloo_on(interface):
        dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=NO_TIMEOUT)
        mesh = init_device_mesh("cpu", (context, tensor), mesh_dim_names=("context", "tensor"))
    context_links, tensor_links = (TorchTransport(mesh.get_group(name)) for name in ("context", "tensor"))
    prove(context_links, secret, "context")
    prove(tensor_links, secret, "tensor")
    if not stop_accepting(store.left):
        log.warning("gloo's listening sockets were not found: they stay open for as long as this rank runs")
    return Group(rank, size, mesh, context_links, tensor_links, store)


def prove(transport: Transport, secret: str, name: str) -> None:
    """Every rank shows to every other that it knows the secret. Raises Refused."""
    others = [rank for rank in range(transport.size) if rank != transport.rank]
    ours = {rank: secrets.token_bytes(32) for rank in others}
    theirs = _exchange(transport, ours, 0)

    def proved(nonce: bytes, by: int, to: int) -> bytes:
        return proof(secret, b"rank", name.encode(), nonce, bytes([by >> 8, by & 255, to >> 8, to & 255]))

    answers = _exchange(transport, {rank: proved(theirs[rank], transport.rank, rank) for rank in others}, 1)
    for rank in others:
        if not hmac.compare_digest(answers[rank], proved(ours[rank], rank, transport.rank)):
            raise Refused(f"rank {rank} of the {name} group does not know the secret")
    transport.traffic.messages.clear()
    transport.traffic.bytes.clear()
    transport.traffic.wait_s = 0.0


def _exchange(transport: Transport, messages: dict[int, bytes], piece: int) -> dict[int, bytes]:
    """Sends 32 bytes to each other rank and receives as many from each."""
    tag = Tag(Apart.proof, 0, piece)
    arrived = {rank: torch.empty(32, dtype=torch.uint8) for rank in messages}
    works = [transport.irecv(x, rank, tag) for rank, x in arrived.items()]
    for rank, message in messages.items():
        works.append(transport.isend(torch.frombuffer(bytearray(message), dtype=torch.uint8), rank, tag))
    for work in works:
        work.wait()
    return {rank: bytes(x.tolist()) for rank, x in arrived.items()}


@contextmanager
def gloo_on(interface: str) -> Iterator[None]:
    """Within, gloo listens on the interface that has this IPv4 address, and on no other."""
    name, before = "GLOO_SOCKET_IFNAME", os.environ.get("GLOO_SOCKET_IFNAME")
    os.environ[name] = interface_name(interface)
    try:
        yield
    finally:
        del os.environ[name]
        if before is not None:
            os.environ[name] = before


def unless_failed(workers: WorkerSupervisor, call: Callable[[], Any], limit_s: float | None = None) -> Any:
    """call(), given up with RankLost when a worker fails meanwhile: torch's own waiting cannot be interrupted.

    Raises TimeoutError after limit_s.
    """
    done = threading.Event()
    outcome: list[Any] = []

    def run() -> None:
        try:
            outcome.append(call())
        except BaseException as error:
            outcome.append(error)
        done.set()

    threading.Thread(target=run, name="headrace-form", daemon=True).start()
    workers.on_failure(lambda _: done.set())
    done.wait(limit_s)
    if not outcome:
        workers.check()
        raise TimeoutError(f"the ranks did not make their links within {limit_s:g} s")
    if isinstance(outcome[0], BaseException):
        raise outcome[0]
    return outcome[0]
