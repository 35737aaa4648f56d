"""Replies that no command can have: a fault of the remote tier, bounded in bytes, that no number or text outlives."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Iterable, Iterator
from dataclasses import fields
from typing import Any

import msgspec
import pytest
import redis
from hypothesis import given
from hypothesis import strategies as st

from headrace.offload.tiers import redis_connection
from headrace.offload.tiers.base import Read, TierStats
from headrace.offload.tiers.remote import RemoteTier, without
from headrace.offload.tiers.resp_protocol import (
    LINE_BYTES,
    LONGEST_LINE,
    DeadlineCall,
    Expected,
    IntegerReply,
    IntegersReply,
    ReplyParser,
    StatusReply,
    ValueReply,
)
from tests.support.redis_servers import ScriptedServer, wait_for
from tests.support.remote_tier import BUDGETS, NAMES, in_time, tier_of, whole

pytestmark = pytest.mark.unit

MOST = 2**63 - 1
HANDSHAKE = {b"AUTH", b"CLIENT", b"SELECT"}
SLACK = LINE_BYTES + LONGEST_LINE + 64
"""What a reply may cost beside the bytes asked for."""

CALLS: dict[str, Callable[[RemoteTier], Any]] = {
    "has": lambda tier: tier.has(NAMES[:2]),
    "read": lambda tier: whole(tier, NAMES[0], 1000),
    "put": lambda tier: tier.put(NAMES[0], b"", [b"x" * 1000]),
    "drop": lambda tier: tier.drop(NAMES[:2]),
}
NOTHING: dict[str, Any] = {"has": [False, False], "read": None, "put": False, "drop": None}


@pytest.fixture
def serve() -> Iterator[Callable[..., ScriptedServer]]:
    """serve(reply): a server that greets as it should and answers all else with the pieces of `reply`."""
    servers = []

    def make(reply: Iterable[bytes], greets: bool = True) -> ScriptedServer:
        def answer(arguments: list[bytes]) -> Iterable[bytes]:
            return [b"+OK\r\n"] if greets and arguments[0] in HANDSHAKE else reply

        servers.append(ScriptedServer(answer))
        return servers[-1]

    yield make
    for server in servers:
        server.close()


def sound(stats: TierStats) -> None:
    """Nothing in it that a message or a metric cannot hold."""
    msgspec.msgpack.encode(stats)
    numbers = [getattr(stats, f.name) for f in fields(stats) if f.name not in ("degraded", "reason")]
    assert all(type(number) is int and 0 <= number <= MOST for number in numbers)
    assert stats.reason.isprintable() and len(stats.reason) < 400


def fails(tier: RemoteTier, call: str) -> str:
    """The call has nothing, and the tier has failed; the reason."""
    assert in_time(lambda: CALLS[call](tier)) == NOTHING[call]
    stats = tier.stats()
    sound(stats)
    assert stats.degraded and stats.errors == 1 and stats.writes == stats.evictions == stats.bad == 0
    tier.close()
    return stats.reason


NO_INTEGERS = [
    b":18446744073709551616", b":9223372036854775808", b":-9223372036854775809", b":-1", b":+1", b":1_0", b": 1",
    b":1 ",
    ":\u0661".encode(), b":", b":-", b":00", b":01", b":-0", b":0x1", b":1e3", b":1.0", b":nan", b":3",
    b":" + b"9" * 4000,
    b":" + b"9" * 10**6, b"$1\r\n1", b"+1", b"*0", b"*1\r\n:1", b"*-1", b"$-1", b"_", b"#t", b",1", b"(1", b">1\r\n:1",
]  # fmt: skip


@pytest.mark.parametrize("line", NO_INTEGERS, ids=range(len(NO_INTEGERS)))
@pytest.mark.parametrize("call", ["has", "put", "drop"])
def test_no_integer(serve: Callable[..., ScriptedServer], call: str, line: bytes) -> None:
    """Nor one that the command can have: two names are dropped, one is touched or set at a time."""
    tier = tier_of(serve([line + b"\r\n"]).port)
    reason = fails(tier, call)
    assert "expected an integer from 0 to" in reason and "kv_remote_url" in reason


@pytest.mark.parametrize("call", ["has", "put", "drop"])
@pytest.mark.parametrize("bad", [2**64, 2**63, -1])
def test_no_account(serve: Callable[..., ScriptedServer], call: str, bad: int) -> None:
    """Each number of a script's reply is checked, and their count."""
    right = {"has": [1, 1], "put": [1, 1, 0, 1000, 1], "drop": [2, 1000, 1]}[call]
    for at in range(len(right)):
        reply = b"".join(b":%d\r\n" % number for number in [*right[:at], bad, *right[at + 1 :]])
        assert "integers" in fails(tier_of(serve([b"*%d\r\n" % len(right) + reply]).port, budget_bytes=10**6), call)
    for count in (len(right) - 1, len(right) + 1):
        reply = b"*%d\r\n" % count + b":1\r\n" * count
        assert "integers" in fails(tier_of(serve([reply]).port, budget_bytes=10**6), call)


