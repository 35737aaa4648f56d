"""The tiers that the settings ask for, and what `headrace doctor` finds of them. No tier is known here but by name.

A tier's module has two functions:

    open_tier(config) -> Tier | None              None where it is not asked for
    findings(config, free_memory) -> dict         name of a finding -> what was found; empty where it is not asked for
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

from headrace.config import EngineConfig
from headrace.offload.tiers.stack import Tiers

MODULES = ("headrace.offload.tiers.host", "headrace.offload.tiers.disk", "headrace.offload.tiers.remote")
"""Fastest first. A module is imported when it is asked."""


def open_tiers(config: EngineConfig) -> Tiers:
    """The tiers asked for, fastest first. Raises ValueError for a path or URL that cannot work."""
    asked = [import_module(name).open_tier(config) for name in MODULES]
    tiers = [tier for tier in asked if tier is not None]
    return Tiers(tiers, queue_bytes=config.kv_offload_queue_mb << 20, timeout_s=config.kv_offload_timeout_s)


def findings(config: EngineConfig, free_memory: int) -> dict[str, Any]:
    """How each tier does. What does not work is a finding, not an error."""
    found: dict[str, Any] = {}
    for name in MODULES:
        found |= import_module(name).findings(config, free_memory)
    return found
