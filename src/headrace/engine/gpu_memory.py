"""How much of a GPU's memory the KV cache may take: what is left beside the weights and the largest step."""

from __future__ import annotations

import logging

import numpy as np
import torch

from headrace.attention.execute import PlanAttention
from headrace.attention.plan import Span, build
from headrace.attention.recurrence import alone
from headrace.config import EngineConfig
from headrace.device import current
from headrace.engine.adapters import adapter_bytes
from headrace.engine.draft_facts import DraftFacts
from headrace.engine.footprint import Footprint, gib, ranks_here, tokens_in
from headrace.engine.outside import ExpertsOutside
from headrace.host import GIB
from headrace.kernels.backend import backend_of
from headrace.kv.storage import KVStorage
from headrace.models.config import ModelConfig
from headrace.models.decoder import Decoder, TokenBatch
from headrace.models.sizes import HEAD, compute_type, weight_bytes
from headrace.parallel.torchrun_environment import started_this
from headrace.types import CHUNK, chunks_for

log = logging.getLogger(__name__)

SPARE_SHARE, SPARE_BYTES = 10, GIB
"""Left free: a tenth of what is free beside the weights, at least 1 GiB for each model. States of attention and what
torch cuts its memory into lie there."""
TWICE = 2
"""A step may be launched as well as replayed; recordings have memory of their own, which all of them share."""


def sharing(config: EngineConfig) -> int:
    """Ranks on a device; before they know of each other, on that which has most. Processes of torchrun that see one
    device may each see another."""
    device = current()
    if device.sharers is not None:
        return device.sharers
    return 1 if device.count == 1 and started_this() else -(-ranks_here(config) // device.count)


def beside_weights(config: EngineConfig, model: ModelConfig) -> int:
    """Bytes of a GPU that its rank has beside the weights, also a draft model's, which need not be loaded yet, slots of
    experts, adapters and recurrent states. Raises ValueError where these do not fit."""
    asked, ranks = config.model, sharing(config)
    compute, tensor = compute_type(model, asked.dtype), config.ranks.tensor
    weights = weight_bytes(model, compute, asked.quantization, ranks=tensor, on_gpu=True)
    weights += adapter_bytes(config)
    outside, draft = ExpertsOutside.of(config, model), DraftFacts.of(config)
    if outside is not None:
        weights -= outside.outside - outside.kept
    left = current().free_memory() // ranks - weights - (0 if draft is None else draft.weight_bytes)
    taken = footprint(config, model)
    states = taken.state_bytes() // ranks_here(config)
    if states > max(0, left):
        raise ValueError(
            f"recurrent_states {taken.states():,} need {gib(states)}; {gib(left)} are free on the GPU "
            "beside the weights: lower recurrent_states"
        )
    return left - states


def footprint(config: EngineConfig, model: ModelConfig) -> Footprint:
    """Of a host or, on a GPU, of its memory: what the number of recurrent states follows from."""
    return Footprint.of(config, model, current().free_memory() if config.model.on_gpu else None)


def states(config: EngineConfig, model: ModelConfig) -> tuple[int | None, int]:
    """(recurrent states in memory, tokens between those within prompts); (None, a chunk) where a model has none."""
    if model.recurrent is None:
        return None, CHUNK
    taken = footprint(config, model)
    return taken.states(), taken.state_interval()


def check_pool(config: EngineConfig, model: ModelConfig, tokens: int, bytes_per_token: int) -> None:
    """Raises ValueError for a KV cache that a GPU has no memory for."""
    left, asked = max(0, beside_weights(config, model)), tokens * bytes_per_token
    if asked > left:
        each = " of each rank" if sharing(config) > 1 else ""
        raise ValueError(
            f"kv_cache_tokens {tokens:,} needs {gib(asked)}; {gib(left)} are free on the GPU beside the weights{each}: "
            f"at most {left // bytes_per_token // CHUNK * CHUNK:,} tokens fit"
        )


def pool_tokens(config: EngineConfig, model: ModelConfig, decoder: Decoder, backend: str, per_token: int) -> int:
    """Tokens of the pool, whole chunks, now that the weights are loaded. per_token: bytes. Raises ValueError as
    bytes_for_cache and tokens_in."""
    models = 1 + (config.speculation.model is not None)
    free = bytes_for_cache(decoder, backend, *largest_rows(config, model), models)
    return tokens_in(config, model, free, per_token)


def largest_rows(config: EngineConfig, model: ModelConfig) -> tuple[int, int]:
    """Rows of the largest step, and from how many of them tokens are drawn, those of drafts among them."""
    rows = min(config.scheduler.max_batch_tokens, model.max_model_len)
    drafted = config.speculation.tokens if config.speculation.on else 0
    return rows, min(rows, config.scheduler.max_sequences * (1 + drafted))


def bytes_for_cache(
    decoder: Decoder, backend: str, rows: int, drawn: int, models: int = 1, free: int | None = None
) -> int:
    """Bytes that the KV cache may have, beside a step of `rows` rows from `drawn` of which tokens are drawn. models:
    that compute steps, this one among them; all are loaded. free: what there is, of a device that ranks share. Raises
    ValueError where there is no memory for the step alone."""
    device = current()
    free = device.free_memory() if free is None else free
    try:
        step = device.peak_memory(lambda: largest_step(decoder, backend, rows, drawn))
    except torch.OutOfMemoryError:
        raise ValueError(
            f"no memory for a step of {rows:,} tokens: {gib(free)} are free beside the weights; lower max_batch_tokens"
        ) from None
    left = free - TWICE * step - max(free // SPARE_SHARE, models * SPARE_BYTES)
    log.info("%s free beside the weights, twice %s of them for a step of %d tokens", gib(free), gib(step), rows)
    return max(0, left)


@torch.inference_mode()
def largest_step(decoder: Decoder, backend: str, rows: int, drawn: int) -> None:
    """Computes the first `rows` tokens of a sequence, of an adapter if there is one, in memory of its own."""
    spec = decoder.config.attention
    slots = chunks_for(rows)
    storage = KVStorage(spec, slots, decoder.dtype, device=decoder.device)
    plan = build([Span(np.arange(slots, dtype=np.int32), 0, rows)])
    attend = PlanAttention(plan, storage, spec, backend_of(backend), decoder.key_bias, decoder.sinks)
    positions = torch.from_numpy(plan.positions)
    lengths = torch.full_like(positions, rows) if decoder.config.rope_depends_on_length else None
    recur = alone(decoder.config.recurrent, decoder.dtype, rows, decoder.device)
    zeros = torch.zeros_like(positions)
    batch = TokenBatch(zeros, positions, lengths, None if decoder.adapters is None else zeros)
    hidden = decoder.forward(batch, attend, recur=recur)
    if HEAD in decoder.matrices:  # of tensor ranks the first one's alone
        decoder.logits(hidden[-drawn:])
