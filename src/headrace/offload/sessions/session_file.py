"""The file of a session: safetensors, which holds numbers and texts and nothing that runs.

    chunks  U8  [n, bytes of a blob]   keys and values of the first n chunks, each a blob as the disk tier has it
    state   U8  [bytes of a blob]      of a model with recurrent layers: the state behind the last of them, or nothing
    tokens  I32 [T]                    all tokens of the session

The blobs carry their chunk's name, the engine's identity and checksums (offload.frame), and are checked against names
that are computed anew from the tokens. Nothing that the file says names a chunk.
"""

from __future__ import annotations

import os
from array import array
from io import FileIO
from typing import Literal, NamedTuple, Self

import msgspec
import xxhash

from headrace.offload import frame

FORMAT, VERSION = "headrace session", "1"

MOST_HEADER = 1 << 16
MOST_TOKENS = 1 << 24

Place = Literal["file", "tier"]


class BadSession(ValueError):
    """This is no sound file of a session for this engine; the message says why."""


class Metadata(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """identity: of the engine, hexadecimal (offload.identity.chunk_identity). salt: what tells a cache_salt from
    others, and not which it is. place: where the chunks are. sum: of the tokens. adapter: the name of the one that they
    are of, and the digest of its files; empty: the model itself."""

    identity: str
    salt: str
    place: Place
    sum: str
    adapter: str = ""
    adapter_digest: str = ""
    format: str = FORMAT
    version: str = VERSION


class _Tensor(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]


class _Header(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    metadata: Metadata = msgspec.field(name="__metadata__")
    chunks: _Tensor
    state: _Tensor
    tokens: _Tensor


class Sizes(NamedTuple):
    """chunks: how many; chunk_bytes: of each blob; state_bytes: 0 for none; tokens: how many."""

    chunks: int
    chunk_bytes: int
    state_bytes: int
    tokens: int

    @property
    def state_at(self) -> int:
        """Where the state begins, from the first byte behind the header; chunks come before it."""
        return self.chunks * self.chunk_bytes

    @property
    def tokens_at(self) -> int:
        return self.state_at + self.state_bytes

    @property
    def end(self) -> int:
        return self.tokens_at + 4 * self.tokens

    def header(self, metadata: Metadata) -> bytes:
        """The beginning of the file, a multiple of 64 bytes."""
        body = msgspec.json.encode(self._header(metadata))
        body += b" " * (-(len(body) + 8) % frame.ALIGN)
        return len(body).to_bytes(8, "little") + body

    def _header(self, metadata: Metadata) -> _Header:
        return _Header(
            metadata,
            _Tensor("U8", (self.chunks, self.chunk_bytes), (0, self.state_at)),
            _Tensor("U8", (self.state_bytes,), (self.state_at, self.tokens_at)),
            _Tensor("I32", (self.tokens,), (self.tokens_at, self.end)),
        )


def token_bytes(tokens: list[int]) -> bytes:
    """As the file has them: 32 bits each, little-endian."""
    return array("i", tokens).tobytes()


def sum_of(tokens: bytes) -> str:
    """XXH3, 64 bits, hexadecimal."""
    return xxhash.xxh3_64_hexdigest(tokens)


class SessionReader:
    """A session's file, open for reading. Raises BadSession for one that is not whole and in this form, OSError.

    file: its own from now on. size: of the file, bytes.
    """

    def __init__(self, file: FileIO) -> None:
        self._file = file
        try:
            self.size = os.fstat(file.fileno()).st_size
            self._data_at, header = self._read_header()
            self.metadata, self.sizes = header.metadata, _sizes(header)
            if self._data_at + self.sizes.end != self.size:
                raise BadSession(f"has {self.size:,} bytes instead of {self._data_at + self.sizes.end:,}")
            self.tokens = self._read_tokens()
        except BaseException:
            file.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        self._file.close()

    def chunk(self, number: int, into: memoryview) -> None:
        """Fills `into` with the blob of a chunk, not checked."""
        self._read(number * self.sizes.chunk_bytes, into)

    def state(self, into: memoryview) -> None:
        """Fills `into` with the blob of the state, not checked."""
        self._read(self.sizes.state_at, into)

    def _read(self, at: int, into: memoryview) -> None:
        done = 0
        while done < len(into):
            count = os.preadv(self._file.fileno(), [into[done:]], self._data_at + at + done)
            if not count:
                raise BadSession("was cut short while it was read")
            done += count

    def _read_header(self) -> tuple[int, _Header]:
        length = int.from_bytes(os.pread(self._file.fileno(), 8, 0), "little")
        if not 0 < length <= min(MOST_HEADER, self.size - 8):
            raise BadSession("has no header of a session")
        try:
            header = msgspec.json.decode(os.pread(self._file.fileno(), length, 8), type=_Header)
        except (ValueError, RecursionError) as error:
            raise BadSession(f"has a header that is not a session's: {str(error)[:200]}") from None
        found = (header.metadata.format, header.metadata.version)
        if found != (FORMAT, VERSION):
            raise BadSession("is of version {1!r} of {0!r}; this is version {3!r} of {2!r}".format(
                *(each[:40] for each in found), FORMAT, VERSION))  # fmt: skip
        return 8 + length, header

    def _read_tokens(self) -> list[int]:
        data = bytearray(4 * self.sizes.tokens)
        self._read(self.sizes.tokens_at, memoryview(data))
        if sum_of(bytes(data)) != self.metadata.sum:
            raise BadSession("has tokens that do not have their checksum")
        tokens = array("i", bytes(data)).tolist()
        if min(tokens) < 0:
            raise BadSession("has a token below 0")
        return tokens


def _sizes(header: _Header) -> Sizes:
    """What the shapes say, if all else that the header says of the tensors is what follows from them."""
    chunks, state, tokens = header.chunks.shape, header.state.shape, header.tokens.shape
    if (len(chunks), len(state), len(tokens)) != (2, 1, 1) or min(*chunks, *state) < 0:
        raise BadSession("has tensors of other shapes than a session's")
    sizes = Sizes(*chunks, *state, *tokens)
    if not 0 < sizes.tokens <= MOST_TOKENS:
        raise BadSession(f"has {sizes.tokens:,} tokens; it may have 1 to {MOST_TOKENS:,}")
    if sizes._header(header.metadata) != header:
        raise BadSession("has tensors that do not lie one behind the other")
    return sizes
