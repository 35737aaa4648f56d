"""The store that the driver keeps for the ranks, and gloo's sockets once the ranks have met."""

from __future__ import annotations

import ctypes
import select
import socket
import threading
from collections.abc import Callable
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from headrace.parallel import link_store as stores
from headrace.parallel import supervisor
from headrace.parallel.control import (
    Channel,
    ControlMessage,
    JoinGroup,
    RunStep,
    StoreAdd,
    StoreGet,
    StoreSet,
    StoreValue,
    WorkerHello,
    WorkerReady,
)
from headrace.parallel.link_store import LinkStore, StoreValues
from headrace.parallel.listeners import LIBC, EpollEvent, _as_bytes, stop_accepting
from headrace.parallel.supervisor import WorkerSupervisor
from headrace.parallel.transport import RankLost
from headrace.parallel.worker import DriverLink
from tests.support.control_channels import pair

ASKS = st.one_of(
    st.builds(StoreSet, st.text(max_size=12), st.binary(max_size=40)),
    st.builds(StoreGet, st.text(max_size=12)),
    st.builds(StoreAdd, st.text(max_size=12), st.integers(-(2**63), 2**63 - 1)),
)
ODD = [
    StoreSet("x" * (stores.MOST_KEY + 1), b""),
    StoreSet("x", bytes(stores.MOST_VALUE + 1)),
    StoreAdd("x", 1),
]


@given(st.lists(ASKS, max_size=40))
def test_bounds_hold_whatever_is_asked(asks: list[StoreSet | StoreGet | StoreAdd]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stores, "MOST_KEYS", 4)
        patch.setattr(stores, "MOST_KEY", 8)
        patch.setattr(stores, "MOST_VALUE", 30)
        patch.setattr(stores, "MOST_TOTAL", 60)
        values, held = StoreValues(), dict[str, bytes]()
        for ask in asks:
            try:
                told = values.answer(ask).value
            except ValueError:
                assert values.answer(StoreGet(ask.key)).value == held.get(ask.key)
                continue
            if isinstance(ask, StoreSet):
                held[ask.key] = ask.value
            elif isinstance(ask, StoreAdd):
                held[ask.key] = str(int(held.get(ask.key, b"0")) + ask.amount).encode()
            assert told == held.get(ask.key)
        assert len(held) <= 4 and sum(map(len, held.values())) <= 60
        assert all(len(key) <= 8 and len(value) <= 30 for key, value in held.items())


def test_torch_uses_it_through_prefixes() -> None:
    values = StoreValues()
    first, second = (LinkStore(values.answer) for _ in range(2))
    near, far = dist.PrefixStore("p", first), dist.PrefixStore("p", second)
    got: list[bytes] = []
    waiting = threading.Thread(target=lambda: got.append(far.get("k")))
    waiting.start()
    assert not far.check(["k"])
    near.set("k", b"value")
    waiting.join(60)
    far.wait(["k"], timedelta(seconds=60))
    assert got == [b"value"] and far.check(["k"])
    assert [near.add("n", 2), far.add("n", 40)] == [2, 42]
    assert first.left == [b"value"]


def test_what_nobody_leaves_is_not_waited_for_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stores, "FORM_S", 0.1)
    with pytest.raises(TimeoutError, match="no rank left k"):
        LinkStore(StoreValues().answer).get("k")


def served(answer: Callable[[WorkerSupervisor, Channel], None]) -> None:
    """A workers with one worker, whose end of the link is given to `answer`."""
    driver, worker = pair()
    workers = WorkerSupervisor({1: (driver, WorkerHello(1, 1, "here"))}, 30.0)
    try:
        answer(workers, worker)
    finally:
        workers.close()
        worker.close()


