"""What lies below the pool, made from the settings."""

from __future__ import annotations

import hashlib
import time
from pathlib import Path

from headrace.config import EngineConfig
from headrace.engine.capacity import Capacity, model_folder
from headrace.engine.identity import chunk_identity, model_identity
from headrace.engine.offload import Offload
from headrace.kernels import registry
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
    if not config.offloads or config.kv_offload_activations == "off":
        return False
    spec = model.attention
    smaller = model.hidden_size * element_bytes < 2 * spec.kv_heads * spec.head_dim * kv_element_bytes
    return smaller or config.kv_offload_activations == "on"


def identity(config: EngineConfig, capacity: Capacity) -> bytes:
    """What the chunks of this engine are named by where they outlive it: content, not place."""
    directory = Path(config.kv_offload_path) if config.kv_offload_path else None
    return chunk_identity(
        model_identity(model_folder(config.model), directory),
        dtype=capacity.dtype,
        kv_dtype=capacity.kv_cache_dtype,
        quantization=capacity.quantization,
        backend=capacity.backend,
        formats=(config.kv_host_format, config.kv_disk_format, config.kv_remote_format),
    )


def open_tiers(config: EngineConfig) -> Tiers:
    """The tiers asked for, fastest first. Raises ValueError for a path or URL that cannot work."""
    timeout, quota = config.kv_offload_timeout_s, config.kv_tenant_quota
    tiers: list[Tier] = []
    if config.kv_offloading_size:
        tiers.append(HostTier(int(config.kv_offloading_size * GIB), config.kv_host_format, quota))
    if config.kv_offload_path is not None:
        size = int(config.kv_offload_disk_size * GIB)
        tiers.append(DiskTier(Path(config.kv_offload_path), size, config.kv_disk_format, quota, timeout))
    if config.redis_url is not None:
        budget = int(config.kv_remote_size * GIB) or None
        tiers.append(RemoteTier(config.redis_url, config.kv_remote_format, timeout, budget, quota))
    return Tiers(tiers, queue_bytes=config.kv_offload_queue_mb << 20, timeout_s=timeout)


def open_offload(
    config: EngineConfig, capacity: Capacity, cache: KVCache, decoder: Decoder, storage: KVStorage
) -> Offload:
    """Opens the tiers and measures what the solver needs to know. Raises ValueError as open_tiers does."""
    tiers = open_tiers(config)
    spec = decoder.config.attention
    backend = registry.backend(capacity.backend)
    layout = backend.layout(decoder.dtype, spec.head_dim)
    shelf, other = (ChunkCodec(storage, spec, cache.identity, decoder.dtype, layout) for _ in range(2))
    link = Link(config.kv_link_gbps * 1e9 if config.kv_link_gbps else None, config.kv_link_latency_ms / 1e3)
    return Offload(
        cache=cache,
        tiers=tiers,
        shelf=shelf,
        lane=ThreadStream("restore", link),
        looking=ThreadStream("look"),
        rates=_probed(measure(decoder, storage, backend), tiers).behind(link.bytes_s, link.latency_s),
        writeback=Writeback(cache, tiers, shelf, other),
        max_batch_tokens=config.max_batch_tokens,
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
