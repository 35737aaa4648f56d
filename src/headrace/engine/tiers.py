"""Opens what lies below the pool, from the settings: tiers, codec, copy streams, rates, write-back."""

from __future__ import annotations

from pathlib import Path

import torch

from headrace.config import EngineConfig
from headrace.engine.capacity import Capacity, model_folder
from headrace.engine.stored_prefixes import StoredPrefixes
from headrace.host import GIB
from headrace.kernels.backend import backend_of
from headrace.kv.cache import KVCache
from headrace.kv.storage import KVStorage
from headrace.models.decoder import Decoder
from headrace.offload.chunk_codec import ChunkCodec
from headrace.offload.copy_streams import ThreadStream
from headrace.offload.emulated_link import EmulatedLink
from headrace.offload.identity import chunk_identity, model_identity
from headrace.offload.restore.profile import measure, probe
from headrace.offload.restore.rates import Rates
from headrace.offload.restore.source import StoredChunks
from headrace.offload.tiers.notes import ModelNote, write_note
from headrace.offload.tiers.open import open_tiers
from headrace.offload.writeback import Writeback
from headrace.types import CHUNK
from headrace.version import __version__


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
    rates = measure(decoder, storage, backend, tiers.tiers, brief=config.tiers.write == "sparing")
    probe(tiers, rates)
    only_idle = config.tiers.write == "idle" or (config.tiers.write == "sparing" and _costs_much(config, codec, rates))
    keep_notes(config, capacity, cache.identity)
    return StoredPrefixes(
        cache=cache,
        source=StoredChunks(tiers, codec, ThreadStream("restore", link), ThreadStream("look")),
        rates=rates.behind(link.bytes_s, link.latency_s),
        writeback=Writeback(cache, tiers, codec, other, only_idle),
        max_batch_tokens=config.scheduler.max_batch_tokens,
    )


WRITE_S, WRITE_BYTE_S = 0.7e-3, 2.9e-9
"""Seconds of a core, about, to write a chunk to a tier (a file, the index), and per byte (two copies, a checksum)."""
MOST_SHARE = 0.02


def _costs_much(config: EngineConfig, codec: ChunkCodec, rates: Rates) -> bool:
    """Whether writing a chunk takes more than MOST_SHARE of the cores for as long as computing it takes."""
    assert config.tiers is not None
    size = sum(codec.blob_bytes("k", own.format) for own in config.tiers.each if own.outlives)
    computing = float(rates.prefill(0, CHUNK)) * torch.get_num_threads()
    return WRITE_S + size * WRITE_BYTE_S > MOST_SHARE * computing


def keep_notes(config: EngineConfig, capacity: Capacity, identity: bytes) -> None:
    """Says in the directories of the tiers whose chunks these are, for people (headrace cache ls)."""
    assert config.tiers is not None
    for own in config.tiers.each:
        if own.directory is not None:
            folder = model_folder(config.model.folder).resolve()
            note = ModelNote(
                model=config.model.folder, folder=str(folder), dtype=capacity.dtype,
                kv_dtype=capacity.kv_cache_dtype, quantization=capacity.quantization, format=own.format,
                budget_bytes=int(own.size * GIB), version=__version__,
            )  # fmt: skip
            write_note(Path(own.directory), identity, note)
