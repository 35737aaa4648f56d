"""Hybrid models over tensor ranks: each has value heads or channels of its own, with the bits of one rank."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from itertools import chain
from pathlib import Path
from typing import Any

import pytest

from headrace import LLM
from headrace.config import EngineConfig, RecurrentSpec
from headrace.engine.footprint import Footprint
from headrace.engine.preflight import check_fit
from headrace.kernels import dispatch
from headrace.models.config import read_config
from headrace.models.decoder import load_decoder
from headrace.models.recurrent_shares import RecurrentShare, fits
from headrace.models.shards import Share
from headrace.parallel.tensor import TensorGroup
from headrace.parallel.transport import RankLost
from headrace.types import Request
from tests.support.gguf_families import write_family
from tests.support.gguf_files import q4_k_m, tokens_of
from tests.support.hybrid_checkpoints import make_checkpoint
from tests.support.hybrid_prompts import LONG, SHORT, alone, prompts, words
from tests.support.offloading import counters, flush, forced, watched
from tests.support.ranked_offloading import RankedLLM, close, over_ranks
from tests.support.tensor_ranks import on_ranks
from tests.support.traces import Trace, same

pytestmark = [pytest.mark.cpu, pytest.mark.usefixtures("one_thread")]

FolderOf = Callable[[str], Path]


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory: pytest.TempPathFactory) -> FolderOf:
    return lru_cache(None)(lambda kind: make_checkpoint(kind, tmp_path_factory.mktemp(kind)))


@pytest.fixture(scope="module")
def folder(folder_of: FolderOf) -> Path:
    return folder_of("3_5_ends_recurrent")


@pytest.fixture(scope="module")
def truth(folder: Path) -> list[Trace]:
    return alone(folder, prompts())


def ranked(folder: Path, size: int, tensor: int, **settings: Any) -> RankedLLM:
    given = {"tokens": 4096, "recurrent_states": 24, "max_model_len": 900, **settings}
    return over_ranks(size, ("chain", "single"), model=folder, tensor=tensor, **given)


KINDS = ["3_5", "granite", "lfm2", "kimi", "falcon_h1"]
MORE = ["next_experts", "next_uneven", "3_5_experts", "lfm3", "lfm2_experts", "granite_experts", "nemotron_experts"]


@pytest.mark.parametrize("kind", [*KINDS, *(pytest.param(each, marks=pytest.mark.matrix) for each in MORE)])
def test_families(kind: str, folder_of: FolderOf) -> None:
    """Nets, Mamba-2 layers whose one group of heads two ranks share, short convolutions; cold and from kept states."""
    folder, given = folder_of(kind), prompts()[2:6]
    truth = alone(folder, given, kv_cache_dtype="int8")
    for size in (1, 2):
        llm = ranked(folder, size, 2, kv_cache_dtype="int8")
        same(watched(llm, given, SHORT), truth)
        for prompt, trace in zip(given, truth, strict=True):
            same(watched(llm, [prompt], SHORT), [trace])
        assert llm.engine.stats().tokens.cached > 400
        close(llm)


def test_more_ranks_than_key_heads(tmp_path: Path) -> None:
    """Two key heads on four ranks: two hold copies of each."""
    folder = make_checkpoint("3_5", tmp_path, linear_num_key_heads=2, linear_num_value_heads=4)
    llm = ranked(folder, 1, 4)
    same(watched(llm, prompts()[2:6], SHORT), alone(folder, prompts()[2:6]))
    close(llm)


@pytest.mark.parametrize("settings", [{"quantization": "int8"}, {"speculative": "ngram"}])
def test_with(settings: dict[str, Any], folder: Path) -> None:
    given = [each * 2 for each in prompts()[2:5]]
    llm = ranked(folder, 2, 2, **settings)
    same(watched(llm, given, LONG), alone(folder, given, LONG, **settings))
    close(llm)


def test_a_file_of_gguf(tmp_path: Path) -> None:
    """Columns of `out` lie in an order of their own there, of all heads together."""
    path, given = tmp_path / "m.gguf", [tokens_of(200), tokens_of(70)]
    write_family("qwen3_5_three_each", path, q4_k_m)
    llm = ranked(path, 1, 2, max_model_len=512)
    same(watched(llm, given, SHORT), alone(path, given))
    close(llm)


def test_preempted(folder: Path) -> None:
    given = prompts()[2:7]
    llm = ranked(folder, 1, 2, tokens=576, max_batch_tokens=512, recurrent_states=4, max_model_len=512)
    same(watched(llm, given, LONG), alone(folder, given, LONG))
    assert llm.engine.stats().scheduler.preemptions > 0
    close(llm)


@pytest.mark.parametrize("kind", ["3_5_ends_recurrent", "granite", "lfm2", "kimi", "falcon_h1"])
def test_any_number_of_ranks_restores_what_any_stored(kind: str, folder_of: FolderOf, tmp_path: Path) -> None:
    """A stored state is of all heads, whoever has computed them."""
    folder, given = folder_of(kind), [words(300, 50), *prompts()[4:]]
    truth = alone(folder, given)
    disk: dict[str, Any] = {"kv_offload_path": str(tmp_path), "kv_offloading_size": 0}
    first = ranked(folder, 2, 2, **disk)
    same([watched(first, [each], SHORT)[0] for each in given], truth)
    flush(first)
    first.forget()
    loads(first, given, truth)
    close(first)
    for size, tensor in ((1, 2), (2, 1)):
        other = ranked(folder, size, tensor, **disk)
        loads(other, given, truth)
        close(other)
    one = LLM(str(folder), dtype="bfloat16", kv_cache_tokens=4096, recurrent_states=24, max_model_len=900, **disk)
    loads(one, given, truth)
    one.close()


def loads(llm: LLM, given: list[list[int]], truth: list[Trace]) -> None:
    assert llm.engine.offload is not None
    llm.engine.offload.choose = forced(0.0, 0.0)
    same([watched(llm, [each], SHORT)[0] for each in given], truth)
    assert counters(llm).loaded_tokens >= 500 and counters(llm).failures == 0


def test_evicted_to_memory_and_restored(folder: Path, truth: list[Trace]) -> None:
    llm = ranked(folder, 1, 2, tokens=512, recurrent_states=3, max_model_len=512)
    assert llm.engine.offload is not None
    llm.engine.offload.choose = forced(0.0, 0.0)
    for _ in range(2):
        for prompt, trace in zip(prompts(), truth, strict=True):
            same(watched(llm, [prompt], SHORT), [trace])
    assert counters(llm).loaded_tokens > 300 and counters(llm).failures == 0
    close(llm)


def test_a_lost_rank_ends_the_step(folder: Path) -> None:
    """Also while a state is gathered."""
    llm = ranked(folder, 1, 2)
    watched(llm, [words(300)], SHORT)
    states = llm.engine.cache.states
    assert states is not None
    llm.hubs.fail("rank 1 is gone")
    with pytest.raises(RankLost, match="rank 1 is gone"):
        llm.engine.loaded.executor.fetch(0)  # type: ignore[attr-defined]
    llm.engine.add(Request("one", words(300, 1), SHORT))
    with pytest.raises(RankLost, match="rank 1 is gone"):
        while llm.engine.has_work:
            llm.engine.step()
    llm.workers.close()


NET = RecurrentSpec(3, 4, 8, 16, 32, 4)
KIMI = replace(NET, kind="kda", key_heads=8, value_dim=16)
SPECS = [NET, KIMI, replace(NET, kind="mamba2"), replace(NET, kind="mamba2", key_heads=1)]


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("size", [2, 4, 8])
def test_shares_are_all_of_it(spec: RecurrentSpec, size: int) -> None:
    """Values and what gates them are each rank's own; keys of groups that several ranks have are copies."""
    shares = [RecurrentShare.of(spec, rank, size) for rank in range(size)]
    for module, rows in (("mixed", sum(spec.mixed)), ("conv", spec.channels), ("gates", spec.gate_rows), ("delta", 8)):
        each = [share.rows(module) or [] for share in shares]
        assert {row for part in chain(*each) for row in part} == set(range(rows))
        copies = 2 * spec.keys * (size // min(size, spec.key_heads) - 1) if module in ("mixed", "conv") else 0
        if module == "mixed" and spec.kind == "kda":
            copies += 2 * spec.key_dim * (size - 1)  # of which each makes its decays and gates
        assert sum(len(part) for part in chain(*each)) == rows + copies
        widths = dict(mixed=sum(shares[0].spec.mixed), conv=shares[0].spec.channels, gates=shares[0].spec.gate_rows)
        assert {sum(map(len, parts)) for parts in each} == {widths.get(module, 8 // size)}


def test_how_many_ranks_fit() -> None:
    assert [size for size in range(1, 9) if fits(NET, size)] == [1, 2, 4, 8]
    assert [size for size in range(1, 9) if fits(replace(NET, key_heads=2, value_heads=6), size)] == [1, 2, 6]


def test_what_does_not_fit_is_told(tmp_path: Path) -> None:
    model = read_config(make_checkpoint("granite_uneven", tmp_path))
    told = "4 query heads and 2 KV heads, and 6 value heads and 3 key heads of recurrent layers; this model can use 1"
    with pytest.raises(ValueError, match=f"tensor_parallel_size 2 does not divide {told}$"):
        Share(model, 0, 2)


def test_short_convolutions_are_cut_where_products_are(tmp_path: Path) -> None:
    model = read_config(make_checkpoint("lfm2", tmp_path / "120"))
    assert [each.spec.values for each in Share(model, 0, 2).recurrent_shares] == [32, 88]
    told = "4 query heads and 2 KV heads, or leaves a rank less than 32 of 120 channels; this model can use 1, 2"
    with pytest.raises(ValueError, match=f"tensor_parallel_size 4 does not divide {told}$"):
        Share(model, 0, 4)


def test_without_the_kernels(folder: Path) -> None:
    """torch computes a head otherwise among others than alone."""

    def rank(group: TensorGroup) -> None:
        with pytest.raises(ValueError, match="tensor ranks share where the C\\+\\+ kernels compute them"):
            load_decoder(folder, tensor=group)

    with dispatch.force("torch"):
        on_ranks(2, rank)


def test_each_rank_has_its_part_of_a_state(folder: Path) -> None:
    """Its heads' matrices, and their channels of the convolutions' last inputs."""
    model = read_config(folder)
    sizes = [
        Footprint.of(EngineConfig(model=str(folder), recurrent_states=4, tensor_parallel_size=ranks), model)
        for ranks in (1, 2)
    ]
    assert sizes[1].state_bytes() == sizes[0].state_bytes() > 0
    check_fit(EngineConfig(model=str(folder), tensor_parallel_size=2), model)
