"""Settings that all tiers below the pool share, and KVTiers: KV kept in tiers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

from headrace.config.fields import NOT_NEGATIVE, POSITIVE, SHARE, SettingsRecord, at_least, setting
from headrace.config.tiers import DiskTierSettings, HostTierSettings, OffloadFormat, RemoteTierSettings, TierSettings

Switch = Literal["auto", "on", "off"]
WriteWhen = Literal["auto", "ended", "idle", "sparing"]

TIMEOUT_S, QUEUE_MB, TENANT_QUOTA = 1.0, 256, 0.25

RAW_IF_UNUSED: tuple[type[TierSettings], ...] = (HostTierSettings, DiskTierSettings, RemoteTierSettings)
"""Tiers that count as raw in `KVTiers.formats` while they are not in use. Names of stored chunks depend on that: a tier
added here would change names without being in use."""


@dataclass(frozen=True, slots=True)
class OffloadSettings(SettingsRecord):
    """What all tiers share."""

    prefix: ClassVar[str] = "kv_offload_"
    title: ClassVar[str] = TierSettings.title

    activations: Switch = setting(
        "auto",
        "Store the inputs of the K and V projections too: auto (where they are smaller than K and V), on, off.",
        rare=True,
    )
    timeout_s: float = setting(
        TIMEOUT_S, "Longest time that a call to a tier may take; then it is left alone.", check=POSITIVE, rare=True
    )
    queue_mb: int = setting(
        QUEUE_MB, "MiB that may wait to be written to each tier.", check=at_least(1), rare=True, unit="MiB"
    )
    write: WriteWhen = setting(
        "auto",
        "When KV is written to tiers: ended (as a request ends), idle (while nothing is computed), sparing (ended if "
        "that costs less than 2 % of computing, else idle). auto: ended; sparing in the user's cache directory.",
        rare=True,
    )
    tenant_quota: float = setting(
        TENANT_QUOTA,
        "Share of each tier that no other tenant can take from one (cache_salt).",
        name="kv_tenant_quota",
        check=SHARE,
        rare=True,
    )

    @property
    def of_tiers(self) -> Mapping[str, bool]:
        """Settings that say nothing without a tier, by their names, and whether they are given."""
        return {
            "kv_offload_write": self.write != "auto",
            "kv_offload_timeout_s": self.timeout_s != TIMEOUT_S,
            "kv_offload_queue_mb": self.queue_mb != QUEUE_MB,
            "kv_tenant_quota": self.tenant_quota != TENANT_QUOTA,
        }


@dataclass(frozen=True, slots=True)
class LinkSettings(SettingsRecord):
    """An emulated link to where KV is kept. gbps None: as fast as it is."""

    prefix: ClassVar[str] = "kv_link_"
    title: ClassVar[str] = TierSettings.title

    gbps: float | None = setting(
        None, "Emulate a link of so many GB/s to where KV is kept. For experiments.", check=POSITIVE, rare=True
    )
    latency_ms: float = setting(0.0, "Latency of the emulated link, per transfer.", check=NOT_NEGATIVE, rare=True)

    @property
    def bytes_s(self) -> float | None:
        return None if self.gbps is None else self.gbps * 1e9

    @property
    def latency_s(self) -> float:
        return self.latency_ms / 1e3


@dataclass(frozen=True, slots=True)
class KVTiers(OffloadSettings):
    """KV that leaves the pool is kept in each of these tiers, fastest first, and comes back when a prompt needs it."""

    each: tuple[TierSettings, ...] = ()
    link: LinkSettings = LinkSettings()

    @property
    def outlive(self) -> bool:
        """Whether KV outlives the engine, on disk or remotely."""
        return any(tier.outlives for tier in self.each)

    @property
    def formats(self) -> tuple[OffloadFormat, ...]:
        """The formats on which the names of stored chunks depend: those of the tiers in use and of RAW_IF_UNUSED."""
        used = {type(own): own.format for own in self.each}
        return (*(used.pop(kind, "raw") for kind in RAW_IF_UNUSED), *used.values())
