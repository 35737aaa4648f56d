"""The driver's side of its workers: sends them steps, notices when one is gone, and ends them all."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Mapping
from typing import Protocol

from headrace.logs import shown
from headrace.parallel.control import (
    FORM_S,
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
)
from headrace.parallel.link_store import StoreValues
from headrace.parallel.transport import RankLost

log = logging.getLogger(__name__)

GRACE_S = 0.5
"""So long after a worker said that it lost another, that one's own failure is waited for: it says more."""

STOP_S = 2.0

MOST_REASON = 2000
"""Characters of what a worker says of its failure."""


class WorkerProcess(Protocol):
    """A worker's process, as far as whoever started it can reach it."""

    def ended(self) -> str | None:
        """How it ended, for a reader; None while it runs."""
        ...

    def terminate(self) -> None: ...

    def kill(self) -> None: ...


class WorkerSupervisor:
    """Workers by rank, each with its control link.

    failed: set once a worker is gone, hangs or gave up; `reason` then says which and why, and stays.
    on_answer: may be set to hear what the tiers of a worker answer, on a thread of the supervisor.
    on_failure: called once with the reason, on a thread of the supervisor; at once where one has failed already.
    """

    def __init__(
        self,
        links: Mapping[int, tuple[Channel, WorkerHello]],
        timeout_s: float,
        processes: Mapping[int, WorkerProcess] | None = None,
    ) -> None:
        self.failed = threading.Event()
        self.reason: str | None = None
        self.timeout_s = timeout_s
        self.pids = {rank: hello.pid for rank, (_, hello) in links.items()}
        self._channels = {rank: channel for rank, (channel, _) in links.items()}
        self._processes = dict(processes or {})
        self._changed = threading.Condition()
        self._reports: dict[int, bytes] = {}
        self._lost_peer: set[int] = set()
        """Ranks that gave up because they lost another, whose own end says more."""
        self._values = StoreValues()
        self.on_answer: Callable[[int, bytes], None] | None = None
        self._callbacks: list[Callable[[str], None]] = []
        self._closed = threading.Event()
        self._heard = dict.fromkeys(self._channels, time.monotonic())
        for rank, channel in self._channels.items():
            channel.limit_sends(timeout_s)
            threading.Thread(target=self._read, args=(rank, channel), name=f"headrace-rank-{rank}", daemon=True).start()
        threading.Thread(target=self._watch, name="headrace-heartbeat", daemon=True).start()

    def on_failure(self, callback: Callable[[str], None]) -> None:
        with self._changed:
            self._callbacks.append(callback)
            reason = self.reason
        if reason is not None:
            callback(reason)

    def check(self) -> None:
        """Raises RankLost, naming rank and cause, if a worker has failed."""
        if self.reason is not None:
            raise RankLost(self.reason)

    def join(self, join: JoinGroup) -> None:
        """Tells every worker what group to form. Raises RankLost."""
        self._send_all(join)

    def send(self, step: bytes) -> None:
        """Sends a step (messages.encode) to every worker. Raises RankLost."""
        self._send_all(RunStep(step))

    def send_to(self, rank: int, command: bytes) -> None:
        """Sends a command to the tiers of one worker. Raises RankLost."""
        self.check()
        try:
            self._channels[rank].send(TierCommand(command))
        except OSError as error:
            self._gone(rank, f"its link took nothing: {error}")
        self.check()

    def ask(self, what: StoreAsk) -> StoreValue:
        """The driver's own access to the store that it keeps for the ranks. Raises RankLost, ValueError beyond it."""
        self.check()
        return self._values.answer(what)

    def wait_ready(self, timeout_s: float | None = None) -> dict[int, bytes]:
        """The workers' reports, once all are ready. Raises RankLost, or TimeoutError."""
        with self._changed:
            there = self._changed.wait_for(
                lambda: self.reason is not None or len(self._reports) == len(self._channels), timeout_s
            )
        self.check()
        if not there:
            missing = ", ".join(str(rank) for rank in self._channels if rank not in self._reports)
            raise TimeoutError(f"rank {missing} was not ready within {timeout_s:g} s")
        return dict(self._reports)

    def close(self) -> None:
        """Ends all workers: asked to, then by the end of their links, then by signals. May be called again."""
        with self._changed:
            if self._closed.is_set():
                return
            self._closed.set()
        for channel in self._channels.values():
            with contextlib.suppress(OSError):
                if self.reason is None:
                    channel.send(StopWorker())
        if self.reason is None:
            _until_ended(self._processes, STOP_S)
        for channel in self._channels.values():
            channel.close()
        end_processes(self._processes)

    def _send_all(self, message: ControlMessage) -> None:
        self.check()
        for rank, channel in self._channels.items():
            try:
                channel.send(message)
            except OSError as error:
                self._gone(rank, f"its link took nothing: {error}")
        self.check()

    def _read(self, rank: int, channel: Channel) -> None:
        """Takes in what a worker says until its link ends."""
        try:
            while (message := channel.receive()) is not None:
                self._heard[rank] = time.monotonic()
                self._take(rank, channel, message)
            cause = "its link was closed"
        except (OSError, ValueError) as error:
            cause = f"its link failed: {error}"
        self._gone(rank, cause)

    def _take(self, rank: int, channel: Channel, message: ControlMessage) -> None:
        if isinstance(message, WorkerReady):
            with self._changed:
                self._reports[rank] = message.report
                self._changed.notify_all()
        elif isinstance(message, WorkerFailed) and message.lost:
            self._lost_peer.add(rank)
            threading.Timer(GRACE_S, self._fail, args=(_failure(rank, message),)).start()
        elif isinstance(message, WorkerFailed):
            self._fail(_failure(rank, message))
        elif isinstance(message, StoreAsk):
            channel.send(self._values.answer(message))
        elif isinstance(message, TierAnswer) and self.on_answer is not None:
            self.on_answer(rank, message.body)
        elif not isinstance(message, WorkerPong):
            self._fail(f"rank {rank} sent a {type(message).__name__}, which no worker sends")

    def _gone(self, rank: int, cause: str) -> None:
        """Prefers how the process ended to how its link did."""
        if rank in self._lost_peer:
            return  # what it said is told after GRACE_S, unless the other's own end says more
        process = self._processes.get(rank)
        end = time.monotonic() + GRACE_S
        while process is not None and not self._closed.is_set() and time.monotonic() < end:
            if (ended := process.ended()) is not None:
                cause = ended
                break
            time.sleep(0.01)
        self._fail(f"rank {rank} is gone: {cause}")

    def _watch(self) -> None:
        """Pings all workers; a stop right after an answer is noticed within timeout_s too.

        A worker that has not said Ready has FORM_S: while libraries and weights load, its threads may stand still.
        """
        interval = self.timeout_s / 8
        while True:
            began = time.monotonic()
            if self._closed.wait(interval) or self.reason is not None:
                return
            now = time.monotonic()
            if now - began > 2 * interval:  # this process stood still: the silence may be its own
                self._heard = dict.fromkeys(self._channels, now)
            self._ping(now)

    def _ping(self, now: float) -> None:
        for rank, channel in self._channels.items():
            silent = now - self._heard[rank]
            if rank in self._reports and silent > self.timeout_s * 7 / 8:
                self._fail(f"rank {rank} does not answer (rank_timeout_s is {self.timeout_s:g})")
                return
            if silent > max(self.timeout_s, FORM_S):
                self._fail(f"rank {rank} did not answer for {silent:.0f} s while it loaded")
                return
            try:
                channel.send(DriverPing())
            except OSError as error:
                self._gone(rank, f"its link took nothing: {error}")

    def _fail(self, reason: str) -> None:
        with self._changed:
            if self._closed.is_set() or self.reason is not None:
                return
            self.reason = reason
            callbacks = list(self._callbacks)
            self.failed.set()
            self._changed.notify_all()
        log.error("%s", reason)
        for callback in callbacks:
            callback(reason)


def _failure(rank: int, message: WorkerFailed) -> str:
    return f"rank {rank} failed: {shown(message.reason, MOST_REASON)}"


def end_processes(processes: Mapping[int, WorkerProcess]) -> None:
    """Ends what still runs: lets it end by itself, terminates it, kills it."""
    _until_ended(processes, GRACE_S)
    for process in processes.values():
        if process.ended() is None:
            process.terminate()
    _until_ended(processes, GRACE_S)
    for process in processes.values():
        if process.ended() is None:
            process.kill()
    _until_ended(processes, STOP_S)


def _until_ended(processes: Mapping[int, WorkerProcess], seconds: float) -> None:
    end = time.monotonic() + seconds
    while any(process.ended() is None for process in processes.values()) and time.monotonic() < end:
        time.sleep(0.01)
