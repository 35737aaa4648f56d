"""The remote tier against fakeredis, and against a real server where there is one: blobs, connections, settings."""

from __future__ import annotations

import shutil
import socket
import ssl
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import redis
from hypothesis import given
from hypothesis import strategies as st

from headrace.offload.tiers import redis_connection, remote
from headrace.offload.tiers.base import Read
from headrace.offload.tiers.remote import RemoteTier
from tests.support.redis_servers import Address, Proxy, fake_server, wait_for
from tests.support.remote_tier import BUDGETS, FAR_S, NAMES, blob_of, client, in_time, tier_of, whole
from tests.support.tier_contract import TierContract

pytestmark = pytest.mark.unit


class TestWithBudget(TierContract):
    @pytest.fixture(autouse=True)
    def _served(self, server: Address) -> None:
        self.port = server[1]

    def make(self, tmp_path: Path, budget_bytes: int, quota: float) -> RemoteTier:
        return tier_of(self.port, budget_bytes=budget_bytes, quota=quota)


class TestWithoutBudget(TestWithBudget):
    shares_budget = False

    def make(self, tmp_path: Path, budget_bytes: int, quota: float) -> RemoteTier:
        return tier_of(self.port)


# Storing and reading


@pytest.mark.parametrize("budget", BUDGETS)
def test_put_has_read_drop(server: Address, budget: int | None) -> None:
    tier = tier_of(server[1], budget_bytes=budget)
    parts = [b"head", bytearray(b"x" * 5000), memoryview(b"tail")]
    blob = b"".join(parts)
    assert tier.has(NAMES[:2]) == [False, False]
    assert tier.put(NAMES[0], b"tenant", parts)
    assert tier.has(NAMES[:2]) == [True, False]
    assert whole(tier, NAMES[0], len(blob)) == blob
    assert whole(tier, NAMES[1], len(blob)) is None
    tier.drop([NAMES[0], NAMES[1]])
    assert tier.has(NAMES[:2]) == [False, False]
    stats = tier.stats()
    assert (stats.reads, stats.read_bytes, stats.misses) == (1, len(blob), 1)
    assert (stats.writes, stats.written_bytes, stats.errors, stats.degraded) == (1, len(blob), 0, False)
    tier.close()


@pytest.mark.parametrize("budget", BUDGETS)
def test_a_blob_is_left_as_it_is(server: Address, budget: int | None) -> None:
    tier = tier_of(server[1], budget_bytes=budget)
    assert tier.put(NAMES[0], b"a", [b"first"]) and tier.put(NAMES[0], b"b", [b"other"])
    assert whole(tier, NAMES[0], 5) == b"first"
    tier.close()


def test_ranges(server: Address) -> None:
    tier = tier_of(server[1])
    blob = bytes(range(256)) * 100
    assert tier.put(NAMES[0], b"", [blob])
    into = bytearray(len(blob) + 64)
    view = memoryview(into)
    ends = len(blob)
    cases = [(0, 1), (0, 0), (255, 4096), (300, 5000), (ends - 1, 1), (ends - 1, 2), (ends, 1), (ends + 9, 3)]
    reads = [Read(NAMES[0], offset, view[:size]) for offset, size in cases]
    assert [tier.read([read])[0] for read in reads] == [True, True, True, True, True, False, False, False]
    for offset, size in cases[:5]:
        assert tier.read([Read(NAMES[0], offset, view[:size])]) == [True]
        assert into[:size] == blob[offset : offset + size]
    tier.close()


def test_many_reads_of_several_rounds(server: Address, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote, "ROUND_BYTES", 10_000)
    monkeypatch.setattr(remote, "ROUND_NAMES", 7)
    tier = tier_of(server[1])
    blobs = [blob_of(i, 3000 + 500 * i) for i in range(len(NAMES))]
    for name, blob in zip(NAMES[::2], blobs[::2], strict=True):
        assert tier.put(name, b"", [blob])
    assert tier.has(NAMES) == [True, False] * 20
    intos = [bytearray(len(blob)) for blob in blobs]
    done = tier.read([Read(name, 0, memoryview(into)) for name, into in zip(NAMES, intos, strict=True)])
    assert done == [True, False] * 20
    assert [bytes(into) for into in intos[::2]] == blobs[::2]
    tier.close()


