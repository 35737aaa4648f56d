"""Settings of decoding on KV that stays outside the pool."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from headrace.config.fields import SettingsRecord, at_least, need, setting
from headrace.config.offload import LinkSettings, Switch
from headrace.config.tiers import DiskTierSettings, HostTierSettings, TierSettings

OffloadSchedule = Literal["off", "row", "column", "auto"]
BATCHES = 4
STAGING_MB = 512


@dataclass(frozen=True, slots=True)
class StreamSettings(SettingsRecord):
    prefix: ClassVar[str] = "offload_"
    title: ClassVar[str] = "Streaming: decode on KV that stays outside the pool"

    schedule: OffloadSchedule = setting(
        "off", "Decode on KV that stays outside the pool: row (latency), column (throughput), auto; off: KV comes back."
    )
    batches: int = setting(
        BATCHES, "Batches into which the column schedule divides the sequences of a step.", check=at_least(1), rare=True
    )
    staging_mb: int = setting(
        STAGING_MB,
        "MiB of fast memory through which KV passes while it is streamed.",
        check=at_least(1),
        rare=True,
        unit="MiB",
    )
    x_resident: bool = setting(
        False,
        "Keep the inputs of the K and V projections in fast memory while KV is streamed (half of KV in MHA).",
        rare=True,
    )
    weights: bool = setting(
        False,
        "Keep the weights outside too and load each layer's when it is computed.",
        name="weight_offload",
        rare=True,
    )

    def check_together(self) -> None:
        on = self.schedule != "off"
        for given, name in (
            (self.weights, "weight_offload"),
            (self.x_resident, "offload_x_resident"),
            (self.batches != BATCHES, "offload_batches"),
            (self.staging_mb != STAGING_MB, "offload_staging_mb"),
        ):
            need(given, on, name, "a schedule: set offload_schedule")
        grouped = self.schedule != "row"
        need(self.batches != BATCHES, grouped, "offload_batches", "groups of sequences: set offload_schedule column")


@dataclass(frozen=True, slots=True)
class KVStreaming(StreamSettings):
    """All KV lies outside the pool, in a file if `disk` names a directory, else in host memory, and each step fetches
    what it attends to."""

    host: HostTierSettings = HostTierSettings()
    disk: DiskTierSettings = DiskTierSettings()
    activations: Switch = "auto"
    link: LinkSettings = LinkSettings()

    @property
    def each(self) -> tuple[TierSettings, ...]:
        """The places that were named."""
        return tuple(place for place in (self.host, self.disk) if place.given)

    @property
    def path(self) -> str | None:
        return self.disk.directory

    @property
    def room(self) -> tuple[str, float]:
        """(Name of the setting, GiB that KV may take)."""
        return ("kv_offloading_size", self.host.size) if self.host.size else ("kv_offload_disk_size", self.disk.size)
