"""Ranks started in three ways, with one way behind them: by this process, by torchrun, by Ray.

However a worker was started, it gets the driver's address, the secret and its rank, and calls worker.rank_main. All
else it learns over its control link.
"""

from __future__ import annotations

import logging
import os
import secrets
import stat
import subprocess
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from headrace.config import EngineConfig
from headrace.device import current
from headrace.files import open_own
from headrace.host import python_module, told_signal
from headrace.parallel import torchrun_environment
from headrace.parallel.control import FORM_S, Channel, JoinGroup, WorkerHello
from headrace.parallel.group import Group, form, unless_failed
from headrace.parallel.handshake import Handshake
from headrace.parallel.link_store import LinkStore
from headrace.parallel.supervisor import WorkerProcess, WorkerSupervisor, end_processes
from headrace.parallel.transport import RankLost
from headrace.parallel.worker import encode_config, end_process, rank_main

log = logging.getLogger(__name__)

SECRET = "HEADRACE_RANK_SECRET"
LOOPBACK = "127."


def open_group(config: EngineConfig, maker: str, start: Starter | None = None) -> Group:
    """Starts the workers and meets them; this process is the driver, rank 0. They go on making their ranks: see
    WorkerSupervisor.wait_ready.

    maker: 'package.module:function', which every worker calls as function(config, group); what that returns runs the
    steps. start: how workers are started, by default as the settings and the environment say.
    Raises ValueError for settings that cannot work, RankLost where a worker ends, TimeoutError where one does
    not come.
    """
    size = config.ranks.context * config.ranks.tensor
    if size < 2:
        raise ValueError("one rank needs no group: raise context_parallel_size or tensor_parallel_size")
    if dist.is_initialized():
        raise ValueError(f"this process is in a group already: {current().lost or 'close that first'}")
    secret = os.environ.get(SECRET) or secrets.token_hex(32)
    with ExitStack() as undo:
        processes, links = _meet(config, secret, start or _starter(config), undo)
        workers = WorkerSupervisor(links, config.ranks.timeout_s, processes)
        undo.callback(workers.close)
        group = _join(workers, config, maker, secret)
        undo.pop_all()
        return group


def _meet(
    config: EngineConfig, secret: str, start: Starter, undo: ExitStack
) -> tuple[Mapping[int, WorkerProcess], dict[int, tuple[Channel, WorkerHello]]]:
    """The workers' processes, whose end is left to `undo`, and their links. The port where they came in is closed."""
    size = config.ranks.context * config.ranks.tensor
    with Handshake(config.ranks.interface, secret) as handshake, ExitStack() as met:
        processes = start(config, handshake.address, secret, met)
        undo.callback(end_processes, processes)
        return processes, handshake.admit(range(1, size), FORM_S, lambda: _all_run(processes))


def serve_if_worker(interface: str) -> None:
    """Under torchrun, on all ranks but 0: serves as a worker and ends the process. Returns where the driver is."""
    environment = TorchRun.read()
    if environment is None or environment.rank == 0:
        return
    environment.check(interface)
    store = environment.store()
    address, kept = store.get("headrace/driver").decode(), store.get("headrace/secret").decode()
    secret = _read_secret(kept) if kept else os.environ[SECRET]
    end_process(rank_main(address, secret, environment.rank, interface))


def _join(workers: WorkerSupervisor, config: EngineConfig, maker: str, secret: str) -> Group:
    context, tensor = config.ranks.context, config.ranks.tensor
    workers.join(JoinGroup(context * tensor, context, tensor, encode_config(config), maker))
    store = LinkStore(workers.ask)
    group: Group = unless_failed(
        workers, lambda: form(0, context, tensor, store, config.ranks.interface, secret), FORM_S
    )
    group.workers = workers
    workers.on_failure(group.fail)
    return group


Starter = Callable[[EngineConfig, str, str, ExitStack], Mapping[int, WorkerProcess]]
"""start(config, address, secret, met) -> the workers' processes; `met` is closed when all have come, or none will."""


def _starter(config: EngineConfig) -> Starter:
    environment = TorchRun.read()
    if environment is not None:
        if environment.rank != 0:
            raise ValueError("only rank 0 opens the group; the others call serve_if_worker")
        return environment.invite
    if config.ranks.launcher == "ray":
        from headrace.parallel.on_ray import start

        return start
    if not config.ranks.interface.startswith(LOOPBACK):
        log.info("ranks on this host talk over %s, not over the loopback interface", config.ranks.interface)
    return spawn


