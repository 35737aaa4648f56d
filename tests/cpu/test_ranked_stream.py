"""Several ranks that stream KV from outside, as threads: the bits of one rank that has everything in memory."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from headrace import LLM, SamplingParams
from headrace.bench import shapes
from headrace.kernels.backend import Attend
from headrace.models.layers import OneByOne
from headrace.offload.streaming.staged_store import BUFFERS
from headrace.offload.streaming_totals import StreamingTotals
from headrace.offload.weights.in_turn import LayersInTurn
from headrace.parallel.transport import RankLost
from headrace.parallel.workspace import DEPTH
from headrace.types import CHUNK, Request
from tests.support.checkpoints import INDEXED, KINDS, MIXED, NEAR, FolderOf, make_checkpoint
from tests.support.streamed_ranks import close, stores, streamed_ranks
from tests.support.traces import Trace, prompts_of, run, same, words

pytestmark = pytest.mark.usefixtures("one_thread")

PARAMS = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
STRATEGIES = [("single",), ("chain",), ("ring-kv",), ("gather",), ("ring-q", "ring-kv")]
WEIGHTS: dict[str, Any] = {"offload_schedule": "column", "weight_offload": True}


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM("tiny", dtype="bfloat16", kv_cache_tokens=40_000)


@pytest.fixture(scope="module")
def prompts(llm: LLM) -> list[list[int]]:
    """Uneven ones that share prefixes, and two of two blocks."""
    long = words(llm, 2300, seed=1)
    return [*prompts_of(llm)[3::2], long, long[:2200] + words(llm, 30, seed=2)]


@pytest.fixture(scope="module")
def truth(llm: LLM, prompts: list[list[int]]) -> list[Trace]:
    return run(llm, prompts, PARAMS)


@pytest.mark.parametrize("allowed", STRATEGIES, ids=str)
@pytest.mark.parametrize("settings", [{}, WEIGHTS], ids=("row", "column, weights outside"))
def test_by_every_strategy(
    allowed: tuple[str, ...], settings: dict[str, Any], prompts: list[list[int]], truth: list[Trace]
) -> None:
    """Also on cached prefixes, and on a link so slow that layers wait for it."""
    llm = streamed_ranks(2, allowed=allowed, max_model_len=4096, kv_link_gbps=0.5, **settings)
    same(run(llm, prompts, PARAMS), truth)
    same(run(llm, prompts[-4:], PARAMS), truth[-4:])
    assert all(store.totals.loaded and store.totals.bytes_out for store in stores(llm))
    close(llm)


@pytest.mark.parametrize(("context", "tensor"), [(1, 2), (2, 2), (3, 1)])
def test_every_kind_of_ranks(context: int, tensor: int, prompts: list[list[int]], truth: list[Trace]) -> None:
    llm = streamed_ranks(context, tensor, max_model_len=4096, **WEIGHTS)
    same(run(llm, prompts, PARAMS), truth)
    kv = {rank.decoder.config.attention.kv_heads for rank in llm.ranks}  # type: ignore[attr-defined]
    assert kv == {4 // tensor}
    close(llm)


class Echo(Attend):
    """Attention that gives the queries back."""

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor, rows: Tensor | None = None) -> Tensor:
        return q.clone()


def test_the_first_layers_in_turn() -> None:
    """As a profile of ranks on GPUs computes them, twice: layer 0 follows the last of them."""
    llm = streamed_ranks(2, **WEIGHTS)
    decoder = llm.ranks[0].decoder  # type: ignore[attr-defined]
    x = torch.randn(3, decoder.config.hidden_size, generator=torch.Generator().manual_seed(1)).bfloat16()
    turns = decoder.rope.at(torch.arange(3), None)
    expected = OneByOne(decoder.layers.layers[:3])(x.clone(), turns, Echo())
    some = LayersInTurn(decoder.layers.source, StreamingTotals(), count=3)
    for _ in range(2):
        assert torch.equal(some(x.clone(), turns, Echo()), expected)
    assert some.totals.bytes_in == 2 * 3 * decoder.layers.source.bytes_per_layer
    close(llm)


TYPES: list[dict[str, Any]] = [{}, {"kv_cache_dtype": "int8"}, {"quantization": "int8"}, {"quantization": "int4"}]


@pytest.mark.parametrize("every", [False, pytest.param(True, marks=pytest.mark.matrix)], ids=["llama_gqa", "all"])
@pytest.mark.parametrize("types", TYPES, ids=str)
def test_families_and_types(every: bool, types: dict[str, Any], folder_of: FolderOf) -> None:
    """GQA, MHA, windows, ALiBi, learned positions; int8 KV, weights of 8 and 4 bits that lie outside as well. Of
    the kinds that have facts of their own a quarter with each, in one order or the other."""
    streamed = [kind for kind in KINDS if kind not in (*INDEXED, *MIXED, *NEAR)]
    both: list[tuple[tuple[str, ...], dict[str, Any]]] = [(("chain",), {}), (("ring-q", "ring-kv"), WEIGHTS)]
    for turn, each in enumerate(streamed[TYPES.index(types) :: len(TYPES)] if every else ["llama_gqa"]):
        one = LLM(folder_of(each), kv_cache_tokens=4096, dtype="bfloat16", **types)
        asked = [words(one, n, seed=n) for n in (3, 400)] + [words(one, 400, seed=400)[:300]]
        expected = run(one, asked, PARAMS)
        for allowed, outside in both[turn % 2 :: 2] if every else both:
            llm = streamed_ranks(2, model=folder_of(each), allowed=allowed, **outside, **types)
            for _ in range(2):  # the second time on cached chunks
                same(run(llm, asked, PARAMS), expected)
            close(llm)


def test_a_store_too_small(llm: LLM) -> None:
    """Sequences are preempted, their chunks evicted and computed again."""
    long = SamplingParams(temperature=0.0, max_tokens=64, ignore_eos=True)
    asked = [each for each in prompts_of(llm) if len(each) < 520]
    other = streamed_ranks(2, kv_offloading_size=0.001, max_model_len=640, max_batch_tokens=192)
    assert other.capacity.kv_cache_tokens == 1280
    same(run(other, asked, long), run(llm, asked, long))
    stats = other.engine.stats()
    assert stats.scheduler.preemptions and stats.kv.evictions
    close(other)


def test_small_staging(llm: LLM, prompts: list[list[int]], truth: list[Trace]) -> None:
    """Sequences that do not fit the buffers together are computed in several groups."""
    other = streamed_ranks(2, kv_cache_tokens=-(-40 * (BUFFERS + DEPTH) // 3) * CHUNK, max_model_len=40 * CHUNK)
    assert {store.capacity for store in stores(other)} == {40}
    same(run(other, prompts, PARAMS), truth)
    close(other)


def test_aborted(llm: LLM, prompts: list[list[int]], truth: list[Trace]) -> None:
    """In the middle of its prefill and of its answer: the others' bits do not change."""
    other = streamed_ranks(2, allowed=("ring-kv",), max_model_len=4096, max_batch_tokens=1024)
    for steps in (1, 6):
        other.engine.add(Request("gone", prompts[-2], PARAMS, arrival_s=0.0))
        for _ in range(steps):
            other.engine.step()
        other.engine.abort("gone")
        assert other.engine.cache.used == 0
        same(run(other, prompts[-1:], PARAMS), truth[-1:])
    close(other)


