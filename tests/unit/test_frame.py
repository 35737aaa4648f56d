"""The stored form of a chunk: what was written is read, and nothing else passes for it."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.offload import frame
from headrace.offload.frame import Damaged, Header, Stamp

pytestmark = pytest.mark.unit

IDENTITY, DIGEST = bytes(range(32)), bytes(range(100, 132))


@st.composite
def blobs(draw: st.DrawFn) -> tuple[Stamp, bytes, list[bytes]]:
    """A stamp, a digest and sections."""
    layers, size = draw(st.integers(1, 40)), draw(st.integers(0, 70))
    kind, form = draw(st.sampled_from(frame.KINDS)), draw(st.sampled_from(frame.FORMATS))
    stamp = Stamp(draw(st.binary(min_size=32, max_size=32)), layers, size, kind, form)
    section = st.binary(min_size=size, max_size=size)
    sections = draw(st.lists(section, min_size=layers, max_size=layers))
    return stamp, draw(st.binary(min_size=32, max_size=32)), sections


def written(stamp: Stamp, digest: bytes, sections: list[bytes]) -> bytes:
    return frame.make_header(stamp, digest, [frame.checksum(x) for x in sections]) + b"".join(sections)


def read(blob: bytes, stamp: Stamp, digest: bytes) -> tuple[Header, list[bytes]]:
    header = frame.read_header(blob, digest, stamp.kind, stamp.identity)
    ends = [frame.section_at(header.layers, header.section_bytes, j) for j in range(header.layers + 1)]
    sections = [blob[ends[j] : ends[j + 1]] for j in range(header.layers)]
    for j, section in enumerate(sections):
        header.check(j, section)
    return header, sections


def small(kind: str = "k") -> tuple[Stamp, bytes, list[bytes]]:
    stamp = Stamp(IDENTITY, 3, 40, kind, "raw")  # type: ignore[arg-type]
    return stamp, DIGEST, [bytes([j] * 40) for j in range(3)]


@settings(deadline=None)
@given(blobs())
def test_what_was_written_is_read(blob: tuple[Stamp, bytes, list[bytes]]) -> None:
    stamp, digest, sections = blob
    data = written(*blob)
    header, back = read(data, stamp, digest)
    assert back == sections and len(data) == stamp.blob_bytes
    assert (header.format, header.layers, header.section_bytes) == (stamp.format, stamp.layers, stamp.section_bytes)
    assert frame.header_bytes(stamp.layers) % 64 == 0


@settings(deadline=None)
@given(blobs(), st.data())
def test_any_changed_byte_is_found(blob: tuple[Stamp, bytes, list[bytes]], data: st.DataObject) -> None:
    stamp, digest, _ = blob
    broken = bytearray(written(*blob))
    broken[data.draw(st.integers(0, len(broken) - 1))] ^= data.draw(st.integers(1, 255))
    with pytest.raises(Damaged):
        read(bytes(broken), stamp, digest)


@pytest.mark.parametrize("flip", [1, 128, 255])
def test_each_byte_is_covered(flip: int) -> None:
    blob = small()
    whole = written(*blob)
    for i in range(len(whole)):
        broken = bytearray(whole)
        broken[i] ^= flip
        with pytest.raises(Damaged):
            read(bytes(broken), *blob[:2])


def test_each_length_but_the_whole_is_found() -> None:
    blob = small()
    whole = written(*blob)
    for size in range(len(whole)):
        with pytest.raises(Damaged):
            read(whole[:size], *blob[:2])


def test_the_message_says_what_is_wrong() -> None:
    _, digest, sections = blob = small()
    whole = written(*blob)
    cases = {
        b"": "0 bytes are no header",
        b"PK" + whole[2:]: "starts with",
        whole[:8] + b"\x02" + whole[9:]: "version 2; this is version 1",
        whole[:100]: "header for 3 layers cut off: 100 of 128 bytes",
        whole[:12] + b"\xff\xff\xff\xff" + whole[16:]: "4294967295 layers cut off",
        whole[:20] + b"\x01" + whole[21:]: "checksum of the header",
    }
    for bad, message in cases.items():
        with pytest.raises(Damaged, match=message):
            frame.read_header(bad, digest, "k", IDENTITY)
    for args, message in (
        ((digest, "k", digest), "identity is 0001.* instead of 6465"),
        ((IDENTITY, "k", IDENTITY), "digest is 6465.* instead of 0001"),
        ((digest, "x", IDENTITY), "kind is 6b instead of 78"),
    ):
        with pytest.raises(Damaged, match=message):
            frame.read_header(whole, *args)  # type: ignore[arg-type]
    header = frame.read_header(whole, digest, "k", IDENTITY)
    with pytest.raises(Damaged, match="section 1 does not have its checksum"):
        header.check(1, sections[0])
    with pytest.raises(Damaged, match="section 2 has 39 bytes instead of 40"):
        header.check(2, sections[2][1:])


def test_a_format_of_the_future_is_found() -> None:
    stamp, digest, sections = small()
    body = bytearray(written(stamp, digest, sections)[:120])
    body[11] = 77
    with pytest.raises(Damaged, match="unknown format 77"):
        frame.read_header(body + frame.checksum(body).to_bytes(8, "little"), digest, "k", IDENTITY)


def test_the_bytes_of_version_1() -> None:
    """What is on people's disks: a change here asks for another VERSION."""
    stamp, digest, sections = small("x")
    stamp = replace(stamp, format="int4")
    data = written(stamp, digest, sections)
    fixed = b"HEADRACE" + b"\1\0" + b"x" + b"\2" + b"\3\0\0\0" + b"\x28" + bytes(7) + IDENTITY + DIGEST
    assert data[:88] == fixed and data[88:96].hex() == SUM_OF_ZEROS and len(data) == 128 + 120
    assert data[112:120] == bytes(8) and int.from_bytes(data[120:128], "little") == frame.checksum(data[:120])


SUM_OF_ZEROS = "a95a4d26dadf4d11"
"""XXH3 of 40 zeros, little-endian."""


def test_a_writable_view_does() -> None:
    blob = small()
    data = memoryview(bytearray(written(*blob)))
    assert frame.read_header(data, DIGEST, "k", IDENTITY).layers == 3
    assert frame.checksum(data[128:168]) == frame.checksum(bytes(40))


def test_refusals() -> None:
    stamp, digest, _ = small()
    for bad in (dict(identity=b""), dict(layers=0), dict(section_bytes=-1), dict(kind="y"), dict(format="int2")):
        with pytest.raises(ValueError, match=r"identity|layers|kind"):
            replace(stamp, **bad)  # type: ignore[arg-type]
    for sums, name in (([1], digest), ([1, 2, 3], b"short")):
        with pytest.raises(ValueError, match="need a digest of 32 bytes and 3 sums"):
            frame.make_header(stamp, name, sums)
