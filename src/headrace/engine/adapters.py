"""Adapters (LoRA) of an engine: where they are, and from which token on a prompt has one. Imports no torch."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from headrace.config import EngineConfig
from headrace.engine.folders import hub_folder
from headrace.logs import shown
from headrace.models.adapter_files import CONFIG, WEIGHTS, AdapterFacts, read_adapter
from headrace.types import CHUNK, InvalidRequest

GROWTH = 2
"""Bytes in memory for each byte of a file, about: parts of a fused matrix are padded by zeros."""


class Applied(NamedTuple):
    """The adapter of a sequence, by its number, and the position from which on its rows have it."""

    number: int
    start: int


NO_ADAPTER = Applied(-1, 0)


@dataclass(frozen=True, slots=True)
class ServedAdapter:
    """What both sides of a process boundary need to know. invocation: see AdapterFacts. digest: in hexadecimal."""

    name: str
    invocation: tuple[int, ...]
    digest: str

    def start(self, tokens: Sequence[int]) -> int | None:
        """The position from which on a prompt has it; None: nothing in the prompt invokes it."""
        return last_place(self.invocation, tokens) if self.invocation else 0

    def mark(self, start: int) -> tuple[bytes, int]:
        """What stands for it in the names of chunks, 16 bytes, and the chunk from which on it does."""
        named = f"{self.digest} {start}".encode()
        return hashlib.blake2b(named, digest_size=16, person=b"adapter").digest(), start // CHUNK


def last_place(wanted: Sequence[int], tokens: Sequence[int]) -> int | None:
    """Where `wanted` stands in `tokens` for the last time; None: nowhere."""
    size, first = len(wanted), wanted[0]
    for begin in range(len(tokens) - size, -1, -1):
        if tokens[begin] == first and list(tokens[begin : begin + size]) == list(wanted):
            return begin
    return None


def started(adapters: Sequence[ServedAdapter], name: str, tokens: Sequence[int]) -> int:
    """The position from which on a prompt has the adapter of that name; "": none, and 0. Raises InvalidRequest for one
    that is not there, and for a prompt that does not invoke it."""
    if not isinstance(name, str):
        told = f"adapter must be the name of one of lora_modules, or '' for the model; got {type(name).__name__}"
        raise InvalidRequest(told, "adapter")
    if name == "":
        return 0
    adapter = next((each for each in adapters if each.name == name), None)
    if adapter is None:
        known = ", ".join(repr(each.name) for each in adapters) or "none: name some with lora_modules"
        raise InvalidRequest(f"there is no adapter {shown(repr(name[:100]))}; this engine has {known}", "adapter")
    start = adapter.start(tokens)
    if start is None:
        told = f"the prompt lacks {list(adapter.invocation)}, the invocation tokens at which {name!r} begins"
        raise InvalidRequest(f"{told}: end it with them, or ask the model itself", "adapter")
    return start


def adapter_folder(given: str) -> Path:
    """The folder of an adapter: a path, or what Hugging Face's tools have downloaded under a name of the hub. Raises
    ValueError if there is none."""
    path = Path(given).expanduser()
    try:
        if (path / CONFIG).is_file():
            return path
        found = None if path.exists() else hub_folder(given, CONFIG)
    except OSError as error:
        raise ValueError(f"lora_modules: {shown(repr(given))}: {error.strerror or error}") from None
    if found is not None:
        return found
    what = f"the folder has no {CONFIG}" if path.is_dir() else "there is no such folder"
    raise ValueError(f"lora_modules: {shown(repr(given))}: {what}; give the folder of an adapter in PEFT's form")


def read_adapters(config: EngineConfig) -> tuple[AdapterFacts, ...]:
    """Of all adapters of the settings. Raises ValueError, or UnsupportedModel, which says what is wrong."""
    return tuple(read_adapter(name, adapter_folder(folder)) for name, folder in config.adapters.each)


def adapter_bytes(config: EngineConfig) -> int:
    """Memory of the adapters on each rank, about."""
    files = (adapter_folder(folder) / WEIGHTS for _, folder in config.adapters.each)
    return GROWTH * sum(file.stat().st_size for file in files if file.is_file())


def served(facts: Sequence[AdapterFacts]) -> tuple[ServedAdapter, ...]:
    return tuple(ServedAdapter(each.name, each.invocation, each.digest.hex()) for each in facts)
