"""What `headrace cache ls` shows: stored blobs by model and tenant, as a table and as JSON."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

from rich.console import Console
from rich.table import Table
from rich.text import Text

from headrace.config.environment import from_home
from headrace.console import Trimmed
from headrace.offload.tiers import upkeep
from headrace.offload.tiers.notes import ModelNote, read_notes
from headrace.offload.tiers.upkeep import UNSALTED, StoredBlob, Tell
from headrace.progress import sized

ID = 8
"""Digits of an identity that are shown; so many and more name it."""

MODEL, OTHERS = 12, 67
"""Characters of a model's name in a line at least, and what the other columns take of it."""
SHORT = {"bfloat16": "bf16", "float32": "fp32"}


@dataclass(frozen=True, slots=True)
class Group:
    """Blobs of one model, or of one tenant of it."""

    blobs: Sequence[StoredBlob]

    @property
    def chunks(self) -> int:
        return sum(bool(blob.tokens) for blob in self.blobs)

    @property
    def tokens(self) -> int:
        return sum(blob.tokens for blob in self.blobs)

    @property
    def size(self) -> int:
        return sum(blob.entry.size for blob in self.blobs)

    @property
    def used_ns(self) -> int:
        return max(blob.used_ns for blob in self.blobs)

    def told(self) -> dict[str, Any]:
        used = datetime.fromtimestamp(self.used_ns / 1e9, UTC).isoformat(timespec="seconds")
        return {"chunks": self.chunks, "tokens": self.tokens, "bytes": self.size, "last_use": used}

    def cells(self) -> list[str]:
        return [f"{self.chunks:,}", f"{self.tokens:,}", sized(self.size), ago(time.time() - self.used_ns / 1e9)]


@dataclass(frozen=True, slots=True)
class StoredModel(Group):
    """identity: None for blobs whose header cannot be read; note: None if there is none on it."""

    identity: bytes | None
    note: ModelNote | None

    @property
    def id(self) -> str:
        return "" if self.identity is None else self.identity.hex()

    @property
    def name(self) -> str:
        if self.identity is None:
            return "unreadable"
        return "?" if self.note is None else Path(self.note.model).name or self.note.model

    @property
    def types(self) -> str:
        """'bf16, raw', with the cache's type and the weights' rounding where they are others."""
        if self.note is None:
            return ""
        note, dtype, kv_dtype = self.note, *(SHORT.get(name, name) for name in (self.note.dtype, self.note.kv_dtype))
        kept = f"KV {kv_dtype}" if kv_dtype != dtype else ""
        rounded = f"weights {note.quantization}" if note.quantization != "none" else ""
        return ", ".join(filter(None, (dtype, kept, rounded, note.format)))

    def is_named(self, text: str) -> bool:
        names = [self.name] if self.note is None else [self.note.model, self.name, self.note.folder]
        return text in names or (len(text) >= ID and self.id.startswith(text))

    def tenants(self) -> dict[bytes, Group]:
        """By their mark; those of most bytes first."""
        own: dict[bytes, list[StoredBlob]] = {}
        for blob in self.blobs:
            own.setdefault(blob.entry.tenant, []).append(blob)
        groups = {tenant: Group(blobs) for tenant, blobs in own.items()}
        return dict(sorted(groups.items(), key=lambda item: -item[1].size))


@dataclass(frozen=True, slots=True)
class Listing:
    """budget_bytes: of the engine that opened the directory last; None if nothing tells."""

    place: str
    models: Sequence[StoredModel]
    budget_bytes: int | None

    @property
    def size(self) -> int:
        return sum(model.size for model in self.models)

    def chosen(self, model: str | None, before_ns: int | None) -> list[StoredBlob]:
        """Those of a model (None: all) that were last used before then. Raises ValueError for an unknown model."""
        models = [each for each in self.models if model is None or each.is_named(model)]
        if model is not None and not models:
            known = ", ".join(dict.fromkeys(each.id[:ID] if each.name == "?" else each.name for each in self.models))
            raise ValueError(f"{self.place} holds nothing of {model!r}; it holds {known or 'nothing'}")
        blobs = [blob for each in models for blob in each.blobs]
        return [blob for blob in blobs if before_ns is None or blob.used_ns < before_ns]

    def told(self) -> dict[str, Any]:
        models = []
        for model in self.models:
            note = model.note
            known = {} if note is None else {name: getattr(note, name) for name in (
                "folder", "dtype", "kv_dtype", "quantization", "format", "version")}  # fmt: skip
            tenants = [{"tenant": _tenant(mark), **group.told()} for mark, group in model.tenants().items()]
            models.append({"model": model.name, "id": model.id, **known, **model.told(), "tenants": tenants})
        return {"directory": self.place, "bytes": self.size, "budget_bytes": self.budget_bytes, "models": models}


def listing(root: Path, tell: Tell) -> Listing:
    """What a directory holds; models used last come first."""
    notes = read_notes(root)
    own: dict[bytes | None, list[StoredBlob]] = {}
    for blob in upkeep.blobs(root, tell) if upkeep.holds_kv(root) else ():
        own.setdefault(blob.identity, []).append(blob)
    models = [
        StoredModel(blobs, identity, notes[identity][0] if identity in notes else None)
        for identity, blobs in own.items()
    ]
    latest = max(notes.values(), key=lambda note: note[1], default=None)
    models.sort(key=lambda model: -model.used_ns)
    return Listing(from_home(root), models, latest[0].budget_bytes if latest else None)


def show(console: Console, found: Listing) -> None:
    """Prints the table, with a line for each tenant where there are some."""
    budget = f" of {sized(found.budget_bytes)}" if found.budget_bytes else ""
    console.print(Text(f"{found.place}: {sized(found.size)}{budget}" if found.models else f"{found.place}: nothing"))
    if not found.models:
        return
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="")
    for name in ("model", "types, tenants", "chunks", "tokens", "size", "last use", "id"):
        justify: Literal["left", "right"] = "right" if name in ("chunks", "tokens", "size") else "left"
        most = max(MODEL, console.width - OTHERS) if name == "model" else None
        wraps = name in ("model", "types, tenants")
        table.add_column(name, justify=justify, no_wrap=not wraps, max_width=most, overflow="fold")
    for model in found.models:
        table.add_row(Text(model.name), Text(model.types), *model.cells(), model.id[:ID])
        for name, cells in _rows(model):
            table.add_row("", Text(name), *cells, "")
    console.print(Trimmed(table))


def _rows(model: StoredModel) -> Iterator[tuple[str, list[str]]]:
    tenants = model.tenants()
    if set(tenants) != {UNSALTED}:
        for mark, group in tenants.items():
            yield _tenant(mark) or "no tenant", group.cells()


def ago(seconds: float) -> str:
    """'3 d ago'."""
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= length:
            return f"{int(seconds // length)} {unit} ago"
    return "now"


def _tenant(mark: bytes) -> str | None:
    """The hash that stands for a tenant; None for requests without one."""
    return None if mark == UNSALTED else mark.hex()
