"""The link between the driver and each worker: TCP on one interface, authenticated, msgpack inside.

Both sides prove that they know the shared secret before anything is parsed, and every frame carries a MAC over its
number, so that nothing can be slipped in, repeated or left out. The content is not encrypted: across hosts use a
network that nobody listens to.

    handshake   driver -> worker  nonce D
                worker -> driver  nonce W, HMAC(secret, "worker" D W)
                driver -> worker  HMAC(secret, "driver" D W); REFUSAL if the worker's does not fit
    frame       length (4 bytes), HMAC(key of the direction, number (8 bytes), body), body

The driver's side is a generator without I/O (`greet`), so that one thread can serve many connections: see handshake.
"""

from __future__ import annotations

import contextlib
import errno
import hmac
import secrets
import socket
import struct
import threading
import time
from collections.abc import Generator
from typing import Any

import msgspec

from headrace.logs import shown

NONCE = MAC = 32
HEADER = 4 + MAC
REFUSAL = bytes(MAC)
"""In place of the driver's proof. A connection that ends without either may be tried again."""

MOST_BYTES = 1 << 30
"""One frame from the driver, a step for instance."""
MOST_FROM_WORKER = 16 << 20
MOST_HELLO = 4096

HANDSHAKE_S = 10.0
"""So long a worker waits for the driver's next part of one handshake."""
FORM_S = 120.0
"""So long all ranks may take to meet: a worker tries again until then if its connection ends before the proof."""
MIN_SECRET = 16


class Refused(ValueError):
    """The other side does not know the secret, or a frame is not what it sent."""


class WorkerHello(msgspec.Struct, frozen=True, tag=True):
    """A worker's first words."""

    rank: int
    pid: int
    host: str


class JoinGroup(msgspec.Struct, frozen=True, tag=True):
    """What a worker needs to know. `config`: an EngineConfig as msgpack. `maker`: see launch.open_group."""

    size: int
    context: int
    tensor: int
    config: bytes
    maker: str


class RunStep(msgspec.Struct, frozen=True, tag=True):
    """A step, as parallel.messages.encode made it."""

    body: bytes


class WorkerReady(msgspec.Struct, frozen=True, tag=True):
    """The worker's rank is made. `report`: what that said of itself."""

    report: bytes


class WorkerFailed(msgspec.Struct, frozen=True, tag=True):
    """The worker gives up. `lost`: because it lost another rank, whose own failure says more."""

    reason: str
    lost: bool


class StoreSet(msgspec.Struct, frozen=True, tag=True):
    """A worker leaves a value for the others. Answered, as StoreGet and StoreAdd are, by a StoreValue."""

    key: str
    value: bytes


class StoreGet(msgspec.Struct, frozen=True, tag=True):
    key: str


class StoreAdd(msgspec.Struct, frozen=True, tag=True):
    """The value is a decimal number; the sum is stored and returned."""

    key: str
    amount: int


class StoreValue(msgspec.Struct, frozen=True, tag=True):
    """What the driver holds now under the key that was asked for; None: nothing."""

    value: bytes | None


class TierCommand(msgspec.Struct, frozen=True, tag=True):
    """What the driver asks of the worker's tiers: offload.ranked.words."""

    body: bytes


class TierAnswer(msgspec.Struct, frozen=True, tag=True):
    body: bytes


class DriverPing(msgspec.Struct, frozen=True, tag=True):
    pass


class WorkerPong(msgspec.Struct, frozen=True, tag=True):
    pass


class StopWorker(msgspec.Struct, frozen=True, tag=True):
    pass


StoreAsk = StoreSet | StoreGet | StoreAdd
FromDriver = JoinGroup | RunStep | TierCommand | StoreValue | DriverPing | StopWorker
FromWorker = WorkerHello | WorkerReady | WorkerFailed | TierAnswer | StoreAsk | WorkerPong
ControlMessage = FromDriver | FromWorker

_encoder = msgspec.msgpack.Encoder()
_decoder: Any = msgspec.msgpack.Decoder(ControlMessage)
_length = struct.Struct("!I")


class IncomingFrames:
    """Checks the frames of one direction in order. `most`: bytes of a frame's body."""

    def __init__(self, key: bytes, most: int) -> None:
        self._key, self.most = key, most
        self._number = 0

    def length(self, header: bytes) -> int:
        """Of the body that follows. Raises Refused for one that is too long, before any of it is read."""
        count = int(_length.unpack_from(header)[0])
        if count > self.most:
            raise Refused(f"a frame of {count} bytes is too long; at most {self.most}")
        return count

    def opened(self, header: bytes, body: bytes) -> ControlMessage:
        """Raises Refused for a frame that the other side did not send as the next one, or that holds no message."""
        if not hmac.compare_digest(header[_length.size :], _frame_mac(self._key, self._number, body)):
            raise Refused("a frame does not carry the right code")
        self._number += 1
        try:
            message: ControlMessage = _decoder.decode(body)
        except (ValueError, RecursionError) as error:
            raise Refused(f"a frame holds no message: {shown(error)}") from error
        return message


