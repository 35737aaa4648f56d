"""The engine's process: `python -m headrace.engine.worker FD`, FD being a connected socket inherited from the server.

One thread reads the socket and answers pings from the first moment on, the main thread steps. The process ends when the
socket does, so it never outlives its server: at once while it loads, which may hang, and after storing what waits to be
stored once it serves. It also ends when it has lost a rank, whatever it is doing then.
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import signal
import socket
import sys
import threading
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING, NoReturn

from headrace import logs
from headrace.config import EngineConfig
from headrace.engine import messages as m
from headrace.engine import process
from headrace.engine.calls import Refused
from headrace.engine.watchdog import StepWatch
from headrace.host import open_streams
from headrace.stats import EngineStats
from headrace.types import InvalidRequest, UnsupportedModel

if TYPE_CHECKING:
    from headrace.engine.call_handlers import Answered, CallHandlers
    from headrace.engine.core import EngineCore
    from headrace.engine.ranks import Ranks
    from headrace.progress import Prefill

log = logging.getLogger("headrace.engine.worker")

TICK_S = 0.05
"""Between reports of an engine that has nothing to do but to store chunks."""

GONE = (BrokenPipeError, ConnectionResetError)
"""The server is."""

REPORT_S = 1.0
"""Between reports of an idle engine with tiers, which may change by themselves."""


def main(descriptor: int) -> int:
    """Serves until the other side closes the socket. Exit status 0, or 1 after a failure (which is reported first)."""
    open_streams()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal's ctrl-c reaches the server, which ends this process
    logs.to_stderr(logging.WARNING)
    link = Link(socket.socket(fileno=descriptor))
    inbox = Inbox(link)
    with ExitStack() as closing:  # the other ranks, after the report
        try:
            return _serve(link, inbox, closing)
        except GONE:
            return 0
        except Exception as error:
            _report(link, _failure(error, serving=inbox.serving.is_set()))
            return 1


def _failure(error: Exception, *, serving: bool) -> m.EngineFailed:
    """What is told of it. A traceback is of use for a failure of ours alone; while an engine loads, to those who ask
    for it by --debug."""
    settings = isinstance(error, ValueError | UnsupportedModel) and not isinstance(error, InvalidRequest)
    if serving:
        log.exception("the engine has failed")
    else:
        log.debug("the engine has failed", exc_info=True)
    told = f"{error}" if settings and not serving else f"{type(error).__name__}: {error}"
    return m.EngineFailed(told, settings)


class Link:
    """The socket, for a thread that reads and several that send. Raises OSError where the other side is gone."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._sending = threading.Lock()  # whole frames only
        self._told = False

    def send(self, message: m.FromEngine) -> None:
        frame = m.frame(message)
        with self._sending:
            self._sock.sendall(frame)

    def send_events(self, events: m.Events) -> None:
        """Counters that cannot be packed (a number beyond 64 bits from a tier, say) are left out, once in the log: they
        must end neither process, since the next engine would count the same."""
        try:
            self.send(events)
        except (OverflowError, TypeError, ValueError) as error:
            if not self._told:
                log.error("the engine's counters cannot be told to the server: %s", logs.shown(error))
            self._told = True
            self.send(m.Events(events.deltas, events.started, events.refused, EngineStats()))

    def receive(self) -> m.ToEngine | m.Misread | None:
        """The next message; None at the end of the stream."""
        header = self._exactly(m.LENGTH.size)
        body = header and self._exactly(m.length(header))
        return m.to_engine(body) if body else None

    def _exactly(self, count: int) -> bytes | None:
        """`count` bytes, or None if the stream ends before."""
        parts: list[bytes] = []
        while count:
            part = self._sock.recv(min(count, 1 << 20))
            if not part:
                return None
            parts.append(part)
            count -= len(part)
        return b"".join(parts)


class Inbox:
    """What the server has said, read by a thread of its own; None at the end. Pings are answered there, at once.

    on_ping: is called at each of them, about once a second.

    Before `serving` is set the end of the stream ends the process, by `leave`. Afterwards the process has
    `process.STORE_S` left.
    """

    def __init__(self, link: Link, leave: Callable[[int], object] | None = None) -> None:
        self.serving = threading.Event()
        self.on_ping: Callable[[], object] = lambda: None
        self._link, self._leave = link, leave or _leave
        self._messages: queue.SimpleQueue[m.ToEngine | m.Misread | None] = queue.SimpleQueue()
        threading.Thread(target=self._read, name="headrace-inbox", daemon=True).start()

    def get(self, timeout: float | None = None) -> m.ToEngine | m.Misread | None:
        """Raises queue.Empty."""
        return self._messages.get(timeout=timeout)

    def empty(self) -> bool:
        return self._messages.empty()

    def _read(self) -> None:
        try:
            while (message := self._link.receive()) is not None:
                if isinstance(message, m.EnginePing):
                    self._link.send(m.EnginePong())
                    self.on_ping()
                else:
                    self._messages.put(message)
        except GONE:
            pass
        except (OSError, ValueError):
            log.exception("the link to the server failed")
        if not self.serving.is_set():
            self._leave(0)
        self._messages.put(None)
        end = threading.Timer(process.STORE_S, self._leave, (1,))
        end.daemon = True
        end.start()


