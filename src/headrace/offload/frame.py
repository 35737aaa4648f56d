"""The stored form of a chunk: a header that says what it is, then one section for each layer.

    0        8       10   11   12      16             24         56       88           -8
    | magic  | version| kind| fmt | layers | section bytes | identity | digest | sums ... 0 | checksum |

Numbers are little-endian. digest: the chunk's; of a share of its heads (tiers.base.HeadShare) the SHA-256 of what names
that. sums: a checksum of each section, 8 bytes each; then zeros, so that the header is a multiple of 64 bytes long and
sections lie as tensors like to; its last 8 bytes are the checksum of all bytes before them. The layout of a section is
defined by kernels.chunk_formats. Checksums (XXH3, 64 bits) find damage, not malice: whoever can write to a tier is
trusted.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, get_args

import xxhash

from headrace.offload.tiers.base import BlobFormat, BlobKind

MAGIC = b"HEADRACE"
VERSION = 1
"""Of the header and of what the sections hold: a blob of another version is a stranger."""
ALIGN = 64
FORMATS: tuple[BlobFormat, ...] = get_args(BlobFormat)
KINDS: tuple[BlobKind, ...] = get_args(BlobKind)

NAMED = (32, 36)
"""Bytes that name a chunk, and a share of one."""

Bytes = bytes | bytearray | memoryview

_FIXED = struct.Struct("<8sHcBIQ32s32s")
_SUM = struct.Struct("<Q")


class DamagedBlob(ValueError):
    """These bytes are not the blob that was asked for; the message says why."""


@dataclass(frozen=True, slots=True)
class BlobLayout:
    """What the blobs of one model, type, kind and format have in common. identity: 32 bytes that the model, its types
    and the layout of sections went into. Raises ValueError for what a header cannot hold."""

    identity: bytes
    layers: int
    section_bytes: int
    kind: BlobKind
    format: BlobFormat

    def __post_init__(self) -> None:
        if len(self.identity) != 32:
            raise ValueError(f"identity must be 32 bytes, got {len(self.identity)}")
        if not 1 <= self.layers < 2**32 or not 0 <= self.section_bytes < 2**64:
            raise ValueError(f"cannot store {self.layers} layers of {self.section_bytes} bytes")
        if self.kind not in KINDS or self.format not in FORMATS:
            raise ValueError(f"kind must be one of {KINDS} and format one of {FORMATS}, got {self.kind}, {self.format}")

    @property
    def blob_bytes(self) -> int:
        """Bytes of header and sections."""
        return section_at(self.layers, self.section_bytes, self.layers)


class BlobHeader(NamedTuple):
    """What a sound header says. sums: a checksum for each section."""

    format: BlobFormat
    layers: int
    section_bytes: int
    sums: tuple[int, ...]

    def check(self, layer: int, section: Bytes) -> None:
        """Raises DamagedBlob unless these are the bytes of that layer's section."""
        size = memoryview(section).nbytes
        if size != self.section_bytes:
            raise DamagedBlob(f"section {layer} has {size} bytes instead of {self.section_bytes}")
        if checksum(section) != self.sums[layer]:
            raise DamagedBlob(f"section {layer} does not have its checksum")


def checksum(data: Bytes) -> int:
    """XXH3 (64 bits) of contiguous bytes. Other threads run meanwhile where there are many."""
    return xxhash.xxh3_64_intdigest(data)


