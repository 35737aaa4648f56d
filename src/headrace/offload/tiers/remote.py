"""Blobs on a Valkey or Redis server, which several engines may share and which may go away at any time.

Keys: headrace:1:FORMAT:NAME, so that engines which store in different formats do not take each other's blobs for bad
ones. A server set aside for this needs `maxmemory` and `maxmemory-policy allkeys-lru`: then it makes room by itself.
With another policy a full server refuses writes; the tier then reads on and leaves writing alone for a while.
With budget_bytes the tier counts the bytes instead, per tenant (tiers.quotas); then `maxmemory` must be above the
budget and the policy noeviction. One server, not a Redis Cluster.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import takewhile
from typing import Any

from headrace.config.offload import OffloadSettings
from headrace.config.tiers import RemoteTierSettings
from headrace.logs import shown
from headrace.offload.tiers import quotas, redis_connection
from headrace.offload.tiers.base import BlobFormat, BlobParts, Read, TierStats, flat
from headrace.offload.tiers.breaker import Breaker
from headrace.offload.tiers.index import put_quota
from headrace.offload.tiers.resp_protocol import (
    MOST,
    DeadlineCall,
    Expected,
    IntegerReply,
    IntegersReply,
    StatusReply,
    ValueReply,
)
from headrace.planner.machine import PieceRate

PREFIX = b"headrace:1:"
ROUND_BYTES = 32 << 20
"""Asked for at once; what a server may have to hold ready for one connection."""
ROUND_NAMES = 1024
ROUND_TRIPS = 5
GIB = 1 << 30
NOBODYS = bytes(32)
"""A name that no chunk has."""
LARGEST_BLOB = 512 << 20
"""proto-max-bulk-len, a server's default bound of one value."""

SECRET_PREFIX = 8
"""A text that holds so many first characters of the password is masked too: a server may quote a part of it."""

Command = tuple[redis_connection.CommandPieces, Expected]
Take = Callable[[int, Any], None]


