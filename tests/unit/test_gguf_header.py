"""GGUF headers as hostile files write them: each lie ends in one error that names the file, before memory is taken."""

from __future__ import annotations

import struct
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from headrace.models.gguf.header import GgufFile, parts_of
from headrace.types import UnsupportedModel

pytestmark = pytest.mark.unit

few = settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
LARGEST = 4 << 20
"""Bytes that reading a header of a few hundred may take at most."""


def text(value: str | bytes) -> bytes:
    data = value if isinstance(value, bytes) else value.encode()
    return struct.pack("<Q", len(data)) + data


def entry(key: str | bytes, kind: int, value: bytes) -> bytes:
    return text(key) + struct.pack("<I", kind) + value


def array(key: str, kind: int, count: int, values: bytes) -> bytes:
    return entry(key, 9, struct.pack("<IQ", kind, count) + values)


def tensor(name: str | bytes, shape: tuple[int, ...], kind: int, begin: int) -> bytes:
    return text(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, kind, begin)


ENTRIES = (
    entry("general.architecture", 8, text("llama")),
    entry("llama.block_count", 4, struct.pack("<I", 2)),
    array("tokenizer.ggml.tokens", 8, 2, text("a") + text("\u2581b")),
    array("tokenizer.ggml.scores", 6, 2, struct.pack("<2f", 0.5, -1.0)),
)
TENSORS = (tensor("a", (4, 2), 0, 0), tensor("b", (32,), 8, 32))


def header(
    entries: tuple[bytes, ...] = ENTRIES,
    tensors: tuple[bytes, ...] = TENSORS,
    *,
    magic: bytes = b"GGUF",
    version: int = 3,
    counts: tuple[int, int] | None = None,
    data: int = 96,
) -> bytes:
    """A file; counts: of tensors and entries as it claims; data: bytes behind the header."""
    claimed = counts or (len(tensors), len(entries))
    head = magic + struct.pack("<IQQ", version, *claimed) + b"".join(entries) + b"".join(tensors)
    return head + bytes(-len(head) % 32) + bytes(range(data))


def read(path: Path, content: bytes) -> GgufFile:
    path.write_bytes(content)
    return GgufFile(path)


def test_what_a_sound_file_says(tmp_path: Path) -> None:
    file = read(tmp_path / "m.gguf", header())
    assert file.metadata["llama.block_count"] == 2 and file.metadata["general.architecture"] == "llama"
    assert file.strings("tokenizer.ggml.tokens") == ["a", "\u2581b"] and file.strings("none") == []
    assert np.array_equal(file.metadata["tokenizer.ggml.scores"], [0.5, -1.0])
    a, b = file.tensors["a"], file.tensors["b"]
    assert a.shape == (2, 4) and b.type.name == "Q8_0" and (a.size, b.size) == (32, 34)
    assert np.array_equal(file.bytes_of(a).reshape(-1), np.arange(32)) and file.bytes_of(b).shape == (1, 34)


