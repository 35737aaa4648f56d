"""What `headrace doctor` says of the tiers: room in memory, the directory and its disk, the remote server."""

from __future__ import annotations

from typing import Any

from headrace.config import EngineConfig
from headrace.config.fields import listed
from headrace.config.tiers import SWITCHES
from headrace.offload.tiers.open import findings


def findings_of(config: EngineConfig, free_memory: int) -> dict[str, Any]:
    """Tier -> how it does. What does not work is a finding, not an error."""
    found = findings(config, free_memory)
    outside = config.tiers or config.streaming
    if outside is not None and outside.link.gbps is not None:
        found["emulated link"] = f"{outside.link.gbps:g} GB/s, {outside.link.latency_ms:g} ms"
    return found or {"tiers": f"none: set {listed(SWITCHES, 'or')} (docs/offload.md)"}
