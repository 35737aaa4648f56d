"""Stored chunks as an engine frames them, for the doors behind which they lie."""

from __future__ import annotations

from random import Random

from headrace.offload import frame
from headrace.offload.tiers.base import Read, Tier, name_of

IDENTITY, LAYERS, SECTION = bytes(32), 2, 1000
STAMP = frame.BlobLayout(IDENTITY, LAYERS, SECTION, "k", "raw")


def digest(number: int) -> bytes:
    return number.to_bytes(32, "big")


def named(number: int) -> bytes:
    return name_of(digest(number), "k")


def blob(number: int) -> bytes:
    sections = [Random(f"{number}/{layer}").randbytes(SECTION) for layer in range(LAYERS)]
    return frame.make_header(STAMP, digest(number), list(map(frame.checksum, sections))) + b"".join(sections)


def there(tier: Tier, number: int, sound: bytes) -> bool:
    """Whether the blob is there, whole and right; a damaged one is dropped, as an engine does.

    Raises AssertionError if what passes the checks of its frame is anything but `sound`."""
    into = bytearray(STAMP.blob_bytes)
    if tier.read([Read(named(number), 0, memoryview(into))]) != [True]:
        return False
    try:
        header = frame.read_header(into, digest(number), "k", IDENTITY)
        for layer in range(LAYERS):
            start = frame.section_at(LAYERS, SECTION, layer)
            header.check(layer, memoryview(into)[start : start + SECTION])
    except (frame.DamagedBlob, IndexError):
        tier.drop([named(number)])
        return False
    start = frame.section_at(LAYERS, SECTION, 0)
    assert into[start:] == sound[start:], "wrong bits passed the checks"
    return True
