"""What the server's process and the engine's process say to each other: msgpack behind a four-byte length."""

from __future__ import annotations

import asyncio
import struct
from dataclasses import dataclass
from typing import Any

import msgspec

from headrace.engine.calls import Answer, EngineCall, Refused
from headrace.engine.capacity import Capacity
from headrace.progress import Prefill
from headrace.stats import EngineStats
from headrace.types import Delta, Request

LENGTH = struct.Struct(">I")
MAX_MESSAGE = 1 << 30


class LoadModel(msgspec.Struct, tag=True):
    """To the engine, first of all: what to load, as EngineConfig.flat."""

    settings: dict[str, Any]


class Add(msgspec.Struct, tag=True):
    """To the engine: a checked request."""

    request: Request


class Abort(msgspec.Struct, tag=True):
    """To the engine: end a request, if it is still under way."""

    request_id: str


class Call(msgspec.Struct, tag=True):
    """To the engine: something about its cache; answered by a CallAnswer of the same number."""

    number: int
    call: EngineCall


class EnginePing(msgspec.Struct, tag=True):
    """To the engine: are you there? Its reading thread answers EnginePong, however long the step under way takes."""


class EnginePong(msgspec.Struct, tag=True):
    """From the engine: the answer to EnginePing."""


class LoadProgress(msgspec.Struct, tag=True):
    """From the engine: a LoadPhase begins, or gets on."""

    phase: str
    done: int = 0
    total: int = 0


class EngineReady(msgspec.Struct, tag=True):
    """From the engine: it takes requests."""

    capacity: Capacity


class Prefills(msgspec.Struct, tag=True):
    """From the engine, as a step begins that computes a chunk of prompts or more: all prompts being read, and
    the seconds that it should take, if known. Events say that it has ended."""

    prefills: list[Prefill]
    expected_s: float = 0.0


class Events(msgspec.Struct, tag=True):
    """From the engine, after a step: deltas, requests that left the queue, requests refused, counters."""

    deltas: list[Delta]
    started: list[str]
    refused: dict[str, Refused]
    stats: EngineStats


class CallAnswer(msgspec.Struct, tag=True):
    """From the engine: the answer to a Call, or why there is none."""

    number: int
    answer: Answer = None
    refused: Refused | None = None


class EngineFailed(msgspec.Struct, tag=True):
    """From the engine, last of all: why it ends. `settings`: the settings or the model are at fault, not the engine."""

    reason: str
    settings: bool = False


@dataclass(frozen=True)
class Misread:
    """In place of an Add that does not decode: whose it is, and why."""

    request_id: str
    told: str


ToEngine = LoadModel | Add | Abort | Call | EnginePing
FromEngine = LoadProgress | EngineReady | Prefills | Events | CallAnswer | EngineFailed | EnginePong


class _Id(msgspec.Struct):
    request_id: str


class _Named(msgspec.Struct, tag="Add"):
    """What has to be right of an Add."""

    request: _Id


_encoder = msgspec.msgpack.Encoder()
_to_engine: Any = msgspec.msgpack.Decoder(ToEngine)
_named: Any = msgspec.msgpack.Decoder(_Named)
_from_engine: Any = msgspec.msgpack.Decoder(FromEngine)


def frame(message: ToEngine | FromEngine) -> bytes:
    """The message with its length, ready for a socket."""
    body = _encoder.encode(message)
    return LENGTH.pack(len(body)) + body


def length(header: bytes) -> int:
    """Length of the body that follows. Raises ValueError if it cannot be true."""
    (size,) = LENGTH.unpack(header)
    if size > MAX_MESSAGE:
        raise ValueError(f"a message of {size} bytes: the stream is broken")
    return int(size)


def to_engine(body: bytes) -> ToEngine | Misread:
    """Raises ValueError for what does not decode, and does not say whose request it is."""
    try:
        message: ToEngine = _to_engine.decode(body)
    except msgspec.ValidationError as error:
        return Misread(_named.decode(body).request.request_id, str(error))
    return message


def from_engine(body: bytes) -> FromEngine:
    message: FromEngine = _from_engine.decode(body)
    return message


async def receive(reader: asyncio.StreamReader) -> FromEngine | None:
    """The next message from the engine; None at the end of the stream."""
    try:
        body = await reader.readexactly(length(await reader.readexactly(LENGTH.size)))
    except (asyncio.IncompleteReadError, ConnectionResetError, BrokenPipeError):
        return None  # a reset is the end of a process that had not read all we sent
    return from_engine(body)