def test_a_worker_is_given_longer_until_it_is_ready() -> None:
    """Loading may keep its threads from answering; the limit of seconds counts from WorkerReady."""
    driver, worker = pair()
    workers = WorkerSupervisor({1: (driver, WorkerHello(1, 1, "here"))}, 0.2)
    try:
        assert not workers.failed.wait(0.6)
        worker.send(WorkerReady(b"there"))
        assert workers.wait_ready(20) == {1: b"there"}
        assert workers.failed.wait(20)
        assert workers.reason == "rank 1 does not answer (rank_timeout_s is 0.2)"
    finally:
        workers.close()
        worker.close()


def test_a_worker_that_never_gets_ready_is_lost_in_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor, "FORM_S", 0.3)
    driver, worker = pair()
    workers = WorkerSupervisor({1: (driver, WorkerHello(1, 1, "here"))}, 0.2)
    try:
        with pytest.raises(RankLost, match=r"rank 1 did not answer for .* s while it loaded"):
            workers.wait_ready(20)
    finally:
        workers.close()
        worker.close()


def test_workers_and_driver_share_values_over_the_control_link() -> None:
    def ask(workers: WorkerSupervisor, worker: Channel) -> None:
        workers.ask(StoreSet("driver", b"0"))
        worker.send(StoreSet("worker", b"1"))
        worker.send(StoreGet("driver"))
        worker.send(StoreGet("none"))
        told = [worker.receive() for _ in range(3)]
        assert told == [StoreValue(b"1"), StoreValue(b"0"), StoreValue(None)]
        assert workers.ask(StoreGet("worker")) == StoreValue(b"1")
        link = DriverLink(worker)
        answers: list[StoreValue] = []
        asking = threading.Thread(target=lambda: answers.append(link.ask(StoreAdd("n", 5))))
        asking.start()
        said = worker.receive()
        assert said is not None
        link._take(said)
        asking.join(60)
        assert answers == [StoreValue(b"5")]

    served(ask)


FROM_NO_WORKER = [*ODD, StoreValue(b"x"), RunStep(b""), WorkerHello(1, 1, ""), JoinGroup(2, 2, 1, b"", "os:abort")]


@pytest.mark.parametrize("odd", FROM_NO_WORKER)
def test_a_worker_that_sends_what_it_must_not_is_lost_and_nothing_else(odd: ControlMessage) -> None:
    def ask(workers: WorkerSupervisor, worker: Channel) -> None:
        worker.send(StoreSet("x", b"no number"))
        worker.send(odd)
        assert workers.failed.wait(60)
        with pytest.raises(RankLost, match="rank 1 "):
            workers.ask(StoreGet("x"))

    served(ask)


def test_only_sockets_that_were_published_stop_accepting() -> None:
    with ExitStack() as closing:
        ours, others = (closing.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(2))
        polled = closing.enter_context(select.epoll())
        for one in (ours, others):
            polled.register(one, select.EPOLLIN)
        linked = closing.enter_context(socket.create_connection(ours.getsockname()))
        accepted = closing.enter_context(ours.accept()[0])
        assert stop_accepting([b"before" + _as_bytes(ours.getsockname()) + b"after"]) == 1
        for address in (ours.getsockname(), others.getsockname()):
            closing.enter_context(socket.create_connection(address))
        assert polled.poll(60) == [(others.fileno(), select.EPOLLIN)]
        linked.sendall(b"as before")
        assert accepted.recv(64) == b"as before"
        polled.unregister(ours)
        assert stop_accepting([]) == 0


def test_what_a_poller_reports_with_a_socket_stays() -> None:
    """gloo keeps a pointer there."""
    with socket.create_server(("127.0.0.1", 0)) as listening, select.epoll() as poller:
        event = EpollEvent(select.EPOLLIN, 0x7F00DEADBEE8)
        assert LIBC.epoll_ctl(poller.fileno(), 1, listening.fileno(), ctypes.byref(event)) == 0
        assert stop_accepting([_as_bytes(listening.getsockname())]) == 1
        line = next(x for x in Path(f"/proc/self/fdinfo/{poller.fileno()}").read_text().splitlines() if "tfd" in x)
        assert line.split()[5] == "7f00deadbee8" and int(line.split()[3], 16) & select.EPOLLIN == 0
