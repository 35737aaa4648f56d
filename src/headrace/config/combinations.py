"""What goes with what: the features of an engine, and the few pairs that exclude each other.

Settings are refused by these pairs (config.together), and docs/combinations.md is made of them (tools/combinations.py):
a pair that is not here works, with the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from headrace.config.adapters import AdapterSettings
from headrace.config.cache import CacheSettings
from headrace.config.model import ModelSettings
from headrace.config.offload import OffloadSettings
from headrace.config.ranks import RankSettings
from headrace.config.speculation import SpeculationSettings
from headrace.config.streaming import StreamSettings
from headrace.config.tiers import TIERS, TierSettings


class Given(Protocol):
    """The records of the settings: config.together.Records."""

    streams: bool

    def of(self, record: type[Any]) -> Any: ...


@dataclass(frozen=True, slots=True)
class Feature:
    """label: in the table. on: whether the settings ask for it. example: settings that do. remedy: what to leave out
    so that they do not."""

    name: str
    label: str
    on: Callable[[Given], bool]
    example: Mapping[str, Any]
    remedy: str


PLACES = ("host", "disk")
"""Tiers whose place may hold all of KV, too: then they are no tiers, but where streamed KV lies."""
VALUES: Mapping[str, Any] = {"kv_offloading_size": 0.1, "kv_remote_url": "redis://127.0.0.1:1/0"}
"""Values of settings that ask for a tier, for examples; of all others a directory."""


def _tier(record: type[TierSettings]) -> Feature:
    def on(given: Given) -> bool:
        return given.of(record).given and not (given.streams and record.kind in PLACES)

    switch = record.switch
    return Feature(record.kind, f"{record.label} tier", on, {switch: VALUES.get(switch, "DIR")}, switch)


def _streams_x(given: Given) -> bool:
    asked = given.of(OffloadSettings).activations == "on" or given.of(StreamSettings).x_resident
    return given.streams and asked


FEATURES: tuple[Feature, ...] = (
    Feature("context", "context ranks", lambda given: given.of(RankSettings).context > 1, {"context_parallel_size": 2},
            "context_parallel_size"),
    Feature("tensor", "tensor ranks", lambda given: given.of(RankSettings).tensor > 1, {"tensor_parallel_size": 2},
            "tensor_parallel_size"),
    *map(_tier, TIERS),
    Feature("activations", "activations stored",
            lambda given: given.of(OffloadSettings).activations == "on" and not given.streams,
            {"kv_offload_activations": "on", "kv_offloading_size": 0.1}, "kv_offload_activations"),
    Feature("x", "activations streamed", _streams_x,
            {"offload_schedule": "row", "kv_offloading_size": 0.1, "kv_offload_activations": "on"},
            "kv_offload_activations and offload_x_resident"),
    Feature("weights", "weights outside", lambda given: given.of(StreamSettings).weights,
            {"weight_offload": True, "offload_schedule": "auto", "kv_offloading_size": 0.1}, "weight_offload"),
    Feature("row", "streamed, row", lambda given: given.of(StreamSettings).schedule in ("row", "auto"),
            {"offload_schedule": "row", "kv_offloading_size": 0.1}, "offload_schedule"),
    Feature("column", "streamed, column", lambda given: given.of(StreamSettings).schedule == "column",
            {"offload_schedule": "column", "kv_offloading_size": 0.1}, "offload_schedule"),
    Feature("int8_kv", "K and V in int8", lambda given: given.of(CacheSettings).dtype == "int8",
            {"kv_cache_dtype": "int8"}, "kv_cache_dtype"),
    Feature("quantised", "weights in int8 or int4", lambda given: given.of(ModelSettings).quantization != "none",
            {"quantization": "int8"}, "quantization"),
    Feature("speculation", "speculation", lambda given: given.of(SpeculationSettings).on, {"speculative": "ngram"},
            "speculative"),
    Feature("draft", "a draft model", lambda given: given.of(SpeculationSettings).model is not None,
            {"speculative": "tiny"}, "speculative"),
    Feature("adapters", "adapters", lambda given: given.of(AdapterSettings).modules is not None,
            {"lora_modules": "name=DIR"}, "lora_modules"),
    Feature("private", "prefix caching off", lambda given: not given.of(CacheSettings).prefix_caching,
            {"enable_prefix_caching": False}, "--no-enable-prefix-caching"),
    Feature("gpu", "a GPU", lambda given: given.of(ModelSettings).on_gpu, {"attention_backend": "triton"},
            "attention_backend"),
)  # fmt: skip
BY_NAME = {feature.name: feature for feature in FEATURES}
KINDS = tuple(record.kind for record in TIERS)
STREAMED = ("x", "weights", "row", "column")


@dataclass(frozen=True, slots=True)
class Exclusion:
    """Two features that do not go together. why: one sentence. yet: it makes sense, and is not built."""

    one: str
    other: str
    why: str
    yet: bool = True

    def told(self) -> str:
        """What a user is told: the point, then the remedy."""
        one, other = BY_NAME[self.one], BY_NAME[self.other]
        return f"{one.label} and {other.label} exclude each other: {self.why}. Leave out {one.remedy} or {other.remedy}"


EXCLUSIONS: tuple[Exclusion, ...] = (
    *(Exclusion(tier, way, "streaming needs host memory or a disk", yet=False)
      for tier in KINDS if tier not in PLACES for way in STREAMED),
    *(Exclusion(tier, "private", "stored chunks go by the names that prefix caching gives them", yet=False)
      for tier in (*KINDS, "activations")),
    Exclusion("gpu", "int8_kv", "an engine with both ended by an illegal access of memory on an H200"),
)  # fmt: skip


def excluded(given: Given) -> Exclusion | None:
    """The first pair that the settings ask for and cannot have."""
    on = {feature.name for feature in FEATURES if feature.on(given)}
    return next((each for each in EXCLUSIONS if {each.one, each.other} <= on), None)