class Channel:
    """One end of a control link, after the handshake. `send` may be called by several threads, `receive` by one."""

    def __init__(self, link: socket.socket, send_key: bytes, incoming: IncomingFrames) -> None:
        self._link = link
        self._key, self._sent = send_key, 0
        self._incoming = incoming
        self._sending = threading.Lock()

    def send(self, message: ControlMessage) -> None:
        """Raises OSError where the link is gone or takes nothing for the time set."""
        body = _encoder.encode(message)
        if len(body) > MOST_BYTES:
            raise ValueError(f"a message of {len(body)} bytes is too long; at most {MOST_BYTES}")
        with self._sending:
            mac = _frame_mac(self._key, self._sent, body)
            self._sent += 1
            self._link.sendall(_length.pack(len(body)) + mac + body)

    def receive(self) -> ControlMessage | None:
        """The next message; None at the end. Raises OSError, and Refused for what the other side did not send."""
        header = _exactly(self._link, HEADER)
        if header is None:
            return None
        body = _exactly(self._link, self._incoming.length(header))
        return None if body is None else self._incoming.opened(header, body)

    def limit_sends(self, seconds: float) -> None:
        """From now on a send that the other side takes nothing of for so long fails."""
        whole = int(seconds)
        limit = struct.pack("ll", whole, int((seconds - whole) * 1e6))
        self._link.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)

    def close(self) -> None:
        """Also wakes a thread that receives."""
        with contextlib.suppress(OSError):
            self._link.shutdown(socket.SHUT_RDWR)
        self._link.close()


Greeting = Generator[tuple[bytes, int], bytes, tuple[Channel, WorkerHello]]
"""Yields what to send and how many bytes to pass in next; raises Refused."""


def greet(link: socket.socket, secret: str) -> Greeting:
    """The driver's side of the handshake and the worker's Hello, for a connection just accepted.

    All but the first part is yielded only to a worker that has proved to know the secret.
    """
    key = checked(secret)
    ours = secrets.token_bytes(NONCE)
    answer = yield ours, NONCE + MAC
    both = ours + answer[:NONCE]
    if not hmac.compare_digest(answer[NONCE:], _mac(key, b"worker", both)):
        raise Refused("the other side does not know the secret")
    incoming = IncomingFrames(_mac(key, b"to driver", both), MOST_HELLO)
    header = yield _mac(key, b"driver", both), HEADER
    body = yield b"", incoming.length(header)
    hello = incoming.opened(header, body)
    if not isinstance(hello, WorkerHello):
        raise Refused("its first message is not a greeting")
    incoming.most = MOST_FROM_WORKER
    return _channel(link, _mac(key, b"to worker", both), incoming), hello


def connect(address: tuple[str, int], secret: str, interface: str, limit_s: float = FORM_S) -> Channel:
    """The worker's side, from the given interface.

    The driver may drop a connection to make room for others while strangers flood its port, so one that ends before
    the driver's proof is tried again until limit_s. Raises Refused for a wrong proof, OSError.
    """
    key, pause, end = checked(secret), 0.02, time.monotonic() + limit_s
    while True:
        try:
            return _attempt(address, key, interface)
        except OSError as error:
            if not _may_pass(error) or time.monotonic() + pause > end:
                raise
        time.sleep(pause)
        pause = min(1.0, 1.5 * pause)


def _may_pass(error: OSError) -> bool:
    """Whether another attempt may succeed. A refused connection means that the driver no longer listens."""
    if isinstance(error, ConnectionRefusedError):
        return False
    return isinstance(error, ConnectionError | TimeoutError) or error.errno == errno.EADDRINUSE


def _attempt(address: tuple[str, int], key: bytes, interface: str) -> Channel:
    link = socket.create_connection(address, timeout=HANDSHAKE_S, source_address=(interface, 0))
    try:
        ours = secrets.token_bytes(NONCE)
        both = _part(link, NONCE) + ours
        link.sendall(ours + _mac(key, b"worker", both))
        if not hmac.compare_digest(_part(link, MAC), _mac(key, b"driver", both)):
            raise Refused("the driver did not prove that it knows the secret, or does not take ours")
        incoming = IncomingFrames(_mac(key, b"to worker", both), MOST_BYTES)
        return _channel(link, _mac(key, b"to driver", both), incoming)
    except BaseException:
        link.close()
        raise


def _part(link: socket.socket, count: int) -> bytes:
    part = _exactly(link, count)
    if part is None:
        raise ConnectionResetError("the driver closed the connection before its proof")
    return part


def checked(secret: str) -> bytes:
    """The secret as a key. Raises ValueError for one too short to be one."""
    if len(secret) < MIN_SECRET:
        raise ValueError(f"the secret of the ranks must have at least {MIN_SECRET} characters, got {len(secret)}")
    return secret.encode()


def proof(secret: str, *parts: bytes) -> bytes:
    """HMAC-SHA256 over parts, each with its length, so that no two lists of parts are the same."""
    return _mac(checked(secret), *(_length.pack(len(part)) + part for part in parts))


def _channel(link: socket.socket, send_key: bytes, incoming: IncomingFrames) -> Channel:
    """A host that vanishes without a word is noticed after about a minute, also by one that has nothing to send."""
    link.settimeout(None)
    link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    link.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in ((socket.TCP_KEEPIDLE, 30), (socket.TCP_KEEPINTVL, 10), (socket.TCP_KEEPCNT, 3)):
        link.setsockopt(socket.IPPROTO_TCP, option, value)
    return Channel(link, send_key, incoming)


def _mac(key: bytes, *parts: bytes) -> bytes:
    return hmac.digest(key, b"".join(parts), "sha256")


def _frame_mac(key: bytes, number: int, body: bytes) -> bytes:
    return hmac.digest(key, number.to_bytes(8, "big") + body, "sha256")


def _exactly(link: socket.socket, count: int) -> bytes | None:
    """`count` bytes, or None if the stream ends before."""
    parts: list[bytes] = []
    while count:
        part = link.recv(min(count, 1 << 20))
        if not part:
            return None
        parts.append(part)
        count -= len(part)
    return b"".join(parts)