def test_counters_stop_at_the_largest(serve: Callable[..., ScriptedServer]) -> None:
    tier = tier_of(serve([b"*5\r\n:1\r\n:1\r\n" + b":%d\r\n" % MOST * 3]).port, budget_bytes=10**6)
    for name in NAMES[:3]:
        assert tier.put(name, b"", [b"x"])
    stats = tier.stats()
    sound(stats)
    assert (stats.evictions, stats.used_bytes, stats.errors) == (MOST, MOST, 0)
    tier.close()


def endless(*pieces: bytes) -> Iterable[bytes]:
    first, *rest = pieces
    return itertools.chain([first], itertools.repeat(rest[0] if rest else first))


ENDLESS = {
    "array of values": (b"*1000000\r\n", b"$1000\r\n%b\r\n" % bytes(1000) * 60),
    "array of lines": (b"*2\r\n", b"+OK\r\n" * 10_000),
    "array of integers": (b"*1048576\r\n", b":1\r\n" * 10_000),
    "large value": (b"$999999999999\r\n", bytes(60_000)),
    "value longer than asked": (b"$1001\r\n", bytes(60_000)),
    "value without end": (b"$1000\r\n", bytes(60_000)),
    "no line": (b"x" * 60_000,),
    "status without end": (b"+", b"x" * 60_000),
    "error without end": (b"-ERR ", b"x" * 60_000),
    "nested": (b"*1\r\n" * 10_000,),
    "digits": (b":", b"9" * 60_000),
    "length of digits": (b"$", b"1" * 60_000),
    "negative length": (b"$-2\r\n", b"x" * 60_000),
}


