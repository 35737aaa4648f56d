"""The control link: who is let in, what is noticed where somebody meddles with it, and the proof between ranks."""

from __future__ import annotations

import queue
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import pytest

from headrace.config import EngineConfig
from headrace.parallel import control
from headrace.parallel.control import Refused, RunStep, StopWorker, WorkerHello, connect, proof
from headrace.parallel.group import prove
from headrace.parallel.handshake import Handshake
from headrace.parallel.interfaces import interface_name
from headrace.parallel.launch import TorchRun, _read_secret, open_group
from headrace.parallel.supervisor import WorkerSupervisor
from headrace.parallel.transport import LoopbackHub, RankLost
from headrace.parallel.worker import decode_config, encode_config
from tests.support.control_channels import SECRET, address, nothing, pair

OTHER = "another secret of theirs"


def test_messages_pass_both_ways_and_end() -> None:
    driver, worker = pair()
    big = RunStep(bytes(range(256)) * 20_000)
    threading.Thread(target=lambda: [driver.send(m) for m in (big, StopWorker(), big)], daemon=True).start()
    assert [worker.receive() for _ in range(3)] == [big, StopWorker(), big]
    worker.send(WorkerHello(1, 2, "host"))
    assert driver.receive() == WorkerHello(1, 2, "host")
    worker.close()
    assert driver.receive() is None
    driver.close()


