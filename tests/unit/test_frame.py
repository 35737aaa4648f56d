"""The stored form of a chunk: what was written is read, and nothing else passes for it."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.offload import frame
from headrace.offload.frame import BlobHeader, BlobLayout, DamagedBlob

pytestmark = pytest.mark.unit

IDENTITY, DIGEST = bytes(range(32)), bytes(range(100, 132))


@st.composite
def blobs(draw: st.DrawFn) -> tuple[BlobLayout, bytes, list[bytes]]:
    """A layout, a digest and sections."""
    layers, size = draw(st.integers(1, 40)), draw(st.integers(0, 70))
    kind, form = draw(st.sampled_from(frame.KINDS)), draw(st.sampled_from(frame.FORMATS))
    layout = BlobLayout(draw(st.binary(min_size=32, max_size=32)), layers, size, kind, form)
    section = st.binary(min_size=size, max_size=size)
    sections = draw(st.lists(section, min_size=layers, max_size=layers))
    return layout, draw(st.binary(min_size=32, max_size=32)), sections


def written(layout: BlobLayout, digest: bytes, sections: list[bytes]) -> bytes:
    return frame.make_header(layout, digest, [frame.checksum(x) for x in sections]) + b"".join(sections)


def read(blob: bytes, layout: BlobLayout, digest: bytes) -> tuple[BlobHeader, list[bytes]]:
    header = frame.read_header(blob, digest, layout.kind, layout.identity)
    ends = [frame.section_at(header.layers, header.section_bytes, j) for j in range(header.layers + 1)]
    sections = [blob[ends[j] : ends[j + 1]] for j in range(header.layers)]
    for j, section in enumerate(sections):
        header.check(j, section)
    return header, sections


def small(kind: str = "k") -> tuple[BlobLayout, bytes, list[bytes]]:
    layout = BlobLayout(IDENTITY, 3, 40, kind, "raw")  # type: ignore[arg-type]
    return layout, DIGEST, [bytes([j] * 40) for j in range(3)]


@settings(deadline=None)
@given(blobs())
def test_what_was_written_is_read(blob: tuple[BlobLayout, bytes, list[bytes]]) -> None:
    layout, digest, sections = blob
    data = written(*blob)
    header, back = read(data, layout, digest)
    assert back == sections and len(data) == layout.blob_bytes
    assert (header.format, header.layers, header.section_bytes) == (layout.format, layout.layers, layout.section_bytes)
    assert frame.header_bytes(layout.layers) % 64 == 0


@settings(deadline=None)
@given(blobs(), st.data())
def test_any_changed_byte_is_found(blob: tuple[BlobLayout, bytes, list[bytes]], data: st.DataObject) -> None:
    layout, digest, _ = blob
    broken = bytearray(written(*blob))
    broken[data.draw(st.integers(0, len(broken) - 1))] ^= data.draw(st.integers(1, 255))
    with pytest.raises(DamagedBlob):
        read(bytes(broken), layout, digest)


@pytest.mark.parametrize("flip", [1, 128, 255])
def test_each_byte_is_covered(flip: int) -> None:
    blob = small()
    whole = written(*blob)
    for i in range(len(whole)):
        broken = bytearray(whole)
        broken[i] ^= flip
        with pytest.raises(DamagedBlob):
            read(bytes(broken), *blob[:2])


def test_each_length_but_the_whole_is_found() -> None:
    blob = small()
    whole = written(*blob)
    for size in range(len(whole)):
        with pytest.raises(DamagedBlob):
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
        with pytest.raises(DamagedBlob, match=message):
            frame.read_header(bad, digest, "k", IDENTITY)
    for args, message in (
        ((digest, "k", digest), "identity is 0001.* instead of 6465"),
        ((IDENTITY, "k", IDENTITY), "digest is 6465.* instead of 0001"),
        ((digest, "x", IDENTITY), "kind is 6b instead of 78"),
    ):
        with pytest.raises(DamagedBlob, match=message):
            frame.read_header(whole, *args)  # type: ignore[arg-type]
    header = frame.read_header(whole, digest, "k", IDENTITY)
    with pytest.raises(DamagedBlob, match="section 1 does not have its checksum"):
        header.check(1, sections[0])
    with pytest.raises(DamagedBlob, match="section 2 has 39 bytes instead of 40"):
        header.check(2, sections[2][1:])


def test_a_format_of_the_future_is_found() -> None:
    layout, digest, sections = small()
    body = bytearray(written(layout, digest, sections)[:120])
    body[11] = 77
    with pytest.raises(DamagedBlob, match="unknown format 77"):
        frame.read_header(body + frame.checksum(body).to_bytes(8, "little"), digest, "k", IDENTITY)


def test_the_bytes_of_version_1() -> None:
    """What is on people's disks: a change here asks for another VERSION."""
    layout, digest, sections = small("x")
    layout = replace(layout, format="int4")
    data = written(layout, digest, sections)
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
    layout, digest, _ = small()
    for bad in (dict(identity=b""), dict(layers=0), dict(section_bytes=-1), dict(kind="y"), dict(format="int2")):
        with pytest.raises(ValueError, match=r"identity|layers|kind"):
            replace(layout, **bad)  # type: ignore[arg-type]
    for sums, name in (([1], digest), ([1, 2, 3], b"short")):
        with pytest.raises(ValueError, match="need a digest of 32 bytes and 3 sums"):
            frame.make_header(layout, name, sums)
