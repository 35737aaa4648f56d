"""Tiers of several ranks, as threads: what each rank stored comes back with the bits of one rank, by every strategy."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from headrace import LLM, SamplingParams
from headrace.engine import tiers
from headrace.engine.core import EngineCore
from headrace.engine.driver import Driver
from headrace.engine.sequence import Slice
from headrace.kv.cache import KVCache
from headrace.kv.storage import KVStorage
from headrace.offload.ranked.peers import TierPeers
from headrace.offload.restore.solver import Split
from headrace.parallel.rank import Rank
from headrace.parallel.transport import LoopbackHub
from headrace.planner.choice import choose
from headrace.planner.machine import ModelShape
from headrace.strategies import STRATEGIES
from headrace.types import BLOCK_CHUNKS, CHUNK
from tests.support import traces
from tests.support.checkpoints import KINDS, FolderOf
from tests.support.offloading import counters, flush, forced, watched
from tests.support.rank_threads import MACHINE, Threads
from tests.support.traces import Trace, run, same

PARAMS = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
STORED = {"kv_offloading_size": 0.05}


class OneOwner(Driver):
    """Wants each block of a table to have one owner, as long as no rank is so full that another takes its chunks."""

    def _part(self, part: Slice) -> Any:
        table = part.sequence.table
        assert table is not None
        owners = table.slots // self.cache.pool.per_rank
        for block in range(0, len(owners), BLOCK_CHUNKS):
            assert self.cache.displaced or len(set(owners[block : block + BLOCK_CHUNKS].tolist())) == 1
        return super()._part(part)


def over_ranks(
    size: int,
    allowed: tuple[str, ...] = tuple(STRATEGIES),
    tokens: int = 8192,
    model: str | Path = "tiny",
    **settings: Any,
) -> LLM:
    """An offline engine with `size` ranks, each with tiers of its own."""
    llm = LLM(str(model), kv_cache_tokens=tokens, dtype="bfloat16", kv_offload_activations="off",
              **{"max_model_len": 4096, **STORED, **settings})  # fmt: skip
    loaded = llm.engine.loaded
    loaded.below.close()
    decoder, backend, hub = loaded.decoder, loaded.capacity.backend, LoopbackHub(size)

    def make(rank: int) -> Rank:
        kv_dtype = torch.int8 if loaded.config.cache.dtype == "int8" else decoder.dtype
        storage = KVStorage(decoder.config.attention, tokens // CHUNK, kv_dtype)
        return Rank(decoder, storage, backend, hub.transport(rank))

    ranks = [make(rank) for rank in range(size)]
    agents = {rank: tiers.agent_of(loaded.config, each, backend) for rank, each in enumerate(ranks)}
    cache = KVCache(size * tokens // CHUNK, loaded.cache.identity, size)
    shape = ModelShape.of(decoder.config)

    def advise(count: int, start: int, cached_on: Any, allow: tuple[str, ...]) -> Any:
        return choose(MACHINE, shape, size, count, start, cached_on, allowed=allow)

    workers = Threads(ranks[1:], hub)
    peers = TierPeers(size, agents, lambda rank, body: None, lambda: None)
    offload = tiers.open_ranked(
        loaded.config,
        loaded.capacity,
        cache,
        ranks[0],
        peers,
        agents[0],
        lambda new, cached, lies: dict.fromkeys(allowed, 1e-3 * new),
    )
    driver = OneOwner(ranks[0], cache, workers.send, advise, allowed)
    llm.engine = EngineCore(replace(loaded, cache=cache, executor=driver, offload=offload))
    llm.workers, llm.hub, llm.ranks = workers, hub, ranks  # type: ignore[attr-defined]
    return llm


def close(llm: LLM) -> None:
    llm.engine.below.close()
    llm.workers.close()  # type: ignore[attr-defined]
    assert llm.hub.left_over() == 0  # type: ignore[attr-defined]


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def prompts_of(llm: LLM) -> list[list[int]]:
    generator = torch.Generator().manual_seed(3)
    tokens = torch.randint(10, llm.capacity.vocab_size, (3000,), generator=generator).tolist()
    return [tokens[:2500], tokens[:2300] + tokens[2400:2460], tokens[7:140]]


@pytest.fixture(scope="module")
def truth() -> list[Trace]:
    llm = LLM("tiny", kv_cache_tokens=8192, max_model_len=4096, dtype="bfloat16", enable_prefix_caching=False)
    return run(llm, prompts_of(llm), PARAMS)


@pytest.mark.parametrize(
    "allowed", [("single",), ("gather",), ("chain",), ("ring-kv",), ("ring-q", "ring-kv")], ids=str
)
@pytest.mark.parametrize("share", [0.0, 0.2, pytest.param(0.7, marks=pytest.mark.matrix)])
def test_what_ranks_stored_comes_back(allowed: tuple[str, ...], share: float, truth: list[Trace]) -> None:
    llm = over_ranks(2, allowed, kv_link_gbps=0.05)  # so slow that steps wait for what comes
    prompts = prompts_of(llm)
    same([watched(llm, [each], PARAMS)[0] for each in prompts], truth)
    for together in (True, False):
        flush(llm)
        for rank in llm.ranks:  # type: ignore[attr-defined]
            for pool in rank.storage.pools:
                pool.k.fill_(7), pool.v.fill_(7)
        assert llm.engine.offload is not None
        llm.engine.offload.choose = forced(share, 0.0)
        before = counters(llm).loaded_tokens
        asked = [prompts] if together else [[each] for each in prompts]
        same([trace for each in asked for trace in watched(llm, each, PARAMS)], truth)
        assert counters(llm).loaded_tokens > before + 500 and counters(llm).failures == 0
    close(llm)


@pytest.mark.parametrize("front", ["chain", "ring-kv"])
def test_the_strategies_of_the_plan_are_used(front: str, truth: list[Trace]) -> None:
    """Whatever the planner thinks when a slice is scheduled, with the bits of one rank."""
    llm = over_ranks(2, kv_link_gbps=0.05)
    prompt, offload = prompts_of(llm)[0], llm.engine.offload
    assert offload is not None and offload.rates.by_strategy is not None
    same(watched(llm, [prompt], PARAMS), truth[:1])
    for _ in range(6):  # all but one were seen to be slow
        for name in STRATEGIES:
            offload.rates.by_strategy.observe(name, 0, 512, 0.5 if name == front else 50.0)
    for closing in ("single", "chain", "ring-kv", "ring-q", "gather"):
        flush(llm)
        offload.choose = lambda run, *_, by=closing: Split(16, 0, run.chunks - 16, 1.0, "", by, 2.0)  # type: ignore[misc]
        before = dict(llm.engine.stats().ranks.prefills)
        same(watched(llm, [prompt], PARAMS), truth[:1])
        counted = Counter(llm.engine.stats().ranks.prefills) - Counter(before)
        assert counted == Counter([front, closing]), "another strategy was used than planned"
    assert counters(llm).plans == {"recompute+load": 5} and counters(llm).loaded_from["host"] > 5000
    close(llm)


def test_a_stored_chunk_has_no_owner(tmp_path: Path, truth: list[Trace]) -> None:
    """Stored by two ranks, restored by three, then by one."""
    disk = {"kv_offload_path": str(tmp_path), "kv_offloading_size": 0}
    for size in (2, 3):
        llm = over_ranks(size, **disk)
        for prompt, expected in zip(prompts_of(llm), truth, strict=True):
            same(watched(llm, [prompt], PARAMS), [expected])
        flush(llm)
        assert (counters(llm).loaded_tokens > 0) == (size > 2)
        close(llm)
    one = LLM("tiny", kv_cache_tokens=8192, max_model_len=4096, dtype="bfloat16", kv_offload_activations="off", **disk)
    same(watched(one, prompts_of(one), PARAMS), truth)
    assert counters(one).loaded_tokens > 2000
    one.close()


def restored(llm: LLM, prompts: list[list[int]], truth: list[Trace]) -> None:
    """Stored, forgotten and loaded, one by one, with the bits of `truth`."""
    same([watched(llm, [each], PARAMS)[0] for each in prompts], truth)
    flush(llm)
    assert llm.engine.offload is not None
    llm.engine.offload.choose = forced(0.0, 0.0)
    same([watched(llm, [each], PARAMS)[0] for each in prompts], truth)
    assert counters(llm).loaded_tokens > 300 and counters(llm).failures == 0


@pytest.mark.parametrize("kind", ["llama", pytest.param("all", marks=pytest.mark.matrix)])
@pytest.mark.parametrize("kv", ["auto", "int8"])
def test_families(kind: str, kv: str, folder_of: FolderOf) -> None:
    """GQA and MHA, windows, ALiBi, learned positions; K and V in int8."""
    for each in KINDS if kind == "all" else [kind]:
        settings: dict[str, Any] = dict(kv_cache_dtype=kv, max_model_len=None)
        one = LLM(str(folder_of(each)), kv_cache_tokens=4096, dtype="bfloat16", enable_prefix_caching=False, **settings)
        prompts = few(one)
        truth = run(one, prompts, PARAMS)
        for allowed in (("chain",), ("ring-kv",), ("ring-q", "ring-kv")):
            llm = over_ranks(2, allowed, 4096, folder_of(each), **settings)
            restored(llm, prompts, truth)
            close(llm)


def few(llm: LLM) -> list[list[int]]:
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(10, llm.capacity.vocab_size, (460,), generator=generator).tolist()
    return [tokens[:400], tokens[:300] + tokens[310:350]]


def test_a_pool_too_small() -> None:
    """Sequences are preempted, their chunks evicted, stored by their ranks and brought back."""
    long = SamplingParams(temperature=0.0, max_tokens=90, ignore_eos=True)
    whole = LLM("tiny", kv_cache_tokens=40_000, dtype="bfloat16", max_model_len=640)
    prompts = [each for each in traces.prompts_of(whole) if len(each) < 520]
    truth = run(whole, prompts, long)
    llm = over_ranks(2, tokens=640, max_model_len=640, max_batch_tokens=192)
    for _ in range(2):
        same(watched(llm, prompts, long), truth)
    stats = llm.engine.stats()
    assert stats.scheduler.preemptions and stats.kv.evictions and counters(llm).restores
    close(llm)


def test_aborted_while_it_comes(truth: list[Trace]) -> None:
    """Nobody else gets the slots until no rank writes to them any more."""
    llm = over_ranks(2, ("ring-kv",), kv_link_gbps=0.005)
    prompts = prompts_of(llm)[:1]
    same(watched(llm, prompts, PARAMS), truth[:1])
    flush(llm)
    core = llm.engine
    assert core.offload is not None
    core.offload.choose = forced(0.0, 0.0)
    for abort_after in range(5):
        request = llm._request(prompts[0], PARAMS, None, 0)
        core.add(request)
        for _ in range(abort_after):
            core.step()
            core.cache.check()
        core.abort(request.request_id)
        core.cache.check()
    same(watched(llm, prompts, PARAMS), truth[:1])
    close(llm)


@pytest.mark.parametrize("where", [30, 200, -100])
def test_damage_costs_time_only(where: int, truth: list[Trace], tmp_path: Path) -> None:
    """A byte of a chunk of the second rank's is flipped: found on the way, and computed again from there."""
    disk = {"kv_offload_path": str(tmp_path), "kv_offloading_size": 0, "kv_link_gbps": 0.05}
    llm = over_ranks(2, ("ring-kv",), **disk)
    prompts = prompts_of(llm)[:1]
    same(watched(llm, prompts, PARAMS), truth[:1])
    flush(llm)
    table = llm.engine.cache.open(list(prompts[0]))
    name = table.digest(34).hex()
    llm.engine.cache.close(table)
    (path,) = [each for each in tmp_path.rglob(f"*{name}*") if each.is_file()]
    content = bytearray(path.read_bytes())
    content[where] ^= 4
    path.write_bytes(content)
    assert llm.engine.offload is not None
    llm.engine.offload.choose = forced(0.0, 0.0)
    for again in (False, True):
        same(watched(llm, prompts, PARAMS), truth[:1])
        assert counters(llm).failures == 1, "the damage was not noticed, or not repaired"
        if not again:
            assert counters(llm).loaded_tokens == 34 * CHUNK
            flush(llm)
    close(llm)