@given(st.lists(st.integers(0, 50), max_size=60))
def test_rounds(sizes: list[int]) -> None:
    """Every read that wants anything is in one round, in order; a round is within both bounds or one read."""
    reads = [Read(b"", 0, memoryview(bytearray(size))) for size in sizes]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(remote, "ROUND_BYTES", 60)
        patch.setattr(remote, "ROUND_NAMES", 5)
        made = list(remote.rounds(reads))
    assert [index for indices in made for index in indices] == [i for i, size in enumerate(sizes) if size]
    for indices in made:
        assert len(indices) == 1 or (sum(sizes[i] for i in indices) <= 60 and len(indices) <= 5)


def test_formats_do_not_meet(server: Address) -> None:
    raw, coarse = tier_of(server[1]), tier_of(server[1], format="int8")
    assert raw.put(NAMES[0], b"", [b"raw"])
    assert coarse.has([NAMES[0]]) == [False]
    raw.close()
    coarse.close()


@pytest.mark.parametrize("budget", BUDGETS)
def test_several_threads(server: Address, budget: int | None) -> None:
    tier = tier_of(server[1], budget_bytes=budget)

    def work(index: int) -> None:
        size = 20_000 + index
        assert tier.put(NAMES[index], b"%d" % (index % 3), [blob_of(index, size)])
        for _ in range(5):
            assert tier.has([NAMES[index]]) == [True]
            assert whole(tier, NAMES[index], size) == blob_of(index, size)

    with ThreadPoolExecutor(6) as threads:
        list(threads.map(work, range(18)))
    assert tier.stats().errors == 0
    tier.close()


def test_wrong_type_is_a_miss(server: Address) -> None:
    tier = tier_of(server[1])
    assert tier.put(NAMES[1], b"", [b"good"])
    client(server).rpush(remote.PREFIX + b"raw:" + NAMES[0], "x")
    into = bytearray(8)
    reads = [Read(NAMES[0], 0, memoryview(into)[:4]), Read(NAMES[1], 0, memoryview(into)[4:])]
    assert tier.read(reads) == [False, True] and into[4:] == b"good"
    stats = tier.stats()
    assert (stats.misses, stats.errors, stats.degraded) == (1, 0, False)
    tier.drop([NAMES[0]])
    assert tier.stats().bad == 1
    assert tier.put(NAMES[0], b"", [b"mine"]) and whole(tier, NAMES[0], 4) == b"mine"
    tier.close()


def test_closed(server: Address) -> None:
    tier = tier_of(server[1])
    assert tier.put(NAMES[0], b"", [b"x"])
    tier.close()
    tier.close()
    assert tier.has([NAMES[0]]) == [False] and whole(tier, NAMES[0], 1) is None
    assert not tier.put(NAMES[1], b"", [b"x"])
    tier.drop([NAMES[0]])
    assert client(server).exists(remote.PREFIX + b"raw:" + NAMES[0]) == 1


def test_idle_connection_lost(proxy: Proxy) -> None:
    """A server that was started again between two calls costs a connection, not a failure."""
    tier = tier_of(proxy.port)
    assert tier.put(NAMES[0], b"", [b"x"])
    proxy.hang_up()
    assert whole(tier, NAMES[0], 1) == b"x"
    stats = tier.stats()
    assert proxy.connections == 2 and (stats.errors, stats.degraded) == (0, False)
    tier.close()


# Settings


def test_password_is_never_told(proxy: Proxy, caplog: pytest.LogCaptureFixture) -> None:
    """Not even where the server quotes it."""
    proxy.misbehave("say", 0, b"-ERR unknown command 'AUTH', with args beginning with: 'ge/heim'\r\n")
    tier = RemoteTier(f"redis://:ge%2Fheim@127.0.0.1:{proxy.port}", timeout_s=1.0)
    assert tier.has(NAMES[:1]) == [False]
    assert "AUTH" in tier.stats().reason and "***" in tier.stats().reason
    assert "heim" not in caplog.text + tier.stats().reason
    tier.close()


