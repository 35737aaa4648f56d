"""How much of a GPU's memory the KV cache may take: what is left beside the weights and the largest step."""

from __future__ import annotations

import logging

import numpy as np
import torch

from headrace.attention.execute import PlanAttention
from headrace.attention.plan import Span, build
from headrace.config import EngineConfig
from headrace.device import current
from headrace.engine.footprint import gib, ranks_here
from headrace.engine.outside import ExpertsOutside
from headrace.host import GIB
from headrace.kernels.backend import backend_of
from headrace.kv.storage import KVStorage
from headrace.models.config import ModelConfig
from headrace.models.decoder import Decoder, TokenBatch
from headrace.models.sizes import compute_type, weight_bytes
from headrace.types import CHUNK, chunks_for

log = logging.getLogger(__name__)

SPARE_SHARE, SPARE_BYTES = 10, GIB
"""Left free: a tenth of what is free beside the weights, at least 1 GiB. States of attention and what torch cuts its
memory into lie there."""
TWICE = 2
"""A step may be launched as well as replayed; recordings have memory of their own, which all of them share."""


def beside_weights(config: EngineConfig, model: ModelConfig) -> int:
    """Bytes of a GPU that its rank has beside the weights, which need not be loaded yet, and slots of experts."""
    asked, ranks = config.model, -(-ranks_here(config) // current().count)  # on this device
    weights = weight_bytes(model, compute_type(model, asked.dtype), asked.quantization, ranks=config.ranks.tensor)
    outside = ExpertsOutside.of(config, model)
    if outside is not None:
        weights -= outside.outside - outside.kept
    return current().free_memory() // ranks - weights


def check_pool(config: EngineConfig, model: ModelConfig, tokens: int, bytes_per_token: int) -> None:
    """Raises ValueError for a KV cache that a GPU has no memory for."""
    left, asked = max(0, beside_weights(config, model)), tokens * bytes_per_token
    if asked > left:
        each = " of each rank" if ranks_here(config) > current().count else ""
        raise ValueError(
            f"kv_cache_tokens {tokens:,} needs {gib(asked)}; {gib(left)} are free on the GPU beside the weights{each}: "
            f"at most {left // bytes_per_token // CHUNK * CHUNK:,} tokens fit"
        )


def bytes_for_cache(decoder: Decoder, backend: str, rows: int, drawn: int) -> int:
    """Bytes that the KV cache may have, beside a step of `rows` rows from `drawn` of which tokens are drawn. Raises
    ValueError where there is no memory for the step alone."""
    device = current()
    free = device.free_memory()
    try:
        step = device.peak_memory(lambda: largest_step(decoder, backend, rows, drawn))
    except torch.OutOfMemoryError:
        raise ValueError(
            f"no memory for a step of {rows:,} tokens: {gib(free)} are free beside the weights; lower max_batch_tokens"
        ) from None
    left = free - TWICE * step - max(free // SPARE_SHARE, SPARE_BYTES)
    log.info("%s free beside the weights, twice %s of them for a step of %d tokens", gib(free), gib(step), rows)
    return max(0, left)


@torch.inference_mode()
def largest_step(decoder: Decoder, backend: str, rows: int, drawn: int) -> None:
    """Computes the first `rows` tokens of a sequence, in memory of its own."""
    spec = decoder.config.attention
    slots = chunks_for(rows)
    storage = KVStorage(spec, slots, decoder.dtype, device=decoder.device)
    plan = build([Span(np.arange(slots, dtype=np.int32), 0, rows)])
    attend = PlanAttention(plan, storage, spec, backend_of(backend), decoder.key_bias, decoder.sinks)
    positions = torch.from_numpy(plan.positions)
    lengths = torch.full_like(positions, rows) if decoder.config.rope_depends_on_length else None
    hidden = decoder.forward(TokenBatch(torch.zeros_like(positions), positions, lengths), attend)
    if decoder.config.head:
        decoder.logits(hidden[-drawn:])
