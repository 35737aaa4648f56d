"""A worker rank: `python -m headrace.parallel.worker RANK HOST:PORT INTERFACE FD`, the secret being read from FD.

A thread answers the driver while the main thread computes. The process ends when the driver's link does, whatever it
is doing then, so no worker outlives its driver.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
import os
import queue
import signal
import socket
import sys
import threading
from collections.abc import Callable
from typing import Any, NoReturn, Protocol

import msgspec

from headrace import logs
from headrace.config import EngineConfig
from headrace.host import open_streams
from headrace.parallel import messages
from headrace.parallel.control import (
    Channel,
    ControlMessage,
    DriverPing,
    JoinGroup,
    RunStep,
    StopWorker,
    StoreAsk,
    StoreValue,
    TierAnswer,
    TierCommand,
    WorkerFailed,
    WorkerHello,
    WorkerPong,
    WorkerReady,
    connect,
)
from headrace.parallel.group import Group, form
from headrace.parallel.link_store import LinkStore
from headrace.parallel.step_fence import StepFence
from headrace.parallel.transport import RankLost

log = logging.getLogger("headrace.parallel.worker")

SETTLE_S = 1.5
"""So long a worker that was told to stop stays for what others still want; less than WorkerSupervisor.close waits."""

GONE = 3
"""Exit status of a worker whose driver is gone."""


class RankLike(Protocol):
    """What a maker makes. Its `report`, if any, goes to the driver: see WorkerSupervisor.wait_ready. Its `obey`, if
    any, gets what TierCommand carries and whom to answer; its `fence`, if any, hears of each step before that."""

    def run(self, step: messages.RankStep) -> object: ...


Maker = Callable[[EngineConfig, Group], RankLike]


class DriverLink:
    """The worker's end of its control link. `steps` gets what RunStep carries, and None after StopWorker.

    When the link ends the process does: with status 0 after StopWorker, GONE otherwise. ready: the rank has been made.
    tiers: takes a TierCommand's body, and whom to answer. fence: hears of each step as it comes.
    """

    def __init__(self, channel: Channel) -> None:
        self.channel = channel
        self.steps: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._answers: queue.SimpleQueue[StoreValue] = queue.SimpleQueue()
        self._asking = threading.Lock()
        self._status = GONE
        self.ready = False
        self.tiers: Callable[[bytes, Callable[[bytes], None]], None] | None = None
        self.fence = StepFence()

    @property
    def stopped(self) -> bool:
        return self._status == 0

    def listen(self) -> None:
        threading.Thread(target=self._read, name="headrace-driver", daemon=True).start()

    def _read(self) -> None:
        with contextlib.suppress(OSError, ValueError):
            while (message := self.channel.receive()) is not None:
                self._take(message)
        os._exit(self._status)

    def _take(self, message: ControlMessage) -> None:
        if isinstance(message, DriverPing):
            self.channel.send(WorkerPong())
        elif isinstance(message, RunStep):
            self.fence.sent()
            self.steps.put(message.body)
        elif isinstance(message, TierCommand) and self.tiers is not None:
            self.tiers(message.body, lambda body: self.tell(TierAnswer(body)))
        elif isinstance(message, StoreValue):
            self._answers.put(message)
        elif isinstance(message, StopWorker):
            self._status = 0
            self.steps.put(None)
        else:
            raise ValueError(f"the driver sent a {type(message).__name__}")

    def ask(self, what: StoreAsk) -> StoreValue:
        """The driver's answer, which it gives at once. Raises OSError."""
        with self._asking:
            self.channel.send(what)
            return self._answers.get()

    def tell(self, message: WorkerReady | WorkerFailed | TierAnswer) -> None:
        with contextlib.suppress(OSError):  # the listening thread notices
            self.channel.send(message)


def rank_main(address: str, secret: str, rank: int, interface: str) -> int:
    """Serves as a worker until the driver says stop (0) or something fails (1, after it was reported).

    Ends the whole process where the driver's link ends before that.
    """
    host, _, port = address.rpartition(":")
    channel = connect((host, int(port)), secret, interface)
    channel.send(WorkerHello(rank, os.getpid(), socket.gethostname()))
    join = channel.receive()
    if not isinstance(join, JoinGroup):
        return 0 if join is None or isinstance(join, StopWorker) else 1
    link = DriverLink(channel)
    link.listen()
    try:
        return _serve(link, join, rank, interface, secret)
    except Exception as error:
        if link.stopped and isinstance(error, RankLost):
            return 0  # the others end as well, and nobody wants the rest of the step
        # What is wrong with the model or the settings the driver tells; a traceback is for those who ask by --debug.
        level, lost = logging.ERROR if link.ready else logging.DEBUG, isinstance(error, RankLost)
        log.log(level, "rank %d has failed: %s", rank, error, exc_info=not lost)
        link.tell(WorkerFailed(f"{type(error).__name__}: {error}", lost))
        return 1


def _serve(link: DriverLink, join: JoinGroup, rank: int, interface: str, secret: str) -> int:
    config = decode_config(join.config).replace(rank_interface=interface)
    logs.to_stderr(logs.level_of(config.server.log_level, logging.WARNING), config.server.log_format)
    make = named(join.maker)
    group = form(rank, join.context, join.tensor, LinkStore(link.ask), interface, secret)
    made = make(config, group)
    link.tiers = getattr(made, "obey", None)
    link.fence = getattr(made, "fence", link.fence)
    link.ready = True
    link.tell(WorkerReady(getattr(made, "report", b"")))
    while (body := link.steps.get()) is not None:
        made.run(messages.decode(body))
    group.context.settle(SETTLE_S)
    return 0


def named(maker: str) -> Maker:
    """The function that 'package.module:function' names. Raises ValueError if there is none."""
    module, _, name = maker.partition(":")
    found: Maker | None = getattr(importlib.import_module(module), name, None)
    if found is None:
        raise ValueError(f"no function {name!r} in {module}")
    return found


def encode_config(config: EngineConfig) -> bytes:
    """As msgpack; without the key of the API, which is no worker's business."""
    return msgspec.msgpack.encode(config.flat | {"api_key": None})


def decode_config(body: bytes) -> EngineConfig:
    """Raises ValueError for values that cannot work and for what is no config."""
    return EngineConfig(**msgspec.msgpack.decode(body, type=dict[str, Any]))


def main(rank: str, address: str, interface: str, descriptor: str) -> int:
    open_streams()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal's ctrl-c reaches the driver, which ends the workers
    logs.to_stderr(logging.WARNING)
    with os.fdopen(int(descriptor)) as pipe:
        secret = pipe.read()
    return rank_main(address, secret, int(rank), interface)


def end_process(status: int) -> NoReturn:
    """Ends a worker without finalizing the interpreter. A thread that waits in torch would hold that up if a rank is
    lost, and abort the process if its wait ended meanwhile: Python unwinds it through torch."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


if __name__ == "__main__":
    end_process(main(*sys.argv[1:]))
