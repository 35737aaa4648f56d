"""Restored == resident, bit for bit: every mix of loaded, projected and recomputed chunks, every family."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any

import pytest

from headrace import LLM, SamplingParams
from headrace.progress import Prefill
from headrace.types import CHUNK
from tests.support import traces
from tests.support.checkpoints import EVERY_KIND_SLOWLY, FolderOf
from tests.support.offloading import (
    MIXES,
    PARAMS,
    answer,
    counters,
    engine,
    flush,
    forced,
    offloading,
    prompts_of,
    watched,
)
from tests.support.traces import run, same

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize("kind", EVERY_KIND_SLOWLY)
def test_every_family_and_mix(kind: str, folder_of: FolderOf) -> None:
    truth = answer(engine(folder_of(kind), enable_prefix_caching=False), prompts_of(engine(folder_of(kind))))
    llm = offloading(folder_of(kind))
    prompts = prompts_of(llm)
    same(answer(llm, prompts), truth)
    for mix in MIXES:
        flush(llm)
        assert llm.engine.offload is not None
        llm.engine.offload.choose = forced(*MIXES[mix])
        before = counters(llm).loaded_tokens, counters(llm).projected_tokens
        same(watched(llm, prompts), truth)
        loaded, projected = counters(llm).loaded_tokens - before[0], counters(llm).projected_tokens - before[1]
        assert (loaded > 0) == (mix in ("load", "all three")) and (projected > 0) == (mix in ("project", "all three"))
    assert counters(llm).failures == 0
    llm.close()


@pytest.mark.parametrize(("backend", "kv"), list(product(["reference", "cpu"], ["auto", "int8"])))
def test_backends_and_int8_pools(backend: str, kv: str, folder_of: FolderOf) -> None:
    settings = dict(attention_backend=backend, kv_cache_dtype=kv)
    truth = answer(engine(folder_of("llama"), **settings), prompts_of(engine(folder_of("llama"))))
    llm = offloading(folder_of("llama"), **settings)
    same(answer(llm, prompts_of(llm)), truth)
    for mix in MIXES:
        flush(llm)
        assert llm.engine.offload is not None
        llm.engine.offload.choose = forced(*MIXES[mix])
        same(watched(llm, prompts_of(llm)), truth)
    llm.close()


@pytest.mark.parametrize("mix", [(0.0, 0.0), (0.0, 1.0), (0.5, 0.0), (0.35, 0.35)])
def test_rates_are_told_whether_all_was_loaded(mix: tuple[float, float], folder_of: FolderOf) -> None:
    """What copy stream and engine lose to each other is learned apart for these restores."""
    llm = offloading(folder_of("llama"))
    prompt = prompts_of(llm)[:1]
    answer(llm, prompt)
    flush(llm)
    told: list[bool] = []
    assert llm.engine.offload is not None
    llm.engine.offload.choose = forced(*mix)
    llm.engine.offload.profile.observe_restore = lambda *figures: told.append(figures[-1])  # type: ignore[method-assign]
    watched(llm, prompt)
    assert told == [mix == (0.0, 0.0)]
    llm.close()


def test_fp32(folder_of: FolderOf) -> None:
    truth = answer(engine(folder_of("qwen3"), dtype="float32"), prompts_of(engine(folder_of("qwen3"))))
    llm = offloading(folder_of("qwen3"), "all three", dtype="float32")
    same(answer(llm, prompts_of(llm)), truth)
    flush(llm)
    same(watched(llm, prompts_of(llm)), truth)
    llm.close()


@pytest.mark.parametrize(
    "mix", [pytest.param(mix, marks=() if mix == "project" else pytest.mark.matrix) for mix in MIXES]
)
def test_eviction_in_mid_request(mix: str) -> None:
    """A pool too small for what runs: sequences are preempted, their chunks evicted, stored and brought back."""
    long = SamplingParams(temperature=0.0, max_tokens=100, ignore_eos=True)
    whole = engine("tiny", kv_cache_tokens=40_000)
    prompts = traces.prompts_of(whole)
    truth = run(whole, prompts, long)
    llm = offloading("tiny", mix, kv_cache_tokens=1024, max_batch_tokens=200)
    same(watched(llm, prompts, long), truth)
    assert llm.engine.stats().scheduler.preemptions > 0 and llm.engine.stats().kv.evictions > 0
    assert counters(llm).restores > 0 or mix == "recompute", "nothing came back"
    same(watched(llm, prompts, long), truth)
    llm.close()


def test_two_that_begin_alike_are_brought_once(folder_of: FolderOf) -> None:
    llm = offloading(folder_of("llama"))
    prompts = prompts_of(llm)[:1]
    truth = answer(llm, prompts)
    flush(llm)
    before = counters(llm).loaded_tokens
    both = watched(llm, prompts * 3)
    same(both, truth * 3)
    assert counters(llm).loaded_tokens - before == 399 // CHUNK * CHUNK
    llm.close()


def test_a_step_of_one_new_token_waits_for_what_comes() -> None:
    """All of its logits are wanted, as while decoding, where all layers are one call that waits for nothing."""
    llm = offloading("tiny", kv_offload_activations="off", kv_link_gbps=0.005)
    prompts = [prompts_of(llm)[0][: 4 * CHUNK + 1]]
    truth = answer(llm, prompts)
    flush(llm)
    for pool in llm.engine.loaded.executor.storage.pools:  # type: ignore[attr-defined]
        pool.k.fill_(7), pool.v.fill_(7)
    same(watched(llm, prompts), truth)
    assert counters(llm).loaded_tokens == 4 * CHUNK
    llm.close()


def test_a_prompt_that_waits_for_what_comes_is_told() -> None:
    """What is on its way is not read yet."""
    llm = offloading("tiny", kv_offload_activations="off")
    prompts = [prompts_of(llm)[0][: 4 * CHUNK + 9]]
    answer(llm, prompts)
    flush(llm)
    told: list[list[Prefill]] = []
    llm.engine.on_prefill = lambda prefills, expected_s: told.append(prefills)
    answer(llm, prompts)
    assert [each._replace(request_id="") for prefills in told for each in prefills] == [
        Prefill("", 0, 0, 4 * CHUNK + 9, 9, coming=4 * CHUNK)
    ]
    llm.close()


def test_aborted_while_it_comes(folder_of: FolderOf) -> None:
    """Slow link: the request leaves while its chunks are still written to. Nobody else gets them until then."""
    llm = offloading(folder_of("llama"), kv_link_gbps=0.001)
    (prompt, *_) = prompts = prompts_of(llm)
    truth = answer(llm, prompts)
    flush(llm)
    core = llm.engine
    for abort_after in range(6):
        request = llm._request(prompt, PARAMS, None, 0)
        core.add(request)
        for _ in range(abort_after):
            core.step()
            core.cache.check()
        core.abort(request.request_id)
        core.cache.check()
    same(answer(llm, prompts), truth)
    llm.close()


def test_restart(folder_of: FolderOf, tmp_path: Path) -> None:
    """Another engine on the same directory has what the first one stored, and a changed model has nothing of it."""
    settings: dict[str, Any] = dict(kv_offloading_size=0.0, kv_offload_path=str(tmp_path / "kv"))
    llm = offloading(folder_of("qwen2"), **settings)
    truth = answer(llm, prompts_of(llm))
    llm.close()
    again = offloading(folder_of("qwen2"), "all three", **settings)
    same(watched(again, prompts_of(again)), truth)
    assert counters(again).loaded_tokens > 0 and counters(again).projected_tokens > 0
    again.close()
    other = offloading(folder_of("llama"), **settings)
    answer(other, prompts_of(other))
    assert counters(other).restores == 0
    other.close()


POSITIONS = {"magic": 0, "stamp": 30, "digest": 60, "sums": 90, "first layer": 200, "last layer": -100}


@pytest.mark.parametrize("where", POSITIONS)
@pytest.mark.parametrize("mix", ["load", "project", "all three"])
def test_damage_costs_time_only(where: str, mix: str, folder_of: FolderOf, tmp_path: Path) -> None:
    """A byte of one stored chunk is flipped: found on the way, perhaps in the middle of the step that needs it; the
    answer is right, and the chunk is gone from the tier and stored anew."""
    settings: dict[str, Any] = dict(kv_offloading_size=0.0, kv_offload_path=str(tmp_path / "kv"), kv_link_gbps=0.01)
    llm = offloading(folder_of("llama"), mix, **settings)
    prompts = prompts_of(llm)[:1]
    truth = answer(llm, prompts)
    flush(llm)
    digest = chunk_digests(llm, prompts[0])[4]
    blobs = [path for path in (tmp_path / "kv").rglob(f"*{digest.hex()}*") if path.is_file()]
    assert len(blobs) == 2, "K and V, and activations"
    for path in blobs:
        content = bytearray(path.read_bytes())
        content[POSITIONS[where]] ^= 4
        path.write_bytes(content)
    for again in (False, True):
        same(watched(llm, prompts), truth)
        assert counters(llm).failures == 1, "the damage was not noticed, or not repaired"
        if not again:
            flush(llm)
    assert llm.engine.stats().tokens.prefilled < 3 * 400
    llm.close()


def chunk_digests(llm: LLM, prompt: list[int]) -> list[bytes]:
    table = llm.engine.cache.open(list(prompt))
    digests = [table.digest(chunk) for chunk in range(len(prompt) // CHUNK)]
    llm.engine.cache.close(table)
    return digests


@pytest.mark.parametrize(("form", "bound"), [("int8", 0.04), ("int4", 0.5)])
@pytest.mark.parametrize("mix", ["load", "project"])
def test_rounded_tiers(form: str, bound: float, mix: str, folder_of: FolderOf) -> None:
    """What comes back rounded changes the logits: their error, as a share of their spread.

    Numbers of standard deviation 1 have a maximum of about 3 in a row of 128 (int8: an error of 3 / 127 / sqrt(12),
    0.7 %) and a range of about 5 in a group of 64 (int4: 5 / 15 / sqrt(12), 10 %); K, V and two layers add up to about
    twice that, and the bound is twice as much again.
    """
    llm = offloading(folder_of("llama_gqa"), mix, kv_host_format=form)
    prompts = prompts_of(llm)[:1]
    once = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)
    (truth,) = answer(llm, prompts, once)
    flush(llm)
    (back,) = watched(llm, prompts, once)
    ((position, want),) = truth.items()
    error = ((back[position] - want).pow(2).mean().sqrt() / want.std()).item()
    assert 0 < error < bound
    assert counters(llm).restores == 1 and counters(llm).failures == 0
    llm.close()
