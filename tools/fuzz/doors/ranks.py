"""The ranks' port while workers come, a control link whose bytes somebody changes, and a worker that sends nonsense.

Whatever strangers send, a true worker gets in each time; a control link passes on a beginning of what was sent or is
refused; a worker that knows the secret and sends what it must not is lost, and the driver goes on.
"""

from __future__ import annotations

import os
import socket
import struct
import threading
import time
from contextlib import ExitStack, suppress
from pathlib import Path
from random import Random
from typing import Any

from headrace.parallel import control
from headrace.parallel.control import (
    MOST_FROM_WORKER,
    NONCE,
    Channel,
    ControlMessage,
    DriverPing,
    JoinGroup,
    Refused,
    RunStep,
    StopWorker,
    StoreAdd,
    StoreGet,
    StoreSet,
    StoreValue,
    WorkerFailed,
    WorkerHello,
    WorkerPong,
    WorkerReady,
    connect,
)
from headrace.parallel.handshake import Handshake
from headrace.parallel.supervisor import WorkerSupervisor
from headrace.parallel.transport import RankLost
from tools.fuzz.doors import Door
from tools.fuzz.mutate import EDGES, TEXTS, damaged

SECRET = "the secret of the attacked ranks"
HOST = "127.0.0.1"
LIMIT_S = 25.0


def door() -> Door:
    return RanksDoor()


class RanksDoor:
    memory_mib = 96
    case_s = 60.0

    def open(self, folder: Path) -> None:
        self._crashed: list[str] = []
        self._answers: list[bytes] = [bytes(64)]
        threading.excepthook = lambda args: self._crashed.append(f"{args.exc_type.__name__}: {args.exc_value}")
        link, _ = pair()  # what is made once, and stays
        link.close()
        self._descriptors = len(os.listdir("/proc/self/fd"))
        self._threads = threading.active_count()

    def case(self, rng: Random) -> str:
        told = rng.choice((self._port, self._port, self._frames, self._worker, self._greetings))(rng)
        assert not self._crashed, self._crashed
        self._check_nothing_stays()
        return told

    def close(self) -> None:
        threading.excepthook = threading.__excepthook__

    def _check_nothing_stays(self) -> None:
        end = time.monotonic() + LIMIT_S
        while len(os.listdir("/proc/self/fd")) > self._descriptors or threading.active_count() > self._threads:
            assert time.monotonic() < end, "descriptors or threads stay behind"
            time.sleep(0.001)

    def _port(self, rng: Random) -> str:
        """Strangers, and then a true worker."""
        with Handshake(HOST, SECRET) as handshake, ExitStack() as held:
            for _ in range(rng.choice((1, 4, 16, 300))):
                with suppress(OSError):
                    link = held.enter_context(socket.create_connection(_address(handshake), timeout=LIMIT_S))
                    self._attack(link, rng)
            worker = connect(_address(handshake), SECRET, HOST, LIMIT_S)
            worker.send(WorkerHello(1, 1, HOST))
            driver, _ = handshake.admit(range(1, 2), LIMIT_S, lambda: None)[1]
            driver.send(StopWorker())
            assert worker.receive() == StopWorker()
            driver.close()
            worker.close()
        return "worker came in"

    def _attack(self, link: socket.socket, rng: Random) -> None:
        """One stranger: it knows nothing of the secret but what it saw of handshakes that were true."""
        kind = rng.randrange(8)
        if kind == 0:
            return
        if kind == 1:
            link.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            link.close()
        elif kind == 2:
            link.sendall(rng.randbytes(rng.choice((1, 31, 63, 64, 65, 5000, 200_000))))
        elif kind == 3:
            link.sendall(rng.choice(self._answers))
        else:
            nonce = control._exactly(link, NONCE) or bytes(NONCE)
            answer, key, both = _answer(nonce, rng)
            self._answers = [*self._answers[-20:], answer]
            if kind == 4:
                link.sendall(nonce + answer[NONCE:])
            elif kind == 5:
                changed = damaged(answer, rng)
                link.sendall(changed if changed[:64] != answer else changed[:32])
            else:
                link.sendall(answer)
                frame = _frame(control._mac(key, b"to driver", both), 0, _body(WorkerHello(1, 1, HOST)))
                changed = damaged(frame, rng)
                link.sendall(rng.choice((b"", frame[:-1], _cut(changed, frame), b"\xff" * 40)))

    def _frames(self, rng: Random) -> str:
        """Frames that were sent, in another order, repeated, cut or damaged on their way, in either direction."""
        driver, worker = pair()
        near, far = (driver, worker) if rng.random() < 0.5 else (worker, driver)
        sent = [_message(rng) for _ in range(rng.choice((1, 2, 5)))]
        wire = _Wire()
        link, near._link = near._link, wire  # type: ignore[assignment]
        for message in sent:
            near.send(message)
        near._link = link
        sender = threading.Thread(target=_send_all, args=(link, _changed(wire.frames, rng)))
        sender.start()
        got, how = [], "ended"
        try:
            while (message := far.receive()) is not None:  # type: ignore[assignment]
                got.append(message)
        except (Refused, OSError) as error:
            how = type(error).__name__
        far.close()
        sender.join()
        near.close()
        assert got == sent[: len(got)], "a frame passed that was not sent as the next one"
        return f"link {how}"

    def _worker(self, rng: Random) -> str:
        """A worker that knows the secret and sends whatever comes to its mind."""
        driver, worker = pair()
        workers = WorkerSupervisor({1: (driver, WorkerHello(1, 1, HOST))}, LIMIT_S)
        worker._link.settimeout(LIMIT_S)
        try:
            with suppress(OSError):
                for _ in range(rng.choice((1, 3, 10))):
                    if rng.random() < 0.2:
                        _send_raw(worker, damaged(_body(_message(rng)), rng))
                    else:
                        worker.send(_message(rng))
            with suppress(OSError):
                worker.send(StoreGet("end"))
                worker._link.shutdown(socket.SHUT_WR)
            assert workers.failed.wait(LIMIT_S), "the end of the link is the end of the rank"
            try:
                workers.send(b"")
            except RankLost as lost:
                return "lost: " + str(lost).split(":")[0][:40]
            raise AssertionError("a lost rank was sent a step")
        finally:
            worker.close()
            workers.close()

    def _greetings(self, rng: Random) -> str:
        """A worker that knows the secret and says something odd at first."""
        with Handshake(HOST, SECRET) as handshake:
            worker = connect(_address(handshake), SECRET, HOST, LIMIT_S)
            with suppress(OSError):
                worker.send(WorkerHello(_number(rng), _number(rng), rng.choice(TEXTS[:6] + TEXTS[7:])))
            try:
                links = handshake.admit(range(1, 3), 0.05, lambda: None)
            except (ValueError, TimeoutError) as error:
                return type(error).__name__
            finally:
                worker.close()
            raise AssertionError(f"two ranks of one: {links}")


