"""Tiers of several ranks, as threads: what each rank stored comes back with the bits of one rank, by every strategy."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
import torch

from headrace import LLM, SamplingParams
from headrace.offload.restore.solver import Split
from headrace.strategies import STRATEGIES
from headrace.types import BLOCK_CHUNKS, CHUNK
from tests.support import traces
from tests.support.checkpoints import KINDS, NEAR, FolderOf
from tests.support.offloading import counters, flush, forced, projecting, watched
from tests.support.ranked_offloading import PARAMS, OwnersDriver, close, over_ranks, restored
from tests.support.traces import Trace, run, same

pytestmark = pytest.mark.usefixtures("one_thread")

RUNS = [("single",), ("gather",), ("chain",), ("ring-kv",), ("ring-q", "ring-kv")]


def prompts_of(llm: LLM) -> list[list[int]]:
    generator = torch.Generator().manual_seed(3)
    tokens = torch.randint(10, llm.capacity.vocab_size, (3000,), generator=generator).tolist()
    return [tokens[:2500], tokens[:2300] + tokens[2400:2460], tokens[7:140]]


@pytest.fixture(scope="module")
def truth() -> list[Trace]:
    llm = LLM("tiny", kv_cache_tokens=8192, max_model_len=4096, dtype="bfloat16", enable_prefix_caching=False)
    return run(llm, prompts_of(llm), PARAMS)


ToldByOne = Callable[[str, str], tuple[list[list[int]], list[Trace]]]


@pytest.fixture(scope="module")
def told_by_one(folder_of: FolderOf) -> ToldByOne:
    """told_by_one(kind, kv): some prompts, and what one rank says to them."""

    @lru_cache(None)
    def told(kind: str, kv: str) -> tuple[list[list[int]], list[Trace]]:
        one = LLM(str(folder_of(kind)), kv_cache_tokens=4096, dtype="bfloat16", enable_prefix_caching=False,
                  kv_cache_dtype=kv)  # fmt: skip
        return few(one), run(one, few(one), PARAMS)

    return told


@pytest.mark.parametrize("allowed", RUNS, ids=str)
@pytest.mark.parametrize("share", [0.0, 0.2, pytest.param(0.7, marks=pytest.mark.matrix)])
def test_what_ranks_stored_comes_back(allowed: tuple[str, ...], share: float, truth: list[Trace]) -> None:
    llm = over_ranks(2, allowed, kv_link_gbps=0.05)  # so slow that steps wait for what comes
    prompts = prompts_of(llm)
    same([watched(llm, [each], PARAMS)[0] for each in prompts], truth)
    for together in (True, False):
        flush(llm)
        llm.forget()
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
    assert offload is not None and offload.profile.by_strategy is not None
    same(watched(llm, [prompt], PARAMS), truth[:1])
    for _ in range(6):  # all but one were seen to be slow
        for name in STRATEGIES:
            offload.profile.by_strategy.observe(name, 0, 512, 0.5 if name == front else 50.0)
    for closing in ("single", "chain", "ring-kv", "ring-q", "gather"):
        flush(llm)
        offload.choose = lambda run, *_, by=closing: Split(16, 0, run.chunks - 16, 1.0, "", by, 2.0)  # type: ignore[misc]
        before = dict(llm.engine.stats().ranks.prefills)
        same(watched(llm, [prompt], PARAMS), truth[:1])
        counted = Counter(llm.engine.stats().ranks.prefills) - Counter(before)
        assert counted == Counter([front, closing]), "another strategy was used than planned"
    assert counters(llm).plans == {"recompute+load": 5} and counters(llm).loaded_from["host"] > 5000
    close(llm)


@pytest.mark.parametrize("x", ["off", "on"])
def test_a_stored_chunk_has_no_owner(x: str, tmp_path: Path, truth: list[Trace]) -> None:
    """Stored by two ranks, restored by three, then by one, which projects what has activations."""
    disk = {"kv_offload_path": str(tmp_path), "kv_offloading_size": 0, "kv_offload_activations": x}
    for size in (2, 3):
        llm = over_ranks(size, **disk)
        for prompt, expected in zip(prompts_of(llm), truth, strict=True):
            same(watched(llm, [prompt], PARAMS), [expected])
        flush(llm)
        assert (counters(llm).loaded_tokens > 0) == (size > 2)
        close(llm)
    one = LLM("tiny", kv_cache_tokens=8192, max_model_len=4096, dtype="bfloat16", **disk)
    assert one.engine.offload is not None
    one.engine.offload.choose = projecting
    same(watched(one, prompts_of(one), PARAMS), truth)
    assert counters(one).loaded_tokens + counters(one).projected_tokens > 2000
    assert (counters(one).projected_tokens > 0) == (x == "on")
    one.close()


@pytest.mark.parametrize(
    "kinds",
    [
        ["llama"],
        ["glm_dsa"],
        pytest.param([kind for kind in KINDS if kind not in NEAR], marks=pytest.mark.matrix),
    ],
    ids=["llama", "glm_dsa", "all"],
)
@pytest.mark.parametrize("kv", ["auto", "int8"])
def test_families(kinds: list[str], kv: str, folder_of: FolderOf, told_by_one: ToldByOne) -> None:
    """GQA and MHA, windows, ALiBi, learned positions, rows that choose their keys; K and V in int8. Of kinds with facts
    of their own half with either, and with two of the three strategies."""
    for turn, each in enumerate(kinds[kv == "int8" :: 2] if len(kinds) > 1 else kinds):
        settings: dict[str, Any] = dict(kv_cache_dtype=kv, max_model_len=None)
        prompts, truth = told_by_one(each, kv)
        strategies = [("chain",), ("ring-kv",), ("ring-q", "ring-kv")]
        if len(kinds) > 1:
            del strategies[turn % 3]
        for allowed in strategies:
            llm = over_ranks(2, allowed, 4096, folder_of(each), **settings)
            restored(llm, prompts, truth)
            close(llm)


def projected(llm: LLM, prompts: list[list[int]], truth: list[Trace], allowed: tuple[str, ...]) -> None:
    """Forgotten and brought back by `projecting`, one by one, by these strategies, with the bits of `truth`."""
    flush(llm)
    for rank in llm.ranks:  # type: ignore[attr-defined]
        for pool, x in zip(rank.storage.pools, rank.storage.x, strict=True):
            pool.k.fill_(7), pool.v.fill_(7), x.fill_(7)
    driver: Any = llm.engine.loaded.executor
    assert llm.engine.offload is not None
    driver.allowed, llm.engine.offload.choose = allowed, projecting
    before = counters(llm).projected_tokens
    same([watched(llm, [each], PARAMS)[0] for each in prompts], truth)
    assert counters(llm).projected_tokens > before and counters(llm).failures == 0


@pytest.mark.parametrize("allowed", RUNS, ids=str)
def test_all_ranks_project(allowed: tuple[str, ...], truth: list[Trace]) -> None:
    """The second block's owner computed it, too: in the step that waits each projects its chunks, whose rows it has."""
    llm = over_ranks(2, ("single",), kv_offload_activations="on", kv_link_gbps=0.05)
    prompts = prompts_of(llm)
    same([watched(llm, [each], PARAMS)[0] for each in prompts], truth)
    projected(llm, prompts, truth, allowed)
    assert counters(llm).projected_tokens > BLOCK_CHUNKS * CHUNK
    close(llm)