@pytest.mark.parametrize(
    "url",
    [
        "", "localhost:6379", "http://:geheim@localhost", "redis://", "redis://:geheim@", "redis://:geheim@host:port",
        "redis://:geheim@host:99999", "redis://:geheim@host/two", "redis://:geheim@host/0?protocol=3", "unix://",
        "redis://:geheim@host/0#1", "redis://:geheim@[::1", "redis://:geheim@host/0?db=one", "redis://:ge/heim@host",
    ],
)  # fmt: skip
def test_malformed_urls(url: str) -> None:
    with pytest.raises(ValueError, match="redis://") as raised:
        RemoteTier(url)
    assert "heim" not in str(raised.value)


def test_urls() -> None:
    kwargs = redis_connection.settings_of("redis://me:ge%2Fheim@host:7000/3", redis)
    assert kwargs == {"username": "me", "password": "ge/heim", "host": "host", "port": 7000, "db": 3}
    assert redis_connection.settings_of("rediss://host", redis)["connection_class"] is redis.SSLConnection
    assert redis_connection.settings_of("unix:///run/redis.sock?db=2", redis)["path"] == "/run/redis.sock"


@pytest.mark.parametrize(
    "options", [{"timeout_s": 0}, {"timeout_s": float("inf")}, {"budget_bytes": 0}, {"quota": 1.5}]
)
def test_settings_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(options))):
        RemoteTier("redis://localhost", **options)


def test_redis_py_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "redis", None)
    with pytest.raises(ValueError, match=r"headrace\[remote\]"):
        RemoteTier("redis://localhost")


def test_redis_py_old(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(redis, "__version__", "5.0.8")
    with pytest.raises(ValueError, match=r"5\.3"):
        RemoteTier("redis://localhost")


def test_connecting_ends_in_time() -> None:
    """Though looking up a name has no time-out; a socket that comes late is closed."""
    go, late = threading.Event(), socket.socket()

    def slow() -> socket.socket:
        go.wait(FAR_S)
        return late

    with pytest.raises(TimeoutError):
        in_time(lambda: redis_connection.connect_within(slow, 0.05))
    assert late.fileno() >= 0
    go.set()
    wait_for(lambda: late.fileno() < 0)


@pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl makes the certificate")
def test_tls(tmp_path: Path) -> None:
    """Values arrive, time-outs hold, an idle connection is found good, an unknown certificate is refused."""
    key, cert = tmp_path / "key.pem", tmp_path / "cert.pem"
    command = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2 -subj /CN=kv"
    ends = ["-addext", "subjectAltName=IP:127.0.0.1", "-keyout", str(key), "-out", str(cert)]
    subprocess.run([*command.split(), *ends], check=True, capture_output=True)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(cert, key)
    with fake_server(context) as address:
        proxy = Proxy(address)
        url = f"rediss://127.0.0.1:{proxy.port}/0"
        tier = RemoteTier(f"{url}?ssl_ca_certs={cert}", timeout_s=2.0, cooldown_s=0.05)
        blob = blob_of(7, 300_000)
        wait_for(lambda: tier.put(NAMES[0], b"", [blob]))
        before = proxy.connections
        assert whole(tier, NAMES[0], len(blob)) == blob and tier.has(NAMES[:2]) == [True, False]
        assert proxy.connections == before
        proxy.misbehave("trickle", 100_000)
        assert in_time(lambda: whole(tier, NAMES[0], len(blob))) is None
        proxy.mode = "pass"
        stranger = RemoteTier(url, timeout_s=5.0)
        assert stranger.has(NAMES[:1]) == [False] and "CERTIFICATE" in stranger.stats().reason
        wait_for(lambda: whole(tier, NAMES[0], len(blob)) == blob)
        tier.close()
        stranger.close()
        proxy.close()
