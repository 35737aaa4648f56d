"""Hybrid models over context ranks: states go from rank to rank with the chain, and the bits are those of one rank."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from headrace import LLM
from headrace.bench.prefill_testbed import open_testbed
from headrace.config import EngineConfig
from headrace.engine.footprint import Footprint
from headrace.engine.group_room import GroupRoom
from headrace.kv.table_state import Segment
from headrace.models.config import read_config
from headrace.parallel import group_layout
from headrace.parallel.messages import StateMove, StateRun, StepGroup, StepPart
from headrace.parallel.states import GroupMove, StateHolders, moves_of
from headrace.parallel.transport import RankLost
from headrace.types import Request
from tests.support.hybrid_checkpoints import make_checkpoint
from tests.support.hybrid_prompts import LONG, SHORT, alone, prompts, words
from tests.support.offloading import counters, flush, forced, watched
from tests.support.ranked_offloading import RankedLLM, close, over_ranks
from tests.support.traces import Trace, same

pytestmark = [pytest.mark.cpu, pytest.mark.usefixtures("one_thread")]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint("3_5_ends_recurrent", tmp_path_factory.mktemp("hybrid"))


@pytest.fixture(scope="module")
def truth(folder: Path) -> list[Trace]:
    return alone(folder, prompts())


def ranked(folder: Path, size: int, allowed: tuple[str, ...] = ("chain",), **settings: Any) -> RankedLLM:
    given = {"tokens": 4096, "recurrent_states": 24, "max_model_len": 900, **settings}
    return over_ranks(size, allowed, model=folder, **given)


MATRIX = [pytest.param(*each, marks=pytest.mark.matrix) for each in ((2, 192), (3, 2048))]


@pytest.mark.parametrize(("size", "budget"), [(2, 2048), (3, 192), *MATRIX])
def test_the_chain_hands_the_state_on(size: int, budget: int, folder: Path, truth: list[Trace]) -> None:
    """In a batch, cut, and from kept states wherever these lie."""
    llm = ranked(folder, size, max_batch_tokens=budget)
    same(watched(llm, prompts(), SHORT), truth)
    same(watched(llm, prompts(), SHORT), truth)
    for prompt, trace in zip(prompts(), truth, strict=True):
        same(watched(llm, [prompt], SHORT), [trace])
    assert llm.engine.stats().tokens.cached > 1500 and llm.engine.stats().ranks.prefills["chain"] > 3
    holders = llm.engine.loaded.executor.holders  # type: ignore[attr-defined]
    assert len(set(holders.of)) == size, "some rank has no state"
    close(llm)


@pytest.mark.parametrize(
    "kind",
    ["next_experts", "3_5", "lfm3", "lfm2", "lfm2_experts", "granite", "nemotron_experts", "kimi", "falcon_h1", "glm5"],
)
def test_families(kind: str, tmp_path: Path) -> None:
    folder, given = make_checkpoint(kind, tmp_path), prompts()[2:6]
    llm = ranked(folder, 2, ("chain", "single"), kv_cache_dtype="int8")
    same(watched(llm, given, SHORT), alone(folder, given, kv_cache_dtype="int8"))
    close(llm)


def test_preempted(folder: Path) -> None:
    given = prompts()[2:7]
    small = {"max_batch_tokens": 512, "recurrent_states": 4, "max_model_len": 512}
    llm = ranked(folder, 2, tokens=512, **small)
    same(watched(llm, given, LONG), alone(folder, given, LONG))
    assert llm.engine.stats().scheduler.preemptions > 0
    close(llm)


def test_no_rank_has_room_for_a_prompt(folder: Path) -> None:
    """Four chunks are free on each of two ranks for a prompt of seven: each computes its own, with their only block
    on both; so is the answer."""
    given = [words(300, 1), words(300, 2), words(400, 3)]
    llm = ranked(folder, 2, tokens=576, max_model_len=576)
    same(watched(llm, given, SHORT), alone(folder, given))
    assert llm.engine.stats().ranks.prefills == {"chain": 2, "single": 1}
    assert llm.engine.loaded.executor.split > 0  # type: ignore[attr-defined]
    close(llm)


def test_evicted_to_memory_and_restored(folder: Path, truth: list[Trace]) -> None:
    """States of other ranks are stored by rank 0, and what it reads goes to the rank that computes."""
    llm = ranked(folder, 2, tokens=512, recurrent_states=3, max_model_len=512)
    assert llm.engine.offload is not None
    llm.engine.offload.choose = forced(0.0, 0.0)
    for _ in range(2):
        for prompt, trace in zip(prompts(), truth, strict=True):
            same(watched(llm, [prompt], SHORT), [trace])
    assert counters(llm).loaded_tokens > 300 and counters(llm).failures == 0
    close(llm)


def test_restored_from_disk_by_another_number_of_ranks(folder: Path, truth: list[Trace], tmp_path: Path) -> None:
    """One of two states is with rank 1, and nobody goes on from it: rank 0 has to be sent it."""
    disk, own = {"kv_offload_path": str(tmp_path), "kv_offloading_size": 0}, [words(300, 50), words(300, 51)]
    given, truth = prompts() + own, truth + alone(folder, own)
    first = ranked(folder, 2, **disk)
    same(watched(first, own, SHORT), truth[-2:])
    states, holders = first.engine.cache.states, first.engine.loaded.executor.holders  # type: ignore[attr-defined]
    assert states is not None and {holders.of[node.state] for node in states.nodes()} == {0, 1}
    same(watched(first, prompts(), SHORT), truth[:-2])
    close(first)
    three = ranked(folder, 3, **disk)
    flush(three)
    one = LLM(str(folder), dtype="bfloat16", kv_cache_tokens=4096, recurrent_states=24, max_model_len=900, **disk)
    for llm in (three, one):
        assert llm.engine.offload is not None
        llm.engine.offload.choose = forced(0.0, 0.0)
        same(watched(llm, given, SHORT), truth)
        assert counters(llm).loaded_tokens >= 320 + 2 * 256 and counters(llm).failures == 0
    close(three)
    one.close()


def test_a_request_that_is_aborted_leaves_no_state_held(folder: Path, truth: list[Trace]) -> None:
    llm = ranked(folder, 2, max_batch_tokens=128, recurrent_states=4)
    states = llm.engine.cache.states
    assert states is not None
    for steps in range(5):
        for seed in (steps, steps, 99):
            llm.engine.add(Request(f"{steps}-{seed}-{llm.engine._order}", words(200, seed), SHORT))
        for _ in range(steps):
            llm.engine.step()
        for request_id in list(llm.engine._active):
            llm.engine.abort(request_id)
            llm.engine.scheduler.check()
        assert not states._refs
    same(watched(llm, prompts(), SHORT), truth)
    close(llm)


def test_a_lost_rank_ends_the_step(folder: Path) -> None:
    llm = ranked(folder, 2)
    llm.engine.add(Request("one", words(300), SHORT))
    llm.hubs.fail("rank 1 is gone")
    with pytest.raises(RankLost, match="rank 1 is gone"):
        while llm.engine.has_work:
            llm.engine.step()
    llm.workers.close()


def test_who_has_a_state() -> None:
    """Segments are cut where another rank goes on; empty shards have no part in it."""
    holders = StateHolders(6)
    found = holders.route([Segment(100, -1, 3), Segment(170, 3, 5)], 0, [0, 64, 64, 170], [2, 0, 1])
    assert found == [StateRun(64, -1, 3, 2, 2), StateRun(100, 3, 3, 1, 2), StateRun(170, 3, 5, 1, 1)]
    assert holders.of == [0, 0, 0, 1, 0, 1]
    assert holders.route([Segment(171, 5, 0)], 170, [170, 171], [2]) == [StateRun(171, 5, 0, 2, 1)]


def test_each_rank_has_memory_for_all_states(folder: Path) -> None:
    model = read_config(folder)
    sizes = [
        Footprint.of(EngineConfig(model=str(folder), recurrent_states=4, context_parallel_size=ranks), model)
        for ranks in (1, 2)
    ]
    assert sizes[1].state_bytes() == 2 * sizes[0].state_bytes() > 0


def part(*states: StateRun, ranks: tuple[int, ...] = (0,)) -> StepPart:
    bounds = [*range(len(ranks)), 10]
    return StepPart([0] * 10, 0, [0], bounds, list(ranks), states=list(states))


def test_what_moves_within_a_group() -> None:
    """Two sequences go on from one state, which is sent once; a chain hands on what it makes."""
    both = [part(StateRun(10, 3, 4, 1, 0)), part(StateRun(10, 3, 5, 1, 0))]
    assert moves_of(StepGroup("ring-q", both)) == [GroupMove(StateMove(3, 0, 1), within=False)]
    chain = part(StateRun(4, 2, 3, 1, 0), StateRun(10, 3, 3, 0, 1), ranks=(1, 0))
    handed = [GroupMove(StateMove(2, 0, 1), within=False), GroupMove(StateMove(3, 1, 0), within=True)]
    assert moves_of(StepGroup("chain", [chain])) == handed


def test_a_state_that_another_rank_leaves_is_of_an_earlier_group() -> None:
    room = GroupRoom(None, 8)
    room.begin(part(StateRun(10, 1, 2, 0, 0)))
    assert room.takes(part(StateRun(10, 2, 3, 0, 0)), "single")
    assert room.takes(part(StateRun(10, 5, 6, 1, 0)), "single")
    assert not room.takes(part(StateRun(10, 3, 4, 1, 0)), "single")


def test_ranks_that_would_wait_for_each_other() -> None:
    zigzag = part(StateRun(10, -1, 0, 0, 0), ranks=(0, 1, 1, 0))
    with pytest.raises(ValueError, match=r"cannot go through ranks \[0, 1, 1, 0\]: use chain or single"):
        group_layout.check(StepGroup("ring-kv", [zigzag]), 2)


def test_prefills_are_not_measured_by_strategy(folder: Path) -> None:
    with (
        pytest.raises(ValueError, match="Qwen3_5ForCausalLM has recurrent layers"),
        open_testbed(EngineConfig(model=str(folder), context_parallel_size=2, kv_cache_tokens=2048)),
    ):
        pass