@pytest.mark.parametrize("kind", ["llama", "mistral_window", "falcon_rw"])
@pytest.mark.parametrize("kv", ["auto", "int8"])
@pytest.mark.parametrize("stored", RUNS, ids=str)
def test_activations_of_chunks_that_their_owner_computed(
    stored: tuple[str, ...], kv: str, kind: str, folder_of: FolderOf, told_by_one: ToldByOne
) -> None:
    """Of a run in part: of ranks that shared its rows, or of one that computed them all."""
    settings: dict[str, Any] = dict(kv_cache_dtype=kv, max_model_len=None)
    prompts, truth = told_by_one(kind, kv)
    llm = over_ranks(2, stored, 4096, folder_of(kind), kv_offload_activations="on", **settings)
    same([watched(llm, [each], PARAMS)[0] for each in prompts], truth)
    for allowed in (("ring-kv",), stored):
        projected(llm, prompts, truth, allowed)
    close(llm)


def few(llm: LLM) -> list[list[int]]:
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(10, llm.capacity.vocab_size, (460,), generator=generator).tolist()
    return [tokens[:400], tokens[:300] + tokens[310:350]]


@pytest.mark.parametrize("x", [pytest.param("off", marks=pytest.mark.matrix), "on"])
def test_a_pool_too_small(x: str) -> None:
    """Sequences are preempted, their chunks evicted, stored by their ranks and brought back. Blocks are split."""
    long = SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True)
    roomy = LLM("tiny", kv_cache_tokens=40_000, dtype="bfloat16", max_model_len=640)
    prompts = [each for each in traces.prompts_of(roomy) if len(each) < 520]
    truth = run(roomy, prompts, long)
    llm = over_ranks(2, tokens=640, max_model_len=640, max_batch_tokens=192, kv_offload_activations=x)
    assert llm.engine.offload is not None
    llm.engine.offload.choose = projecting if x == "on" else forced(0.0, 0.0)  # rates as measured may say: recompute
    for _ in range(2):
        same(watched(llm, prompts, long), truth)
    driver = llm.engine.loaded.executor
    assert isinstance(driver, OwnersDriver) and driver.split
    stats = llm.engine.stats()
    assert stats.scheduler.preemptions and stats.kv.evictions and counters(llm).restores
    assert (counters(llm).projected_tokens > 0) == (x == "on")
    close(llm)


