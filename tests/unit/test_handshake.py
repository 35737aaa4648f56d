"""The port where workers come in, under attack: connections that say nothing, little, too much, or come in floods."""

from __future__ import annotations

import errno
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

import pytest

from headrace.parallel import control, handshake
from headrace.parallel.control import Channel, Refused, WorkerFailed, WorkerHello, connect
from headrace.parallel.handshake import Handshake

pytestmark = pytest.mark.unit

SECRET = "a secret of the ranks"
OTHER = "another secret of theirs"
LIMIT_S = 60


@pytest.fixture
def listener() -> Iterator[Handshake]:
    with Handshake("127.0.0.1", SECRET) as listener:
        yield listener


def address(listener: Handshake) -> tuple[str, int]:
    host, port = listener.address.split(":")
    return host, int(port)


def stranger(listener: Handshake) -> socket.socket:
    return socket.create_connection(address(listener), timeout=LIMIT_S)


def come(listener: Handshake, *ranks: int) -> list[tuple[Channel, Channel]]:
    """Workers that come now, and the driver's ends."""
    first = min(ranks)
    workers = []
    for rank in ranks:
        workers.append(connect(address(listener), SECRET, "127.0.0.1"))
        workers[-1].send(WorkerHello(rank, 1, "here"))
    links = listener.admit(range(first, first + len(ranks)), LIMIT_S, lambda: None)
    return [(worker, links[rank][0]) for worker, rank in zip(workers, ranks, strict=True)]


def ended(link: socket.socket) -> bool:
    """Waits for the other side's end of a connection."""
    try:
        while link.recv(1 << 16):
            pass
    except ConnectionError:
        return True
    except TimeoutError:
        return False
    return True


def is_open(link: socket.socket) -> bool:
    link.setblocking(False)
    try:
        return bool(link.recv(1, socket.MSG_PEEK))
    except BlockingIOError:
        return True
    except ConnectionError:
        return False


def until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


@contextmanager
def meanwhile(attack: Callable[[], Any]) -> Iterator[None]:
    """Repeats an attack on a thread."""
    over = threading.Event()

    def repeat() -> None:
        while not over.is_set():
            with suppress(OSError):
                attack()

    thread = threading.Thread(target=repeat)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


@pytest.mark.parametrize("count", [70, 400])
def test_silent_connections_do_not_keep_workers_out(listener: Handshake, count: int) -> None:
    threads = threading.active_count()
    with ExitStack() as held:
        for _ in range(count):
            held.enter_context(stranger(listener))
        come(listener, 1, 2)
        assert threading.active_count() <= threads + 1


def test_a_flood_does_not_keep_workers_out(listener: Handshake) -> None:
    """The places are filled anew all the time."""
    held: list[socket.socket] = []

    def more() -> None:
        held.append(stranger(listener))
        if len(held) > 300:
            held.pop(0).close()

    with meanwhile(more):
        until(lambda: len(held) >= 100)
        come(listener, 1, 2, 3)
    for link in held:
        link.close()


def test_connections_that_are_reset_at_once_take_no_place(listener: Handshake) -> None:
    for _ in range(200):
        link = stranger(listener)
        link.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        link.close()
    come(listener, 1)


def test_a_byte_now_and_then_does_not_hold_a_place(listener: Handshake, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handshake, "PROVE_S", 1.0, raising=False)
    with stranger(listener) as slow:
        assert len(slow.recv(32)) == 32
        with pytest.raises(ConnectionError):
            for _ in range(63):
                slow.sendall(b"x")
                time.sleep(0.1)
    come(listener, 1)


def test_the_oldest_stranger_makes_way(listener: Handshake, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handshake, "MOST_STRANGERS", 3)
    monkeypatch.setattr(handshake, "PROVE_S", 600.0)
    monkeypatch.setattr(handshake, "HELLO_S", 600.0)
    proved = connect(address(listener), SECRET, "127.0.0.1")
    with ExitStack() as held:
        strangers = []
        for _ in range(5):
            strangers.append(held.enter_context(stranger(listener)))
            assert len(strangers[-1].recv(32)) == 32
        assert ended(strangers[0]) and ended(strangers[1])
        assert all(is_open(link) for link in strangers[2:])
        proved.send(WorkerHello(1, 1, "here"))
        assert listener.admit(range(1, 2), LIMIT_S, lambda: None)[1][1] == WorkerHello(1, 1, "here")


