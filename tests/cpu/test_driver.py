"""The engine over several ranks, as threads: the answers of one rank, whatever the planner chooses."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from headrace import LLM, SamplingParams
from headrace.engine.core import EngineCore
from headrace.engine.driver import Driver, mark_activations
from headrace.kv.cache import KVCache
from headrace.kv.storage import KVStorage
from headrace.parallel.rank import Rank
from headrace.parallel.transport import LoopbackHub, RankLost
from headrace.planner.choice import StrategyChoice, choose
from headrace.planner.machine import ModelShape
from headrace.planner.shards import Prefill
from headrace.strategies import STRATEGIES
from headrace.types import CHUNK, Structured
from tests.support.rank_threads import MACHINE, Threads


def test_activations_are_those_of_chunks_that_their_owner_computed_whole() -> None:
    """Chunks 0 to 3 of rank 1, 4 to 6 of rank 0; rank 1 computes all but the rows from the middle of chunk 2 to 5."""
    cache = KVCache(20, ranks=2)
    cache.block_chunks = 4
    table = cache.open(list(range(7 * CHUNK)))
    assert cache.extend(table, 7 * CHUNK, lambda chunk: int(chunk < 4))
    mark_activations(table, [0, 2 * CHUNK + 32, 5 * CHUNK, 5 * CHUNK, 7 * CHUNK], [1, 0, 1, 1])
    assert [node.activations for node in table.nodes] == [True, True, False, False, True, False, False]


GREEDY = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)


def over_ranks(size: int, tokens: int = 4096, allowed: tuple[str, ...] = tuple(STRATEGIES), **settings: Any) -> LLM:
    """An offline engine with `size` ranks of `tokens` tokens of KV cache each; close with llm.workers.close()."""
    llm = LLM("tiny", kv_cache_tokens=tokens, max_model_len=min(tokens, 4096), **settings)
    loaded = llm.engine.loaded
    per_rank, decoder = tokens // CHUNK, loaded.decoder
    hub = LoopbackHub(size)

    def make(rank: int) -> Rank:
        storage = KVStorage(decoder.config.attention, per_rank, decoder.dtype)
        return Rank(decoder, storage, loaded.capacity.backend, hub.transport(rank))

    workers = Threads([make(rank) for rank in range(1, size)], hub)
    shape = ModelShape.of(decoder.config)
    cache = KVCache(size * per_rank, loaded.cache.identity, size)

    def advise(count: int, start: int, cached_on: Any, allow: tuple[str, ...]) -> Any:
        return choose(Prefill(MACHINE, shape, size, count, start, cached_on), allowed=allow)

    driver = Driver(make(0), cache, workers.send, advise, allowed)
    llm.engine = EngineCore(replace(loaded, cache=cache, executor=driver))
    llm.workers, llm.hub, llm.driver = workers, hub, driver  # type: ignore[attr-defined]
    return llm


@pytest.fixture(params=[2, 3])
def size(request: Any) -> Iterator[int]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield request.param
    torch.set_num_threads(threads)


def prompts_of(llm: LLM) -> list[list[int]]:
    generator = torch.Generator().manual_seed(3)
    common = torch.randint(0, 2000, (200,), generator=generator).tolist()
    own = [torch.randint(0, 2000, (n,), generator=generator).tolist() for n in (400, 17, 1, 64, 900)]
    return [common + own[0], common + own[1], own[2], own[3], own[4]]


@pytest.fixture(scope="module")
def truth() -> list[list[int]]:
    llm = LLM("tiny", kv_cache_tokens=4096)
    return [x.token_ids for x in llm.generate(prompts_of(llm), GREEDY)]


@pytest.mark.parametrize("allowed", [("single",), ("gather",), ("chain",), ("ring-kv",), ("ring-q", "ring-kv"), None])
@pytest.mark.parametrize("budget", [2048, 192])
def test_the_answers_are_those_of_one_rank(size: int, allowed: Any, budget: int, truth: list[list[int]]) -> None:
    llm = over_ranks(size, allowed=allowed or tuple(STRATEGIES), max_batch_tokens=budget)
    prompts = prompts_of(llm)
    for _ in range(2):  # the second time from the cache
        ours = llm.generate(prompts, GREEDY)
        assert [x.token_ids for x in ours] == truth
    assert max(x.metrics.cached_tokens for x in ours) > 800
    llm.engine.scheduler.check()
    if allowed is not None:
        assert set(llm.driver.counts) <= set(allowed)  # type: ignore[attr-defined]
    llm.workers.close()  # type: ignore[attr-defined]
    assert llm.hub.left_over() == 0  # type: ignore[attr-defined]


def test_logits_have_the_same_bits(size: int) -> None:
    truth = LLM("tiny", kv_cache_tokens=4096)
    for strategy in ("gather", "chain", "ring-kv"):
        llm = over_ranks(size, allowed=(strategy,))
        tokens = prompts_of(llm)[4]
        assert torch.equal(llm.logits(tokens), truth.logits(tokens))
        llm.workers.close()  # type: ignore[attr-defined]


def test_forced_tokens_are_those_of_one_rank(size: int) -> None:
    """Computed one at a time, across the ends of chunks, with prompts beside them."""
    literal = Structured(choice=[" ".join(str(number) for number in range(60))])
    shapes = [literal, Structured(json_object=True), literal, Structured(regex="[a-z]{3}( of the)+")]
    truth, llm = LLM("tiny", kv_cache_tokens=4096), over_ranks(size, max_batch_tokens=192)
    prompts = prompts_of(llm)[:4]
    params = [replace(GREEDY, structured=shape, max_tokens=100) for shape in shapes]
    for _ in range(2):
        ours, theirs = llm.generate(prompts, params), truth.generate(prompts, params)
        assert [x.token_ids for x in ours] == [x.token_ids for x in theirs]
    assert llm.engine.stats().structured.forced == truth.engine.stats().structured.forced > 200
    llm.engine.scheduler.check()
    llm.close()
    llm.workers.close()  # type: ignore[attr-defined]


def test_capacity_grows_with_ranks_and_full_caches_evict_and_preempt(size: int) -> None:
    truth = LLM("tiny", kv_cache_tokens=8192)
    llm = over_ranks(size, tokens=512, max_batch_tokens=512)
    llm.capacity = replace(llm.capacity, max_model_len=1024)
    llm.engine.loaded.capacity = llm.capacity
    generator = torch.Generator().manual_seed(5)
    prompts = [torch.randint(0, 2000, (n,), generator=generator).tolist() for n in (750, 350, 350, 700, 150)]
    for _ in range(2):
        ours, theirs = llm.generate(prompts, GREEDY), truth.generate(prompts, GREEDY)
        assert [x.token_ids for x in ours] == [x.token_ids for x in theirs]
    stats = llm.engine.stats()
    assert stats.kv.evictions > 0
    assert stats.ranks.prefills
    llm.engine.scheduler.check()
    llm.workers.close()  # type: ignore[attr-defined]


def test_the_choice_is_told(size: int) -> None:
    llm = over_ranks(size)
    (answer,) = llm.generate([prompts_of(llm)[4]], GREEDY)
    assert answer.metrics.strategy in STRATEGIES
    assert "predicted" in answer.metrics.strategy_reason
    llm.workers.close()  # type: ignore[attr-defined]


def test_the_time_that_a_step_should_take_is_told(size: int) -> None:
    """It is that of the strategy that was chosen, for all prompts of the step."""
    llm = over_ranks(size, max_batch_tokens=1024)
    told: list[tuple[list[int], float]] = []
    llm.engine.on_prefill = lambda prefills, expected_s: told.append(([each.step for each in prefills], expected_s))
    made: list[StrategyChoice] = []
    advise = llm.driver.advise  # type: ignore[attr-defined]

    def note(*asked: Any) -> StrategyChoice:
        made.append(advise(*asked))
        return made[-1]

    llm.driver.advise = note  # type: ignore[attr-defined]
    llm.generate([[5] * 400, [6] * 300], GREEDY)
    assert len(made) == 2 and min(choice.predicted_s[choice.strategy] for choice in made) > 0
    assert told == [([400, 300], sum(choice.predicted_s[choice.strategy] for choice in made))]
    llm.workers.close()  # type: ignore[attr-defined]


def test_a_lost_rank_is_an_error(size: int) -> None:
    llm = over_ranks(size, allowed=("chain",))
    llm.hub.fail("rank 1 is gone")  # type: ignore[attr-defined]
    with pytest.raises(RankLost, match="rank 1"):
        llm.generate([prompts_of(llm)[4]], GREEDY)
    llm.workers.close()  # type: ignore[attr-defined]


def test_a_short_continuation_stays_with_what_it_reads(size: int) -> None:
    """A rank that begins a block after a longer cached part is the one that holds it, though others have more room."""
    llm = over_ranks(size, allowed=("single",))
    tokens = torch.randint(10, 2000, (2048 + 130,), generator=torch.Generator().manual_seed(1)).tolist()
    truth = LLM("tiny", kv_cache_tokens=4096)
    for prompt in (tokens[:2049], tokens):
        assert llm.generate([prompt], GREEDY)[0].token_ids == truth.generate([prompt], GREEDY)[0].token_ids
    table = llm.engine.cache.open(list(tokens))
    llm.engine.cache.reuse(table)
    assert len({table.owner(chunk) for chunk in range(len(table.nodes))}) == 1 and len(table.nodes) == 34
    llm.engine.cache.close(table)
    llm.workers.close()  # type: ignore[attr-defined]