FRAMES: list[tuple[str, Callable[[bytes], bytes]]] = [
    ("changed", lambda sent: sent[:-1] + bytes([sent[-1] ^ 1])),
    ("repeated", lambda sent: sent + sent),
    ("left out", lambda sent: sent[len(sent) // 2 :]),
    ("exchanged", lambda sent: sent[len(sent) // 2 :] + sent[: len(sent) // 2]),
    ("slipped in", lambda sent: struct.pack("!I", 4) + bytes(32) + b"\x81\xa4te" + sent),
    ("too long", lambda sent: struct.pack("!I", control.MOST_BYTES + 1) + sent[4:]),
]


@pytest.mark.parametrize("meddle", [meddle for _, meddle in FRAMES], ids=[name for name, _ in FRAMES])
def test_a_frame_that_was_not_sent_so_is_refused(meddle: Callable[[bytes], bytes]) -> None:
    driver, worker = pair(meddle)
    both = driver._link
    sent = []

    class Collect:
        def sendall(self, data: bytes) -> None:
            sent.append(data)

    driver._link = Collect()  # type: ignore[assignment]
    driver.send(RunStep(b"first"))
    driver.send(RunStep(b"other"))
    both.sendall(b"".join(sent))
    with pytest.raises(Refused):
        while worker.receive() is not None:
            pass
    both.close()


def test_a_frame_of_one_direction_is_none_of_the_other() -> None:
    driver, worker = pair()
    worker.send(StopWorker())
    frame = driver._link.recv(1 << 16)
    driver._link.sendall(frame)
    with pytest.raises(Refused, match="right code"):
        worker.receive()


@pytest.fixture
def listener() -> Iterator[Handshake]:
    with Handshake("127.0.0.1", SECRET) as listener:
        yield listener


def test_handshake_lets_in_who_knows_the_secret_and_nobody_else(
    listener: Handshake, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(Refused):
        connect(address(listener), OTHER, "127.0.0.1")
    with socket.create_connection(address(listener)) as mute, socket.create_connection(address(listener)) as rude:
        rude.sendall(bytes(200))
        assert len(rude.recv(32)) == 32
        with suppress(ConnectionResetError):
            assert rude.recv(64) in (b"", control.REFUSAL)
        connect(address(listener), SECRET, "127.0.0.1").send(WorkerHello(1, 42, "here"))
        links = listener.admit(range(1, 2), 60, nothing)
        assert links[1][1] == WorkerHello(1, 42, "here")
        mute.close()
    listener.close()
    assert " ".join(caplog.messages).count("1 the other side does not know the secret") == 2


def test_a_driver_that_does_not_know_the_secret_learns_nothing() -> None:
    with Handshake("127.0.0.1", OTHER) as false, pytest.raises(Refused):
        connect(address(false), SECRET, "127.0.0.1")


@pytest.mark.parametrize("rank", [0, 1, 3])
def test_handshake_refuses_ranks_that_are_taken_or_none(listener: Handshake, rank: int) -> None:
    for number in (1, rank):
        connect(address(listener), SECRET, "127.0.0.1").send(WorkerHello(number, 1, "here"))
    with pytest.raises(ValueError, match="says that it is rank"):
        listener.admit(range(1, 3), 60, nothing)


def test_handshake_names_who_is_missing(listener: Handshake) -> None:
    connect(address(listener), SECRET, "127.0.0.1").send(WorkerHello(2, 1, "here"))
    with pytest.raises(TimeoutError, match=r"rank 1 did not come within 0\.3 s"):
        listener.admit(range(1, 3), 0.3, nothing)


def test_supervisor_keeps_the_first_reason_and_tells_late_listeners() -> None:
    driver, worker = pair()
    workers = WorkerSupervisor({1: (driver, WorkerHello(1, 1, "here"))}, 10.0)
    told: queue.SimpleQueue[str] = queue.SimpleQueue()
    workers.on_failure(told.put)
    worker.send(control.WorkerFailed("ValueError: this", False))
    assert workers.failed.wait()
    worker.close()
    workers.on_failure(told.put)
    with pytest.raises(RankLost, match="rank 1 failed: ValueError: this"):
        workers.wait_ready()
    workers.close()
    assert [told.get(), told.get()] == ["rank 1 failed: ValueError: this"] * 2 and told.empty()


class Ended:
    """A worker's process that has ended."""

    def __init__(self, how: str) -> None:
        self._how = how

    def ended(self) -> str | None:
        return self._how

    def terminate(self) -> None: ...

    kill = terminate


@pytest.mark.parametrize("killed", [True, False])
def test_a_rank_that_ends_over_another_is_not_the_one_that_is_named(killed: bool) -> None:
    """Rank 2 says that it lost rank 1, and is gone, before the end of rank 1 is seen."""
    (driver1, worker1), (driver2, worker2) = pair(), pair()
    links = {1: (driver1, WorkerHello(1, 1, "here")), 2: (driver2, WorkerHello(2, 1, "here"))}
    workers = WorkerSupervisor(links, 10.0, {1: Ended("ended by SIGKILL"), 2: Ended("ended with status 1")})
    worker2.send(control.WorkerFailed("RankLost: rank 1", True))
    worker2.close()
    if killed:
        assert not workers.failed.wait(0.1)
        worker1.close()
    assert workers.failed.wait(10)
    assert workers.reason == ("rank 1 is gone: ended by SIGKILL" if killed else "rank 2 failed: RankLost: rank 1")
    workers.close()
    worker1.close()


@pytest.mark.parametrize(("second", "agree"), [(SECRET, True), (OTHER, False)])
def test_ranks_prove_the_secret_to_each_other(second: str, agree: bool) -> None:
    hub = LoopbackHub(3)
    ends = [hub.transport(rank) for rank in range(3)]
    with ThreadPoolExecutor() as pool:
        done = [
            pool.submit(prove, end, secret, "x") for end, secret in zip(ends, (SECRET, second, SECRET), strict=True)
        ]
        errors = [future.exception() for future in done]
    assert [error is None for error in errors] == [agree] * 3
    assert agree or "rank 1 of the x group" in str(errors[0])


def test_proofs_differ_by_where_their_parts_end() -> None:
    assert proof(SECRET, b"ab", b"c") != proof(SECRET, b"a", b"bc")
    with pytest.raises(ValueError, match="at least 16"):
        proof("short")


def test_a_secret_file_that_others_can_read_is_not_trusted(tmp_path: Path) -> None:
    path = tmp_path / "secret"
    path.write_text(SECRET)
    path.chmod(0o600)
    assert _read_secret(str(path)) == SECRET
    path.chmod(0o640)
    with pytest.raises(ValueError, match="not trusted"):
        _read_secret(str(path))


def test_config_travels_without_the_key_of_the_api() -> None:
    config = EngineConfig(api_key="key", context_parallel_size=3, rank_timeout_s=2.5, max_model_len=None)
    got = decode_config(encode_config(config))
    assert got.server.api_key is None
    assert got.replace(api_key="key") == config


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"context_parallel_size": 0}, "context_parallel_size must be an integer of at least 1"),
        ({"tensor_parallel_size": 0}, "tensor_parallel_size must be an integer of at least 1"),
        ({"distributed_backend": "mpi"}, "distributed_backend must be one of mp, ray"),
        ({"rank_interface": "eth0"}, "rank_interface must be an IPv4 address"),
        ({"rank_interface": "0.0.0.0"}, "rank_interface must be the address of one interface"),
        ({"rank_timeout_s": 0}, "rank_timeout_s must be above 0"),
    ],
)
def test_settings_that_cannot_work(settings: dict[str, object], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        EngineConfig(**settings)


def test_refusals_before_anything_is_started(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="one rank needs no group"):
        open_group(EngineConfig(), "x:y")
    assert interface_name("127.0.0.1") == "lo"
    with pytest.raises(ValueError, match=r"198\.51\.100\.1 is not an address of this host; there are 127\.0\.0\.1"):
        interface_name("198.51.100.1")
    monkeypatch.delenv("HEADRACE_RANK_SECRET", raising=False)
    with pytest.raises(ValueError, match="set HEADRACE_RANK_SECRET"):
        TorchRun(0, 4, 2).check("192.0.2.1")
    monkeypatch.setenv("HEADRACE_RANK_SECRET", SECRET)
    TorchRun(0, 4, 2).check("192.0.2.1")
    with pytest.raises(ValueError, match="reaches no other host"):
        TorchRun(0, 4, 2).check("127.0.0.1")
