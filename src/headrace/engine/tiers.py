"""Opens what lies below the pool, from the settings: tiers, codec, copy streams, rates, write-back."""

from __future__ import annotations

from pathlib import Path

from headrace.config import EngineConfig
from headrace.engine.capacity import Capacity, model_folder
from headrace.engine.stored_prefixes import StoredPrefixes
from headrace.kernels.backend import backend_of
from headrace.kv.cache import KVCache
from headrace.kv.storage import KVStorage
from headrace.models.decoder import Decoder
from headrace.offload.chunk_codec import ChunkCodec
from headrace.offload.copy_streams import ThreadStream
from headrace.offload.emulated_link import EmulatedLink
from headrace.offload.identity import chunk_identity, model_identity
from headrace.offload.restore.profile import measure, probe
from headrace.offload.restore.source import StoredChunks
from headrace.offload.tiers.open import open_tiers
from headrace.offload.writeback import Writeback


def identity(config: EngineConfig, capacity: Capacity) -> bytes:
    """What names the chunks that outlive this engine: the content of the model, not its place."""
    assert config.tiers is not None
    notes = next((Path(own.directory) for own in config.tiers.each if own.directory), None)
    return chunk_identity(
        model_identity(model_folder(config.model.folder), notes),
        dtype=capacity.dtype,
        kv_dtype=capacity.kv_cache_dtype,
        quantization=capacity.quantization,
        backend=capacity.backend,
        formats=config.tiers.formats,
    )


def open_offload(
    config: EngineConfig, capacity: Capacity, cache: KVCache, decoder: Decoder, storage: KVStorage
) -> StoredPrefixes:
    """Opens the tiers and measures what the solver needs to know. Raises ValueError as open_tiers does."""
    assert config.tiers is not None
    tiers = open_tiers(config.tiers)
    spec = decoder.config.attention
    backend = backend_of(capacity.backend)
    layout = backend.layout(decoder.dtype, spec.head_dim)
    codec, other = (ChunkCodec(storage, spec, cache.identity, decoder.dtype, layout) for _ in range(2))
    link = EmulatedLink(config.tiers.link.bytes_s, config.tiers.link.latency_s)
    rates = measure(decoder, storage, backend, tiers.tiers)
    probe(tiers, rates)
    return StoredPrefixes(
        cache=cache,
        source=StoredChunks(tiers, codec, ThreadStream("restore", link), ThreadStream("look")),
        rates=rates.behind(link.bytes_s, link.latency_s),
        writeback=Writeback(cache, tiers, codec, other),
        max_batch_tokens=config.scheduler.max_batch_tokens,
    )
