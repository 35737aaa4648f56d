"""Streamed decoding made from the settings: what is kept outside, how much of it, and where."""

from __future__ import annotations

import logging
import math

import torch

from headrace import memory
from headrace.config import EngineConfig
from headrace.memory import Allocate
from headrace.models.decoder import Decoder
from headrace.models.spec import ModelConfig
from headrace.offload.copy_streams import open_copy_streams
from headrace.offload.emulated_link import EmulatedLink
from headrace.offload.streaming.profile import measure
from headrace.offload.streaming.schedule import Schedule
from headrace.offload.streaming.staging import Staging
from headrace.offload.streaming.step import StreamingOptions
from headrace.offload.streaming.store import FileMemory, OutsideStore, bytes_per_chunk, room, shapes
from headrace.offload.streaming.streamer import Streamer
from headrace.offload.streaming.transfers import Transfers
from headrace.offload.weights.layers import layers_of, tensors_of
from headrace.offload.weights.streamed import ResidentLayers, StreamedLayers
from headrace.types import CHUNK, chunks_for

log = logging.getLogger(__name__)


def check(config: EngineConfig) -> None:
    """Raises ValueError for settings of streaming that do not go together (others: EngineConfig)."""
    if not config.streams:
        return
    if config.offload_x_resident and config.kv_offload_activations == "off":
        raise ValueError("offload_x_resident needs activations: set kv_offload_activations to auto or on")
    for name in ("kv_host_format", "kv_disk_format"):
        if getattr(config, name) != "raw":
            raise ValueError(
                f"{name} {getattr(config, name)}: offload_schedule streams KV as the kernels read it; set {name} to "
                "raw (kv_cache_dtype int8 halves what crosses the link)"
            )


def schedule_of(config: EngineConfig) -> Schedule:
    """Row where the weights are resident, column where they are streamed, unless one is asked for."""
    if config.offload_schedule == "row" or (config.offload_schedule == "auto" and not config.weight_offload):
        return "row"
    return "column"


def hidden_kept(config: EngineConfig, model: ModelConfig, kv_dtype: torch.dtype, rows: torch.dtype) -> int:
    """Width of the X that is kept; 0 where none is: by default where it is not smaller than K and V and would have to
    cross the link (models whose queries share KV heads)."""
    if config.kv_offload_activations == "off":
        return 0
    kv = bytes_per_chunk(model.attention, kv_dtype, rows, 0) // model.attention.layers
    smaller = CHUNK * model.hidden_size * rows.itemsize < kv
    kept = smaller or config.offload_x_resident or config.kv_offload_activations == "on"
    return model.hidden_size if kept else 0


def sizes(config: EngineConfig, model: ModelConfig, kv_dtype: torch.dtype, rows: torch.dtype) -> tuple[int, int]:
    """(tokens that the store holds, whole chunks; longest sequence). Raises ValueError naming the field."""
    hidden = 0 if config.offload_x_resident else hidden_kept(config, model, kv_dtype, rows)
    each = bytes_per_chunk(model.attention, kv_dtype, rows, hidden)
    name, size = "kv_offloading_size", config.kv_offloading_size
    if not size:
        name, size = "kv_offload_disk_size", config.kv_offload_disk_size
    chunks = int(size * 2**30) // each
    if config.kv_cache_tokens is not None:
        chunks = min(chunks, config.kv_cache_tokens // CHUNK)
    if config.max_model_len is not None and config.max_model_len > model.max_model_len:
        raise ValueError(f"max_model_len {config.max_model_len} exceeds the model's {model.max_model_len}")
    wanted = config.max_model_len or model.max_model_len
    chunks = min(chunks, config.max_sequences * chunks_for(wanted))
    if not chunks or (config.max_model_len is not None and config.max_model_len > chunks * CHUNK):
        least = (chunks_for(config.max_model_len or 1) * each) / 2**30
        raise ValueError(
            f"{name} {size} GiB holds {chunks * CHUNK} tokens: raise it to at least {least:.4f}, or lower max_model_len"
        )
    return chunks * CHUNK, min(wanted, chunks * CHUNK)


def open_streamer(config: EngineConfig, decoder: Decoder, slots: int, kv_dtype: torch.dtype, backend: str) -> Streamer:
    """Store, staging and copy streams for a decoder, whose matrices leave it if weight_offload is set. Measures link
    and projection."""
    model, dtype = decoder.config, decoder.dtype
    hidden = hidden_kept(config, model, kv_dtype, dtype)
    outside = _outside(config, decoder, slots, kv_dtype, hidden)
    store = OutsideStore(
        model.attention, slots, kv_dtype, dtype, hidden, outside, memory.zeros if config.offload_x_resident else None
    )
    if config.kv_cache_prefault:
        store.prefault()
    staging = Staging(model.attention, _capacity(config, store), kv_dtype, dtype, hidden)
    streams = open_copy_streams(torch.device("cpu"), _link(config))
    layers: ResidentLayers | StreamedLayers = ResidentLayers(decoder)
    weight_bytes = 0
    if config.weight_offload:
        layers = StreamedLayers(decoder, streams.into, outside if config.kv_offload_path else None)
        weight_bytes = layers.bytes_per_layer
    options = StreamingOptions(schedule_of(config), config.weight_offload)
    log.info(
        "streaming %s: %d chunks outside (%s), staging of %d, X %s", options.schedule, slots,
        config.kv_offload_path or "host memory", staging.capacity,
        "not kept" if not hidden else "in memory" if config.offload_x_resident else "outside",
    )  # fmt: skip
    transfers = Transfers(store, staging, layers, streams, backend, weight_bytes, config.offload_x_resident)
    measure(decoder, transfers)
    return Streamer(decoder, transfers, options)


def _link(config: EngineConfig) -> EmulatedLink:
    rate = None if config.kv_link_gbps is None else config.kv_link_gbps * 1e9
    return EmulatedLink(rate, config.kv_link_latency_ms / 1e3)


def _capacity(config: EngineConfig, store: OutsideStore) -> int:
    """Chunks that a staging buffer holds."""
    each = 2 * (store.chunk_bytes + store.x_bytes)
    count = min(store.slots, config.offload_staging_mb * 2**20 // each)
    if count < 1:
        raise ValueError(f"offload_staging_mb {config.offload_staging_mb} holds no chunk of {each} bytes: raise it")
    return count


def _outside(config: EngineConfig, decoder: Decoder, slots: int, kv_dtype: torch.dtype, hidden: int) -> Allocate:
    """Memory for the store, and for weights where they leave too: the host's, or a file."""
    if config.kv_offload_path is None:
        return memory.zeros
    spec = decoder.config.attention
    layer = [slots * math.prod(shape) * kind.itemsize for shape, kind in shapes(spec, kv_dtype).values()]
    if hidden and not config.offload_x_resident:
        layer.append(slots * CHUNK * hidden * decoder.dtype.itemsize)
    sizes = layer * spec.layers
    if config.weight_offload:
        matrices = [weight for each in layers_of(decoder) for weight in each.matrices.values()]
        sizes += [x.nbytes for weight in matrices for x in tensors_of(weight).values()]
    return FileMemory(config.kv_offload_path, sum(room(size) for size in sizes))
