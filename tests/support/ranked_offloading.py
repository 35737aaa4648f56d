"""Offline engines of several ranks as threads of one process, each rank with tiers of its own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from headrace import LLM, SamplingParams
from headrace.config import EngineConfig
from headrace.engine import tiers
from headrace.engine.capacity import model_folder
from headrace.engine.core import EngineCore
from headrace.engine.driver import Driver
from headrace.engine.sequence import Slice
from headrace.kv.cache import KVCache
from headrace.kv.storage import KVStorage, StateStorage
from headrace.models.decoder import Decoder, load_decoder
from headrace.offload.ranked.agent import TierAgent
from headrace.offload.ranked.peers import TierPeers
from headrace.parallel.messages import StepGroup
from headrace.parallel.rank import Rank
from headrace.parallel.split_blocks import split_blocks
from headrace.parallel.tensor import TensorGroup
from headrace.parallel.transport import LoopbackHub
from headrace.planner.choice import choose
from headrace.planner.machine import ModelShape
from headrace.planner.profile import Profile
from headrace.planner.shards import Prefill
from headrace.strategies import STRATEGIES
from headrace.types import CHUNK
from tests.support.offloading import counters, flush, forced, watched
from tests.support.rank_threads import MACHINE, Threads
from tests.support.traces import Trace, same

PARAMS = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
STORED = {"kv_offloading_size": 0.05}

ConfigOf = Callable[[EngineConfig, int], EngineConfig]
"""(settings, world rank) -> that rank's own settings."""


@dataclass(slots=True)
class OwnersDriver(Driver):
    """Wants each block of a table to have one owner, as long as no rank is so full that another takes its chunks.

    split: slices whose queries went to a block on several ranks.
    """

    split: int = 0

    def _part(self, part: Slice) -> Any:
        strategy, made = Driver._part(self, part)
        several = bool(split_blocks(StepGroup(strategy, [made]), self.cache.pool.per_rank))
        assert self.cache.displaced or not several
        self.split += several and strategy == "ring-q"
        return strategy, made


@dataclass
class Hubs:
    """The links of context ranks, for each tensor rank, and of tensor ranks, for each context rank."""

    context: list[LoopbackHub]
    tensor: list[LoopbackHub]

    def fail(self, why: str) -> None:
        for hub in (*self.context, *self.tensor):
            hub.fail(why)

    def left_over(self) -> int:
        return sum(hub.left_over() for hub in (*self.context, *self.tensor))


class RankedLLM(LLM):
    """ranks, agents: by world rank. peers: rank 0's end of the tiers."""

    ranks: list[Rank]
    agents: dict[int, TierAgent]
    hubs: Hubs
    workers: Threads

    def forget(self) -> None:
        """What lies in the pools becomes wrong, so that whatever is read before it has come back shows."""
        for rank in self.ranks:
            states = [] if rank.states is None else [*rank.states.storage.layers]
            pools = (x for pool in rank.storage.pools for x in (pool.k, pool.v))
            kept = (x for layer in states for x in (layer.last, layer.matrices))
            for each in (*pools, *(rank.storage.x or ()), *kept):
                each.fill_(7)


def over_ranks(
    size: int,
    allowed: tuple[str, ...] = tuple(STRATEGIES),
    tokens: int = 8192,
    model: str | Path = "tiny",
    tensor: int = 1,
    config_of: ConfigOf = lambda config, rank: config,
    **settings: Any,
) -> RankedLLM:
    """`size` context ranks of `tensor` tensor ranks each."""
    llm = RankedLLM(str(model), kv_cache_tokens=tokens, dtype="bfloat16",
                    **{"max_model_len": 4096, "kv_offload_activations": "off", **STORED, **settings})  # fmt: skip
    loaded = llm.engine.loaded
    loaded.below.close()
    config, backend = loaded.config, loaded.capacity.backend
    hubs = Hubs([LoopbackHub(size) for _ in range(tensor)], [LoopbackHub(tensor) for _ in range(size)])

    def make(rank: int) -> Rank:
        context, place = divmod(rank, tensor)
        decoder = loaded.decoder if tensor == 1 else _share(config, hubs.tensor[context], place)
        kv_dtype = torch.int8 if config.cache.dtype == "int8" else decoder.dtype
        hidden = decoder.config.hidden_size if settings.get("kv_offload_activations") == "on" else None
        storage = KVStorage(decoder.config.attention, tokens // CHUNK, kv_dtype, hidden, decoder.dtype)
        spec, count = decoder.config.recurrent, settings.get("recurrent_states", 0)
        states = None if spec is None else StateStorage(spec, count, decoder.dtype)
        return Rank(decoder, storage, backend, hubs.context[place].transport(context), states=states)

    ranks = [make(rank) for rank in range(size * tensor)]
    agents = {rank: tiers.agent_of(config_of(config, rank), each, backend) for rank, each in enumerate(ranks)}
    cache = KVCache(size * tokens // CHUNK, loaded.cache.identity, size, settings.get("recurrent_states"))
    shape = ModelShape.of(ranks[0].decoder.config)

    def advise(count: int, start: int, cached_on: Any, allow: tuple[str, ...]) -> Any:
        return choose(Prefill(MACHINE, shape, size, count, start, cached_on), allowed=allow)

    workers = Threads(ranks[1:], hubs)
    peers = TierPeers(size, agents, tensor=tensor)
    profile = Profile(MACHINE, shape, size, allowed=allowed) if size > 1 else None
    offload = tiers.open_offload(config, loaded.capacity, cache, ranks[0], peers, profile)
    driver = OwnersDriver(ranks[0], cache, workers.send, advise, allowed)
    if offload.states is not None:
        offload.states.home = driver
    llm.engine = EngineCore(replace(loaded, cache=cache, decoder=ranks[0].decoder, executor=driver, offload=offload))
    llm.workers, llm.hubs, llm.ranks, llm.agents = workers, hubs, ranks, agents
    return llm


def _share(config: EngineConfig, hub: LoopbackHub, place: int) -> Decoder:
    return load_decoder(model_folder(config.model.folder), config.model.dtype, None, config.model.quantization,
                        TensorGroup(hub.transport(place)))  # fmt: skip


def close(llm: RankedLLM) -> None:
    llm.engine.below.close()
    llm.workers.close()
    assert llm.hubs.left_over() == 0


def restored(llm: RankedLLM, prompts: list[list[int]], truth: list[Trace], least: int = 300) -> None:
    """Stored, forgotten and loaded, one by one, with the bits of `truth`; at least so many tokens are loaded."""
    same([watched(llm, [each], PARAMS)[0] for each in prompts], truth)
    flush(llm)
    llm.forget()
    loads(llm, prompts, truth, least)


def loads(llm: LLM, prompts: list[list[int]], truth: list[Trace], least: int = 300) -> None:
    """Answers, one by one, from what the tiers hold."""
    assert llm.engine.offload is not None
    llm.engine.offload.choose = forced(0.0, 0.0)
    same([watched(llm, [each], PARAMS)[0] for each in prompts], truth)
    assert counters(llm).loaded_tokens > least and counters(llm).failures == 0
