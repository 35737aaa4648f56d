"""The link between the driver and each worker: TCP on one interface, authenticated, msgpack inside.

Both sides prove that they know the shared secret before anything is parsed, and every frame carries a MAC over its
number, so that nothing can be slipped in, repeated or left out. The content is not encrypted: across hosts use a
network that nobody listens to.

    handshake   driver -> worker  nonce D
                worker -> driver  nonce W, HMAC(secret, "worker" D W)
                driver -> worker  HMAC(secret, "driver" D W)
    frame       length (4 bytes), HMAC(key of the direction, number (8 bytes), body), body
"""

from __future__ import annotations

import contextlib
import hmac
import secrets
import socket
import struct
import threading
from typing import Any

import msgspec

NONCE = MAC = 32
MOST_BYTES = 1 << 30
HANDSHAKE_S = 10.0
MIN_SECRET = 16


class Refused(ValueError):
    """The other side does not know the secret, or a frame is not what it sent."""


class Hello(msgspec.Struct, frozen=True, tag=True):
    """A worker's first words."""

    rank: int
    pid: int
    host: str


class Join(msgspec.Struct, frozen=True, tag=True):
    """What a worker needs to know. `config`: an EngineConfig as msgpack. `maker`: see launch.open_group."""

    size: int
    context: int
    tensor: int
    store: tuple[str, int]
    config: bytes
    maker: str


class Run(msgspec.Struct, frozen=True, tag=True):
    """A step, as parallel.messages.encode made it."""

    body: bytes


class Ready(msgspec.Struct, frozen=True, tag=True):
    """The worker's rank is made. `report`: what that said of itself."""

    report: bytes


class Failed(msgspec.Struct, frozen=True, tag=True):
    """The worker gives up. `lost`: because it lost another rank, whose own failure says more."""

    reason: str
    lost: bool


class Ping(msgspec.Struct, frozen=True, tag=True):
    pass


class Pong(msgspec.Struct, frozen=True, tag=True):
    pass


class Stop(msgspec.Struct, frozen=True, tag=True):
    pass


Message = Hello | Join | Run | Ready | Failed | Ping | Pong | Stop

_encoder = msgspec.msgpack.Encoder()
_decoder: Any = msgspec.msgpack.Decoder(Message)
_length = struct.Struct("!I")


class Channel:
    """One end of a control link, after the handshake. `send` may be called by several threads, `receive` by one."""

    def __init__(self, link: socket.socket, send_key: bytes, receive_key: bytes) -> None:
        self._link = link
        self._keys = send_key, receive_key
        self._sent = self._received = 0
        self._sending = threading.Lock()

    def send(self, message: Message) -> None:
        """Raises OSError where the link is gone or takes nothing for the time set."""
        body = _encoder.encode(message)
        if len(body) > MOST_BYTES:
            raise ValueError(f"a message of {len(body)} bytes is too long; at most {MOST_BYTES}")
        with self._sending:
            mac = _frame_mac(self._keys[0], self._sent, body)
            self._sent += 1
            self._link.sendall(_length.pack(len(body)) + mac + body)

    def receive(self) -> Message | None:
        """The next message; None at the end. Raises OSError, and Refused for what the other side did not send."""
        header = _exactly(self._link, _length.size + MAC)
        if header is None:
            return None
        count = int(_length.unpack_from(header)[0])
        if count > MOST_BYTES:
            raise Refused(f"a frame of {count} bytes is too long")
        body = _exactly(self._link, count)
        if body is None:
            return None
        if not hmac.compare_digest(header[_length.size :], _frame_mac(self._keys[1], self._received, body)):
            raise Refused("a frame does not carry the right code")
        self._received += 1
        message: Message = _decoder.decode(body)
        return message

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


def accept(link: socket.socket, secret: str) -> Channel:
    """The driver's side of the handshake on a connection just accepted. Raises Refused or OSError."""
    key = checked(secret)
    link.settimeout(HANDSHAKE_S)
    ours = secrets.token_bytes(NONCE)
    link.sendall(ours)
    answer = _exactly(link, NONCE + MAC)
    if answer is None:
        raise Refused("the connection ended before the other side had proved that it knows the secret")
    both = ours + answer[:NONCE]
    if not hmac.compare_digest(answer[NONCE:], _mac(key, b"worker", both)):
        raise Refused("the other side does not know the secret")
    link.sendall(_mac(key, b"driver", both))
    return _channel(link, _mac(key, b"to worker", both), _mac(key, b"to driver", both))


def connect(address: tuple[str, int], secret: str, interface: str) -> Channel:
    """The worker's side, from the given interface. Raises Refused or OSError."""
    key = checked(secret)
    link = socket.create_connection(address, timeout=HANDSHAKE_S, source_address=(interface, 0))
    theirs = _exactly(link, NONCE)
    ours = secrets.token_bytes(NONCE)
    both = (theirs or b"") + ours
    link.sendall(ours + _mac(key, b"worker", both))
    proof = _exactly(link, MAC)
    if proof is None or not hmac.compare_digest(proof, _mac(key, b"driver", both)):
        link.close()
        raise Refused("the driver did not prove that it knows the secret, or does not take ours")
    return _channel(link, _mac(key, b"to driver", both), _mac(key, b"to worker", both))


def checked(secret: str) -> bytes:
    """The secret as a key. Raises ValueError for one too short to be one."""
    if len(secret) < MIN_SECRET:
        raise ValueError(f"the secret of the ranks must have at least {MIN_SECRET} characters, got {len(secret)}")
    return secret.encode()


def proof(secret: str, *parts: bytes) -> bytes:
    """HMAC-SHA256 over parts, each with its length, so that no two lists of parts are the same."""
    return _mac(checked(secret), *(_length.pack(len(part)) + part for part in parts))


def _channel(link: socket.socket, send_key: bytes, receive_key: bytes) -> Channel:
    """A host that vanishes without a word is noticed after about a minute, also by one that has nothing to send."""
    link.settimeout(None)
    link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    link.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in ((socket.TCP_KEEPIDLE, 30), (socket.TCP_KEEPINTVL, 10), (socket.TCP_KEEPCNT, 3)):
        link.setsockopt(socket.IPPROTO_TCP, option, value)
    return Channel(link, send_key, receive_key)


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
