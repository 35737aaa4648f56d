"""Settings of the KV cache in the pool."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from headrace.config.fields import SHARE, SettingsRecord, at_least, setting
from headrace.types import CHUNK

KVDType = Literal["auto", "int8", "bfloat16", "float32"]
PINNED_SHARE = 0.5


@dataclass(frozen=True, slots=True)
class CacheSettings(SettingsRecord):
    prefix: ClassVar[str] = "kv_cache_"
    title: ClassVar[str] = "KV cache"

    tokens: int | None = setting(
        None,
        "KV in fast memory on each rank, in tokens, as 16384 or 128k (k is 1,024). Default: a quarter of what is free; "
        "on a GPU what the weights and a largest step leave.",
        unit="tokens",
        check=at_least(CHUNK),
        common=True,
    )
    dtype: KVDType = setting(
        "auto",
        "Type of the cached keys and values: auto (the compute type, by name too) or int8 (half of bfloat16, lossy).",
        spellings={"bf16": "bfloat16", "fp32": "float32", "float": "float32"},
    )
    prefault: bool = setting(
        False, "Touch all of the KV cache's memory at start, so that no request waits for the system to map it."
    )
    states: int | None = setting(
        None,
        "Recurrent states in memory, for models that have them: one for each running sequence, the rest for prefixes. "
        "Default: what fits in an eighth of the free memory, at most 4 for each of max_sequences; where a state "
        "takes at most half of a chunk, one for each chunk too.",
        check=at_least(1),
        name="recurrent_states",
    )
    prefix_caching: bool = setting(True, "Share and keep the KV of common prefixes.", name="enable_prefix_caching")
    max_pinned_share: float = setting(
        PINNED_SHARE,
        "Share of the KV cache that pinned prefixes may hold together.",
        name="max_pinned_share",
        check=SHARE,
        rare=True,
    )
