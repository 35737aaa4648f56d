"""The header of a GGUF file: metadata by key, and where each tensor lies. Imports no torch.

The file comes from somewhere else, and every number in it may be a lie. Each is held against what the file has before
anything is read or allocated by it; what does not fit ends in a ValueError that names the file and what is wrong. The
format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md, versions 2 and 3, little-endian.
"""

from __future__ import annotations

import math
import mmap
import re
import struct
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from headrace.files import open_given
from headrace.logs import shown
from headrace.models.gguf.types import TYPES, TensorType, name_of
from headrace.types import UnsupportedModel

SUFFIX = ".gguf"
MAGIC = b"GGUF"
MAX_HEADER = 128 << 20
"""Bytes of metadata and tensor index; a vocabulary of 260,000 tokens with its merges takes 15 MB."""
MAX_ENTRIES = 1 << 16
"""Of metadata, and of tensors."""
MAX_ELEMENTS = 1 << 20
"""Of an array in the metadata."""
MAX_NAME, MAX_DIMENSIONS, MAX_ALIGNMENT, MAX_PARTS = 512, 4, 1 << 16, 1024
NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
"""struct's letters of the metadata's types; 8 is a string, 9 an array."""
STRING, ARRAY = 8, 9
PART = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf")


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """Where a tensor lies. shape: rows first, as torch has it; begin, size: bytes of the file."""

    name: str
    shape: tuple[int, ...]
    type: TensorType
    begin: int
    size: int

    @property
    def held(self) -> int:
        """Bytes in memory, once it is packed."""
        return int(math.prod(self.shape) * self.type.held / 8)

    def apart(self) -> list[TensorInfo]:
        """The tensors [...] that one [count, ...] of two dimensions or more is made of."""
        count, *shape = self.shape
        each = self.size // count
        return [replace(self, shape=tuple(shape), begin=self.begin + i * each, size=each) for i in range(count)]


@dataclass(frozen=True, slots=True)
class _Strings:
    """An array of strings that are read when they are wanted."""

    at: int
    count: int