class RemoteTier:
    """base.Tier over the Redis protocol. Connects when first needed; a server that is not there is a degraded tier.

    An idle connection that the server has closed is opened again; nothing else is tried twice. A call ends within
    timeout_s, and what it has got by then counts. After a failure the tier is left alone (Breaker). Values of a wrong
    length or type are misses; a reply that its command cannot have is a failure (offload.tiers.resp_protocol).
    """

    kind = "remote"
    in_memory = False
    read_guess = PieceRate(2e-9, 1e-3)

    def __init__(
        self,
        url: str,
        format: BlobFormat = "raw",
        timeout_s: float = 1.0,
        budget_bytes: int | None = None,
        quota: float = 0.25,
        *,
        cooldown_s: float = 1.0,
    ) -> None:
        """url: redis_connection.URL_FORM. budget_bytes: None leaves it to the server. quota: of the budget, that no
        other tenant can take from one. Raises ValueError for these, and if redis-py is not installed."""
        if not 0 < timeout_s < float("inf"):
            raise ValueError(f"a remote tier needs timeout_s above 0 and finite, got {timeout_s}")
        if budget_bytes is not None and budget_bytes <= 0:
            raise ValueError(f"budget_bytes of a remote tier must be above 0 or None, got {budget_bytes}")
        if not 0 <= quota <= 1:
            raise ValueError(f"quota must be between 0 and 1, got {quota}")
        self.format, self.timeout_s, self.budget_bytes = format, timeout_s, budget_bytes
        self._common = quota
        self._quotas: dict[bytes, float] = {}
        self._redis = redis_connection.redis_module()
        self._call = DeadlineCall()
        self._pool = redis_connection.pool_of(url, timeout_s, self._call, self._redis)
        self._secret = str(self._pool.connection_kwargs.get("password") or "")
        self._breaker = Breaker(cooldown_s, "the remote tier")
        self._writing = Breaker(cooldown_s, "writing to the remote tier")
        self._lock = threading.Lock()
        self._stats = TierStats(budget_bytes=budget_bytes or 0)
        self._closed = False

    def _member(self, name: bytes) -> bytes:
        return self.format.encode() + b":" + name

    def _key(self, name: bytes) -> bytes:
        return PREFIX + self._member(name)

    def has(self, names: Sequence[bytes]) -> list[bool]:
        there = [False] * len(names)
        if names and self._allowed(self._breaker):
            with self._guarded():
                for begin in reversed(range(0, len(names), ROUND_NAMES)):
                    part = names[begin : begin + ROUND_NAMES]
                    there[begin : begin + len(part)] = self._touch(part)
        return there

    def _touch(self, names: Sequence[bytes]) -> list[bool]:
        """`has` in one round. TOUCH counts a key that is there, and marks it as used; the first name last."""

        if self.budget_bytes is not None:
            replies = self._script(quotas.TOUCH, [self._member(name) for name in reversed(names)], (1,) * len(names))
            return [reply == 1 for reply in reversed(replies)]
        there: list[bool] = []
        commands = [(redis_connection.packed((b"TOUCH", self._key(name))), IntegerReply(1)) for name in reversed(names)]
        self._exchange(commands, lambda _, reply: there.append(self._said(reply) == 1))
        return there[::-1]

    def read(self, reads: Sequence[Read]) -> list[bool]:
        whole = [not len(read.into) for read in reads]
        if reads and self._allowed(self._breaker):
            with self._guarded():
                for indices in rounds(reads):
                    self._ranges([reads[index] for index in indices], indices, whole)
        had = [read for read, done in zip(reads, whole, strict=True) if done]
        missed = len(reads) - len(had)
        self._count(reads=len(had), read_bytes=sum(len(read.into) for read in had), misses=missed)
        return whole

    def _ranges(self, reads: Sequence[Read], indices: Sequence[int], whole: list[bool]) -> None:
        """One round: sets whole[indices] for reads."""

        def take(index: int, reply: Any) -> None:
            if isinstance(reply, self._redis.ResponseError) and str(reply).startswith("WRONGTYPE"):
                return
            whole[indices[index]] = self._said(reply)

        def asking(read: Read) -> Command:
            first, last = b"%d" % read.offset, b"%d" % (read.offset + len(read.into) - 1)
            return redis_connection.packed((b"GETRANGE", self._key(read.name), first, last)), ValueReply(read.into)

        self._exchange([asking(read) for read in reads], take)

    def set_quota(self, tenant: bytes, share: float | None) -> None:
        put_quota(self._quotas, tenant, share)

    def put(self, name: bytes, tenant: bytes, parts: BlobParts) -> bool:
        views = [flat(part) for part in parts]
        size = sum(map(len, views))
        there = new = False
        if size <= LARGEST_BLOB and self._allowed(self._writing) and self._allowed(self._breaker):
            with self._guarded(writes=True):
                there, new = self._set(name, tenant, views)
        self._count(writes=new, written_bytes=size * new, dropped=not there)
        return there

    def _set(self, name: bytes, tenant: bytes, views: Sequence[memoryview]) -> tuple[bool, bool]:
        """Whether the blob is there now, and whether it was not before."""
        if self.budget_bytes is None:
            return True, self._ask(redis_connection.packed((b"SETNX", self._key(name)), views), IntegerReply(1)) == 1
        common, own = (
            b"" if share is None else b"%d" % int(share * self.budget_bytes)
            for share in (self._common, self._quotas.get(tenant))
        )
        arguments = [self._member(name), tenant, b"%d" % self.budget_bytes, common, own]
        stored, there, evicted, *gauges = self._script(quotas.PUT, arguments, (1, 1, MOST, MOST, MOST), views)
        self._count(evictions=evicted)
        self._gauge(*gauges)
        return there == 1, stored == 1

    def drop(self, names: Sequence[bytes]) -> None:
        if not names or not self._allowed(self._breaker):
            return
        with self._guarded():
            for begin in range(0, len(names), ROUND_NAMES):
                self._count(bad=self._forget(names[begin : begin + ROUND_NAMES]))

    def _forget(self, names: Sequence[bytes]) -> int:
        """How many were there."""
        if self.budget_bytes is None:
            there: int = self._ask(redis_connection.packed((b"DEL", *map(self._key, names))), IntegerReply(len(names)))
            return there
        members = [self._member(name) for name in names]
        there, *gauges = self._script(quotas.DROP, members, (len(names), MOST, MOST))
        self._gauge(*gauges)
        return there

    def _gauge(self, used_bytes: int, blobs: int) -> None:
        with self._lock:
            self._stats.used_bytes, self._stats.blobs = used_bytes, blobs

    def stats(self) -> TierStats:
        """used_bytes, blobs and evictions are the server's after this tier's last change, or 0 without a budget."""
        with self._lock:
            stats = replace(self._stats)
        stats.reason = self._breaker.reason or self._writing.reason
        stats.degraded = self._breaker.degraded or self._writing.degraded
        return stats

    def close(self) -> None:
        self._closed = True
        self._pool.disconnect()

    def _allowed(self, breaker: Breaker) -> bool:
        return not self._closed and breaker.allows()

    @contextmanager
    def _guarded(self, *, writes: bool = False) -> Iterator[None]:
        """One call: begins its time, and turns what goes wrong into a failure of the tier, or of writing to it alone
        where the server answers, or where only the sending takes too long."""
        self._call.begin(self.timeout_s)
        try:
            yield
        except Exception as error:  # a garbled reply may raise anything
            self._failed(error, writes)
        else:
            self._breaker.succeeded()
            if writes:
                self._writing.succeeded()

    def _failed(self, error: Exception, writes: bool) -> None:
        if self._closed:
            return
        self._count(errors=1)
        refused = isinstance(error, self._redis.ResponseError)
        reason = self._told(error)
        if writes and refused:
            self._breaker.succeeded()
            self._writing.failed(reason)
        elif writes and isinstance(error, self._redis.TimeoutError | TimeoutError):
            self._writing.failed(reason)
        else:
            self._breaker.failed(reason)

    def _told(self, error: Exception) -> str:
        """The error on one line, without the password, which a server may quote."""
        if isinstance(error, self._redis.TimeoutError | TimeoutError):
            return f"no answer within {self.timeout_s:g} s"
        remedy = ""
        if isinstance(error, self._redis.InvalidResponse):
            remedy = " (does kv_remote_url lead to a Valkey or Redis server?)"
        elif "OOM" in str(error):
            remedy = " (the server is full: set its maxmemory-policy to allkeys-lru)"
        return shown(without(self._secret, f"{type(error).__name__}: {error}")) + remedy

    def _count(self, **more: int) -> None:
        """No counter passes MOST: the server's own may be as large as it likes."""
        with self._lock:
            for name, number in more.items():
                setattr(self._stats, name, min(MOST, getattr(self._stats, name) + int(number)))

    def _said(self, reply: Any) -> Any:
        """The reply; raises it if it is an error."""
        if isinstance(reply, Exception):
            raise reply
        return reply

    def _ask(self, pieces: redis_connection.CommandPieces, expected: Expected) -> Any:
        replies: list[Any] = []
        self._exchange([(pieces, expected)], lambda index, reply: replies.append(reply))
        return self._said(replies[0])

    def _script(
        self, script: str, arguments: Sequence[bytes], mosts: tuple[int, ...], value: BlobParts | None = None
    ) -> list[int]:
        """The script's reply: numbers, each from 0 to its bound in `mosts`."""
        pieces = redis_connection.packed((b"EVAL", script.encode(), b"0", PREFIX, *arguments), value)
        reply: list[int] = self._ask(pieces, IntegersReply(mosts))
        return reply

    def _exchange(self, commands: Sequence[Command], take: Take) -> None:
        """Sends all commands, then gives take(index, reply) each reply, a ResponseError too. Raises what redis-py
        raises; a connection on which replies may be outstanding is not used again."""
        pieces = commands[0][0]
        if len(commands) > 1:
            pieces = [b"".join(piece for command, _ in commands for piece in command)]
        connection = self._pool.get_connection()
        try:
            connection.send_packed_command(pieces, check_health=False)
            for index, (_, self._call.expected) in enumerate(commands):
                take(index, self._reply(connection))
        except BaseException:
            connection.disconnect()
            raise
        finally:
            self._call.expected = StatusReply()
            self._pool.release(connection)

    def _reply(self, connection: Any) -> Any:
        try:
            return connection.read_response()
        except self._redis.ResponseError as error:
            return error


