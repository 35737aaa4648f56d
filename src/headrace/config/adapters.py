"""Settings of adapters (LoRA): which ones requests may ask for, beside the model itself."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from headrace.config.fields import SettingsRecord, setting

FORM = "name=folder, several with commas between them"
MOST = 1024


def pairs_of(given: str) -> tuple[tuple[str, str], ...]:
    """(name, folder) of each adapter."""
    found = (item.partition("=") for item in given.split(","))
    return tuple((name.strip(), folder.strip()) for name, _, folder in found)


def check_modules(name: str, value: Any) -> None:
    """Raises ValueError for a setting that does not name adapters and their folders."""
    if not isinstance(value, str):
        raise ValueError(f"{name} must be a text: {FORM}; got {value!r}")
    pairs = pairs_of(value)
    if not all(called and folder for called, folder in pairs):
        raise ValueError(f"{name} must be {FORM}; got {value!r}")
    if len(pairs) > MOST:
        raise ValueError(f"{name} has {len(pairs):,} adapters, and may have {MOST:,}")
    names = [called for called, _ in pairs]
    twice = next((called for called in names if names.count(called) > 1), None)
    if twice is not None:
        raise ValueError(f"{name} has two adapters called {twice!r}: give each a name of its own")
    starred = next((called for called in names if "*" in called), None)
    if starred is not None:
        raise ValueError(f"{name}: the name of an adapter has no *, got {starred!r}")


@dataclass(frozen=True, slots=True)
class AdapterSettings(SettingsRecord):
    prefix: ClassVar[str] = "lora_"
    title: ClassVar[str] = "Adapters"

    modules: str | None = setting(
        None,
        f"Adapters (LoRA) that requests may name as their model: {FORM} (docs/adapters.md).",
        check=check_modules,
    )

    @property
    def each(self) -> tuple[tuple[str, str], ...]:
        """(name, folder) of each, in order."""
        return () if self.modules is None else pairs_of(self.modules)

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(name for name, _ in self.each)