@pytest.mark.parametrize("x", ["off", "on"])
def test_aborted_while_it_comes(x: str, truth: list[Trace]) -> None:
    """Nobody else gets the slots until no rank writes to them any more."""
    llm = over_ranks(2, ("ring-kv",), kv_link_gbps=0.005, kv_offload_activations=x)
    prompts = prompts_of(llm)[:1]
    same(watched(llm, prompts, PARAMS), truth[:1])
    flush(llm)
    core = llm.engine
    assert core.offload is not None
    core.offload.choose = projecting
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
@pytest.mark.parametrize("x", ["off", "on"])
def test_damage_costs_time_only(where: int, x: str, truth: list[Trace], tmp_path: Path) -> None:
    """A byte of a chunk of the second rank's is flipped: found on the way, and computed again from there."""
    disk = {"kv_offload_path": str(tmp_path), "kv_offloading_size": 0, "kv_link_gbps": 0.05}
    llm = over_ranks(2, ("single",), kv_offload_activations=x, **disk)
    prompts = prompts_of(llm)[:1]
    same(watched(llm, prompts, PARAMS), truth[:1])
    flush(llm)
    table = llm.engine.cache.open(list(prompts[0]))
    name = table.digest(34).hex()
    llm.engine.cache.close(table)
    paths = [each for each in tmp_path.rglob(f"*{name}*") if each.is_file()]
    assert len(paths) == 1 + (x == "on"), "K and V, and activations"
    for path in paths:
        content = bytearray(path.read_bytes())
        content[where] ^= 4
        path.write_bytes(content)
    driver: Any = llm.engine.loaded.executor
    assert llm.engine.offload is not None
    driver.allowed, llm.engine.offload.choose = ("ring-kv",), projecting
    for again in (False, True):
        same(watched(llm, prompts, PARAMS), truth[:1])
        assert counters(llm).failures == 1, "the damage was not noticed, or not repaired"
        if not again:
            assert counters(llm).loaded_tokens + counters(llm).projected_tokens == 34 * CHUNK
            flush(llm)
    close(llm)
