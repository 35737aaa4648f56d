"""Replies of a Redis server, read against what their command may answer: anything else raises before it takes memory.

A reply is an error line, or just what is expected of its command: a status, an integer within a range, an array of
such integers, or a value no longer than the memory that waits for it, where it is received (redis-py's parser copies
it twice, at half the speed). So a call receives no more than it asked for: per reply the value's bytes, or a line.
Protocol: RESP2, https://redis.io/docs/latest/develop/reference/protocol-spec/
"""

from __future__ import annotations

import re
import threading
import time
from typing import Any, NamedTuple

LINE_BYTES = 4096
"""Received at once where a line is expected; what it has of the value that follows is copied once more."""
LONGEST_LINE = 4096
"""Of a status or an error; a parser holds no more than this and LINE_BYTES beside the value."""
MOST = 2**63 - 1
"""The largest integer of the protocol, and of our reports."""

_NUMBER = re.compile(rb"0|[1-9][0-9]{0,18}")
"""As servers write it: int() takes '+1', ' 1', '1_0' and thousands of digits too."""


class StatusReply(NamedTuple):
    """A line such as OK."""

    def __str__(self) -> str:
        return "a status"


class IntegerReply(NamedTuple):
    """0 to `most`."""

    most: int

    def __str__(self) -> str:
        return f"an integer from 0 to {self.most}"


class IntegersReply(NamedTuple):
    """An array with one integer for each of `mosts`, which is 0 to that."""

    mosts: tuple[int, ...]

    def __str__(self) -> str:
        return f"an array of {len(self.mosts)} integers, each from 0 to its bound"


class ValueReply(NamedTuple):
    """At most len(into) bytes, which go to `into`, flat and writable. Read as whether it was filled whole."""

    into: memoryview

    def __str__(self) -> str:
        return f"a value of at most {len(self.into)} bytes"


Expected = StatusReply | IntegerReply | IntegersReply | ValueReply


class DeadlineCall(threading.local):
    """What the calling thread's call may still take, and what the next reply may be."""

    deadline: float = float("inf")
    expected: Expected = StatusReply()
    """Status where redis-py connects: it says AUTH, CLIENT and SELECT."""

    def begin(self, timeout_s: float) -> None:
        self.deadline = time.monotonic() + timeout_s

    @property
    def left_s(self) -> float:
        """Raises TimeoutError if nothing is left."""
        left = self.deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError("the time of the call is over")
        return left


class ReplyParser:
    """Replies of one connection, as call.expected says; redis-py's interface of a parser."""

    def __init__(self, call: DeadlineCall, redis: Any, socket_read_size: int = LINE_BYTES) -> None:
        self._call, self._redis = call, redis
        self._sock: Any = None
        self._buffer = b""

    def on_connect(self, connection: Any) -> None:
        self._sock, self._buffer = connection._sock, b""

    def on_disconnect(self) -> None:
        self._sock, self._buffer = None, b""

    def can_read(self, timeout: float = 0) -> bool:
        """Whether unrequested bytes have arrived. Raises ConnectionError if the other side has hung up."""
        if self._buffer:
            return True
        self._sock.settimeout(timeout)
        try:
            self._more()
        except (BlockingIOError, TimeoutError):
            return False
        except OSError as error:  # an SSL socket that would block says so in its own way
            if type(error).__name__ in ("SSLWantReadError", "SSLWantWriteError"):
                return False
            raise
        finally:
            self._sock.settimeout(None)
        return True

    def read_response(self, disable_decoding: bool = False, **unused: Any) -> Any:
        """bytes (Status), int, list of int, bool (Value), or a ResponseError (returned, not raised). Raises
        InvalidResponse, with the line as it came, for what is not expected; the connection is of no use then."""
        line = self._line()
        match self._call.expected, line[:1]:
            case _, b"-":
                return self._redis.ResponseError(line[1:].decode("utf-8", "backslashreplace"))
            case StatusReply(), b"+":
                return line[1:]
            case IntegerReply(most), b":":
                return self._number(line, most)
            case IntegersReply(mosts), b"*" if self._number(line, MOST) == len(mosts):
                return [self._member(most) for most in mosts]
            case ValueReply(into), b"$":
                return line != b"$-1" and self._value(self._number(line, len(into)), into)
        raise self._unexpected(line)

    def _number(self, line: bytes, most: int) -> int:
        """What follows the first byte of the line, 0 to `most`."""
        if _NUMBER.fullmatch(line, 1) is None or int(line[1:]) > most:
            raise self._unexpected(line)
        return int(line[1:])

    def _member(self, most: int) -> int:
        line = self._line()
        if line[:1] != b":":
            raise self._unexpected(line)
        return self._number(line, most)

    def _value(self, size: int, into: memoryview) -> bool:
        self._fill(into[:size])
        end = bytearray(2)
        self._fill(memoryview(end))
        if end != b"\r\n":
            raise self._unexpected(bytes(end))
        return size == len(into)

    def _fill(self, view: memoryview) -> None:
        done = min(len(self._buffer), len(view))
        view[:done] = self._buffer[:done]
        self._buffer = self._buffer[done:]
        while done < len(view):
            got = self._sock.recv_into(view[done:])
            if not got:
                raise self._redis.ConnectionError("the server has hung up")
            done += got

    def _line(self) -> bytes:
        while (end := self._buffer.find(b"\r\n", 0, LONGEST_LINE + 2)) < 0:
            if len(self._buffer) >= LONGEST_LINE + 2:
                raise self._unexpected(self._buffer)
            self._more()
        line, self._buffer = self._buffer[:end], self._buffer[end + 2 :]
        return line

    def _more(self) -> None:
        data = self._sock.recv(LINE_BYTES)
        if not data:
            raise self._redis.ConnectionError("the server has hung up")
        self._buffer += data

    def _unexpected(self, line: bytes) -> Exception:
        got = line.decode("utf-8", "backslashreplace")
        return self._redis.InvalidResponse(f"expected {self._call.expected}, got '{got}'")
