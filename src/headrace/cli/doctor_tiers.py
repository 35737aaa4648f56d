"""What `headrace doctor` says of the tiers: room in memory, the directory and its disk, the remote server."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
import time
from pathlib import Path
from typing import Any

from headrace.config import EngineConfig, KVTiers
from headrace.config.fields import listed
from headrace.config.tiers import SWITCHES, DiskTierSettings, HostTierSettings, RemoteTierSettings

GIB = 2**30
PROBE_BYTES = 64 << 20
"""Written to the directory and read again, to see how fast its disk is."""

ROUND_TRIPS = 5


def findings_of(config: EngineConfig, free_memory: int) -> dict[str, Any]:
    """Tier -> how it does. What does not work is a finding, not an error."""
    found: dict[str, Any] = {}
    outside = config.outside
    if outside is None:
        return {"tiers": f"none: set {listed(SWITCHES, 'or')} (docs/offload.md)"}
    for tier in outside.each:
        if isinstance(tier, HostTierSettings):
            room = "" if tier.size * GIB < free_memory else ": MORE THAN IS FREE"
            found[tier.label] = f"{tier.size:g} of {free_memory / GIB:,.1f} GiB free{room}"
        elif isinstance(tier, DiskTierSettings):
            found |= disk(Path(tier.place), tier.size)
        elif isinstance(tier, RemoteTierSettings) and isinstance(outside, KVTiers):
            found[tier.label] = remote(tier, outside.timeout_s)
    if outside.link.gbps is not None:
        found["emulated link"] = f"{outside.link.gbps:g} GB/s, {outside.link.latency_ms:g} ms"
    return found


def disk(folder: Path, gib: float) -> dict[str, Any]:
    """Room in the directory (or where it would be made) and the rates of its disk, by a file that is removed again."""
    there = next(parent for parent in (folder, *folder.parents) if parent.exists())
    try:
        free = shutil.disk_usage(there).free
        room = "" if folder.exists() or free > gib * GIB else ": LESS THAN MAY BE USED"
        found = {"disk": f"{folder}, {'there' if folder.exists() else 'not there yet'}, may use {gib:g} GiB",
                 "disk free GiB": f"{free / GIB:,.1f}{room}"}  # fmt: skip
        if free < 2 * PROBE_BYTES:
            return {**found, "disk rates": "not measured: the disk is full"}
        write, read = rates(there)
    except OSError as error:
        return {"disk": f"{folder} CANNOT BE USED: {error.strerror or error}"}
    return {**found, "disk write, read GB/s": f"{write / 1e9:.2f}, {read / 1e9:.2f}"}


def rates(folder: Path) -> tuple[float, float]:
    """Bytes a second of writing until the disk has it, and of reading what the system has let go of. Raises OSError."""
    block = os.urandom(1 << 20)
    descriptor, name = tempfile.mkstemp(prefix=".headrace-doctor-", dir=folder)
    try:
        began = time.perf_counter()
        for _ in range(PROBE_BYTES // len(block)):
            os.write(descriptor, block)
        os.fsync(descriptor)
        written = time.perf_counter() - began
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.lseek(descriptor, 0, os.SEEK_SET)
        began = time.perf_counter()
        while os.read(descriptor, len(block)):
            pass
        return PROBE_BYTES / written, PROBE_BYTES / (time.perf_counter() - began)
    finally:
        os.close(descriptor)
        with contextlib.suppress(OSError):
            os.unlink(name)


def remote(tier: RemoteTierSettings, timeout_s: float) -> str:
    """Whether the server answers, which it is, and how long a round trip takes."""
    shown = tier.place
    try:
        import redis
    except ImportError:
        return f"{shown} CANNOT BE USED: pip install 'headrace[remote]'"
    client = redis.Redis.from_url(tier.redis_url, socket_timeout=timeout_s, socket_connect_timeout=timeout_s)
    try:
        facts: Any = client.info("server")
        times = [_round_trip(client) for _ in range(ROUND_TRIPS)]
    except (redis.RedisError, OSError) as error:
        return f"{shown} CANNOT BE REACHED: {error}"
    finally:
        client.close()
    version = facts.get("valkey_version") or facts.get("redis_version", "of unknown version")
    return f"{shown} answers ({version}), round trip {min(times) * 1e3:.2f} ms"


def _round_trip(client: Any) -> float:
    began = time.perf_counter()
    client.ping()
    return time.perf_counter() - began