def test_who_stops_after_the_proof_is_sent_away_and_keeps_nobody_out(
    listener: Handshake, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(handshake, "HELLO_S", 0.5)
    silent = [connect(address(listener), SECRET, "127.0.0.1") for _ in range(80)]
    come(listener, 1)
    assert all(ended(channel._link) for channel in silent)


@pytest.mark.parametrize("part", [b"", bytes(32)], ids=["at once", "after the first part"])
def test_a_worker_comes_again_if_its_connection_ends_before_the_proof(part: bytes) -> None:
    """Until its limit."""
    with socket.create_server(("127.0.0.1", 0)) as closing:
        closing.settimeout(0.1)
        errors: list[Exception] = []

        def come_in_vain() -> None:
            try:
                connect(closing.getsockname(), SECRET, "127.0.0.1", 1.0)
            except Exception as error:
                errors.append(error)

        worker = threading.Thread(target=come_in_vain)
        worker.start()
        tries = 0
        while worker.is_alive():
            with suppress(TimeoutError):
                link, _ = closing.accept()
                tries += 1
                link.sendall(part)
                link.close()
    assert tries > 1 and isinstance(errors[0], ConnectionError)


def test_a_worker_that_was_sent_away_gets_in_later(listener: Handshake, monkeypatch: pytest.MonkeyPatch) -> None:
    hear, sent_away = handshake._PendingConnection.hear, [ConnectionResetError()] * 3

    def hear_or_not(visitor: Any) -> Any:
        if sent_away:
            raise sent_away.pop()
        return hear(visitor)

    monkeypatch.setattr(handshake._PendingConnection, "hear", hear_or_not)
    come(listener, 1)
    assert not sent_away


def test_a_worker_gives_up_at_once_where_nobody_listens(listener: Handshake) -> None:
    listener.close()
    with pytest.raises(ConnectionRefusedError):
        connect(address(listener), SECRET, "127.0.0.1")


def test_a_wrong_secret_is_not_tried_again(listener: Handshake, caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(Refused, match="does not take ours"):
        connect(address(listener), OTHER, "127.0.0.1")
    listener.close()
    assert caplog.messages == [caplog.messages[0]] and "1 the other side does not know the secret" in caplog.text


def test_want_of_file_descriptors_does_not_close_the_port(listener: Handshake, monkeypatch: pytest.MonkeyPatch) -> None:
    accept, failures = socket.socket.accept, [errno.EMFILE, errno.ENFILE, errno.ENOMEM]

    def accept_or_fail(listening: socket.socket) -> Any:
        if failures:
            raise OSError(failures.pop(), "none left")
        return accept(listening)

    monkeypatch.setattr(socket.socket, "accept", accept_or_fail)
    come(listener, 1)
    assert not failures


def test_many_refusals_are_few_lines_of_the_log(listener: Handshake, caplog: pytest.LogCaptureFixture) -> None:
    for _ in range(300):
        with stranger(listener) as rude:
            rude.sendall(bytes(64))
            assert ended(rude)
    listener.close()
    assert 1 <= len(caplog.messages) <= 20
    counts = [int(line.split("refused: ")[1].split()[0]) for line in caplog.messages]
    assert sum(counts) == 300


def test_closing_ends_all_that_has_not_been_admitted(listener: Handshake) -> None:
    worker, mute = connect(address(listener), SECRET, "127.0.0.1"), stranger(listener)
    worker.send(WorkerHello(1, 1, "here"))
    until(lambda: not listener._admitted.empty())
    listener.close()
    listener.close()
    assert worker.receive() is None and ended(mute)
    with pytest.raises(ConnectionRefusedError):
        stranger(listener)


def test_frames_of_workers_are_bounded_before_they_are_read(listener: Handshake) -> None:
    long = connect(address(listener), SECRET, "127.0.0.1")
    long.send(WorkerHello(1, 1, "x" * control.MOST_HELLO))
    assert ended(long._link)
    (worker, driver), *_ = come(listener, 1)
    worker._link.sendall(struct.pack("!I", control.MOST_FROM_WORKER + 1) + bytes(32))
    with pytest.raises(Refused, match="too long"):
        driver.receive()


def test_a_frame_that_holds_no_message_is_refused(listener: Handshake) -> None:
    """Sent by a worker that knows the secret."""
    (worker, driver), *_ = come(listener, 1)
    worker.send(WorkerFailed("first", False))
    assert driver.receive() == WorkerFailed("first", False)
    for body in (b"", b"\x81", b"\x81\xa4type\xa5Hello", bytes(50), b"\x91" * 100_000):
        mac = control._frame_mac(worker._key, worker._sent, body)
        worker._sent += 1
        worker._link.sendall(struct.pack("!I", len(body)) + mac + body)
        with pytest.raises(Refused, match="holds no message"):
            driver.receive()