def open_tier(own: RemoteTierSettings, shared: OffloadSettings) -> RemoteTier:
    """Raises ValueError as RemoteTier does."""
    budget = int(own.size * GIB) or None
    tier = RemoteTier(own.redis_url, own.format, shared.timeout_s, budget, shared.tenant_quota)
    tier.has([NOBODYS])  # a server that is not there, or refuses us, is told of at the start
    return tier


def findings(own: RemoteTierSettings, shared: OffloadSettings, free_memory: int) -> dict[str, Any]:
    """Whether the server answers, which it is, and how long a round trip takes."""
    try:
        import redis
    except ImportError:
        return {"remote": f"{own.place} CANNOT BE USED: pip install 'headrace[remote]'"}
    timeout_s = shared.timeout_s
    client = redis.Redis.from_url(own.redis_url, socket_timeout=timeout_s, socket_connect_timeout=timeout_s)
    try:
        facts: Any = client.info("server")
        times = [_round_trip(client) for _ in range(ROUND_TRIPS)]
    except redis.AuthenticationError as error:
        return {"remote": f"{own.place} REFUSES US: {_told(error)}"}
    except (redis.RedisError, OSError) as error:
        return {"remote": f"{own.place} CANNOT BE REACHED: {_told(error)}"}
    finally:
        client.close()
    version = facts.get("valkey_version") or facts.get("redis_version", "of unknown version")
    return {"remote": f"{own.place} answers ({version}), round trip {min(times) * 1e3:.2f} ms"}


def _told(error: Exception) -> str:
    return str(error).rstrip(".")


def _round_trip(client: Any) -> float:
    began = time.perf_counter()
    client.ping()
    return time.perf_counter() - began


def rounds(reads: Sequence[Read]) -> Iterator[list[int]]:
    """Indices of the reads that want anything, in order, at most ROUND_BYTES (or one read) and ROUND_NAMES at once."""
    indices: list[int] = []
    size = 0
    for index, read in enumerate(reads):
        if not len(read.into):
            continue
        if indices and (size + len(read.into) > ROUND_BYTES or len(indices) == ROUND_NAMES):
            yield indices
            indices, size = [], 0
        indices.append(index)
        size += len(read.into)
    if indices:
        yield indices


def without(secret: str, text: str) -> str:
    """The text with *** for the secret and for each of its beginnings of SECRET_PREFIX characters or more."""
    head = secret[:SECRET_PREFIX]
    begin = text.find(head) if head else -1
    while begin >= 0:
        size = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(secret, text[begin:], strict=False)))
        text = text[:begin] + "***" + text[begin + size :]
        begin = text.find(head, begin + 3)
    return text
