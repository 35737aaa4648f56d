"""Engines of several ranks as threads, each of which streams its share of KV, and of the weights where asked."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from headrace import LLM
from headrace.config import EngineConfig
from headrace.engine import loader, ranks
from headrace.engine.core import EngineCore
from headrace.engine.driver import Driver
from headrace.engine.ranked_streams import RankedStreams
from headrace.kv.cache import KVCache
from headrace.models.decoder import load_decoder
from headrace.offload.streaming.staged_store import StagedStore
from headrace.parallel.rank import Rank
from headrace.parallel.tensor import TensorGroup
from headrace.parallel.transport import LoopbackHub
from headrace.planner.choice import choose
from headrace.planner.machine import ModelShape
from headrace.planner.shards import Prefill
from headrace.progress import untold
from headrace.strategies import STRATEGIES
from headrace.types import CHUNK
from tests.support.rank_threads import MACHINE, Threads


class Hubs:
    """Those of a mesh: what fails, fails everywhere."""

    def __init__(self, context: int, tensor: int) -> None:
        self.inner = [LoopbackHub(tensor) for _ in range(context)]
        self.outer = [LoopbackHub(context) for _ in range(tensor)]

    def fail(self, why: str) -> None:
        for hub in (*self.inner, *self.outer):
            hub.fail(why)

    def left_over(self) -> int:
        return sum(hub.left_over() for hub in (*self.inner, *self.outer))


def streamed_ranks(
    context: int,
    tensor: int = 1,
    model: str | Path = "tiny",
    allowed: Sequence[str] = tuple(STRATEGIES),
    **settings: Any,
) -> LLM:
    """An offline engine; llm.ranks are all of its ranks, by world rank. End it by `close`."""
    given = {"dtype": "bfloat16", "offload_schedule": "row", "kv_offloading_size": 0.2, **settings}
    config = EngineConfig(
        model=str(model), context_parallel_size=context, tensor_parallel_size=tensor, threads=1, **given
    )
    sized = loader._size(config, untold)
    hubs = Hubs(context, tensor)

    def make(place: tuple[int, int]) -> Rank:
        at, share = place
        group = TensorGroup(hubs.inner[at].transport(share)) if tensor > 1 else None
        outside = ranks.expert_file(config, sized.model)
        decoder = load_decoder(
            sized.capacity.folder, config.model.dtype, None, config.model.quantization, group, outside=outside
        )
        storage = ranks.open_storage(config, decoder)
        return Rank(decoder, storage, sized.capacity.backend, hubs.outer[share].transport(at))

    made = [make((at, share)) for at in range(context) for share in range(tensor)]
    cache = KVCache(sized.capacity.kv_cache_tokens // CHUNK, b"", context)
    shape = ModelShape.of(made[0].decoder.config)

    def advise(count: int, start: int, cached_on: Any, allow: tuple[str, ...]) -> Any:
        return choose(Prefill(MACHINE, shape, context, count, start, cached_on), allowed=allow)

    workers = Threads(made[1:], hubs)  # type: ignore[arg-type]
    streams = RankedStreams({rank: each.storage for rank, each in enumerate(made)})  # type: ignore[misc]
    driver = Driver(made[0], cache, workers.send, advise, tuple(allowed), staged=made[0].staged, streams=streams)
    llm = LLM("tiny", kv_cache_tokens=64, max_model_len=64)
    loaded = replace(
        llm.engine.loaded, config=config, capacity=sized.capacity, decoder=made[0].decoder, cache=cache,
        executor=driver, tokenizer=sized.tokenizer,
    )  # fmt: skip
    llm.engine, llm.capacity = EngineCore(loaded), sized.capacity
    llm.workers, llm.hubs, llm.ranks = workers, hubs, made  # type: ignore[attr-defined]
    return llm


def stores(llm: LLM) -> list[StagedStore]:
    return [rank.storage for rank in llm.ranks]  # type: ignore[attr-defined]


def close(llm: LLM) -> None:
    """Nothing is on its way, and no chunk is held."""
    assert llm.engine.cache.used == 0
    llm.workers.close()  # type: ignore[attr-defined]
    for rank in llm.ranks:  # type: ignore[attr-defined]
        rank.close()
    assert llm.hubs.left_over() == 0  # type: ignore[attr-defined]