def _send_all(link: socket.socket, data: bytes) -> None:
    """All of it, and the end; the other side may hang up before."""
    with suppress(OSError):
        link.sendall(data)
        link.shutdown(socket.SHUT_WR)


class _Wire:
    """Keeps the frames that a channel sends."""

    def __init__(self) -> None:
        self.frames: list[bytes] = []

    def sendall(self, frame: bytes) -> None:
        self.frames.append(frame)


def pair() -> tuple[Channel, Channel]:
    with Handshake(HOST, SECRET) as handshake:
        worker = connect(_address(handshake), SECRET, HOST, LIMIT_S)
        worker.send(WorkerHello(1, 1, HOST))
        return handshake.admit(range(1, 2), LIMIT_S, lambda: None)[1][0], worker


def _address(handshake: Handshake) -> tuple[str, int]:
    host, _, port = handshake.address.partition(":")
    return host, int(port)


def _answer(nonce: bytes, rng: Random) -> tuple[bytes, bytes, bytes]:
    """What a true worker answers."""
    key, ours = SECRET.encode(), rng.randbytes(NONCE)
    return ours + control._mac(key, b"worker", nonce + ours), key, nonce + ours


def _body(message: ControlMessage) -> bytes:
    return bytes(control._encoder.encode(message))


def _frame(key: bytes, number: int, body: bytes) -> bytes:
    return struct.pack("!I", len(body)) + control._frame_mac(key, number, body) + body


def _send_raw(worker: Channel, body: bytes) -> None:
    worker._link.sendall(_frame(worker._key, worker._sent, body))
    worker._sent += 1


def _cut(changed: bytes, frame: bytes) -> bytes:
    return frame[:10] if changed[: len(frame)] == frame else changed


def _changed(frames: list[bytes], rng: Random) -> bytes:
    kind = rng.randrange(6)
    if kind == 0:
        return damaged(b"".join(frames), rng)
    if kind == 1:
        return b"".join(rng.sample(frames, len(frames)))
    if kind == 2:
        return b"".join(frame * rng.choice((1, 2)) for frame in frames)
    if kind == 3:
        return b"".join(frame for frame in frames if rng.random() < 0.6)
    if kind == 4:
        length = rng.choice((0, 1, MOST_FROM_WORKER, MOST_FROM_WORKER + 1, 2**31, 2**32 - 1))
        return b"".join(frames) + struct.pack("!I", length) + rng.randbytes(rng.choice((0, 32, 5000)))
    at = rng.randrange(len(frames))
    return b"".join([*frames[:at], _frame(rng.randbytes(32), at, frames[at][36:]), *frames[at:]])


def _number(rng: Random) -> int:
    return rng.choice([edge for edge in EDGES if -(2**63) <= edge < 2**64])


def _text(rng: Random) -> str:
    return rng.choice([text for text in TEXTS if text != "\ud800"])


def _bytes(rng: Random) -> bytes:
    return rng.choice((b"", b"7", b"no number", bytes(21), bytes(100_000), bytes((1 << 20) + 1)))


def _message(rng: Random) -> ControlMessage:
    made: list[Any] = [
        StoreSet(rng.choice("abc") if rng.random() < 0.5 else _text(rng), _bytes(rng)),
        StoreSet("x" * rng.choice((511, 512, 513)), b""),
        StoreGet(_text(rng)),
        StoreAdd(rng.choice("abc"), _number(rng)),
        StoreValue(None),
        WorkerReady(_bytes(rng)),
        WorkerFailed(_text(rng), rng.random() < 0.5),
        WorkerPong(),
        DriverPing(),
        StopWorker(),
        RunStep(_bytes(rng)),
        WorkerHello(_number(rng), _number(rng), _text(rng)),
        JoinGroup(_number(rng), 0, -1, b"", _text(rng)),
    ]
    message: ControlMessage = rng.choice(made)
    return message
