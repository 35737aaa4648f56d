"""A Redis server that answers what it likes: the tier has what was stored, or nothing, within its time and bounds."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Iterator
from dataclasses import fields
from pathlib import Path
from random import Random

import msgspec

from headrace.offload.tiers import quotas
from tests.support.redis_servers import ScriptedServer
from tests.support.remote_tier import NAMES, blob_of, tier_of, whole
from tools.fuzz.doors import Door
from tools.fuzz.mutate import EDGES, TEXTS, damaged

SIZE = 2000
HANDSHAKE = {b"AUTH", b"CLIENT", b"SELECT", b"HELLO", b"PING"}
MOST = 2**63 - 1


def door() -> Door:
    return Redis()


class Redis:
    memory_mib = 128
    case_s = 30.0

    def open(self, folder: Path) -> None:
        logging.disable(logging.CRITICAL)
        self._rng, self._honest = Random(0), 0.0
        self._server = ScriptedServer(self._answer)

    def _answer(self, arguments: list[bytes]) -> Iterable[bytes]:
        rng = self._rng
        if arguments[0].upper() in HANDSHAKE and rng.random() < 0.9:
            return [b"+OK\r\n"]
        if rng.random() < self._honest:
            return [_honest(arguments)]
        reply = _reply(rng, len(arguments))
        kind = rng.random()
        if kind < 0.3:
            return [damaged(reply, rng)]
        if kind < 0.4:
            return [reply[:at] for at in [rng.randrange(len(reply) + 1)]]
        if kind < 0.45:
            return _endless(reply)
        if kind < 0.5:
            raise OSError("hangs up")
        return [reply]

    def case(self, rng: Random) -> str:
        self._rng, self._honest = Random(rng.random()), rng.choice((0.0, 0.5, 0.8, 0.95))
        tier = tier_of(self._server.port, 0.2, budget_bytes=rng.choice((None, 1 << 20)))
        came = 0
        for _ in range(rng.choice((1, 1, 2, 4))):
            index = rng.randrange(4)
            call = rng.randrange(4)
            if call == 0:
                assert len(tier.has(NAMES[:3])) == 3
            elif call == 1:
                came += whole(tier, NAMES[index], SIZE) is not None
            elif call == 2:
                tier.put(NAMES[index], b"t", [blob_of(index, SIZE)])
            else:
                tier.drop(NAMES[:2])
        stats = tier.stats()
        msgspec.msgpack.encode(stats)
        numbers = [getattr(stats, f.name) for f in fields(stats) if f.name not in ("degraded", "reason")]
        assert all(type(number) is int and 0 <= number <= MOST for number in numbers), stats
        assert stats.reason.isprintable() and len(stats.reason) < 400
        began = time.monotonic()
        tier.close()
        assert time.monotonic() - began < 20
        return "degraded" if stats.degraded else "served"

    def close(self) -> None:
        self._server.close()


def _honest(arguments: list[bytes]) -> bytes:
    """What a server says that has every blob, and stores whatever it is given."""
    command = arguments[0].upper()
    if command == b"GETRANGE":
        index = next((i for i in range(4) if NAMES[i] in arguments[1]), 0)
        return b"$%d\r\n%b\r\n" % (SIZE, blob_of(index, SIZE))
    if command != b"EVAL":
        return b":%d\r\n" % (1 if command in (b"TOUCH", b"SETNX") else len(arguments) - 1)
    replies = {quotas.TOUCH: (1, 1, 1), quotas.PUT: (1, 1, 0, SIZE, 1), quotas.DROP: (2, SIZE, 1)}
    numbers = replies[arguments[1].decode()]
    return b"*%d\r\n" % len(numbers) + b"".join(b":%d\r\n" % number for number in numbers)


def _reply(rng: Random, arguments: int) -> bytes:
    """One of RESP, often of the shape that a command has."""
    number = rng.choice((*EDGES, 0, 1, 2, 3, SIZE))
    bulk = b"$%d\r\n%b\r\n" % (SIZE, blob_of(rng.randrange(4), SIZE))
    kind = rng.randrange(9)
    if kind == 0:
        return b":%d\r\n" % number
    if kind == 1:
        return bulk
    if kind == 2:
        return b"$-1\r\n"
    if kind == 3:
        return b"*%d\r\n" % arguments + b"".join(rng.choice((b":1\r\n", b":0\r\n", bulk)) for _ in range(arguments))
    if kind == 4:
        return b"*%d\r\n" % number
    if kind == 5:
        return b"$%d\r\nx" % number
    if kind == 6:
        return b"-" + rng.choice(TEXTS)[:300].encode(errors="replace").replace(b"\n", b" ") + b"\r\n"
    if kind == 7:
        return b"+" + rng.choice((b"OK", b"PONG", b"QUEUED", b"x" * 70_000)) + b"\r\n"
    return b"*1\r\n" * rng.choice((2, 100_000)) + b":1\r\n"


def _endless(reply: bytes) -> Iterator[bytes]:
    while True:
        yield reply * 8
