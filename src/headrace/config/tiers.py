"""The tiers below the pool: a record of settings for each. offload.py has what they share.

A new tier is a record here, in TIERS, and the module that `opens` names.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal
from urllib.parse import urlsplit

from headrace.config.fields import NOT_NEGATIVE, SettingsRecord, need, setting

OffloadFormat = Literal["raw", "int8", "int4"]  # tiers keep a format's place in this list: new ones come last

DISK_GIB = 32.0
NO_DISK, OWN_DISK = "none", "auto"
"""Values of kv_offload_path that are no directories: nothing on disk; the user's cache directory, if that can be used.
"""
REMOTE_SCHEMES = ("redis", "rediss", "valkey", "valkeys", "unix")
"""Schemes of kv_remote_url; the doubled s is TLS, unix a socket's path."""


@dataclass(frozen=True, slots=True)
class TierSettings(SettingsRecord):
    """One tier. `kind` names it in counters, `label` in what people read; `switch` is the setting that asks for it.

    `opens`, as 'module:function', makes the tier of this record and of KVTiers; it is imported when the tier is opened.
    `outlives`: its KV survives the engine. `size`: GiB that KV may take; 0: as the place decides.
    """

    title: ClassVar[str] = "Tiers: KV kept outside the pool"
    kind: ClassVar[str]
    label: ClassVar[str]
    switch: ClassVar[str]
    opens: ClassVar[str]
    outlives: ClassVar[bool] = True

    size: float
    format: OffloadFormat

    @property
    def given(self) -> bool:
        """Whether the tier is asked for."""
        raise NotImplementedError

    @property
    def place(self) -> str:
        """Where its KV lies, without passwords; may be empty."""
        return ""

    @property
    def directory(self) -> str | None:
        """A directory of this machine that outlives the engine, where notes may be kept beside its KV."""
        return None


@dataclass(frozen=True, slots=True)
class HostTierSettings(TierSettings):
    prefix: ClassVar[str] = "kv_host_"
    kind: ClassVar[str] = "host"
    label: ClassVar[str] = "host memory"
    switch: ClassVar[str] = "kv_offloading_size"
    opens: ClassVar[str] = "headrace.offload.tiers.host:open_tier"
    outlives: ClassVar[bool] = False

    size: float = setting(
        0.0,
        "Host memory for KV that leaves the pool, as 16 (GiB) or 500MiB; with --offload-schedule, for all of the KV.",
        unit="GiB",
        name="kv_offloading_size",
        check=NOT_NEGATIVE,
        common=True,
    )
    format: OffloadFormat = setting("raw", "How KV is stored in host memory: raw (no loss), int8 or int4.")

    @property
    def given(self) -> bool:
        return self.size > 0

    def check_together(self) -> None:
        need(self.format != "raw", self.given, "kv_host_format", "a tier in host memory: set kv_offloading_size")


def _a_directory(name: str, value: Any) -> None:
    if not value.strip():
        raise ValueError(f"{name} must name a directory; {NO_DISK} keeps nothing on disk")


@dataclass(frozen=True, slots=True)
class DiskTierSettings(TierSettings):
    prefix: ClassVar[str] = "kv_disk_"
    kind: ClassVar[str] = "disk"
    label: ClassVar[str] = "disk"
    switch: ClassVar[str] = "kv_offload_path"
    opens: ClassVar[str] = "headrace.offload.tiers.disk:open_tier"

    path: str | None = setting(
        None,
        "Directory for KV on disk, which survives a restart; none: nothing on disk; auto: the user's cache directory, "
        "where serve keeps KV unless told otherwise. With --offload-schedule, of a file with all of the KV.",
        name="kv_offload_path",
        check=_a_directory,
        common=True,
    )
    size: float = setting(
        DISK_GIB,
        "Room for KV on disk, as 32 (GiB) or 1.5TiB.",
        name="kv_offload_disk_size",
        check=NOT_NEGATIVE,
        unit="GiB",
    )
    format: OffloadFormat = setting("raw", "How KV is stored on disk: raw (no loss), int8 or int4.")

    @property
    def given(self) -> bool:
        return self.directory is not None

    @property
    def place(self) -> str:
        return self.directory or ""

    @property
    def directory(self) -> str | None:
        return None if self.path == OWN_DISK else self.path

    def check_together(self) -> None:
        may = self.given or self.path == OWN_DISK
        need(self.format != "raw", may, "kv_disk_format", "a tier on disk: set kv_offload_path")
        need(self.given, self.size > 0, "kv_offload_path", "room: raise kv_offload_disk_size above 0")
        need(self.size != DISK_GIB, may, "kv_offload_disk_size", "a directory: set kv_offload_path")


def _a_remote_url(name: str, url: Any) -> None:
    """Raises ValueError, which does not repeat the URL: it may hold a password."""
    try:
        parts = urlsplit(url)
        database = parts.path.strip("/")
        whole = bool(parts.hostname) and parts.port != 0 and (not database or database.isdecimal())
        whole = bool(parts.path) if parts.scheme == "unix" else whole
    except ValueError:  # a port out of range, a bracket too many
        whole = False
    if not whole or parts.scheme not in REMOTE_SCHEMES:
        raise ValueError(f"{name} must be redis://HOST:PORT/DB, or rediss, valkey or valkeys in place of redis, "
                         "or unix:///PATH/OF/SOCKET")  # fmt: skip


def without_password(url: str) -> str:
    """The URL of a server without user, password and options."""
    parts = urlsplit(url)
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"


@dataclass(frozen=True, slots=True)
class RemoteTierSettings(TierSettings):
    prefix: ClassVar[str] = "kv_remote_"
    kind: ClassVar[str] = "remote"
    label: ClassVar[str] = "remote"
    switch: ClassVar[str] = "kv_remote_url"
    opens: ClassVar[str] = "headrace.offload.tiers.remote:open_tier"

    url: str | None = setting(
        None, "Valkey or Redis server for KV, as redis://HOST:PORT/DB.", check=_a_remote_url, secret=True
    )
    size: float = setting(
        0.0,
        "GiB that KV may take remotely, with --kv-tenant-quota; 0: the server decides (its maxmemory).",
        unit="GiB",
        check=NOT_NEGATIVE,
    )
    format: OffloadFormat = setting("raw", "How KV is stored remotely: raw (no loss), int8 or int4.")

    @property
    def given(self) -> bool:
        return self.url is not None

    @property
    def place(self) -> str:
        return without_password(self.url) if self.url else ""

    @property
    def redis_url(self) -> str:
        """The URL as the clients of the protocol know it: redis(s) for valkey(s); empty if there is none."""
        url = self.url or ""
        return "redis" + url.removeprefix("valkey") if url.startswith("valkey") else url

    def check_together(self) -> None:
        need(self.format != "raw", self.given, "kv_remote_format", "a remote tier: set kv_remote_url")
        need(self.size > 0, self.given, "kv_remote_size", "a server: set kv_remote_url")


TIERS: tuple[type[TierSettings], ...] = (HostTierSettings, DiskTierSettings, RemoteTierSettings)
"""All tiers, fastest first."""
SWITCHES = tuple(tier.switch for tier in TIERS)
