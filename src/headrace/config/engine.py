"""EngineConfig: all settings, made from their flat names and read by room."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from headrace.config.adapters import AdapterSettings
from headrace.config.cache import CacheSettings
from headrace.config.experts import ExpertSettings
from headrace.config.model import ModelSettings
from headrace.config.offload import KVTiers
from headrace.config.ranks import RankSettings
from headrace.config.scheduler import SchedulerSettings
from headrace.config.served import ServedNames
from headrace.config.server import ServerSettings
from headrace.config.sessions import SessionSettings
from headrace.config.speculation import SpeculationSettings
from headrace.config.streaming import KVStreaming
from headrace.config.tiers import NO_DISK
from headrace.config.together import SETTINGS, Outside, Records
from headrace.types import SamplingParams, did_you_mean


@dataclass(frozen=True, slots=True, init=False)
class EngineConfig:
    """All settings: made as EngineConfig(model="tiny", kv_cache_tokens=4096), by the names in SETTINGS, and read as
    config.cache.tokens. Raises ValueError, naming the setting and the remedy, for values that cannot work.

    `expert_folder`: directory of the file in which experts lie; None: in memory.
    `flat`: all values by those names, which EngineConfig can be made of again; this is how settings travel.
    """

    model: ModelSettings
    adapters: AdapterSettings
    cache: CacheSettings
    scheduler: SchedulerSettings
    speculation: SpeculationSettings
    outside: Outside
    experts: ExpertSettings
    expert_folder: str | None
    ranks: RankSettings
    sessions: SessionSettings
    server: ServerSettings
    flat: dict[str, Any] = field(repr=False)

    def __init__(self, **flat: Any) -> None:
        flat = by_own_names(flat)
        unknown = next((name for name in flat if name not in SETTINGS), None)
        if unknown is not None:
            raise TypeError(f"unknown setting {unknown!r}{_meant(unknown)}")
        values = {name: item.value_of(flat[name]) if name in flat else item.default for name, item in SETTINGS.items()}
        if values["max_batch_tokens"] == 0:
            values["max_batch_tokens"] = _batch_tokens(values)
        if values["kv_offload_path"] == NO_DISK:
            values["kv_offload_path"] = None
        made = Records(values)
        found = dict(
            model=made.of(ModelSettings), adapters=made.of(AdapterSettings), cache=made.of(CacheSettings),
            scheduler=made.of(SchedulerSettings),
            speculation=made.of(SpeculationSettings), outside=made.outside(), experts=made.of(ExpertSettings),
            expert_folder=made.expert_folder, ranks=made.of(RankSettings),
            sessions=made.of(SessionSettings), server=made.of(ServerSettings), flat=values,
        )  # fmt: skip
        for item in fields(self):
            object.__setattr__(self, item.name, found[item.name])
        self.served.refuse_twice()

    def __repr__(self) -> str:
        """The settings that are not as by default, by their flat names; secrets as '***'."""
        usual = {name: item.default for name, item in SETTINGS.items()}
        usual["max_batch_tokens"] = _batch_tokens(self.flat)
        given = {name: value for name, value in self.flat.items() if value != usual[name] or name == "model"}
        told = [f"{name}={'***' if SETTINGS[name].secret else value!r}" for name, value in given.items()]
        return f"EngineConfig({', '.join(told)})"

    @property
    def served(self) -> ServedNames:
        """By which names clients may call the model and its adapters."""
        return ServedNames.of(self.server.model_name, self.model.folder, self.adapters.names)

    @property
    def tiers(self) -> KVTiers | None:
        """The tiers below the pool, if KV is kept there."""
        return self.outside if isinstance(self.outside, KVTiers) else None

    @property
    def streaming(self) -> KVStreaming | None:
        """How KV is streamed, if it stays outside the pool."""
        return self.outside if isinstance(self.outside, KVStreaming) else None

    def replace(self, **flat: Any) -> EngineConfig:
        """These settings with others in place of some, by their flat names."""
        return EngineConfig(**{**self.flat, **flat})


def _batch_tokens(values: Mapping[str, Any]) -> int:
    """What max_batch_tokens 0 stands for, beside these values."""
    context_ranks = values["context_parallel_size"]
    if isinstance(context_ranks, int) and context_ranks > 1:
        return 16384
    return 8192 if values["attention_backend"] == "triton" else 2048


def by_own_names(flat: Mapping[str, Any]) -> dict[str, Any]:
    """Settings by their own names, where some are given by other names of their flags (max_num_seqs). Raises TypeError
    for one that is given by two."""
    found: dict[str, Any] = {}
    for name, value in flat.items():
        own = OTHER_NAMES.get(name, name)
        if own in found or (own != name and own in flat):
            raise TypeError(f"{name!r} and {own!r} are the same setting; give one")
        found[own] = value
    return found


OTHER_NAMES: Mapping[str, str] = {
    alias.lstrip("-").replace("-", "_"): item.name
    for item in SETTINGS.values()
    for alias in item.aliases
    if alias.startswith("--")
}
"""Of settings, as flags have them, as keywords."""


def _meant(unknown: str) -> str:
    """Which setting a name stands for that is none: a parameter of requests, a slip."""
    if unknown in SamplingParams.__dataclass_fields__:
        return f"; it is one of requests: SamplingParams({unknown}=...)"
    return did_you_mean(unknown, SETTINGS) or ": headrace serve --help-all lists them"


def config_from_env(**given: Any) -> EngineConfig:
    """EngineConfig from what is given, then the environment, then the defaults."""
    given = by_own_names(given)
    found = {name: os.environ.get(item.env) for name, item in SETTINGS.items() if name not in given}
    told = {name: SETTINGS[name].parse(text, SETTINGS[name].env) for name, text in found.items() if text is not None}
    return EngineConfig(**given, **told)
