"""Where an engine saves sessions: in files, or in its tiers. Imports no torch."""

from __future__ import annotations

from typing import Literal, get_args

from headrace.config import EngineConfig
from headrace.offload.sessions.names import check_name
from headrace.types import InvalidRequest

Place = Literal["file", "tier"]


def check_saving(config: EngineConfig, name: str, to: str) -> None:
    """Raises InvalidRequest where an engine of these settings cannot save a session of that name there."""
    config.sessions.must_save(config.cache.prefix_caching)
    check_name(name)
    if to not in get_args(Place):
        raise InvalidRequest(f"to must be file or tier, got {to!r}", "to")
    if to == "tier":
        check_tiers(config)
    elif config.ranks.count > 1 or config.model.on_gpu or config.streaming is not None:
        raise no_file()


def check_tiers(config: EngineConfig) -> None:
    """Raises InvalidRequest unless a tier outlives the engine."""
    if config.tiers is None or not config.tiers.outlive:
        told = "a session in the tiers needs one that outlives the engine: set kv_offload_path or kv_remote_url"
        raise InvalidRequest(told, "to")


def no_file() -> InvalidRequest:
    told = "a session in a file needs one rank, and K and V in this host's memory; elsewhere save it to: tier"
    return InvalidRequest(told, "to")