@pytest.fixture
def received(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Sizes of what the tiers take from their sockets."""
    sizes: list[int] = []
    recv, recv_into = redis_connection.DeadlineSocket.recv, redis_connection.DeadlineSocket.recv_into

    def counting(self: redis_connection.DeadlineSocket, size: int, flags: int = 0) -> bytes:
        data = recv(self, size, flags)
        sizes.append(len(data))
        return data

    def counting_into(self: redis_connection.DeadlineSocket, buffer: memoryview, size: int = 0, flags: int = 0) -> int:
        got = recv_into(self, buffer, size, flags)
        sizes.append(got)
        return got

    monkeypatch.setattr(redis_connection.DeadlineSocket, "recv", counting)
    monkeypatch.setattr(redis_connection.DeadlineSocket, "recv_into", counting_into)
    return sizes


@pytest.mark.parametrize("kind", ENDLESS)
@pytest.mark.parametrize("budget", BUDGETS)
@pytest.mark.parametrize("call", CALLS)
def test_endless(
    serve: Callable[..., ScriptedServer], received: list[int], call: str, budget: int | None, kind: str
) -> None:
    """A call takes in what it asked for and a line, however much the server sends; so does the greeting."""
    tier = tier_of(serve(endless(*ENDLESS[kind])).port, timeout_s=2.0, budget_bytes=budget)
    fails(tier, call)
    assert sum(received) <= 1000 + SLACK + len(b"+OK\r\n") * 3
    received.clear()
    tier = tier_of(serve(endless(*ENDLESS[kind]), greets=False).port, timeout_s=2.0, budget_bytes=budget)
    fails(tier, call)
    assert sum(received) <= SLACK


@pytest.mark.parametrize(
    "bad", [b"*1\r\n:1\r\n", b":1\r\n", b"$2\r\nOK\r\n", b"%1\r\n+server\r\n+redis\r\n", b"$-1\r\n"]
)
def test_no_greeting(serve: Callable[..., ScriptedServer], bad: bytes) -> None:
    assert "expected a status" in fails(tier_of(serve([bad], greets=False).port), "has")


def test_used_again_when_the_server_is_sane(serve: Callable[..., ScriptedServer]) -> None:
    server = serve([b":7\r\n"])
    tier = tier_of(server.port)
    assert not any(tier.has(NAMES[:1])) and tier.stats().degraded
    server.answer = lambda arguments: [b"+OK\r\n" if arguments[0] in HANDSHAKE else b":1\r\n"]
    wait_for(lambda: tier.has(NAMES[:1]) == [True])
    assert not tier.stats().degraded and tier.stats().errors >= 1
    tier.close()


# The parser alone


class Socket:
    """Gives what it was made with, a few bytes at a time; then the end."""

    def __init__(self, data: bytes, step: int) -> None:
        self.data, self.step = data, step

    def recv(self, size: int) -> bytes:
        size = min(size, self.step)
        part, self.data = self.data[:size], self.data[size:]
        return part

    def recv_into(self, view: memoryview) -> int:
        part = self.recv(len(view))
        view[: len(part)] = part
        return len(part)


def parsed(data: bytes, expected: Expected, step: int = 4096) -> Any:
    """The reply; raises what the parser raises."""
    call = DeadlineCall()
    call.expected = expected
    parser = ReplyParser(call, redis)
    parser._sock = Socket(data, step)
    return parser.read_response()


PIECES = [
    b":",
    b"$",
    b"*",
    b"+",
    b"-",
    b"1",
    b"0",
    b"9" * 25,
    b"\r\n",
    b"\r",
    b"\n",
    b"_",
    b" ",
    b"abc",
    b"*1\r\n",
    b":1\r\n",
]
EXPECTED = st.sampled_from(
    [StatusReply(), IntegerReply(0), IntegerReply(1), IntegerReply(MOST), IntegersReply((1, MOST)), IntegersReply(())]
)


@given(st.lists(st.sampled_from(PIECES), max_size=12).map(b"".join), EXPECTED, st.sampled_from([1, 3, 4096]))
def test_any_bytes(data: bytes, expected: Expected, step: int) -> None:
    """A parser returns what was expected, as it came, or raises one of redis-py's errors."""
    try:
        reply = parsed(data, expected, step)
    except redis.RedisError:
        return
    if isinstance(reply, redis.ResponseError):
        assert data.startswith(b"-")
    elif isinstance(expected, StatusReply):
        assert data.startswith(b"+%b\r\n" % reply)
    elif isinstance(expected, IntegerReply):
        assert 0 <= reply <= expected.most and data.startswith(b":%d\r\n" % reply)
    else:
        wire_form = b"*%d\r\n" % len(reply) + b"".join(b":%d\r\n" % number for number in reply)
        assert data.startswith(wire_form)
        assert all(0 <= number <= most for number, most in zip(reply, expected.mosts, strict=True))


@given(st.binary(max_size=40), st.integers(0, 40), st.sampled_from([1, 7, 4096]))
def test_values(value: bytes, wanted: int, step: int) -> None:
    """Whole only if it has the wanted length; a longer one raises."""
    into = bytearray(wanted)
    reply = b"$%d\r\n%b\r\n" % (len(value), value)
    if len(value) > wanted:
        with pytest.raises(redis.InvalidResponse, match="at most"):
            parsed(reply, ValueReply(memoryview(into)), step)
    else:
        assert parsed(reply, ValueReply(memoryview(into)), step) is (len(value) == wanted)
        assert into[: len(value)] == value
    assert parsed(b"$-1\r\n", ValueReply(memoryview(into)), step) is False


# Text from the server


@pytest.mark.parametrize(
    "text",
    [b"-ERR a\x1b[2J\x07\tb \xff\xe2\x80\xae", b"-ERR x\nWARNING forged", b"-ERR " + b"A" * 3000, b"\x00\xff" * 50],
)
def test_text_is_shown_on_one_short_line(
    serve: Callable[..., ScriptedServer], text: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    reason = fails(tier_of(serve([text + b"\r\n"]).port), "has")  # printable and short
    assert caplog.records[0].message.endswith(reason) and caplog.records[0].message.isprintable()


@pytest.mark.parametrize("quoted", ["{}", "'{}'", "x{}y{}z", "{:.100}", "{:.20}", "a{:.9}"])
@pytest.mark.parametrize("line", ["-ERR {}", "+{}", "{}", ":{}"])
def test_password_is_not_told(
    serve: Callable[..., ScriptedServer], line: str, quoted: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Though its characters would be escaped, and though the server, or we, cut it off."""
    password = "ge\\'h\u00e9\u202e\x01im" + "0123456789" * 30
    said = line.format(quoted.format(password, password)).encode()
    server = serve([said + b"\r\n"])
    url = f"redis://:{password.encode().hex('%').join(['%', ''])}@127.0.0.1:{server.port}"
    tier = RemoteTier(url, timeout_s=5.0)
    assert tier._secret == password
    reason = fails(tier, "has")
    assert "***" in reason
    for told in (reason, caplog.text):
        assert "ge\\" not in told and "im0" not in told and "2345" not in told


@given(st.text("ab*", max_size=12), st.text("ab*", max_size=40))
def test_without(secret: str, text: str) -> None:
    told = without(secret, text)
    if secret[:8] not in text or not secret:
        assert told == text
    elif "*" not in secret:
        assert secret[:8] not in told


def test_read_of_several_with_a_wrong_one(serve: Callable[..., ScriptedServer]) -> None:
    """What came before it counts."""
    replies = [b"$3\r\nabc\r\n$2\r\nde\r\n", b"-WRONGTYPE what\r\n$-1\r\n$3\r\nxyz\r\n$4\r\nabcd\r\n"]
    tier = tier_of(serve(iter(replies)).port)
    intos = [bytearray(3) for _ in range(6)]
    reads = [Read(name, 0, memoryview(into)) for name, into in zip(NAMES, intos, strict=False)]
    assert tier.read(reads) == [True, False, False, False, True, False]
    assert bytes(intos[0]) == b"abc" and bytes(intos[4]) == b"xyz" and tier.stats().degraded
    tier.close()