class GgufFile:
    """One file, mapped. `tensors` by name, in the file's order. Raises ValueError for anything but a sound file, and
    UnsupportedModel for versions and tensor types that are not read."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with open_given(path) as file:
                self.data = mmap.mmap(
                    file.fileno(), 0, access=mmap.ACCESS_COPY
                )  # torch warns of memory that it must not write
        except OSError as error:
            raise ValueError(f"{path} cannot be read: {error.strerror}") from None
        except ValueError:
            raise ValueError(f"{path} is empty; download it again") from None
        self._at = 0
        self._metadata: dict[str, Any] = {}
        self.tensors: dict[str, TensorInfo] = {}
        self._read()

    @property
    def metadata(self) -> dict[str, Any]:
        """Values by key; arrays as numpy arrays, strings among them as `strings` gives them."""
        return self._metadata

    def length(self, key: str) -> int:
        """How many strings an array has, 0 where there is none. Raises ValueError for another kind of value."""
        return self._strings(key).count

    def strings(self, key: str) -> list[str]:
        """An array of strings, [] where there is none. Raises ValueError for another kind of value, and bad UTF-8."""
        found = self._strings(key)
        at, texts = found.at, []
        for _ in range(found.count):
            (length,) = struct.unpack_from("<Q", self.data, at)
            texts.append(self._text(self.data[at + 8 : at + 8 + length], key))
            at += 8 + length
        return texts

    def _strings(self, key: str) -> _Strings:
        found = self._metadata.get(key, _Strings(0, 0))
        if not isinstance(found, _Strings):
            self._refuse(f"{shown(key)} is no list of strings")
        return found

    def bytes_of(self, info: TensorInfo) -> np.ndarray[Any, Any]:
        """uint8 [rows, bytes of a row], a view of the file that keeps it mapped."""
        flat = np.frombuffer(self.data, np.uint8, info.size, info.begin)
        return flat.reshape(-1, info.type.row_bytes(info.shape[-1]))

    # ---- reading -----------------------------------------------------------------------------------------------------

    def _refuse(self, what: str) -> NoReturn:
        raise ValueError(f"{self.path}: {what}; download it again")

    def _read(self) -> None:
        if self.data[:4] != MAGIC:
            self._refuse("this is not a GGUF file, or is a pointer to one")
        self._at = 4
        version = self._number("I")
        if version not in (2, 3):
            told = "big-endian" if version in (2 << 24, 3 << 24) else f"version {version}"
            raise UnsupportedModel(f"{self.path}: {told} GGUF is not read; versions 2 and 3, little-endian, are")
        tensors, entries = self._count("tensors"), self._count("metadata entries")
        for _ in range(entries):
            key = self._string("a key of the metadata")
            if key in self._metadata:
                self._refuse(f"{shown(key)} stands in the metadata twice")
            self._metadata[key] = self._value(key, self._number("I"))
        infos = [self._tensor() for _ in range(tensors)]
        self._place(infos)

    def _take(self, size: int) -> int:
        """The place of `size` bytes from here on, which are passed over."""
        at, end = self._at, self._at + size
        if end > len(self.data):
            self._refuse("it ends within its header: cut short or damaged")
        if end > MAX_HEADER:
            self._refuse(f"its header is longer than {MAX_HEADER >> 20} MiB")
        self._at = end
        return at

    def _number(self, letter: str) -> Any:
        return struct.unpack_from("<" + letter, self.data, self._take(struct.calcsize("<" + letter)))[0]

    def _count(self, what: str, most: int = MAX_ENTRIES) -> int:
        count = int(self._number("Q"))
        if count > most:
            self._refuse(f"it claims {count:,} {what}, at most {most:,} are read")
        return count

    def _string(self, what: str, most: int = MAX_NAME) -> str:
        length = self._count(f"bytes in {what}", most)
        at = self._take(length)
        return self._text(self.data[at : at + length], what)

    def _text(self, data: bytes, what: str) -> str:
        try:
            return data.decode()
        except UnicodeDecodeError:
            self._refuse(f"{shown(what)} is not UTF-8")

    def _value(self, key: str, kind: int) -> Any:
        if kind in NUMBERS:
            return self._number(NUMBERS[kind])
        if kind == STRING:
            return self._string(key, MAX_HEADER)
        if kind != ARRAY:
            self._refuse(f"{shown(key)} is of type {kind}, which does not exist")
        inner = self._number("I")
        count = self._count(f"elements in {shown(key)}", MAX_ELEMENTS)
        if inner in NUMBERS:
            dtype = np.dtype("?" if NUMBERS[inner] == "?" else "<" + NUMBERS[inner])
            return np.frombuffer(self.data, dtype, count, self._take(count * dtype.itemsize))
        if inner != STRING:
            self._refuse(f"{shown(key)} is an array of type {inner}, which is not read")
        at = self._at
        for _ in range(count):
            self._take(self._count("bytes in a string", MAX_HEADER))
        return _Strings(at, count)

    def _tensor(self) -> TensorInfo:
        name = self._string("the name of a tensor")
        count = self._number("I")
        if not 1 <= count <= MAX_DIMENSIONS:
            self._refuse(f"{shown(name)} has {count} dimensions")
        shape = tuple(self._number("Q") for _ in range(count))[::-1]
        kind, begin = self._number("I"), self._number("Q")
        if kind not in TYPES:
            known = ", ".join(each.name for each in TYPES.values())
            raise UnsupportedModel(
                f"{self.path}: {shown(name)} is stored as {name_of(kind)}, which is not read; these are: {known}"
            )
        size = TYPES[kind].bytes_of(shape)
        if size is None:
            self._refuse(f"{shown(name)} of shape {list(shape)} is no whole number of blocks of {TYPES[kind].name}")
        return TensorInfo(name, shape, TYPES[kind], begin, size)

    def _place(self, infos: list[TensorInfo]) -> None:
        """Where tensors lie: behind the header, aligned, in the file, none over another."""
        align = self._metadata.get("general.alignment", 32)
        if not isinstance(align, int) or not 1 <= align <= MAX_ALIGNMENT or align & (align - 1):
            self._refuse(f"general.alignment is {shown(repr(align))}, a power of 2 is needed")
        start = end = -(-self._at // align) * align
        for info in sorted(infos, key=lambda info: info.begin):
            begin = start + info.begin
            if info.begin % align:
                self._refuse(f"{shown(info.name)} lies at {info.begin:,}, which is no multiple of {align}")
            if begin < end:
                self._refuse(f"{shown(info.name)} lies over another tensor")
            end = begin + info.size
            if end > len(self.data):
                missing = end - len(self.data)
                self._refuse(f"{shown(info.name)} ends {missing:,} bytes behind the file: cut short or damaged")
        for info in infos:
            if info.name in self.tensors:
                self._refuse(f"{shown(info.name)} is there twice")
            self.tensors[info.name] = TensorInfo(info.name, info.shape, info.type, start + info.begin, info.size)


def parts_of(path: Path) -> list[Path]:
    """All files of the model that `path` is one of, by number: name-00001-of-000NN.gguf. Raises ValueError naming one
    that is missing."""
    found = PART.fullmatch(path.name)
    if found is None:
        return [path]
    count = int(found["count"])
    if not 1 <= int(found["number"]) <= count <= MAX_PARTS:
        raise ValueError(
            f"{path}: its name counts {count} parts, 1 to {MAX_PARTS} are read; name it as it was published"
        )
    parts = [path.with_name(f"{found['stem']}-{number:05}-of-{count:05}{SUFFIX}") for number in range(1, count + 1)]
    for part in parts:
        if not part.is_file():
            raise ValueError(f"{part} is missing, one of {count} parts; download it too")
    return parts


def open_gguf(path: Path) -> GgufFile:
    """The file, read once while it stays the same. Raises as GgufFile."""
    try:
        facts = path.stat()
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}") from None
    return _opened(path, (facts.st_dev, facts.st_ino, facts.st_size, facts.st_mtime_ns))


@lru_cache(maxsize=2)
def _opened(path: Path, facts: tuple[int, ...]) -> GgufFile:
    return GgufFile(path)
