"""What lies below the pool, made from the settings."""

from __future__ import annotations

import hashlib
import time
from pathlib import Path

from headrace.config import EngineConfig, KVTiers
from headrace.config.tiers import DiskTierSettings, HostTierSettings, RemoteTierSettings
from headrace.engine.capacity import Capacity, model_folder
from headrace.engine.identity import chunk_identity, model_identity
from headrace.engine.offload import Offload
from headrace.kv.cache import KVCache
from headrace.kv.storage import KVStorage
from headrace.models.decoder import Decoder
from headrace.models.spec import ModelConfig
from headrace.offload import frame
from headrace.offload.chunk_codec import ChunkCodec
from headrace.offload.copy_streams import Link, ThreadStream
from headrace.offload.restore.profile import measure
from headrace.offload.restore.rates import Rates
from headrace.offload.tiers.base import Read, Tier, name_of
from headrace.offload.tiers.disk import DiskTier
from headrace.offload.tiers.host import HostTier
from headrace.offload.tiers.remote import RemoteTier
from headrace.offload.tiers.stack import Tiers
from headrace.offload.writeback import Writeback

GIB = 1 << 30
PROBE = name_of(hashlib.sha256(b"headrace probe").digest(), "k")
PROBE_BYTES = 8 << 20
PROBES = 3
"""What is stored and read a few times to see how fast a tier is."""


def keeps_activations(config: EngineConfig, model: ModelConfig, element_bytes: int, kv_element_bytes: int) -> bool:
    """Whether the pool keeps the inputs of the projections beside K and V, to store them below: KVPR, section 3.2.

    They pay where they are smaller than K and V, which is not so where several query heads share a KV head.
    """
    if config.tiers is None or config.tiers.activations == "off":
        return False
    spec = model.attention
    smaller = model.hidden_size * element_bytes < 2 * spec.kv_heads * spec.head_dim * kv_element_bytes
    return smaller or config.tiers.activations == "on"


def identity(config: EngineConfig, capacity: Capacity) -> bytes:
    """What the chunks of this engine are named by where they outlive it: content, not place."""
    assert config.tiers is not None
    paths = [Path(own.path) for own in config.tiers.each if isinstance(own, DiskTierSettings) and own.path]
    return chunk_identity(
        model_identity(model_folder(config.model.folder), paths[0] if paths else None),
        dtype=capacity.dtype,
        kv_dtype=capacity.kv_cache_dtype,
        quantization=capacity.quantization,
        backend=capacity.backend,
        formats=config.tiers.formats,
    )


def open_tiers(asked: KVTiers) -> Tiers:
    """The tiers asked for, fastest first. Raises ValueError for a path or URL that cannot work."""
    timeout, quota = asked.timeout_s, asked.tenant_quota
    tiers: list[Tier] = []
    for own in asked.each:
        size = int(own.size * GIB)
        if isinstance(own, HostTierSettings):
            tiers.append(HostTier(size, own.format, quota))
        elif isinstance(own, DiskTierSettings):
            tiers.append(DiskTier(Path(own.place), size, own.format, quota, timeout))
        elif isinstance(own, RemoteTierSettings):
            tiers.append(RemoteTier(own.redis_url, own.format, timeout, size or None, quota))
    return Tiers(tiers, queue_bytes=asked.queue_mb << 20, timeout_s=timeout)


def open_offload(
    config: EngineConfig, capacity: Capacity, cache: KVCache, decoder: Decoder, storage: KVStorage
) -> Offload:
    """Opens the tiers and measures what the solver needs to know. Raises ValueError as open_tiers does."""
    assert config.tiers is not None
    tiers = open_tiers(config.tiers)
    spec = decoder.config.attention
    shelf, other = (ChunkCodec(storage, spec, cache.identity, decoder.dtype, capacity.backend) for _ in range(2))
    link = Link(config.tiers.link.bytes_s, config.tiers.link.latency_s)
    return Offload(
        cache=cache,
        tiers=tiers,
        shelf=shelf,
        lane=ThreadStream("restore", link),
        looking=ThreadStream("look"),
        rates=_probed(measure(decoder, storage, capacity.backend), tiers).behind(link.bytes_s, link.latency_s),
        writeback=Writeback(cache, tiers, shelf, other),
        max_batch_tokens=config.scheduler.max_batch_tokens,
    )


def _probed(rates: Rates, tiers: Tiers) -> Rates:
    """Rates that know how fast disk and remote give back a blob stored for the purpose."""
    for index, tier in enumerate(tiers.tiers):
        stats = tier.stats()
        full = stats.budget_bytes and stats.used_bytes + PROBE_BYTES > stats.budget_bytes
        if not tiers.queues(index) or full or not tier.put(PROBE, b"", (bytes(PROBE_BYTES),)):
            continue  # nothing is to be evicted for it
        into = memoryview(bytearray(PROBE_BYTES))
        for _ in range(PROBES):
            began = time.perf_counter()
            if all(tier.read([Read(PROBE, 0, into)])):
                frame.checksum(into)
                rates.observe_load(tier.kind, PROBE_BYTES, 1, time.perf_counter() - began)
        tier.drop([PROBE])
    tiers.leave_out()
    return rates
