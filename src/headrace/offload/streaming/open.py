"""Streamed decoding made from the settings: what is kept outside, how much of it, and where."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from headrace import memory
from headrace.config import EngineConfig, KVStreaming
from headrace.device import Device, current
from headrace.kernels.backend import backend_of
from headrace.kernels.records import Allocate, Pool
from headrace.models.decoder import Decoder
from headrace.models.packing import Leave
from headrace.models.shards import shard
from headrace.models.spec import ModelConfig
from headrace.offload.copy_streams import open_copy_streams
from headrace.offload.emulated_link import EmulatedLink
from headrace.offload.streaming.profile import measure, measure_staged
from headrace.offload.streaming.schedule import Schedule
from headrace.offload.streaming.staged_store import BUFFERS, StagedStore
from headrace.offload.streaming.staged_x import StagedX
from headrace.offload.streaming.staging import Staging
from headrace.offload.streaming.step import StreamingOptions
from headrace.offload.streaming.store import FileMemory, OutsideStore, bytes_per_chunk, room
from headrace.offload.streaming.streamer import Streamer
from headrace.offload.streaming.transfers import Transfers
from headrace.offload.weights.in_turn import LayersInTurn
from headrace.offload.weights.layers import layers_of, moved, tensors_of
from headrace.offload.weights.streamed import ResidentLayers, StreamedLayers, bytes_of_buffers
from headrace.types import CHUNK, chunks_for

log = logging.getLogger(__name__)


def check(config: EngineConfig) -> None:
    """Raises ValueError for settings of streaming that do not go together (others: EngineConfig)."""
    asked = config.streaming
    if asked is None:
        return
    if asked.x_resident and asked.activations == "off":
        raise ValueError("offload_x_resident needs activations: set kv_offload_activations to auto or on")
    for name, form in (("kv_host_format", asked.host.format), ("kv_disk_format", asked.disk.format)):
        if form != "raw":
            raise ValueError(
                f"{name} {form}: offload_schedule streams KV as the kernels read it; set {name} to "
                "raw (kv_cache_dtype int8 halves what crosses the link)"
            )


def schedule_of(asked: KVStreaming) -> Schedule:
    """Row where the weights are resident, column where they are streamed, unless one is asked for."""
    return "row" if asked.schedule == "row" or (asked.schedule == "auto" and not asked.weights) else "column"


def hidden_kept(
    asked: KVStreaming, model: ModelConfig, kv_dtype: torch.dtype, rows: torch.dtype, ranks: int = 1
) -> int:
    """Width of the X that is kept; 0 where none is: by default where it is not smaller than K and V and would have to
    cross the link (models whose queries share KV heads), and on several ranks, where few chunks may have it."""
    if asked.activations == "off":
        return 0
    kv = bytes_per_chunk(model.attention, kv_dtype, rows, 0) // model.attention.layers
    smaller = CHUNK * model.stream_size * rows.itemsize < kv
    kept = (smaller and ranks == 1) or asked.x_resident or asked.activations == "on"
    return model.stream_size if kept else 0


class StreamSizes(NamedTuple):
    """store: chunks that lie outside, of each rank. staged: chunks of one layer that a staging buffer holds. longest:
    tokens of the longest sequence, and bound: the setting that keeps it shorter than the model would."""

    store: int
    staged: int
    longest: int
    bound: str


def sizes(
    config: EngineConfig, model: ModelConfig, kv_dtype: torch.dtype, rows: torch.dtype, workspace: int = 0
) -> StreamSizes:
    """What the settings leave room for. workspace: buffers as large as those of staging through which ranks exchange
    chunks. Raises ValueError naming the field."""
    asked, spec = asked_of(config), shard(model, 0, config.ranks.tensor)
    hidden = hidden_kept(asked, model, kv_dtype, rows, config.ranks.count)
    kv, all_of_it = (bytes_per_chunk(spec, kv_dtype, rows, -(-width // config.ranks.tensor)) for width in (0, hidden))
    staged_x = 0 if asked.x_resident and config.ranks.count > 1 else (all_of_it - kv) // spec.layers
    wanted = config.model.max_len or model.max_model_len
    if wanted > model.max_model_len:
        raise ValueError(f"max_model_len {wanted} exceeds the model's {model.max_model_len}")
    room = _stored(config, kv if asked.x_resident else all_of_it)
    chunks = min(room, config.scheduler.max_sequences * chunks_for(wanted))
    buffers = BUFFERS + workspace
    limit, staged = _staged(config, buffers * (kv // spec.layers) + BUFFERS * staged_x, kv, buffers)
    longest, bound = chunks * CHUNK * config.ranks.context, asked.room[0]
    if config.ranks.count > 1 and min(wanted, longest) > staged * CHUNK:
        # All of a sequence may lie on one rank, which stages a layer of it at once.
        longest, bound = staged * CHUNK, limit
        if config.model.max_len is not None:
            raise ValueError(
                f"{limit}: each rank stages a layer of {longest} tokens; raise it, or lower max_model_len {wanted}"
            )
    bound = bound if longest < wanted else "max_model_len"
    if config.model.on_gpu and config.ranks.count == 1 and staged < chunks:
        each = -(-chunks * (buffers * (kv // spec.layers) + BUFFERS * staged_x) // 2**20)
        raise ValueError(
            f"{limit}: on a GPU each staging buffer takes a layer of all {chunks} chunks that lie outside; raise "
            f"offload_staging_mb to {each}, or lower {asked.room[0]}"
        )
    return StreamSizes(chunks, min(chunks, staged), min(wanted, longest), bound)


def _on(device: Device, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    return torch.zeros(tuple(shape), dtype=dtype, device=device.place)


def _stored(config: EngineConfig, each: int) -> int:
    """Chunks of `each` bytes that a rank has room for outside."""
    (name, size), longest, ranks = asked_of(config).room, config.model.max_len or 1, config.ranks.context
    chunks = int(size * 2**30) // each
    if not chunks or longest > chunks * CHUNK * ranks:
        least = -(-chunks_for(longest) // ranks) * each / 2**30
        raise ValueError(
            f"{name} {size} GiB holds {chunks * CHUNK * ranks} tokens: raise it to at least {least:.4f}, "
            f"or lower max_model_len"
        )
    return chunks


def _staged(config: EngineConfig, each: int, whole: int, buffers: int) -> tuple[str, int]:
    """(Setting that bounds staging, chunks of one layer that each buffer has room for). each: bytes of a chunk of one
    layer in all buffers together; whole: of K and V of a chunk in all layers."""
    asked, tokens = asked_of(config), config.cache.tokens
    name, room = "offload_staging_mb", asked.staging_mb * 2**20
    if tokens is not None and tokens // CHUNK * whole < room:
        name, room = "kv_cache_tokens", tokens // CHUNK * whole
    if room < each:
        told = each // buffers
        raise ValueError(f"{name} leaves no room for a chunk of {told} bytes in each of {buffers} buffers: raise it")
    return name, room // each


def leaving(config: EngineConfig) -> Leave | None:
    """Takes the layers' matrices out of a GPU as they are packed, which so never has all of them: into pinned memory,
    or on their way to a file. None: they stay."""
    if not config.model.on_gpu or config.streaming is None or not config.streaming.weights:
        return None
    place = memory.zeros if config.streaming.path else current().pinned
    return lambda name, weight: moved(weight, place) if name.startswith("layers.") else weight


def open_staged(
    config: EngineConfig, decoder: Decoder, sized: StreamSizes, kv_dtype: torch.dtype, backend: str, free: int
) -> StagedStore:
    """What open_streamer is for one rank, for one of several: the decoder goes on computing. free: bytes that it may
    take of a GPU."""
    asked, dtype, turns = asked_of(config), decoder.dtype, decoder.turns.ranks
    spec, device = decoder.config.attention, current() if config.model.on_gpu else None
    hidden = hidden_kept(asked, decoder.config, kv_dtype, dtype, config.ranks.count)
    outside, fast = _outside(asked, decoder, sized.store, kv_dtype, hidden), memory.zeros
    if device is not None:
        _check_rank(config, decoder, sized, kv_dtype, hidden, free)
        fast, outside = partial(_on, device), outside if asked.path else device.pinned
    store = OutsideStore(spec, sized.store, kv_dtype, dtype, hidden, outside, fast if asked.x_resident else None, turns)
    if config.cache.prefault:
        store.prefault()
    streams = open_copy_streams(device, EmulatedLink(asked.link.bytes_s, asked.link.latency_s))
    x = None
    if hidden:
        x = StagedX(decoder, backend_of(backend), store, sized.staged, BUFFERS, asked.x_resident, device=device)
    staged = StagedStore(spec, store, sized.staged, streams, x, device)
    if x is not None:
        measure_staged(staged, x, projects=device is None or not asked.weights)
    if asked.weights:
        layers = StreamedLayers(decoder, streams.into, outside if asked.path else None, fast, device is not None)
        decoder.layers = LayersInTurn(layers, staged.totals, device, staged.once_done)
        if device is not None:  # the profile of the ranks multiplies by those of layer 0
            layers.start()
            first = layers.layer(0).run.layers[0].matrices
            decoder.matrices.update({f"layers.0.{name}": weight for name, weight in first.items()})
        if x is not None:
            x.weight_bytes = layers.bytes_per_layer
    return staged


def open_streamer(
    config: EngineConfig, decoder: Decoder, sized: StreamSizes, kv_dtype: torch.dtype, backend: str
) -> Streamer:
    """Store, staging and copy streams for a decoder, whose matrices leave it if weight_offload is set. Measures link
    and projection."""
    asked, model, dtype = asked_of(config), decoder.config, decoder.dtype
    hidden, device = hidden_kept(asked, model, kv_dtype, dtype), current() if config.model.on_gpu else None
    outside, fast = _outside(asked, decoder, sized.store, kv_dtype, hidden), memory.zeros
    if device is not None:
        fast, outside = partial(_on, device), outside if asked.path else device.pinned
    if device is not None:
        _check_device(device, asked, decoder, sized, bytes_per_chunk(model.attention, kv_dtype, dtype, hidden))
    store = OutsideStore(
        model.attention, sized.store, kv_dtype, dtype, hidden, outside, fast if asked.x_resident else None
    )
    if config.cache.prefault:
        store.prefault()
    staging = Staging(model.attention, sized.staged, kv_dtype, dtype, hidden, fast)
    streams = open_copy_streams(device, EmulatedLink(asked.link.bytes_s, asked.link.latency_s))
    layers: ResidentLayers | StreamedLayers = ResidentLayers(decoder)
    weight_bytes = 0
    if asked.weights:
        layers = StreamedLayers(decoder, streams.into, outside if asked.path else None, fast, device is not None)
        weight_bytes = layers.bytes_per_layer
    options = StreamingOptions(schedule_of(asked), asked.weights)
    log.debug(
        "streaming %s: %d chunks outside (%s), staging of %d, X %s", options.schedule, sized.store,
        asked.path or "host memory", staging.capacity,
        "not kept" if not hidden else "in memory" if asked.x_resident else "outside",
    )  # fmt: skip
    transfers = Transfers(store, staging, layers, streams, backend_of(backend), weight_bytes, asked.x_resident, device)
    measure(decoder, transfers)
    return Streamer(decoder, transfers, options)


def _check_device(device: Device, asked: KVStreaming, decoder: Decoder, sized: StreamSizes, chunk: int) -> None:
    """Raises ValueError for staging and buffers of weights that the GPU has no room for beside what lies there. chunk:
    bytes of one in all layers, with X where that is kept. A tenth of what is free is left for what a step computes."""
    layers = decoder.config.attention.layers
    staging = BUFFERS * sized.staged * chunk // layers
    weights = bytes_of_buffers(layers_of(decoder), experts=True) if asked.weights else 0
    resident = sized.store * CHUNK * decoder.config.stream_size * decoder.dtype.itemsize * layers
    free = device.free_memory() * 9 // 10 - (resident if asked.x_resident else 0)
    if staging + weights > free:
        told = ", leave out offload_x_resident" if asked.x_resident else ""
        raise ValueError(
            f"{free / 2**30:.1f} GiB of the GPU may be taken: staging takes {staging / 2**30:.1f} GiB, "
            f"two layers of weights {weights / 2**30:.1f}; lower {asked.room[0]} and offload_staging_mb{told}, or "
            "take a smaller model"
        )


def _check_rank(
    config: EngineConfig, decoder: Decoder, sized: StreamSizes, kv_dtype: torch.dtype, hidden: int, free: int
) -> None:
    """As _check_device, of one of several ranks, which may take `free` bytes in all."""
    asked, spec, turns = asked_of(config), decoder.config.attention, decoder.turns.ranks
    kv = bytes_per_chunk(spec, kv_dtype, decoder.dtype, 0) // spec.layers
    x = CHUNK * hidden * decoder.dtype.itemsize // turns
    taken = BUFFERS * sized.staged * (kv + (0 if asked.x_resident else x))
    weights = bytes_of_buffers(layers_of(decoder), experts=True) if asked.weights else 0
    resident = sized.store * x * spec.layers if asked.x_resident else 0
    if taken + resident + weights > free:
        told = f", activations {resident / 2**30:.1f}" if resident else ""
        told += f", two layers of weights {weights / 2**30:.1f}" if weights else ""
        raise ValueError(
            f"{free / 2**30:.1f} GiB of the GPU may be taken by a rank: staging takes {taken / 2**30:.1f} GiB"
            f"{told}; lower offload_staging_mb{', or leave out offload_x_resident' if resident else ''}"
        )


def asked_of(config: EngineConfig) -> KVStreaming:
    """The settings of streaming, which must be asked for."""
    assert config.streaming is not None
    return config.streaming


def _outside(asked: KVStreaming, decoder: Decoder, slots: int, kv_dtype: torch.dtype, hidden: int) -> Allocate:
    """Memory for the store, and for weights where they leave too: the host's, or a file."""
    if asked.path is None:
        return memory.zeros
    spec = decoder.config.attention
    parts = Pool.parts(slots, spec.kv_heads, spec.head_dim, kv_dtype, spec.once)
    layer = [math.prod(shape) * kind.itemsize for shape, kind in parts]
    if hidden and not asked.x_resident:
        layer.append(-(-slots // decoder.turns.ranks) * CHUNK * hidden * decoder.dtype.itemsize)
    sizes = layer * spec.layers
    if asked.weights:
        named = [item for each in layers_of(decoder) for item in each.matrices.items()]
        placed = decoder.outside is not None
        matrices = [weight for name, weight in named if not placed or not name.startswith("experts.")]
        sizes += [x.nbytes for weight in matrices for x in tensors_of(weight).values()]
    return FileMemory(asked.path, sum(room(size) for size in sizes))
