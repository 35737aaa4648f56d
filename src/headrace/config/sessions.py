"""Settings of saved sessions."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from headrace.config.fields import POSITIVE, SHARE, SettingsRecord, at_least, need, setting
from headrace.types import InvalidRequest

GIB = 1 << 30
SIZE_GIB, SHARE_OF_ONE, OF_ONE = 64.0, 0.5, 256


def _a_directory(name: str, value: Any) -> None:
    if not value.strip():
        raise ValueError(f"{name} must name a directory; leave it out to save no sessions")


@dataclass(frozen=True, slots=True)
class SessionSettings(SettingsRecord):
    prefix: ClassVar[str] = "sessions_"
    title: ClassVar[str] = "Saved sessions"

    dir: str | None = setting(
        None, "Directory in which sessions are saved by name (docs/cache.md). Without it none are.", check=_a_directory
    )
    size: float = setting(
        SIZE_GIB, "GiB that the saved sessions of all tenants take at most.", check=POSITIVE, unit="GiB"
    )
    tenant_share: float = setting(SHARE_OF_ONE, "Part of sessions_size that the sessions of one tenant take at most.",
                                  check=SHARE)  # fmt: skip
    per_tenant: int = setting(OF_ONE, "Sessions that one tenant may have saved at a time.", check=at_least(1))

    def check_together(self) -> None:
        given = (self.size != SIZE_GIB, "sessions_size"), (self.tenant_share != SHARE_OF_ONE, "sessions_tenant_share")
        for asked, name in (*given, (self.per_tenant != OF_ONE, "sessions_per_tenant")):
            need(asked, self.dir is not None, name, "a directory: set sessions_dir")

    @property
    def path(self) -> Path | None:
        return None if self.dir is None else Path(self.dir).expanduser()

    @property
    def most_bytes(self) -> int:
        return int(self.size * GIB)

    @property
    def most_tenant_bytes(self) -> int:
        return int(self.most_bytes * self.tenant_share)

    def must_save(self, prefix_caching: bool) -> None:
        """Raises InvalidRequest where no sessions are saved. prefix_caching: whether prefixes are kept at all."""
        if self.dir is None:
            raise InvalidRequest("no sessions are saved here: start with --sessions-dir DIR (sessions_dir)", None)
        if not prefix_caching:
            raise InvalidRequest("saved sessions need prefixes to be kept: set enable_prefix_caching", None)