def header_bytes(layers: int) -> int:
    """Length of a header, a multiple of 64."""
    return -(-(_FIXED.size + (layers + 1) * _SUM.size) // ALIGN) * ALIGN


def section_at(layers: int, section_bytes: int, layer: int) -> int:
    """Where a layer's section starts in a blob; where the blob ends for layer = layers."""
    return header_bytes(layers) + layer * section_bytes


def make_header(layout: BlobLayout, digest: bytes, sums: Sequence[int]) -> bytes:
    """The header of chunk `digest` (32 bytes), or a share of one (36), whose sections have these checksums, in layer
    order."""
    if len(digest) not in NAMED or len(sums) != layout.layers:
        raise ValueError(f"need a digest of 32 bytes and {layout.layers} sums, got {len(digest)} and {len(sums)}")
    kind, form, own = layout.kind.encode(), FORMATS.index(layout.format), _digest_in_header(digest)
    fixed = _FIXED.pack(MAGIC, VERSION, kind, form, layout.layers, layout.section_bytes, layout.identity, own)
    body = fixed + struct.pack(f"<{layout.layers}Q", *sums)
    body += bytes(header_bytes(layout.layers) - _SUM.size - len(body))
    return body + _SUM.pack(checksum(body))


def read_header(data: Bytes, digest: bytes, kind: BlobKind, identity: bytes) -> BlobHeader:
    """What the header at the start of `data` says; more bytes may follow it.

    Raises DamagedBlob if the header is missing, cut off, of another version or corrupt, or if it belongs to another
    model (identity), chunk (digest) or kind.
    """
    view = memoryview(data).cast("B")
    if len(view) < _FIXED.size:
        raise DamagedBlob(f"{len(view)} bytes are no header")
    magic, version, its_kind, form, layers, section_bytes, its_identity, its_digest = _FIXED.unpack_from(view)
    if magic != MAGIC:
        raise DamagedBlob(f"starts with {magic!r}, not with {MAGIC!r}")
    if version != VERSION:
        raise DamagedBlob(f"is of version {version}; this is version {VERSION}")
    size = header_bytes(layers)
    if len(view) < size:
        raise DamagedBlob(f"header for {layers} layers cut off: {len(view)} of {size} bytes")
    _expect("checksum of the header", _SUM.unpack_from(view, size - _SUM.size)[0], checksum(view[: size - _SUM.size]))
    _expect("identity", its_identity, identity)
    _expect("digest", its_digest, _digest_in_header(digest))
    _expect("kind", its_kind, kind.encode())
    if form >= len(FORMATS):
        raise DamagedBlob(f"unknown format {form}")
    return BlobHeader(FORMATS[form], layers, section_bytes, struct.unpack_from(f"<{layers}Q", view, _FIXED.size))


def identity_of(data: Bytes) -> bytes:
    """The identity in the header at the start of `data`, whose checksum is not looked at. Raises DamagedBlob for what
    begins otherwise."""
    view = memoryview(data).cast("B")
    if len(view) < _FIXED.size:
        raise DamagedBlob(f"{len(view)} bytes are no header")
    magic, version, _, _, _, _, identity, _ = _FIXED.unpack_from(view)
    if (magic, version) != (MAGIC, VERSION):
        raise DamagedBlob(f"starts with {magic!r} and version {version}, not with {MAGIC!r} and {VERSION}")
    return bytes(identity)


def check_blob(data: Bytes, name: bytes) -> None:
    """Raises DamagedBlob unless these bytes are a whole blob of that name (tiers.base.name_of) with all its checksums.
    Whose model it is remains open."""
    view, kinds = memoryview(data).cast("B"), {kind.encode(): kind for kind in KINDS}
    digest, kind = name[:-1], kinds.get(name[-1:])
    if len(digest) not in NAMED or kind is None:
        raise DamagedBlob("its name is none of a chunk")
    header = read_header(view, digest, kind, identity_of(view))
    if section_at(header.layers, header.section_bytes, header.layers) != len(view):
        raise DamagedBlob(f"{len(view)} bytes are not its header and {header.layers} x {header.section_bytes}")
    for layer in range(header.layers):
        start = section_at(header.layers, header.section_bytes, layer)
        header.check(layer, view[start : start + header.section_bytes])


def _digest_in_header(digest: bytes) -> bytes:
    return digest if len(digest) == 32 else hashlib.sha256(digest).digest()


def _expect(what: str, found: bytes | int, wanted: bytes | int) -> None:
    if found != wanted:
        texts = (x.hex() if isinstance(x, bytes) else f"{x:016x}" for x in (found, wanted))
        raise DamagedBlob("{} is {} instead of {}".format(what, *texts))
