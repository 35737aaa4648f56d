"""How many connections the server keeps open, and for how long one may say nothing.

A connection is idle until the head of its first request has come, and between two requests. Idle connections have a
time limit, and beyond the limit of connections the one that has been idle longest makes room for a new one, those that
never asked anything first: silent strangers lock nobody out, however quickly they come again. A connection with a
request under way is never closed to make room; if all have one, the new one is closed. The limit lies below that of
file descriptors: a server without any left could accept nobody and would spin (asyncio tries again and again).
"""

from __future__ import annotations

import asyncio
import json
import logging
import resource
import time
from collections import Counter, OrderedDict
from collections.abc import Callable
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from headrace.logs import fields
from headrace.server.errors import ApiError
from headrace.server.request_ids import new_id
from headrace.server.tally import MOST_KEYS, Tally

log = logging.getLogger("headrace.server")

HEAD_S = 10.0
"""So long may the head of a request take: the first from the connection on, others from their first byte on."""
KEEP_ALIVE_S = 60.0
"""So long may a connection be silent between two requests."""
WRITE_S = 60.0
LEAST_TAKEN = 1 << 20
"""Bytes that a client takes at least within each WRITE_S of what waits for it, all if that is less."""
ACCEPTED_AT_ONCE = 16
"""asyncio accepts so many in one turn of its loop."""
RESERVED = 128 + 6 * ACCEPTED_AT_ONCE
"""Descriptors for all else: the engine's socket, files, libraries; and connections on their way. From accepting one to
`connection_made` asyncio takes three turns of its loop, and another to close one that was aborted; in each it accepts
more. Without any descriptor left it stops accepting for a second."""
MOST = 10_000
"""Default limit where there are descriptors without end."""
RAISED_TO = 65_536
LOG_S = 10.0
"""Between two lines about connections that were closed."""


