"""Tiers of tensor ranks, as threads: each stores its own heads of every chunk, which come back with one rank's bits."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest

from headrace import LLM, SamplingParams
from headrace.offload.tiers import upkeep
from headrace.types import CHUNK
from tests.support import traces
from tests.support.checkpoints import FolderOf, make_checkpoint
from tests.support.offloading import counters, flush, forced, projecting, prompts_of, watched
from tests.support.ranked_offloading import PARAMS, RankedLLM, close, loads, over_ranks, restored
from tests.support.traces import run, same

pytestmark = pytest.mark.usefixtures("one_thread")

SIZES = [(1, 2), (2, 2)]
"""(context, tensor) ranks."""


class Case:
    """A model, the settings of its engines, prompts, and what one rank with nothing stored says."""

    def __init__(self, folder: Path, **settings: Any) -> None:
        self.settings: dict[str, Any] = {"max_model_len": None, "tokens": 4096, "model": folder, **settings}
        whole = {name: value for name, value in self.settings.items() if name not in ("tokens", "model")}
        one = LLM(str(folder), kv_cache_tokens=4096, dtype="bfloat16", enable_prefix_caching=False, **whole)
        self.prompts = prompts_of(one)
        self.truth = run(one, self.prompts, PARAMS)

    def over(self, size: int, tensor: int, *allowed: str, **settings: Any) -> RankedLLM:
        strategies = {"allowed": allowed} if allowed else {}
        return over_ranks(size, tensor=tensor, **strategies, **{**self.settings, **settings})


CaseOf = Callable[..., Case]


@pytest.fixture(scope="module")
def case_of(folder_of: FolderOf) -> CaseOf:
    """case_of(kind, kv_cache_dtype=...): one for all tests that ask for it."""
    return lru_cache(None)(lambda kind, **settings: Case(folder_of(kind), **settings))


@pytest.fixture(scope="module")
def gqa(case_of: CaseOf) -> Case:
    return case_of("llama_gqa")


@pytest.mark.parametrize(("size", "tensor"), SIZES)
@pytest.mark.parametrize("share", [0.0, 0.4])
def test_what_tensor_ranks_stored_comes_back(size: int, tensor: int, share: float, gqa: Case) -> None:
    """Over a link so slow that steps wait for what comes, layer by layer."""
    llm = gqa.over(size, tensor, kv_link_gbps=0.02)
    same([watched(llm, [each], PARAMS)[0] for each in gqa.prompts], gqa.truth)
    for together in (True, False):
        flush(llm)
        llm.forget()
        assert llm.engine.offload is not None
        llm.engine.offload.choose = forced(share, 0.0)
        before = counters(llm).loaded_tokens
        asked = [gqa.prompts] if together else [[each] for each in gqa.prompts]
        same([trace for each in asked for trace in watched(llm, each, PARAMS)], gqa.truth)
        assert counters(llm).loaded_tokens > before + 200 and counters(llm).failures == 0
    close(llm)


KINDS = ["mistral_window", "falcon_rw", "falcon7", "gemma4", "gemma4_small"]
WAYS = [(1, "single"), (2, "ring-kv")]


@pytest.mark.parametrize("kv", ["auto", "int8"])
@pytest.mark.parametrize("kind", ["llama", *(pytest.param(kind, marks=pytest.mark.matrix) for kind in KINDS)])
def test_families(kind: str, kv: str, case_of: CaseOf) -> None:
    """MHA, a window, ALiBi, one KV head that all tensor ranks hold; K and V in int8."""
    case = case_of(kind, kv_cache_dtype=kv)
    for size, strategy in WAYS if kind == "llama" else [*WAYS, (2, "chain"), (2, "ring-q")]:
        llm = case.over(size, 2, strategy)
        restored(llm, case.prompts, case.truth)
        close(llm)


@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_quantised_weights(quantization: str, case_of: CaseOf) -> None:
    case = case_of("llama_gqa", quantization=quantization)
    llm = case.over(1, 2)
    restored(llm, case.prompts, case.truth)
    close(llm)


@pytest.mark.parametrize("form", ["int8", "int4"])
def test_rounded_as_by_one_rank(form: str, gqa: Case) -> None:
    """A tier that rounds does so head by head: shares come back as the whole does."""
    answers = []
    for tensor in (1, 2):
        llm = gqa.over(1, tensor, kv_host_format=form)
        same([watched(llm, [each], PARAMS)[0] for each in gqa.prompts[:1]], gqa.truth[:1])
        flush(llm)
        llm.forget()
        assert llm.engine.offload is not None
        llm.engine.offload.choose = forced(0.0, 0.0)
        answers.append(watched(llm, gqa.prompts[:1], PARAMS))
        assert counters(llm).loaded_tokens > 300
        close(llm)
    same(*answers)


def test_a_pool_too_small() -> None:
    """Sequences are preempted, their chunks evicted, stored by all tensor ranks and brought back."""
    long = SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True)
    whole = LLM("tiny", kv_cache_tokens=40_000, dtype="bfloat16", max_model_len=640)
    prompts = [each for each in traces.prompts_of(whole) if 150 < len(each) < 520]
    truth = run(whole, prompts, long)
    llm = over_ranks(1, tokens=576, tensor=2, max_model_len=576, max_batch_tokens=192)
    assert llm.engine.offload is not None
    llm.engine.offload.choose = forced(0.0, 0.0)  # rates as measured may say: recompute
    for _ in range(2):
        same(watched(llm, prompts, long), truth)
    stats = llm.engine.stats()
    assert stats.scheduler.preemptions and stats.kv.evictions and counters(llm).restores
    close(llm)


@pytest.mark.parametrize("x", ["off", "on"])
def test_aborted_while_it_comes(x: str, case_of: CaseOf) -> None:
    """Nobody else gets the slots until no tensor rank writes to them any more."""
    case = case_of("llama")
    llm = case.over(1, 2, kv_link_gbps=0.002, kv_offload_activations=x)
    prompts, truth = case.prompts[:1], case.truth[:1]
    same(watched(llm, prompts, PARAMS), truth)
    flush(llm)
    core = llm.engine
    assert core.offload is not None
    core.offload.choose = projecting if x == "on" else forced(0.0, 0.0)
    for abort_after in range(5):
        request = llm._request(prompts[0], PARAMS, None, 0)
        core.add(request)
        for _ in range(abort_after):
            core.step()
            core.cache.check()
        core.abort(request.request_id)
        core.cache.check()
    same(watched(llm, prompts, PARAMS), truth)
    close(llm)


def blobs_of(llm: LLM, prompt: list[int], chunk: int, folder: Path) -> list[Path]:
    """The files of a chunk of the prompt, a share each."""
    table = llm.engine.cache.open(list(prompt))
    name = table.digest(chunk).hex()
    llm.engine.cache.close(table)
    return sorted(each for each in folder.rglob(f"{name}*") if each.is_file())


@pytest.mark.parametrize(("size", "tensor"), SIZES)
@pytest.mark.parametrize("share", [0, 1])
@pytest.mark.parametrize("what", ["header", "section", "gone"])
def test_a_lost_share_is_a_lost_chunk(size: int, tensor: int, share: int, what: str, gqa: Case, tmp_path: Path) -> None:
    """Of one tensor rank alone: all agree on how far the run is good, and what follows is computed again, by all."""
    disk = {"kv_offload_path": str(tmp_path), "kv_offloading_size": 0, "kv_link_gbps": 0.02}
    llm = gqa.over(size, tensor, **disk)
    prompts, truth = gqa.prompts[:1], gqa.truth[:1]
    same(watched(llm, prompts, PARAMS), truth)
    flush(llm)
    paths = blobs_of(llm, prompts[0], 3, tmp_path)
    assert len(paths) == 2
    content = bytearray(paths[share].read_bytes())
    content[30 if what == "header" else -100] ^= 4
    if what == "gone":
        paths[share].unlink()
    else:
        paths[share].write_bytes(content)
    assert llm.engine.offload is not None
    llm.engine.offload.choose = forced(0.0, 0.0)
    for again in (False, True):
        same(watched(llm, prompts, PARAMS), truth)
        assert counters(llm).failures == 1, "the loss was not noticed, or not repaired"
        if not again:
            assert counters(llm).loaded_tokens == 3 * CHUNK
            flush(llm)
    assert counters(llm).loaded_tokens == (3 + 6) * CHUNK
    assert all(path.is_file() for path in paths)
    close(llm)


def test_a_share_that_no_tier_has(gqa: Case, tmp_path: Path) -> None:
    """A chunk is found if every tensor rank finds its share."""
    llm = gqa.over(1, 2, kv_offload_path=str(tmp_path), kv_offloading_size=0)
    prompts, truth = gqa.prompts[:1], gqa.truth[:1]
    same(watched(llm, prompts, PARAMS), truth)
    flush(llm)
    for path in blobs_of(llm, prompts[0], 2, tmp_path)[:1]:
        stored = {each.entry.name.hex(): each.entry for each in upkeep.blobs(tmp_path, lambda done, total: None)}
        upkeep.remove(tmp_path, [stored[path.name.partition("-")[0]]], lambda done, total: None)
    assert llm.engine.offload is not None
    llm.engine.offload.choose = forced(0.0, 0.0)
    same(watched(llm, prompts, PARAMS), truth)
    assert counters(llm).loaded_tokens == 2 * CHUNK and counters(llm).failures == 0
    close(llm)


def test_what_is_stored_is_counted_once_and_verified(gqa: Case, tmp_path: Path) -> None:
    llm = gqa.over(1, 2, kv_offload_path=str(tmp_path), kv_offloading_size=0)
    same(watched(llm, gqa.prompts[:1], PARAMS), gqa.truth[:1])
    flush(llm)
    blobs = list(upkeep.blobs(tmp_path, lambda done, total: None))
    assert len(blobs) == 12 and sum(each.tokens for each in blobs) == 6 * CHUNK
    assert not list(upkeep.verify(tmp_path, lambda done, total: None))
    one, other = blobs_of(llm, gqa.prompts[0], 2, tmp_path)
    one.write_bytes(other.read_bytes())
    assert len(list(upkeep.verify(tmp_path, lambda done, total: None))) == 1, "a share passes for another"
    close(llm)


def test_ranks_share_a_directory(case_of: CaseOf, tmp_path: Path) -> None:
    """And its size. The tensor ranks hold the same KV head here: what both write at the same time is one blob."""
    case = case_of("falcon7")
    most = 150_000
    disk = {"kv_offload_path": str(tmp_path), "kv_offloading_size": 0, "kv_offload_disk_size": most / 2**30}
    llm = case.over(2, 2, **disk)
    for again in (False, True):
        same([watched(llm, [each], PARAMS)[0] for each in case.prompts], case.truth)
        flush(llm)
        stored = list(upkeep.blobs(tmp_path, lambda done, total: None))
        names = {each.entry.name for each in stored}
        assert 4 < len(names) == len(stored) and sum(each.entry.size for each in stored) <= most
        assert not list(upkeep.verify(tmp_path, lambda done, total: None))
        if not again:
            upkeep.remove(tmp_path, [each.entry for each in stored], lambda done, total: None)
    assert llm.engine.offload is not None and not llm.engine.offload.tiers.stats()["disk"].errors
    close(llm)


PAIRS = [(1, 2), (2, 1), (4, 2), *(pytest.param(*pair, marks=pytest.mark.matrix) for pair in [(1, 4), (2, 4), (4, 1)])]


@pytest.mark.parametrize(("stored", "restores"), PAIRS)
@pytest.mark.parametrize("kv", ["auto", pytest.param("int8", marks=pytest.mark.matrix)])
def test_any_number_of_ranks_restores_what_any_stored(
    stored: int, restores: int, kv: str, case_of: CaseOf, tmp_path: Path
) -> None:
    """Tensor ranks that hold more heads than a stored share, or fewer; context ranks come and go as well."""
    case = case_of("llama", kv_cache_dtype=kv)
    disk = {"kv_offload_path": str(tmp_path), "kv_offloading_size": 0}
    first = case.over(1, stored, **disk)
    same([watched(first, [each], PARAMS)[0] for each in case.prompts], case.truth)
    flush(first)
    close(first)
    second = case.over(2, restores, **disk)
    loads(second, case.prompts, case.truth)
    close(second)


def test_one_rank_restores_what_tensor_ranks_stored(gqa: Case, tmp_path: Path) -> None:
    model, disk = str(gqa.settings["model"]), {"kv_offload_path": str(tmp_path)}
    llm = gqa.over(1, 2, **disk, kv_offloading_size=0)
    same([watched(llm, [each], PARAMS)[0] for each in gqa.prompts], gqa.truth)
    flush(llm)
    close(llm)
    with LLM(model, kv_cache_tokens=4096, dtype="bfloat16", kv_offload_activations="off", **disk) as one:
        loads(one, gqa.prompts, gqa.truth)


def test_damage_of_one_of_several_parts(case_of: CaseOf, tmp_path: Path) -> None:
    """A chunk that four ranks stored is lost to two where any of its parts is."""
    case = case_of("llama")
    disk = {"kv_offload_path": str(tmp_path), "kv_offloading_size": 0}
    prompts, truth = case.prompts[:1], case.truth[:1]
    for tensor in (4, 2):
        llm = case.over(1, tensor, **disk)
        if tensor == 2:
            path = blobs_of(llm, prompts[0], 3, tmp_path)[3]
            content = bytearray(path.read_bytes())
            content[-100] ^= 4
            path.write_bytes(content)
            assert llm.engine.offload is not None
            llm.engine.offload.choose = forced(0.0, 0.0)
        same(watched(llm, prompts, PARAMS), truth)
        flush(llm)
    assert counters(llm).failures == 1 and counters(llm).loaded_tokens == 3 * CHUNK


def projects(llm: RankedLLM, case: Case) -> None:
    """Answers from what the tiers hold, of which all that has activations is projected."""
    assert llm.engine.offload is not None
    llm.engine.offload.choose = projecting
    same([watched(llm, [each], PARAMS)[0] for each in case.prompts], case.truth)
    assert counters(llm).projected_tokens > 300 and counters(llm).failures == 0


X = {"kv_offload_activations": "on"}


@pytest.mark.parametrize(("size", "tensor"), SIZES)
@pytest.mark.parametrize("kv", ["auto", "int8"])
def test_activations_are_stored_in_turn(size: int, tensor: int, kv: str, case_of: CaseOf) -> None:
    """Over a slow link: each layer is projected while the next is on its way."""
    case = case_of("llama", kv_cache_dtype=kv)
    llm = case.over(size, tensor, "single", **X, kv_link_gbps=0.02)
    same([watched(llm, [each], PARAMS)[0] for each in case.prompts], case.truth)
    chunks = len(llm.engine.cache.tree.nodes)
    flush(llm)
    llm.forget()
    held = [agent.opened.tiers.stats()["host"].blobs for agent in llm.agents.values()]
    assert sum(held) == 3 * chunks, "two shares of K and V, and activations once"
    assert all(abs(one - other) <= 2 for one, other in zip(held[::2], held[1::2], strict=True))
    projects(llm, case)
    close(llm)


@pytest.mark.parametrize("kind", ["llama", *(pytest.param(kind, marks=pytest.mark.matrix) for kind in KINDS)])
@pytest.mark.parametrize("strategy", ["ring-kv", "chain", "ring-q", "gather"])
def test_by_every_strategy_activations_arrive(kind: str, strategy: str, case_of: CaseOf) -> None:
    case = case_of(kind)
    llm = case.over(2, 2, "single", **X)
    same([watched(llm, [each], PARAMS)[0] for each in case.prompts], case.truth)
    flush(llm)
    llm.forget()
    driver: Any = llm.engine.loaded.executor
    driver.allowed = (strategy,)
    projects(llm, case)
    close(llm)


@pytest.mark.parametrize("size", [1, pytest.param(2, marks=pytest.mark.matrix)])
def test_keys_normed_over_the_heads_of_all_ranks(size: int, tmp_path: Path) -> None:
    """Each projects its own heads, and gathers those of the others for the norm."""
    case = Case(make_checkpoint("olmoe", tmp_path, intermediate_size=128))
    llm = case.over(size, 2, "single", **X, kv_link_gbps=0.02)
    same([watched(llm, [each], PARAMS)[0] for each in case.prompts], case.truth)
    flush(llm)
    llm.forget()
    projects(llm, case)
    close(llm)


@pytest.mark.parametrize(("stored", "restores"), PAIRS)
def test_any_number_of_ranks_projects_what_any_stored(
    stored: int, restores: int, case_of: CaseOf, tmp_path: Path
) -> None:
    """The rest is loaded, from shares of heads of another size."""
    case = case_of("llama")
    disk = {"kv_offload_path": str(tmp_path), "kv_offloading_size": 0, **X}
    first = case.over(1, stored, **disk)
    same([watched(first, [each], PARAMS)[0] for each in case.prompts], case.truth)
    flush(first)
    close(first)
    second = case.over(1, restores, **disk)
    assert second.engine.offload is not None
    second.engine.offload.choose = forced(0.0, 0.5)
    same([watched(second, [each], PARAMS)[0] for each in case.prompts], case.truth)
    told = counters(second)
    assert told.projected_tokens > 100 and told.loaded_tokens > 100 and told.failures == 0
    close(second)


@pytest.mark.parametrize("chunk", [2, 3])
def test_lost_activations_of_one_rank(chunk: int, case_of: CaseOf, tmp_path: Path) -> None:
    """Those of the chunk whose turn it was: all ranks compute it again, and all that follows."""
    case = case_of("llama")
    llm = case.over(1, 2, kv_offload_path=str(tmp_path), kv_offloading_size=0, **X)
    prompts, truth = case.prompts[:1], case.truth[:1]
    same(watched(llm, prompts, PARAMS), truth)
    flush(llm)
    paths = blobs_of(llm, prompts[0], chunk, tmp_path)
    assert len(paths) == 3, "two shares of K and V, and activations once"
    lost = next(path for path in paths if path.name.partition("-")[0].endswith(b"x".hex()))
    content = bytearray(lost.read_bytes())
    content[-100] ^= 4
    lost.write_bytes(content)
    assert llm.engine.offload is not None
    llm.engine.offload.choose = projecting
    same(watched(llm, prompts, PARAMS), truth)
    assert counters(llm).failures == 1 and counters(llm).projected_tokens == chunk * CHUNK
    close(llm)