@pytest.mark.parametrize("allowed", [("ring-kv",), ("ring-q", "ring-kv"), ("chain",)], ids=str)
@pytest.mark.parametrize("stream", ["into", "out"])
def test_a_failing_link_ends_the_ranks(allowed: tuple[str, ...], stream: str, prompts: list[list[int]]) -> None:
    """That of one rank: the others hear of it, and nothing is answered from what did not come or was not kept."""
    llm = streamed_ranks(2, allowed=allowed, max_model_len=4096)
    run(llm, prompts[-2:-1], PARAMS)
    store = [each for each in stores(llm) if each.totals.bytes_out][-1]

    layer = itertools.count()  # the last one of three is the first that fails

    def broken(run: Any, size: int, kind: str) -> Any:
        def fail() -> None:
            raise OSError("the disk is gone")

        return submit(fail if next(layer) >= 2 else run, size, kind)

    copies = getattr(store.streams, stream)
    submit, copies.submit = copies.submit, broken
    with pytest.raises((RankLost, OSError), match="the disk is gone"):
        # What does not come ends the step that needs it, here the only one; what is not kept, the step after.
        few = SamplingParams(temperature=0.0, max_tokens=1 if stream == "into" else 6, ignore_eos=True)
        llm.generate([prompts[-2] + [7] * count for count in (70, 90)], few)
    for rank in llm.ranks:  # type: ignore[attr-defined]
        rank.close()


