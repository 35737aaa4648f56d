"""The tiers that the settings ask for, and what `headrace doctor` finds of them. A tier is known by its record alone.

A record of settings (config.tiers) names its module by `opens`. The module has two functions:

    open_tier(own, shared) -> Tier                 the host tier's also takes what allocates its buffers
    findings(own, shared, free_memory) -> dict    name of a finding -> what was found

own: the tier's record; shared: what all tiers share.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

from headrace.config import EngineConfig, KVTiers
from headrace.config.offload import OffloadSettings
from headrace.config.tiers import TierSettings
from headrace.offload.tiers.host import Allocate, HostTier, empty
from headrace.offload.tiers.stack import Tiers


def open_tiers(asked: KVTiers, allocate: Allocate = empty) -> Tiers:
    """The tiers asked for, fastest first. allocate: gives the host tier its buffers. Raises ValueError for a path or
    URL that cannot work."""
    tiers = [
        _module(own).open_tier(own, asked, *((allocate,) if own.kind == HostTier.kind else ())) for own in asked.each
    ]
    return Tiers(tiers, queue_bytes=asked.queue_mb << 20, timeout_s=asked.timeout_s)


def findings(config: EngineConfig, free_memory: int) -> dict[str, Any]:
    """How each place of KV does. What does not work is a finding, not an error."""
    outside = config.tiers or config.streaming
    shared = config.tiers or OffloadSettings()
    found: dict[str, Any] = {}
    for own in outside.each if outside is not None else ():
        found |= _module(own).findings(own, shared, free_memory)
    return found


def _module(own: TierSettings) -> Any:
    return import_module(own.opens.partition(":")[0])
