"""A real Valkey or Redis server (fakeredis where none is installed) that others write to, and a network that fails: a
chunk that passes its checks is the one that was stored, and when all is well again, so is the tier."""

from __future__ import annotations

import contextlib
import logging
import time
from contextlib import ExitStack
from pathlib import Path
from random import Random
from typing import Any

import msgspec
import redis

from headrace.offload.tiers.remote import RemoteTier
from tests.support.redis_servers import REAL, Proxy, fake_server, real_server
from tests.support.remote_tier import client, tier_of
from tools.fuzz.doors import Door
from tools.fuzz.mutate import EDGES, TEXTS, damaged
from tools.fuzz.stored import blob, named, there

BLOBS = 8
FORGED = (
    b"$-1\r\n", b":1\r\n", b":18446744073709551616\r\n", b"+OK\r\n", b"-MOVED 1 127.0.0.1:1\r\n",
    b"*2\r\n:1\r\n", b"$99999999999\r\n", b"-OOM command not allowed\r\n", b"\r\n",
    b"*5\r\n:1\r\n:1\r\n:-1\r\n:9\r\n:9\r\n",
)  # fmt: skip


def door() -> Door:
    return RedisReal()


class RedisReal:
    memory_mib = 256
    case_s = 30.0

    def open(self, folder: Path) -> None:
        logging.disable(logging.CRITICAL)
        self._ends = ExitStack()
        address = self._ends.enter_context(real_server() if REAL else fake_server())
        self._other = client(address)
        self._proxy = Proxy(address)
        self._ends.callback(self._proxy.close)
        self._blobs = [blob(number) for number in range(BLOBS)]

    def case(self, rng: Random) -> str:
        self._set_right()
        budget = rng.choice((None, 1 << 20, 3 * len(self._blobs[0])))
        with contextlib.closing(tier_of(self._proxy.port, 0.15, budget_bytes=budget)) as tier:
            for number in range(rng.randrange(BLOBS)):
                self._put(tier, number)
            for _ in range(rng.choice((1, 2, 4))):
                with contextlib.suppress(redis.RedisError):
                    self._attack(rng)
                self._use(tier, rng)
            self._set_right()
            self._works_again(tier)
            stats = tier.stats()
            msgspec.msgpack.encode(stats)
            assert stats.used_bytes >= 0 and stats.blobs >= 0 and stats.reason.isprintable(), stats
            return "errors" if stats.errors else "bad" if stats.bad else "served"

    def close(self) -> None:
        self._ends.close()

    def _put(self, tier: RemoteTier, number: int) -> bool:
        return tier.put(named(number), b"tenant %d" % (number % 3), [self._blobs[number]])

    def _use(self, tier: RemoteTier, rng: Random) -> None:
        """All that an engine asks of a tier."""
        numbers = rng.sample(range(BLOBS), 2)
        assert len(tier.has(list(map(named, range(BLOBS))))) == BLOBS
        for number in numbers:
            there(tier, number, self._blobs[number])
        self._put(tier, numbers[0])
        if rng.random() < 0.2:
            tier.drop([named(numbers[1])])

    def _works_again(self, tier: RemoteTier) -> None:
        """After a pause (Breaker) a blob is stored and read: the server is empty and answers."""
        end = time.monotonic() + 10
        while not (self._put(tier, 0) and there(tier, 0, self._blobs[0])):
            assert time.monotonic() < end, f"nothing can be stored any more: {tier.stats().reason}"
            time.sleep(0.01)

    def _set_right(self) -> None:
        self._proxy.mode = "pass"
        self._proxy.hang_up()
        self._other.flushall()
        if REAL:
            self._other.config_set("maxmemory", 0)

    def _attack(self, rng: Random) -> None:
        kind = rng.randrange(8 if REAL else 6)
        if kind < 2:
            said = b"".join(damaged(rng.choice(FORGED), rng) if rng.random() < 0.5 else rng.choice(FORGED)
                            for _ in range(rng.choice((1, 3, 12))))  # fmt: skip
            self._proxy.misbehave(rng.choice(("cut", "stall", "say", "trickle")), rng.randrange(3000), said)
        elif kind < 5:
            keys = sorted(self._other.keys("headrace:*"))
            for key in rng.sample(keys, min(len(keys), rng.choice((1, 3)))):
                self._overwrite(key, rng)
        elif kind == 5:
            self._other.flushall()
        elif kind == 6:
            self._other.config_set("maxmemory", rng.choice(("1", "1200000")))
        else:
            self._other.client_kill_filter(_type="normal")

    def _overwrite(self, key: bytes, rng: Random) -> None:
        """Another value, a value of another type, or a key that goes; the account's keys too."""
        kind = rng.randrange(6)
        value = self._other.get(key) if self._other.type(key) == b"string" else b"7"
        if kind == 0:
            self._other.set(key, damaged(value or b"", rng))
        elif kind == 1:
            self._other.set(key, blob(rng.randrange(BLOBS)))
        elif kind == 2:
            self._other.delete(key)
            self._of_another_type(key, rng)
        elif kind == 3:
            self._other.append(key, b"x")
        elif kind == 4:
            self._other.set(key, str(rng.choice(EDGES)))
        else:
            self._other.delete(key)

    def _of_another_type(self, key: bytes, rng: Random) -> None:
        text: Any = rng.choice(TEXTS).encode(errors="replace")
        kind = rng.randrange(4)
        if kind == 0:
            self._other.rpush(key, text)
        elif kind == 1:
            self._other.hset(key, text, str(rng.choice(EDGES)))
        elif kind == 2:
            self._other.zadd(key, {text: rng.choice((0.0, float("inf"), -1e300, 2.0**63))})
        else:
            self._other.sadd(key, text)