LAYERS = 32
SMALL = shapes.CheckpointShape(
    hidden=64, layers=LAYERS, heads=2, kv_heads=2, head_dim=32, mlp=64, vocab=512, context=2048
)


@pytest.mark.parametrize("strategies", [STRATEGIES[2:], pytest.param(STRATEGIES[:2], marks=pytest.mark.matrix)])
def test_kv_larger_than_memory(strategies: list[tuple[str, ...]], tmp_path: Path) -> None:
    """A context three times as long as what both ranks may have in fast memory, that of exchanges included. It lies in
    a file of each."""
    model = shapes.write_checkpoint(SMALL, tmp_path / "model")
    tokens, ranks = 128, 2
    context = 3 * ranks * tokens
    one = LLM(model, dtype="bfloat16", kv_cache_tokens=context)
    prompt, params = words(one, context - 20, seed=1), SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)
    expected = run(one, [prompt], params)
    for allowed in strategies:
        llm = streamed_ranks(
            ranks, model=model, allowed=allowed, kv_cache_tokens=tokens, max_batch_tokens=256,
            max_model_len=context, kv_offload_path=str(tmp_path / "kv"), kv_offload_disk_size=0.2, kv_offloading_size=0,
        )  # fmt: skip
        same(run(llm, [prompt], params), expected)
        for rank in llm.ranks:  # type: ignore[attr-defined]
            received = [buffer for each in rank.workspace.buffers.values() for buffer in each]
            pools = [*rank.storage.buffers, *(buffer.pool for buffer in received)]
            assert 0 < sum(x.nbytes for pool in pools for x in pool.tensors) <= tokens * llm.capacity.kv_bytes_per_token
        close(llm)


