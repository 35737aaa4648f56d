"""Notes beside the blobs of a directory, for people: which model an identity stands for. Nothing depends on them.

notes/IDENTITY.json      written by each engine that opens the directory; IDENTITY is what its blobs' headers have
"""

from __future__ import annotations

import json
import logging
import os
import re
from contextlib import suppress
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from headrace.files import open_own, read_own

log = logging.getLogger(__name__)

FOLDER = "notes"
NAME = re.compile(r"([0-9a-f]{64})\.json")
MOST_BYTES = 64 << 10
MOST_NOTES = 10_000


@dataclass(frozen=True, slots=True)
class ModelNote:
    """Of an engine: its model as given, that one's folder, its types, the tier's format and budget, its version."""

    model: str
    folder: str
    dtype: str
    kv_dtype: str
    quantization: str
    format: str
    budget_bytes: int
    version: str


def write_note(root: Path, identity: bytes, note: ModelNote) -> None:
    """Replaces the note on an identity. One that cannot be written is done without."""
    folder = root / FOLDER
    own = folder / f".{identity.hex()}.{os.getpid()}"
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        with open(open_own(own, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), "w") as file:
            json.dump(asdict(note), file)
        own.replace(folder / f"{identity.hex()}.json")
    except OSError as error:
        log.debug("no note in %s: %s", folder, error)
        with suppress(OSError):
            own.unlink()


def read_notes(root: Path) -> dict[bytes, tuple[ModelNote, float]]:
    """By identity, each with when it was written [s]. What is no note is left out."""
    found: dict[bytes, tuple[ModelNote, float]] = {}
    with suppress(OSError):
        for file in os.scandir(root / FOLDER):
            match = NAME.fullmatch(file.name)
            if match and len(found) < MOST_NOTES and (note := _read(Path(file.path))) is not None:
                found[bytes.fromhex(match[1])] = note, file.stat(follow_symlinks=False).st_mtime
    return found


def _read(path: Path) -> ModelNote | None:
    with suppress(OSError, ValueError, RecursionError, TypeError):
        told = json.loads(read_own(path, MOST_BYTES))
        note = ModelNote(**{item.name: told[item.name] for item in fields(ModelNote) if item.name in told})
        if all(type(getattr(note, item.name)).__name__ == item.type for item in fields(ModelNote)):
            return note
    return None


def drop_notes(root: Path) -> None:
    """Removes all notes."""
    with suppress(OSError):
        for file in os.scandir(root / FOLDER):
            if NAME.fullmatch(file.name):
                os.unlink(file.path)
