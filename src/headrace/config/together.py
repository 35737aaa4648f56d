"""The records made from flat values, and what settings of different rooms ask of each other."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

from headrace.config.adapters import AdapterSettings
from headrace.config.cache import PINNED_SHARE, CacheSettings
from headrace.config.combinations import excluded
from headrace.config.experts import ExpertSettings
from headrace.config.fields import Setting, SettingsRecord, listed, need, settings_of
from headrace.config.model import ModelSettings
from headrace.config.offload import KVTiers, LinkSettings, OffloadSettings
from headrace.config.ranks import RankSettings
from headrace.config.scheduler import SchedulerSettings
from headrace.config.server import CALLER_PINS, ServerSettings
from headrace.config.sessions import SessionSettings
from headrace.config.speculation import SpeculationSettings
from headrace.config.streaming import KVStreaming, StreamSettings
from headrace.config.tiers import (
    OWN_DISK,
    SWITCHES,
    TIERS,
    DiskTierSettings,
    HostTierSettings,
)

RECORDS: tuple[type[SettingsRecord], ...] = (
    ModelSettings, AdapterSettings, CacheSettings, SchedulerSettings, SpeculationSettings, *TIERS, OffloadSettings,
    LinkSettings, StreamSettings, ExpertSettings, RankSettings, SessionSettings, ServerSettings,
)  # fmt: skip
SETTINGS: Mapping[str, Setting] = {item.name: item for record in RECORDS for item in settings_of(record)}
"""Every setting by its flat name: a keyword of EngineConfig, a flag, and a variable of the environment."""

Outside = KVTiers | KVStreaming | None
"""Where KV lies besides the pool: in tiers from which it comes back, outside for good and streamed, or nowhere."""

R = TypeVar("R", bound=SettingsRecord)


class Records:
    """One record of each room. Raises ValueError for values that cannot work, alone or together."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        self._values = values
        self._made = {record: record(**self._own(record)) for record in RECORDS}
        self.tiers = tuple(tier for kind in TIERS if (tier := self.of(kind)).given)
        self.streams = self.of(StreamSettings).schedule != "off"
        self._check_places()
        self._check_kept()
        self._check_pairs()

    def of(self, record: type[R]) -> R:
        made = self._made[record]
        assert isinstance(made, record)
        return made

    def outside(self) -> Outside:
        host, disk, link = self.of(HostTierSettings), self.of(DiskTierSettings), self.of(LinkSettings)
        if self.streams:
            activations = self.of(OffloadSettings).activations
            return KVStreaming(**self._own(StreamSettings), host=host, disk=disk, activations=activations, link=link)
        return KVTiers(**self._own(OffloadSettings), each=self.tiers, link=link) if self.tiers else None

    @property
    def expert_folder(self) -> str | None:
        """Directory of the file in which experts lie: their own, or that of all weights outside."""
        own, disk = self.of(ExpertSettings).path, self.of(DiskTierSettings)
        return own or (disk.directory if self.streams and self.of(StreamSettings).weights else None)

    def _own(self, record: type[SettingsRecord]) -> dict[str, Any]:
        return {item.field: self._values[item.name] for item in settings_of(record)}

    def _check_places(self) -> None:
        """What needs KV outside the pool, and what that needs."""
        outside, link = bool(self.tiers), self.of(LinkSettings)
        a_tier = f"a tier: set {listed(SWITCHES, 'or')}"
        far = outside or self.of(StreamSettings).weights
        need(self.of(OffloadSettings).activations != "auto", outside, "kv_offload_activations", a_tier)
        written = outside or self.of(DiskTierSettings).path == OWN_DISK
        for name, given in self.of(OffloadSettings).of_tiers.items():
            need(given, written and not self.streams, name, a_tier)
        need(link.gbps is not None, far, "kv_link_gbps", a_tier)
        need(link.latency_ms > 0, far, "kv_link_latency_ms", a_tier)
        place = self.of(HostTierSettings).given or self.of(DiskTierSettings).given
        need(self.of(ExpertSettings).memory is not None, self.expert_folder is not None, "expert_memory_size",
             "experts in a file: set expert_offload_path")  # fmt: skip
        need(self.streams, place, "offload_schedule", "a place for KV: set kv_offloading_size or kv_offload_path")

    def _check_kept(self) -> None:
        """What needs prefixes to be kept."""
        kept = self.of(CacheSettings).prefix_caching
        server = self.of(ServerSettings)
        for given, name in (
            (self.of(SessionSettings).dir is not None, "sessions_dir"),
            (self.of(CacheSettings).max_pinned_share != PINNED_SHARE, "max_pinned_share"),
            (server.cache_control_pins not in (0, CALLER_PINS), "cache_control_pins"),
            (server.public_prefix_file is not None, "public_prefix_file"),
        ):
            need(given, kept, name, "enable_prefix_caching")

    def _check_pairs(self) -> None:
        """See config.combinations."""
        found = excluded(self)
        if found is not None:
            raise ValueError(found.told())
