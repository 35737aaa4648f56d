"""Parts of an engine that its settings choose."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from headrace.engine.fairness import SCHEDULERS
from headrace.engine.loader import Loaded
from headrace.engine.output import Output
from headrace.engine.overlap import Overlap
from headrace.engine.ranks import device_of
from headrace.engine.scheduler import Scheduler
from headrace.engine.sequence import SequenceState
from headrace.engine.speculation.model_speculator import ModelSpeculator
from headrace.engine.speculation.speculator import Speculator
from headrace.kv.chunk_table import ChunkTable
from headrace.types import CHUNK

if TYPE_CHECKING:  # it imports Triton
    from headrace.engine.device_sampler import DeviceSampler


def scheduler(loaded: Loaded, open_table: Callable[[SequenceState], ChunkTable]) -> Scheduler:
    asked = loaded.config.scheduler
    return SCHEDULERS[asked.policy](
        loaded.cache,
        open_table,
        asked.max_batch_tokens,
        asked.max_sequences,
        align=1 if loaded.cache.ranks == 1 else CHUNK,
        owners=loaded.executor.owners,
        below=loaded.below,
        copy=loaded.executor.copy,
    )


def device_sampler(loaded: Loaded) -> DeviceSampler | None:
    """Of an engine whose logits lie on a GPU."""
    if device_of(loaded.config).type == "cpu":
        return None
    from headrace.engine.device_sampler import DeviceSampler

    return DeviceSampler()


def overlap(
    loaded: Loaded, scheduler: Scheduler, outputs: Mapping[SequenceState, Output], sampler: DeviceSampler | None
) -> Overlap:
    """outputs: of all sequences that have not ended. sampler: `device_sampler`."""
    if sampler is None:
        return Overlap(loaded, scheduler, outputs, None)
    from headrace.engine.launched_draws import LaunchedDraws

    capacity = loaded.capacity
    draws = LaunchedDraws(sampler, capacity.vocab_size, capacity.eos_token_ids)
    return Overlap(loaded, scheduler, outputs, draws)


def speculator(loaded: Loaded) -> Speculator | None:
    """None without speculation."""
    asked = loaded.config.speculation
    again, longest = loaded.cache.states is not None, loaded.capacity.max_model_len
    if loaded.draft is not None:
        return ModelSpeculator(loaded.draft, asked.tokens, longest)
    return Speculator(asked.method, asked.tokens, longest, again) if asked.on else None
