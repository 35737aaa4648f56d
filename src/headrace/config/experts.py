"""Settings of experts that lie outside memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from headrace.config.fields import NOT_NEGATIVE, SettingsRecord, setting


def _a_directory(name: str, value: str) -> None:
    if not value.strip():
        raise ValueError(f"{name} must name a directory; leave it out to keep the experts in memory")


@dataclass(frozen=True, slots=True)
class ExpertSettings(SettingsRecord):
    prefix: ClassVar[str] = "expert_"
    title: ClassVar[str] = "Experts outside memory: models larger than memory"

    path: str | None = setting(
        None,
        "Directory of a file in which the experts of a model lie, mapped, where a step reads those that it meets.",
        name="expert_offload_path",
        check=_a_directory,
    )
    memory: float | None = setting(
        None,
        "Memory on each rank for the experts that are used most, as 8 (GiB) or 500MiB, while all lie in a file. "
        "Default: half of what the other weights leave free. A GPU needs it: its own memory for those in use.",
        unit="GiB",
        check=NOT_NEGATIVE,
        name="expert_memory_size",
    )