LIES: dict[str, tuple[Callable[[], bytes], str]] = {
    "nothing": (lambda: b"", "is empty"),
    "another file": (lambda: header(magic=b"GGML"), "not a GGUF file"),
    "an old version": (lambda: header(version=1), "version 1 GGUF"),
    "the other order of bytes": (lambda: header(version=3 << 24), "big-endian"),
    "2^63 tensors": (lambda: header(counts=(2**63, 4)), "claims 9,223,372,036,854,775,808 tensors"),
    "2^63 entries": (lambda: header(counts=(2, 2**63)), "metadata entries"),
    "more tensors than there are": (lambda: header(counts=(60_000, 4)), "ends within its header|dimensions|claims"),
    "a key without end": (lambda: header((struct.pack("<Q", 2**62),)), "a key of the metadata"),
    "a key that is no text": (lambda: header((entry(b"\xff", 4, bytes(4)),)), "is not UTF-8"),
    "a key twice": (lambda: header((*ENTRIES, ENTRIES[1])), "llama.block_count stands in the metadata twice"),
    "a value of no type": (lambda: header((entry("x", 99, bytes(8)),)), "type 99, which does not exist"),
    "a string without end": (lambda: header((entry("x", 8, struct.pack("<Q", 2**40)),)), "bytes in x"),
    "a string past the end": (lambda: header((entry("x", 8, struct.pack("<Q", 9000)),)), "ends within its header"),
    "an array without end": (lambda: header((array("x", 4, 2**63, b""),)), "elements in x"),
    "an array past the end": (lambda: header((array("x", 10, 2**19, b""),)), "ends within its header"),
    "arrays in an array": (lambda: header((array("x", 9, 1, bytes(12)),)), "array of type 9"),
    "strings past the end": (lambda: header((array("x", 8, 2**19, b""),)), "ends within its header|bytes in a string"),
    "no dimensions": (lambda: header(tensors=(tensor("t", (), 0, 0),)), "has 0 dimensions"),
    "too many dimensions": (lambda: header(tensors=(tensor("t", (1,) * 5, 0, 0),)), "has 5 dimensions"),
    "a dimension of 0": (lambda: header(tensors=(tensor("t", (4, 0), 0, 0),)), "no whole number of blocks"),
    "a shape of 2^126": (lambda: header(tensors=(tensor("t", (2**63, 2**63), 0, 0),)), "ends .* bytes behind the file"),
    "half a block": (lambda: header(tensors=(tensor("t", (33,), 8, 0),)), "no whole number of blocks of Q8_0"),
    "an unknown type": (lambda: header(tensors=(tensor("t", (4,), 77, 0),)), "stored as type 77, which is not read"),
    "a type that is not read": (lambda: header(tensors=(tensor("t", (256,), 25, 0),)), "I16, which is not read"),
    "past the end": (lambda: header(tensors=(tensor("t", (64,), 0, 0),)), "ends 160 bytes behind the file"),
    "far past the end": (lambda: header(tensors=(tensor("t", (4,), 0, 2**64 - 32),)), "bytes behind the file"),
    "between alignments": (lambda: header(tensors=(tensor("t", (4,), 0, 16),)), "no multiple of 32"),
    "over another": (lambda: header(tensors=(TENSORS[0], tensor("b", (4,), 0, 0))), "lies over another tensor"),
    "a tensor twice": (lambda: header(tensors=(TENSORS[0], tensor("a", (4,), 0, 32))), "is there twice"),
    "an alignment of 3": (
        lambda: header((entry("general.alignment", 4, struct.pack("<I", 3)),)), "general.alignment is 3"
    ),
    "an alignment of 2^31": (
        lambda: header((entry("general.alignment", 4, struct.pack("<I", 2**31)),)), "general.alignment is"
    ),
}  # fmt: skip


@pytest.mark.parametrize("lie", LIES)
def test_lies(lie: str, tmp_path: Path) -> None:
    made, words = LIES[lie]
    path = tmp_path / "m.gguf"
    path.write_bytes(made())
    tracemalloc.start()
    try:
        with pytest.raises((ValueError, UnsupportedModel), match=words) as refused:
            GgufFile(path)
        assert tracemalloc.get_traced_memory()[1] < LARGEST
    finally:
        tracemalloc.stop()
    assert str(path) in str(refused.value) and len(str(refused.value)) < 600


@given(st.integers(0, 2**32), st.integers(1, 4))
@few
def test_damage(tmp_path: Path, seed: int, faults: int) -> None:
    """Any bytes changed, any end cut: read, or refused by the file's name."""
    rng, content = Random(seed), bytearray(header())
    for _ in range(faults):
        at = rng.randrange(len(content))
        content[at : at + rng.choice((1, 1, 8))] = rng.choice((b"\xff" * 8, bytes(8), rng.randbytes(1)))
    path = tmp_path / "m.gguf"
    path.write_bytes(content[: rng.randrange(len(content)) if rng.random() < 0.3 else None])
    try:
        file = GgufFile(path)
        for info in file.tensors.values():
            assert file.bytes_of(info).size == info.size
        strings: Any = file.strings("tokenizer.ggml.tokens")
        assert all(isinstance(each, str) for each in strings)
    except (ValueError, UnsupportedModel) as error:
        assert str(path) in str(error)


def test_parts_by_their_names(tmp_path: Path) -> None:
    paths = [tmp_path / f"m-0000{number}-of-00002.gguf" for number in (1, 2)]
    for path in paths:
        path.touch()
    assert parts_of(paths[1]) == paths and parts_of(tmp_path / "m.gguf") == [tmp_path / "m.gguf"]
    with pytest.raises(ValueError, match="counts 2 parts"):
        parts_of(tmp_path / "m-00003-of-00002.gguf")
    with pytest.raises(ValueError, match="counts 99999 parts"):
        parts_of(tmp_path / "m-00003-of-99999.gguf")
    with pytest.raises(ValueError, match=r"m-00001-of-00003\.gguf is missing"):
        parts_of(tmp_path / "m-00002-of-00003.gguf")
