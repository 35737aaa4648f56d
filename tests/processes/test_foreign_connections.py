"""Ranks start, and start again, while strangers crowd their ports; afterwards no port takes in anything."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, suppress

import psutil
import pytest

from headrace.config import EngineConfig
from headrace.parallel import launch
from headrace.parallel.group import Group
from headrace.parallel.supervisor import WorkerProcess
from tests.support.rank_groups import echoes, opened

pytestmark = pytest.mark.usefixtures("importable")


SPAWN = launch.spawn


class Crowd:
    """Connections that say nothing, made before the workers come, and held."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.held: list[socket.socket] = []

    def spawn(self, config: EngineConfig, address: str, secret: str, met: ExitStack) -> Mapping[int, WorkerProcess]:
        host, _, port = address.partition(":")
        self.held += [socket.create_connection((host, int(port)), timeout=60) for _ in range(self.count)]
        return SPAWN(config, address, secret, met)

    def __enter__(self) -> Crowd:
        return self

    def __exit__(self, *_: object) -> None:
        for link in self.held:
            link.close()


@pytest.mark.matrix
@pytest.mark.parametrize("count", [70, 400])
def test_a_crowd_at_the_port_does_not_prevent_the_start(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor the second one, after a rank was lost."""
    with Crowd(count) as crowd:
        monkeypatch.setattr(launch, "spawn", crowd.spawn)
        with opened(3) as group:
            assert group.workers is not None
            group.workers.wait_ready()
            assert echoes(group, 1)
            os.kill(group.workers.pids[1], signal.SIGKILL)
            assert group.workers.failed.wait()
        with opened(3) as group:
            assert group.workers is not None
            group.workers.wait_ready()
            assert echoes(group, 1)
        assert len(crowd.held) == 2 * count


def listening(pid: int) -> list[tuple[str, int]]:
    found = psutil.Process(pid).net_connections("tcp")
    return [(one.laddr.ip, one.laddr.port) for one in found if one.status == psutil.CONN_LISTEN]


def pids(group: Group) -> list[int]:
    assert group.workers is not None
    return [os.getpid(), *group.workers.pids.values()]


def try_in(address: tuple[str, int]) -> socket.socket | None:
    link = socket.socket()
    link.settimeout(0.05)
    with suppress(OSError):
        link.connect(address)
        link.sendall((1).to_bytes(8, "little") + b"x" * 100)
        return link
    link.close()
    return None


@pytest.fixture(scope="module")
def met() -> Iterator[tuple[Group, set[tuple[str, int]]]]:
    """Two ranks that have met, and the ports on which this process listened before."""
    before = set(listening(os.getpid()))
    with opened(2) as group:
        assert group.workers is not None
        group.workers.wait_ready()
        yield group, before


STRANGER = """if True:
    import os, sys, threading, time
    from datetime import timedelta
    import torch.distributed as dist

    def change(port):
        dist.TCPStore("127.0.0.1", port, None, False, timedelta(seconds=5), wait_for_workers=False).set("key", "x")
        print("changed", flush=True)

    for port in sys.argv[1:]:
        threading.Thread(target=change, args=(int(port),), daemon=True).start()
    time.sleep(1.5)
    os._exit(0)
"""


def test_no_port_is_a_store_that_strangers_may_change(met: tuple[Group, set[tuple[str, int]]]) -> None:
    group, before = met
    ports = [str(port) for pid in pids(group) for _, port in set(listening(pid)) - before]
    assert ports
    done = subprocess.run([sys.executable, "-c", STRANGER, *ports], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and "changed" not in done.stdout, done
    assert echoes(group, 1)


def test_no_port_takes_in_anything_once_the_ranks_have_met(met: tuple[Group, set[tuple[str, int]]]) -> None:
    """Last, since what the kernel keeps stays there."""
    group, before = met
    with ExitStack() as held:
        kept = 0
        for pid in reversed(pids(group)):
            ours, process = set(listening(pid)) - before, psutil.Process(pid)
            assert 0 < len(ours) <= 3
            descriptors = process.num_fds()
            for address in ours:
                links = [link for _ in range(12) if (link := try_in(address)) is not None]
                for link in links:
                    held.enter_context(link)
                assert len(links) <= 2, "the kernel keeps two, and nobody takes them"
                kept += len(links)
            time.sleep(0.1)
            assert process.num_fds() <= descriptors + (kept if pid == os.getpid() else 0)
        assert echoes(group, 2)
