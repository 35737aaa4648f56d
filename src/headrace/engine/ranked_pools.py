"""What ranks on GPUs have for keys and values, found when the weights of all lie there. Pools whose size is not given
become as large as the rank with least memory allows, since pools have one size."""

from __future__ import annotations

import logging

import torch
from torch import Tensor

from headrace.config import EngineConfig
from headrace.device import current
from headrace.engine import gpu_memory
from headrace.engine.footprint import Footprint, gib, tokens_in
from headrace.models.decoder import Decoder
from headrace.models.spec import ModelConfig
from headrace.parallel import workspace
from headrace.parallel.group import Group
from headrace.parallel.transport import Apart, Tag, Transport, all_gather
from headrace.types import CHUNK

log = logging.getLogger(__name__)

LOADED, FREE, ROOM = range(3)
"""What is told. All have loaded their weights behind the first, and none has taken more before the second."""


def measured(config: EngineConfig) -> bool:
    """Whether several ranks find out how large their pools may be."""
    given = config.cache.tokens is not None or config.streaming is not None
    return config.model.on_gpu and config.ranks.count > 1 and not given


def sized(config: EngineConfig, group: Group, model: ModelConfig, decoder: Decoder, backend: str) -> EngineConfig:
    """The settings with kv_cache_tokens. Every rank calls it once its weights are loaded, and gets the same.

    Raises ValueError on rank 0 where a pool has no room, and on a rank without memory for the largest step; RankLost.
    """
    if not measured(config):
        return config
    free = free_memory(config, group)
    room = gpu_memory.bytes_for_cache(decoder, backend, *gpu_memory.largest_rows(config, model), free=free)
    rooms = _told(group, max(0, room - _state_bytes(config, decoder)), ROOM)
    least = min(rooms)
    told = f"rank {rooms.index(least)} has the least memory for keys and values, {gib(least)} of {current().name}"
    try:
        tokens = tokens_in(config, model, least, bytes_per_token(config, model, decoder))
    except ValueError as error:
        if group.rank == 0:
            raise ValueError(f"{told}: {error}, or lower max_batch_tokens") from None
        tokens = CHUNK  # rank 0 ends all
    if group.rank == 0:
        log.info("%s: each of %d ranks has a pool of %d tokens", told, len(rooms), tokens)
    return config.replace(kv_cache_tokens=tokens)


def free_memory(config: EngineConfig, group: Group) -> int:
    """Bytes of its device that a rank has, beside the weights of all ranks that share it. Every rank calls it. Raises
    RankLost."""
    _told(group, 0, LOADED)
    free = current().free_memory() // gpu_memory.sharing(config)
    _told(group, 0, FREE)
    return free


def bytes_per_token(config: EngineConfig, model: ModelConfig, decoder: Decoder) -> int:
    """Of a rank's pool, and of its workspace, through which chunks of all context ranks may pass at a time."""
    pool, ranks = Footprint.of(config, model).per_token(), config.ranks.context
    if ranks == 1:
        return pool
    return pool + -(-ranks * workspace.bytes_per_chunk(decoder.config.attention, decoder.dtype) // CHUNK)


def _state_bytes(config: EngineConfig, decoder: Decoder) -> int:
    """Of this rank's memory for recurrent states, which is taken behind the pool."""
    spec, slots = decoder.config.recurrent, config.cache.states
    return 0 if spec is None or slots is None else slots * spec.state_bytes(decoder.dtype.itemsize)


def _told(group: Group, figure: int, piece: int) -> list[int]:
    """Every rank's figure, by world rank; returns when all have come. Raises RankLost."""
    line = _gathered(group.tensor, torch.tensor([figure]), piece)
    every: list[int] = _gathered(group.context, line, piece).tolist()
    return every


def _gathered(links: Transport, x: Tensor, piece: int) -> Tensor:
    shares = [x if rank == links.rank else torch.empty_like(x) for rank in range(links.size)]
    for work in all_gather(links, [x], [[share] for share in shares], Tag(Apart.memory, 0, piece)):
        work.wait()
    return torch.cat(shares)