def _report(link: Link, failure: m.EngineFailed) -> None:
    with contextlib.suppress(OSError):  # nobody may be listening any more
        link.send(failure)


class RankWatch:
    """Reports the loss of a rank and ends the process, from whichever thread hears of it first.

    The main thread may be idle then, or in the middle of a long computation that nobody can use any more.
    """

    def __init__(self, link: Link, ranks: Ranks) -> None:
        self._link, self._ranks = link, ranks
        self._once = threading.Lock()  # never released
        ranks.on_failure(self.end)

    def end(self, reason: str) -> NoReturn:
        self._once.acquire()
        _report(self._link, m.EngineFailed(reason))
        self._ranks.end_workers()
        _leave(1)


def _leave(status: int) -> NoReturn:
    """Ends the process; threads that wait in torch for a lost rank would hold up the usual end."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def _leave_hung(link: Link, reason: str) -> NoReturn:
    log.error("%s", reason)
    _report(link, m.EngineFailed(reason))
    _leave(1)


def _serve(link: Link, inbox: Inbox, closing: ExitStack) -> int:
    from headrace.engine.core import EngineCore
    from headrace.engine.loader import load
    from headrace.parallel.transport import RankLost

    first = inbox.get()
    if not isinstance(first, m.LoadModel):
        return 0
    config = EngineConfig(**first.settings)
    logs.to_stderr(logs.level_of(config.server.log_level, logging.WARNING), config.server.log_format)
    loaded = load(config, lambda phase: link.send(m.LoadProgress(*phase)))
    closing.callback(loaded.close)
    watch = RankWatch(link, loaded.ranks) if loaded.ranks is not None else None
    try:
        core = EngineCore(loaded)
        steps = StepWatch.of(config, partial(_leave_hung, link) if watch is None else watch.end)
        inbox.on_ping = steps.look
        return _step_on(core, link, inbox, steps)
    except RankLost as error:
        assert watch is not None and loaded.ranks is not None, "one rank loses none"
        watch.end(loaded.ranks.why_lost(error))


def _step_on(core: EngineCore, link: Link, inbox: Inbox, steps: StepWatch) -> int:
    """Steps until the other side is gone, which ends what is under way."""
    from headrace.engine.call_handlers import CallHandlers

    calls, refused, between = CallHandlers(core), dict[str, Refused](), True
    core.on_prefill = partial(_tell_of_prefills, link)
    inbox.serving.set()
    with contextlib.suppress(*GONE):
        link.send(m.EngineReady(core.loaded.capacity))
        while _drain(core, inbox, refused, calls, link):
            _answer(link, calls.advance())
            between = False
            with steps:
                deltas = core.step()
            between = True
            link.send_events(m.Events(deltas, core.take_started(), refused, core.stats()))
            refused = {}
    if between:  # what a step leaves half done is not to be stored
        core.abort_all()
    return 0


def _tell_of_prefills(link: Link, prefills: list[Prefill], expected_s: float) -> None:
    """In the middle of a step, which goes on to its end whether the other side is there or not."""
    with contextlib.suppress(*GONE):
        link.send(m.Prefills(prefills, expected_s))


def _answer(link: Link, answers: list[Answered]) -> None:
    for each in answers:
        link.send(m.CallAnswer(*each))


def _drain(core: EngineCore, inbox: Inbox, refused: dict[str, Refused], calls: CallHandlers, link: Link) -> bool:
    """Takes in what has arrived, waiting for something if there is nothing to do. False: the other side is gone.

    Where there are tiers, or other ranks stream, it waits for REPORT_S at most: their figures change beside the steps.
    It wakes up for the end of a pin, which the next step sees to.
    """
    block = not core.has_work and not calls.pending
    idle_s = REPORT_S if core.offload is not None or core.loaded.executor.told_late else None
    idle_s = min((each for each in (idle_s, core.pins.wait_s) if each is not None), default=None)
    while block or not inbox.empty():
        try:
            message = inbox.get(timeout=TICK_S if core.settle() else idle_s)
        except queue.Empty:
            return True  # the next report tells what has been stored meanwhile
        if message is None:
            return False
        block = False
        if isinstance(message, m.Abort):
            core.abort(message.request_id)
        elif isinstance(message, m.Call):
            _answer(link, calls.begin(message.number, message.call))
        elif isinstance(message, m.Misread):
            refused[message.request_id] = Refused(f"the engine cannot read this request: {message.told}")
        elif isinstance(message, m.Add):
            try:
                core.add(message.request)
            except InvalidRequest as error:
                refused[message.request.request_id] = Refused.by(error)
    return True


if __name__ == "__main__":
    _leave(main(int(sys.argv[1])))
