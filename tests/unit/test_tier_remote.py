"""The remote tier against fakeredis, against a real server where there is one, and against servers that misbehave."""

from __future__ import annotations

import logging
import shutil
import socket
import ssl
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any, TypeVar

import pytest
import redis
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from headrace.kv.tiers import remote, wire
from headrace.kv.tiers.base import Read, TierStats, name_of
from headrace.kv.tiers.remote import RemoteTier
from tests.unit.redis_servers import REAL, Address, Proxy, fake_server, real_server, wait_for
from tests.unit.tier_contract import TierContract

pytestmark = pytest.mark.unit

T = TypeVar("T")
FAR_S = 20.0
"""Far above every time-out here: a call that takes so long hangs."""
NAMES = [name_of(bytes([i]) * 32, "k") for i in range(40)]
BUDGETS = [None, 1 << 20]


@pytest.fixture(scope="module", params=["fakeredis", "real"])
def shared(request: pytest.FixtureRequest) -> Iterator[Address]:
    if request.param == "real" and REAL is None:
        pytest.skip("no valkey-server or redis-server on the PATH")
    with fake_server() if request.param == "fakeredis" else real_server() as address:
        yield address


@pytest.fixture
def server(shared: Address) -> Address:
    """An empty one."""
    client(shared).flushall()
    return shared


@pytest.fixture(scope="module")
def fake() -> Iterator[Address]:
    with fake_server() as address:
        yield address


@pytest.fixture
def proxy(fake: Address) -> Iterator[Proxy]:
    """In front of an empty fake server."""
    client(fake).flushall()
    made = Proxy(fake)
    yield made
    made.close()


def client(address: Address) -> Any:
    return redis.Redis(host=address[0], port=address[1], protocol=2)


def tier_of(port: int, timeout_s: float = 5.0, **options: Any) -> RemoteTier:
    return RemoteTier(f"redis://127.0.0.1:{port}/0", timeout_s=timeout_s, cooldown_s=0.05, **options)


def blob_of(index: int, size: int) -> bytes:
    return (bytes([index, 255 - index]) * size)[:size]


def whole(tier: RemoteTier, name: bytes, size: int) -> bytes | None:
    into = bytearray(size)
    return bytes(into) if tier.read([Read(name, 0, memoryview(into))]) == [True] else None


def in_time(call: Callable[[], T]) -> T:
    """The call's result; fails if it does not end."""
    done: Future[T] = Future()

    def run() -> None:
        try:
            done.set_result(call())
        except Exception as error:
            done.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    assert wait([done], FAR_S).done, "the call hangs"
    return done.result()


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


# Servers that are not there, or misbehave


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
            while second.recv(1 << 16):
                second.sendall(b":0\r\n")

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


@pytest.mark.skipif(REAL is None, reason="no valkey-server or redis-server on the PATH")
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
    kwargs = wire.settings_of("redis://me:ge%2Fheim@host:7000/3", redis)
    assert kwargs == {"username": "me", "password": "ge/heim", "host": "host", "port": 7000, "db": 3}
    assert wire.settings_of("rediss://host", redis)["connection_class"] is redis.SSLConnection
    assert wire.settings_of("unix:///run/redis.sock?db=2", redis)["path"] == "/run/redis.sock"


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
        in_time(lambda: wire.connect_within(slow, 0.05))
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


# Tenants


class Account:
    """What accounts.py promises, in Python: blobs in the order of their use."""

    def __init__(self, budget: int, quota: int) -> None:
        self.budget, self.quota = budget, quota
        self.blobs: dict[bytes, tuple[bytes, int]] = {}

    def use(self, tenant: bytes) -> int:
        return sum(size for owner, size in self.blobs.values() if owner == tenant)

    def touch(self, name: bytes) -> bool:
        if name in self.blobs:
            self.blobs[name] = self.blobs.pop(name)
        return name in self.blobs

    def put(self, name: bytes, tenant: bytes, size: int) -> bool:
        if self.touch(name):
            return True
        kept, uses = dict(self.blobs), {owner: self.use(owner) for owner, _ in self.blobs.values()}
        uses[tenant] = uses.get(tenant, 0) + size
        while sum(uses.values()) > self.budget:
            owners = {owner for owner, _ in kept.values()}
            giver = max(owners, key=lambda owner: (uses[owner], owner == tenant, owner), default=None)
            if giver is None or (uses[tenant] > self.quota and uses[giver] <= self.quota):
                return False
            oldest = next(name for name, (owner, _) in kept.items() if owner == giver)
            uses[giver] -= kept.pop(oldest)[1]
        self.blobs = kept | {name: (tenant, size)}
        return True


TENANTS = [b"a", b"b:\0", b"", b"d"]
PUT = st.tuples(st.just("put"), st.integers(0, 19), st.sampled_from(TENANTS), st.integers(1, 7))
HAS = st.tuples(st.just("has"), st.lists(st.integers(0, 19), max_size=4))
DROP = st.tuples(st.just("drop"), st.lists(st.integers(0, 19), max_size=2))
STEPS = st.lists(st.one_of(PUT, PUT, PUT, PUT, HAS, DROP), min_size=8, max_size=30)


@settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(steps=STEPS, share=st.sampled_from([0.0, 0.25, 0.35, 0.5, 1.0]))
def test_account(server: Address, steps: list[Any], share: float) -> None:
    """The same blobs as the account in Python keeps, after every step; and the server's books agree with its blobs."""
    admin = client(server)
    admin.flushall()
    tier = tier_of(server[1], budget_bytes=1000, quota=share)
    account = Account(1000, int(1000 * share))
    for kind, *rest in steps:
        if kind == "put":
            index, tenant, size = rest[0], rest[1], 100 * rest[2]  # equal sums are likely
            assert tier.put(NAMES[index], tenant, [bytes(size)]) == account.put(NAMES[index], tenant, size)
        elif kind == "has":
            names = [NAMES[index] for index in rest[0]]
            assert tier.has(names) == [account.touch(name) for name in reversed(names)][::-1]
        else:
            tier.drop([NAMES[index] for index in rest[0]])
            for index in rest[0]:
                account.blobs.pop(NAMES[index], None)
        books_agree(admin, account)
    assert tier.stats().errors == 0
    tier.close()


def books_agree(admin: Any, account: Account) -> None:
    start = remote.PREFIX + b"raw:"
    held = {key.removeprefix(start): admin.strlen(key) for key in admin.scan_iter(match=start + b"*", count=1000)}
    assert held == {name: size for name, (_, size) in account.blobs.items()}
    books = admin.hgetall(remote.PREFIX + b"of")
    assert int(books.pop(b"", 0)) == sum(held.values())
    books.pop(b"#", None)
    assert books == {b"raw:" + name: b"%d:%b" % (size, owner) for name, (owner, size) in account.blobs.items()}
    owners = {owner for owner, _ in account.blobs.values()}
    uses = dict(admin.zrange(remote.PREFIX + b"use", 0, -1, withscores=True))
    assert uses == {owner: account.use(owner) for owner in owners}
    for owner in owners:
        order = [b"raw:" + name for name, (of, _) in account.blobs.items() if of == owner]
        assert admin.zrange(remote.PREFIX + b"lru:" + owner, 0, -1) == order


def test_flood_leaves_quotas(server: Address) -> None:
    tier = tier_of(server[1], budget_bytes=100_000, quota=0.25)
    quiet = {name: blob_of(i, 2500) for i, name in enumerate(NAMES[:10])}
    for name, blob in quiet.items():
        assert tier.put(name, b"quiet", [blob])
    for i in range(300):
        assert tier.put(name_of(i.to_bytes(32, "big"), "x"), b"flood", [blob_of(i % 251, 3000)])
    assert tier.has(list(quiet)) == [True] * 10
    assert all(whole(tier, name, 2500) == blob for name, blob in quiet.items())
    stats: TierStats = tier.stats()
    assert stats.used_bytes <= 100_000 and stats.evictions >= 250 and stats.dropped == 0
    assert stats.blobs == 10 + 25
    tier.close()


def test_too_large_for_the_budget(server: Address) -> None:
    tier = tier_of(server[1], budget_bytes=1000)
    assert tier.put(NAMES[0], b"", [bytes(900)])
    assert not tier.put(NAMES[1], b"", [bytes(1001)])
    assert tier.has(NAMES[:2]) == [True, False] and not tier.stats().degraded
    tier.close()


@pytest.mark.parametrize("lost", ["of", "use", "lru:a", "lru:b", "of use", "of lru:a", "use lru:b", "all"])
def test_lost_books(server: Address, lost: str) -> None:
    """Whatever the server loses, writing goes on, and what is there is right."""
    tier, admin = tier_of(server[1], budget_bytes=1000), client(server)
    for i in range(8):
        assert tier.put(NAMES[i], b"ab"[i % 2 : i % 2 + 1], [bytes([i]) * 120])
    if lost == "all":
        admin.flushall()
    else:
        admin.delete(*(remote.PREFIX + key.encode() for key in lost.split()))
    for i in range(8, 40):
        assert tier.put(NAMES[i], b"ab"[i % 2 : i % 2 + 1], [bytes([i]) * 120])
        assert whole(tier, NAMES[i], 120) == bytes([i]) * 120
    assert tier.stats().errors == 0
    named = [member for tenant in b"ab" for member in admin.zrange(remote.PREFIX + b"lru:%c" % tenant, 0, -1)]
    sizes = [admin.strlen(remote.PREFIX + member) for member in named]
    assert set(sizes) == {120} and sum(sizes) <= 1000
    assert sum(use for _, use in admin.zrange(remote.PREFIX + b"use", 0, -1, withscores=True)) == sum(sizes)
    tier.close()