def _all_run(processes: Mapping[int, WorkerProcess]) -> None:
    for rank, process in processes.items():
        if (ended := process.ended()) is not None:
            raise RankLost(f"rank {rank} is gone before it came: {ended}")


@dataclass
class ChildProcess:
    """A worker that this process started."""

    popen: subprocess.Popen[bytes]

    def ended(self) -> str | None:
        status = self.popen.poll()
        if status is None:
            return None
        if status < 0:
            return f"its process {self.popen.pid} was ended by {told_signal(-status)}"
        return f"its process {self.popen.pid} ended with status {status}"

    def terminate(self) -> None:
        self.popen.terminate()

    def kill(self) -> None:
        self.popen.kill()


def spawn(config: EngineConfig, address: str, secret: str, met: ExitStack) -> Mapping[int, WorkerProcess]:
    """Workers as children of this process. They get the secret through a pipe, which no process list shows."""
    processes: dict[int, WorkerProcess] = {}
    try:
        for rank in range(1, config.ranks.context * config.ranks.tensor):
            processes[rank] = ChildProcess(spawn_one(rank, address, config.ranks.interface, secret))
    except BaseException:
        end_processes(processes)
        raise
    return processes


def spawn_one(
    rank: int, address: str, interface: str, secret: str, before: Sequence[str] = ()
) -> subprocess.Popen[bytes]:
    """A worker that binds to `interface`; `before` is a command that runs it, and becomes it."""
    reading, writing = os.pipe()
    try:
        os.write(writing, secret.encode())
        worker = python_module("headrace.parallel.worker", str(rank), address, interface, str(reading))
        environment = {name: value for name, value in os.environ.items() if name != SECRET}
        return subprocess.Popen([*before, *worker], pass_fds=[reading], stdin=subprocess.DEVNULL, env=environment)
    finally:
        os.close(reading)
        os.close(writing)


@dataclass(frozen=True)
class TorchRun:
    """What torchrun says in the environment."""

    rank: int
    size: int
    on_this_host: int

    @staticmethod
    def read() -> TorchRun | None:
        """None where torchrun did not start this process."""
        if not torchrun_environment.started_this():
            return None
        return TorchRun(*(int(os.environ[name]) for name in torchrun_environment.VARIABLES[:3]))

    def check(self, interface: str) -> None:
        """Raises ValueError where several hosts lack a secret, or an address to reach each other."""
        if self.on_this_host == self.size:
            return
        if not os.environ.get(SECRET):
            raise ValueError(f"ranks on several hosts need a shared secret: set {SECRET} to the same value on all")
        if interface.startswith(LOOPBACK):
            raise ValueError(f"rank_interface {interface} reaches no other host: give each host's own address")

    def store(self) -> Any:
        return next(iter(rendezvous("env://", timeout=timedelta(seconds=FORM_S))))[0]

    def invite(self, config: EngineConfig, address: str, secret: str, met: ExitStack) -> Mapping[int, WorkerProcess]:
        """Leaves the driver's address where the other ranks look for it. Their processes are torchrun's to end."""
        torchrun_environment.check_size(config.ranks.context * config.ranks.tensor)
        self.check(config.ranks.interface)
        store = self.store()
        met.callback(lambda: store)  # it may live in this process, and the others have yet to read it
        store.set("headrace/secret", "" if os.environ.get(SECRET) else _write_secret(secret, met))
        store.set("headrace/driver", address)
        return {}


def _write_secret(secret: str, met: ExitStack) -> str:
    """A file that this user alone can read, for as long as workers are to come."""
    descriptor, path = tempfile.mkstemp(prefix="headrace-secret-")
    met.callback(_remove, path)
    with os.fdopen(descriptor, "w") as file:
        file.write(secret)
    return path


def _read_secret(path: str) -> str:
    """Raises ValueError for a file that someone else could have written or read."""
    with os.fdopen(open_own(Path(path))) as file:
        facts = os.fstat(file.fileno())
        if facts.st_uid != os.getuid() or stat.S_IMODE(facts.st_mode) & 0o077:
            raise ValueError(f"{path} does not belong to this user alone, so its secret is not trusted")
        return file.read()


def _remove(path: str) -> None:
    with suppress(FileNotFoundError):
        os.unlink(path)