def limit(wanted: int | None) -> int:
    """Connections at once: as wanted, or as the descriptors allow, whose soft limit is raised as far as it may be.

    Raises ValueError if more are wanted than there are descriptors for.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = RAISED_TO if hard == resource.RLIM_INFINITY else min(hard, RAISED_TO)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
        soft = most
    room = MOST if soft == resource.RLIM_INFINITY else soft - RESERVED
    if wanted is not None and wanted > room:
        raise ValueError(f"max_connections {wanted} needs {wanted + RESERVED} file descriptors: raise ulimit -n")
    if room < 1:
        raise ValueError(f"{soft} file descriptors are too few for a server: raise ulimit -n above {RESERVED}")
    return min(room, MOST) if wanted is None else wanted


class Connections:
    """All connections of a server. Invariant: `silent` has those that never had a request, `idle` those between two,
    each in the order they became so."""

    def __init__(self, most: int) -> None:
        self.most = most
        self.open = 0
        self.silent: OrderedDict[Connection, None] = OrderedDict()
        self.idle: OrderedDict[Connection, None] = OrderedDict()
        self._closed = Tally(LOG_S, self._tell)

    def make_room(self) -> bool:
        """Whether a new connection may stay."""
        if self.open <= self.most:
            return True
        waiting = self.silent or self.idle
        if not waiting:
            self.note("refused, since all others had a request under way")
            return False
        next(iter(waiting)).end("idle, closed to make room for new ones")
        return True

    def leave(self, one: Connection) -> None:
        """It is closed, or has a request."""
        self.silent.pop(one, None)
        self.idle.pop(one, None)

    def note(self, why: str) -> None:
        """Counts a connection that was closed; a line in the log tells how many, at most every LOG_S."""
        self._closed.note(why)

    def _tell(self, closed: Counter[str], seconds: float) -> None:
        told = ", ".join(f"{count:,} {why}" for why, count in sorted(closed.items()))
        log.warning(
            "closed connections: %s (%d open, at most %d)", told, self.open, self.most,
            extra=fields(closed=dict(closed), open=self.open, most=self.most),
        )  # fmt: skip


NO_HTTP = "this is no HTTP/1.1 request, its head is too large, or its body does not end as its headers say"


class Connection(H11Protocol):
    """uvicorn's HTTP/1.1 under the rules above. `connections` comes first, then uvicorn's own arguments."""

    def __init__(self, connections: Connections, **uvicorn: Any) -> None:
        super().__init__(**uvicorn)
        self._all = connections
        self._deadline: asyncio.TimerHandle | None = None
        self._stalled: asyncio.TimerHandle | None = None
        self._head_begun = True
        self._ended = False

    @property
    def busy(self) -> bool:
        """Whether a request is under way."""
        return self.cycle is not None and not self.cycle.response_complete

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._all.open += 1
        if not self._all.make_room():
            self.end(None)
            return
        self._all.silent[self] = None
        self._limit(HEAD_S, "without a request's head in time")

    def connection_lost(self, exc: Exception | None) -> None:
        self._all.open -= 1
        self._all.leave(self)
        self._stop(self._deadline)
        self._stop(self._stalled)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._ended:
            return
        if not self.busy and not self._head_begun:
            self._head_begun = True
            self._limit(HEAD_S, "without a request's head in time")
        super().data_received(data)

    def handle_events(self) -> None:
        super().handle_events()
        if self.busy:
            self._all.leave(self)
            self._stop(self._deadline)

    def send_400_response(self, msg: str) -> None:
        """What is no HTTP has one answer, in the shape of other errors: a request whose body it is has no other."""
        if self.cycle is not None:
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            body = json.dumps(ApiError(400, NO_HTTP, None, "invalid_framing").body()).encode()
            headers = [
                (b"content-type", b"application/json"), (b"content-length", b"%d" % len(body)),
                (b"connection", b"close"), (b"x-request-id", new_id().encode()),
            ]  # fmt: skip
            answer = h11.Response(status_code=400, headers=headers, reason=b"Bad Request")
            for event in (answer, h11.Data(data=body), h11.EndOfMessage()):
                self.transport.write(self.conn.send(event) or b"")
        self.transport.close()

    def _should_upgrade(self) -> bool:
        """No: a request that offers another protocol is answered in this one (RFC 9110, 7.8)."""
        return False

    def on_response_complete(self) -> None:
        self._head_begun = False
        self._all.idle[self] = None
        self._limit(KEEP_ALIVE_S, "silent after a request")
        super().on_response_complete()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._watch_writing()

    def resume_writing(self) -> None:
        self._stop(self._stalled)
        super().resume_writing()

    def _watch_writing(self) -> None:
        waiting = self.transport.get_write_buffer_size()
        self._stalled = self.loop.call_later(WRITE_S, self._look_at_writing, waiting)

    def _look_at_writing(self, before: int) -> None:
        if before - self.transport.get_write_buffer_size() < LEAST_TAKEN:
            self.end("that took next to nothing of their answer")
        else:
            self._watch_writing()

    def end(self, why: str | None) -> None:
        """Closes at once; what has not been sent is thrown away. why: counted for the log, if given."""
        if not self._ended:
            self._ended = True
            self._all.leave(self)
            if why is not None:
                self._all.note(why)
            self.transport.abort()

    def _limit(self, seconds: float, why: str) -> None:
        self._stop(self._deadline)
        self._deadline = self.loop.call_later(seconds, self.end, why)

    @staticmethod
    def _stop(timer: asyncio.TimerHandle | None) -> None:
        if timer is not None:
            timer.cancel()


class LogThrottle(logging.Filter):
    """Passes a message once per LOG_S, whoever may cause it and how often: bad requests, failed accepts. The next one
    says how many like it were left out."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._clock = clock
        self._until: dict[str, float] = {}
        self._left_out: Counter[str] = Counter()

    def filter(self, record: logging.LogRecord) -> bool:
        now, message = self._clock(), str(record.msg)
        if now < self._until.get(message, now):
            if message in self._left_out or len(self._left_out) < MOST_KEYS:
                self._left_out[message] += 1
            return False
        self._until = {each: until for each, until in self._until.items() if until > now}
        self._until[message] = now + LOG_S
        if more := self._left_out.pop(message, 0):
            record.msg = f"{message} ({more:,} more like it since the last such line)"
        return True
