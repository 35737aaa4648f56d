"""One step's arithmetic where KV, and maybe the weights, stay outside the fast memory: slices in, logits out."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence as Seq

import numpy as np
import torch
from numpy.typing import NDArray

from headrace import memory
from headrace.attention import plan as planning
from headrace.config import EngineConfig
from headrace.engine.runner import Computed, batch_of, prompts_of, slots_of, wanted
from headrace.engine.sequence import Slice
from headrace.kernels import registry
from headrace.kernels.records import Allocate, Pool
from headrace.kernels.registry import in_pieces
from headrace.models.decoder import Decoder
from headrace.models.spec import ModelConfig
from headrace.offload.copy_streams import Link, open_lanes
from headrace.offload.streaming.schedule import Schedule
from headrace.offload.streaming.staging import Staging
from headrace.offload.streaming.store import FileMemory, OutsideStore, bytes_per_chunk, room
from headrace.offload.streaming.streamer import Batch, Options, Streamer
from headrace.offload.weights.layers import layers_of, tensors_of
from headrace.offload.weights.streamed import Resident, Streamed
from headrace.types import CHUNK, chunks_for

log = logging.getLogger(__name__)


class StreamRunner:
    """As engine.runner.Runner, over a streamer. batches: into how many the column schedule divides a step."""

    def __init__(self, streamer: Streamer, batches: int) -> None:
        self.streamer, self.batches = streamer, batches
        self.decoder = streamer.decoder

    @torch.inference_mode()
    def run(self, slices: Seq[Slice]) -> Computed:
        """Computes the slices, each in one batch. Logits as of Runner.run."""
        tables = [slots_of(part) for part in slices]
        order = planning.batch_order(tables)
        spans = [planning.Span(tables[i], slices[i].start, slices[i].length) for i in order]
        ordered = [slices[i] for i in order]
        count = self.batches if self.streamer.options.schedule == "column" else 1
        batches, parts, first = [], [], 0
        for group in cuts(spans, count):
            batch, mine = self._batch([ordered[i] for i in group], [spans[i] for i in group])
            batches.append(batch)
            parts += [(part, range(span.start + first, span.stop + first)) for part, span in mine]
            first += sum(len(span) for _, span in mine)
        hidden = torch.cat(self.streamer.run(batches))
        return Computed(self.decoder.logits(hidden) if first else hidden, parts)

    def _batch(self, slices: list[Slice], spans: list[planning.Span]) -> tuple[Batch, list[tuple[Slice, range]]]:
        plan = planning.build(spans)
        rows, parts = wanted(slices)
        prompts = prompts_of(slices) if self.decoder.config.rope_depends_on_length else None
        some = None if len(rows) == plan.rows else torch.tensor(rows, dtype=torch.int64)
        return Batch(batch_of(self.decoder.config, slices, plan.positions), plan, some, prompts), parts

    def close(self) -> None:
        """Ends the lanes. May be called again."""
        self.streamer.close()


def cuts(spans: Seq[planning.Span], count: int) -> list[range]:
    """At most `count` runs of the spans (in batch order) with about equally many chunks.

    A chunk that one sequence writes in this step and another attends keeps both in one run: batches read of the store
    only what was there before the step, or what is their own.
    """
    free = _free(spans)
    ends = np.cumsum([len(span.slots) for span in spans])
    marks: list[int] = []
    for part in range(1, count):
        goal = ends[-1] * part / count
        later = [at for at in free if at > (marks[-1] if marks else 0)]
        if later:
            marks.append(min(later, key=lambda at: abs(float(ends[at - 1]) - goal)))
    return [range(low, high) for low, high in zip([0, *marks], [*marks, len(spans)], strict=True)]


def _free(spans: Seq[planning.Span]) -> list[int]:
    """Where a batch may begin: no chunk written in this step is attended on both sides."""
    written = np.unique(np.concatenate([_written(span) for span in spans]))
    first: dict[int, int] = {}
    last: dict[int, int] = {}
    for index, span in enumerate(spans):
        for slot in span.slots[np.isin(span.slots, written)].tolist():
            first.setdefault(slot, index)
            last[slot] = index
    held = {at for slot in first for at in range(first[slot] + 1, last[slot] + 1)}
    return [at for at in range(1, len(spans)) if at not in held]


def _written(span: planning.Span) -> NDArray[np.int32]:
    return span.slots[span.start // CHUNK : chunks_for(span.start + span.rows)]


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


def open_stream(
    config: EngineConfig, decoder: Decoder, slots: int, kv_dtype: torch.dtype, backend: str
) -> StreamRunner:
    """Store, staging and lanes for a decoder, whose matrices leave it if weight_offload is set."""
    model, dtype = decoder.config, decoder.dtype
    hidden = hidden_kept(config, model, kv_dtype, dtype)
    outside = _outside(config, decoder, slots, kv_dtype, hidden)
    store = OutsideStore(
        model.attention, slots, kv_dtype, dtype, hidden, outside, memory.zeros if config.offload_x_resident else None
    )
    if config.kv_cache_prefault:
        store.prefault()
    staging = Staging(model.attention, _capacity(config, store), kv_dtype, dtype, hidden)
    lanes = open_lanes(torch.device("cpu"), _link(config))
    options = Options(schedule_of(config), config.weight_offload, x_resident=config.offload_x_resident)
    layers: Resident | Streamed = Resident(decoder)
    weight_bytes = 0
    if config.weight_offload:
        layers = Streamed(decoder, lanes.into, outside if config.kv_offload_path else None)
        weight_bytes = layers.bytes_per_layer
    log.info(
        "streaming %s: %d chunks outside (%s), staging of %d, X %s", options.schedule, slots,
        config.kv_offload_path or "host memory", staging.capacity,
        "not kept" if not hidden else "in memory" if options.x_resident else "outside",
    )  # fmt: skip
    streamer = Streamer(
        decoder, store, staging, layers, lanes, in_pieces(registry.backend(backend)), options, weight_bytes
    )
    return StreamRunner(streamer, config.offload_batches)


def _link(config: EngineConfig) -> Link:
    rate = None if config.kv_link_gbps is None else config.kv_link_gbps * 1e9
    return Link(rate, config.kv_link_latency_ms / 1e3)


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
    parts = Pool.parts(slots, spec.kv_heads, spec.head_dim, kv_dtype)
    layer = [math.prod(shape) * kind.itemsize for shape, kind in parts]
    if hidden and not config.offload_x_resident:
        layer.append(slots * CHUNK * hidden * decoder.dtype.itemsize)
    sizes = layer * spec.layers
    if config.weight_offload:
        matrices = [weight for each in layers_of(decoder) for weight in each.matrices.values()]
        sizes += [x.nbytes for weight in matrices for x in tensors_of(weight).values()]
    return FileMemory(config.kv_offload_path, sum(room(size) for size in sizes))