@pytest.mark.parametrize(("settings", "told"), [
    ({"kv_cache_tokens": 64}, "kv_cache_tokens leaves no room for a chunk of 32768 bytes in each of 5 buffers"),
    ({"kv_cache_tokens": 640, "max_model_len": 512},
     "kv_cache_tokens: each rank stages a layer of 384 tokens; raise it, or lower max_model_len 512"),
    ({"kv_offloading_size": 0.001, "max_model_len": 4096}, "kv_offloading_size 0.001 GiB holds 1280 tokens"),
])  # fmt: skip
def test_refuses_what_cannot_work(settings: dict[str, Any], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        streamed_ranks(2, **settings)


def test_what_bounds_the_context() -> None:
    llm = streamed_ranks(2, kv_cache_tokens=640)
    assert (llm.capacity.max_model_len, llm.capacity.length_limit) == (384, "kv_cache_tokens")
    close(llm)


X: dict[str, Any] = {"kv_offload_activations": "on"}
"""Asks ranks to keep the activations of the chunks whose rows they compute."""


def projecting(llm: LLM, share: float | None = 0.5) -> None:
    """So much of what has X is projected from now on; None: as link and arithmetic are found to be."""
    for store in stores(llm):
        assert store.x is not None
        store.x.share = share


def projected(llm: LLM) -> int:
    """Chunks of all layers."""
    return sum(store.totals.projected for store in stores(llm))


@pytest.mark.parametrize(("context", "tensor"), [(1, 2), (2, 1), (2, 2)])
@pytest.mark.parametrize("settings", [X, {"offload_x_resident": True, "kv_cache_dtype": "int8"}, {**X, **WEIGHTS}],
                         ids=("outside", "resident, int8", "weights outside"))  # fmt: skip
def test_what_comes_as_activations(context: int, tensor: int, settings: dict[str, Any], folder_of: FolderOf) -> None:
    """MHA, one chunk of which has rows of two ranks, on a link so slow that layers wait."""
    folder, kv = folder_of("llama"), {"kv_cache_dtype": settings.get("kv_cache_dtype", "auto")}
    one = LLM(folder, kv_cache_tokens=4096, dtype="bfloat16", **kv)
    prompts = [words(one, n, seed=n) for n in (5, 400)] + [words(one, 400, seed=400)[:300] + words(one, 20, seed=1)]
    expected = run(one, prompts, PARAMS)
    llm = streamed_ranks(context, tensor, model=folder, allowed=("chain",), kv_link_gbps=0.5, **settings)
    projecting(llm)
    for _ in range(2):
        same(run(llm, prompts, PARAMS), expected)
    assert projected(llm)
    assert len({store.totals.projected for store in stores(llm)[:tensor]}) == 1, "tensor ranks project alike"
    resident = "offload_x_resident" in settings
    assert all(bool(store.x and store.x.buffers) != resident for store in stores(llm))
    close(llm)


@pytest.mark.parametrize("settings", [X, {**X, **WEIGHTS}], ids=("outside", "weights outside"))
def test_keys_normed_over_the_heads_of_all_ranks(settings: dict[str, Any], tmp_path: Path) -> None:
    """Each tensor rank projects its own heads of them, and gathers those of the others for the norm."""
    folder = make_checkpoint("olmoe", tmp_path / "m", intermediate_size=128)
    one = LLM(folder, kv_cache_tokens=4096, dtype="bfloat16")
    prompts = [words(one, n, seed=n) for n in (5, 200)]
    expected = run(one, prompts, PARAMS)
    llm = streamed_ranks(1, 2, model=folder, kv_link_gbps=0.5, **settings)
    projecting(llm)
    for _ in range(2):
        same(run(llm, prompts, PARAMS), expected)
    assert projected(llm)
    close(llm)


@pytest.mark.parametrize("allowed", [*STRATEGIES[:1], *STRATEGIES[2:]], ids=str)
def test_activations_by_every_strategy(allowed: tuple[str, ...], prompts: list[list[int]], truth: list[Trace]) -> None:
    """What `single` left behind is attended to by all ranks, half of it projected by who has it."""
    llm = streamed_ranks(2, allowed=("single",), max_model_len=4096, **X)
    projecting(llm)
    same(run(llm, prompts[-2:], PARAMS), truth[-2:])
    before = projected(llm)
    llm.engine.loaded.executor.allowed = allowed  # type: ignore[attr-defined]
    same(run(llm, prompts, PARAMS), truth)
    assert projected(llm) > before
    close(llm)


@pytest.mark.parametrize("tensor", [1, 2])
def test_the_split_follows_the_link(tensor: int, folder_of: FolderOf) -> None:
    """Over a slow link half of K and V is what takes long: it comes as X. Over a fast one all is loaded."""
    folder = folder_of("llama")
    one = LLM(folder, kv_cache_tokens=4096, dtype="bfloat16")
    prompts, params = [words(one, 400, seed=3)], SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)
    expected = run(one, prompts, params)
    for gbps, some in ((0.02, True), (None, False)):
        llm = streamed_ranks(1, tensor, model=folder, **X, **({} if gbps is None else {"kv_link_gbps": gbps}))
        for store in stores(llm):
            assert store.x is not None
            if gbps is None:
                store.x.throughput.project.forget()
                store.x.throughput.projected(1, 1.0)
        same(run(llm, prompts, params), expected)
        assert (projected(llm) > 0) == some
        close(llm)


def test_room_for_activations(folder_of: FolderOf) -> None:
    """They take room outside: of two tensor ranks each has that of half of them."""
    tokens = []
    for tensor in (1, 2):
        for settings in ({}, X):
            llm = streamed_ranks(2, tensor, model=folder_of("llama"), kv_offloading_size=0.001, max_sequences=99,
                                 **settings)  # fmt: skip
            kept = sum(x.nbytes for store in stores(llm)[:tensor] for x in store.store.x)
            whole = sum(pool.k.nbytes for store in stores(llm)[:tensor] for pool in store.store.pools)
            assert whole <= kept <= 1.1 * whole if settings else not kept
            tokens.append(llm.capacity.kv_cache_tokens)
            close(llm)
    assert all(1.4 < bare / with_x < 1.7 for bare, with_x in (tokens[:2], tokens[2:])), tokens
