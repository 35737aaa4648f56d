"""Models with latent attention on a fake GPU (tests.support.fake_device), whose pools hold a latent once: near
transformers, and the same bits in every schedule, with tiers, ranks, adapters, drafts and files in codes."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

pytest.importorskip("triton", reason="Triton is built for Linux only")
if os.environ.get("TRITON_INTERPRET") != "1":  # see tests/conftest.py
    pytest.skip("there is a GPU: tests/gpu has such models, compiled", allow_module_level=True)

from gguf import GGMLQuantizationType as Kind

from headrace import LLM, SamplingParams, device
from headrace.attention.execute import PlanAttention
from headrace.attention.plan import Span, build
from headrace.config import EngineConfig
from headrace.engine.footprint import draft_kv_bytes
from headrace.engine.runner import Runner
from headrace.kernels.backend import backend_of
from headrace.kernels.triton import graph_step
from headrace.kv.storage import KVStorage
from headrace.models.config import read_config
from headrace.models.decoder import Decoder, TokenBatch, load_decoder
from headrace.offload.restore import timing
from headrace.parallel.staged_transport import StagedTransport
from headrace.parallel.tensor import TensorGroup
from headrace.parallel.transport import LoopbackHub
from headrace.planner.machine import ModelShape
from tests.support.adapters import with_adapter, write_adapter
from tests.support.checkpoints import build_model, make_checkpoint
from tests.support.drafting import answered, drafts_from
from tests.support.fake_device import FakeDevice
from tests.support.fake_nccl import HostLinks
from tests.support.gguf_families import write_family
from tests.support.gpu_ranks import computed, interpreted_on, ranks_of
from tests.support.greedy_answers import greedy_behind
from tests.support.kind_sizes import rope
from tests.support.offloading import MIXES, flush, forced, look_at_once, watched
from tests.support.small_gpu_engines import launched, recorded_when_needed, small_buckets, tokens
from tests.support.tensor_ranks import on_ranks
from tests.support.traces import run, same

KIND = "deepseek_v2_lora"
SMALL: dict[str, Any] = dict(
    vocab_size=64, hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
    num_key_value_heads=2, kv_lora_rank=24, qk_rope_head_dim=8, qk_nope_head_dim=16, v_head_dim=12, n_routed_experts=3,
    num_experts_per_tok=2, moe_intermediate_size=32,
)  # fmt: skip
TEMPERED = rope("yarn", factor=4.0, original_max_position_embeddings=4, llama_4_scaling_beta=0.5)
ALONE = SMALL | dict(num_hidden_layers=1)
"""One layer, whose MLP is dense."""
NUMBERS = 24 + 8
"""Of a token in a layer."""
ONE, TWO, SIX = (SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True) for count in (1, 2, 6))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(KIND, tmp_path_factory.mktemp("latent"), **ALONE)


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeDevice]:
    small_buckets(monkeypatch)
    monkeypatch.setattr(graph_step, "MERGES", 4)
    monkeypatch.setattr(timing, "call_seconds", lambda work, most_s=0.05: 1e-3)
    with recorded_when_needed(monkeypatch) as made:
        yield made


def engine(folder: Path, **settings: Any) -> LLM:
    given = {"kv_cache_tokens": 1024, "max_sequences": 4, **settings}
    return LLM(str(folder), attention_backend="triton", dtype="float32", **given)


@pytest.mark.parametrize(
    ("kind", "sizes"),
    [
        (KIND, SMALL),
        pytest.param("deepseek_v2", SMALL, marks=pytest.mark.matrix),
        pytest.param("deepseek_v3", SMALL | dict(n_routed_experts=8), marks=pytest.mark.matrix),
        pytest.param("mistral4", TEMPERED | SMALL | dict(n_group=1, topk_group=1), marks=pytest.mark.matrix),
        pytest.param("glm_lite", SMALL | dict(mlp_layer_types=["dense", "sparse"]), marks=pytest.mark.matrix),
    ],
)
def test_logits_are_those_of_transformers(kind: str, sizes: dict[str, Any], fake: FakeDevice, tmp_path: Path) -> None:
    """Queries by way of a latent of their own, and at once; rotated by halves and by pairs; experts behind."""
    path, given = make_checkpoint(kind, tmp_path, **sizes), tokens(9, 1)
    llm = engine(path)
    with torch.no_grad():
        theirs = build_model(kind, **sizes)(torch.tensor([given])).logits[0]
    assert (llm.logits(given) - theirs).abs().max() < 1e-4


def test_replayed_and_cut_are_the_same_as_launched_alone(folder: Path, fake: FakeDevice) -> None:
    """By slices of four rows, the last of them beside another prompt."""
    prompts = [tokens(5, 1), tokens(2, 2)]
    llm = engine(folder, max_batch_tokens=4, max_sequences=2)
    truth = [launched(llm, [prompt], TWO)[0] for prompt in prompts]
    same(run(llm, prompts, TWO), truth)
    stats = llm.engine.stats().graphs
    assert stats.prompts == 2 and stats.replayed == 3 and not stats.eager


def test_a_latent_is_held_once(folder: Path, fake: FakeDevice) -> None:
    """By the pool; ranks send it once."""
    llm = engine(folder)
    assert llm.capacity.kv_bytes_per_token == 4 * NUMBERS
    runner = llm.engine.loaded.executor
    assert isinstance(runner, Runner)
    assert sum(each.nbytes for pool in runner.storage.pools for each in pool.tensors) == 1024 * 4 * NUMBERS
    shape = ModelShape.of(read_config(folder))
    assert shape.sent_vectors == 1 and shape.layers * shape.kv_bytes == 2 * NUMBERS


@pytest.mark.parametrize("mix", ["load", pytest.param("project", marks=pytest.mark.matrix)])
def test_restored_from_the_host_tier(mix: str, folder: Path, fake: FakeDevice) -> None:
    """Of chunks that two prompts share: as they were, and made of activations."""
    prompts = [tokens(66, 1), [*tokens(65, 1), 3]]
    truth = [launched(engine(folder), [prompt], ONE)[0] for prompt in prompts]
    llm = engine(folder, kv_offloading_size=0.01, kv_offload_activations="on")
    runner = llm.engine.loaded.executor
    assert llm.engine.offload is not None and isinstance(runner, Runner)
    llm.engine.offload.choose, runner.mixed = forced(*MIXES[mix]), runner.eager
    look_at_once(llm)
    same(watched(llm, prompts, ONE), truth)
    flush(llm)
    same(watched(llm, prompts, ONE), truth)
    told = llm.engine.stats().restore
    assert (told.loaded_tokens if mix == "load" else told.projected_tokens) == 64
    llm.close()


@pytest.mark.matrix
@pytest.mark.parametrize("form", ["int8", "int4"])
def test_restored_from_rounded_chunks(form: str, folder: Path, fake: FakeDevice) -> None:
    """Near what was stored: the answer after a prompt of which a chunk is rounded."""
    prompt = tokens(66, 1)
    (truth,) = launched(engine(folder), [prompt], ONE)
    llm = engine(folder, kv_offloading_size=0.01, kv_host_format=form)
    assert llm.engine.offload is not None
    llm.engine.offload.choose = forced(*MIXES["load"])
    look_at_once(llm)
    watched(llm, [prompt], ONE)
    flush(llm)
    (ours,) = watched(llm, [prompt], ONE)
    assert llm.engine.stats().restore.loaded_tokens == 64
    assert 0 < (ours[65] - truth[65]).abs().max() < 0.2 * truth[65].abs().max()
    llm.close()


@pytest.mark.matrix
def test_drafts_are_verified_by_replays(folder: Path, fake: FakeDevice) -> None:
    llm, prompt = engine(folder, speculative="ngram", num_speculative_tokens=2, max_sequences=1), tokens(3, 2)
    truth = launched(llm, [prompt], SIX)
    known = answered(prompt, truth[0])
    drafts_from(llm, [[*known[:5], (known[5] + 1) % 64, 5, 5]])
    same(run(llm, [prompt], SIX), truth)
    spoken = llm.engine.stats().speculation
    assert 0 < spoken.accepted < spoken.drafted and not llm.engine.stats().graphs.eager


@pytest.mark.matrix
def test_adapters(folder: Path, fake: FakeDevice, tmp_path: Path) -> None:
    model, given = AutoModelForCausalLM.from_pretrained(folder), tokens(9, 1)
    write_adapter(tmp_path / "a", model, r".*(q_a_proj|q_b_proj|kv_a_proj_with_mqa|o_proj)", seed=1, size=3.0)
    llm = engine(folder, lora_modules=f"a={tmp_path / 'a'}")
    ours, plain = (llm.generate([given], SIX, adapter=name)[0].token_ids for name in ("a", ""))
    assert ours == greedy_behind(with_adapter(model, tmp_path / "a"), given, ours) != plain


@pytest.mark.matrix
@pytest.mark.parametrize("kind", ["deepseek_v2", "glm_lite"])
def test_files_in_codes(kind: str, fake: FakeDevice, tmp_path: Path) -> None:
    """What heads multiply is multiplied out, of two tensors."""
    path = tmp_path / "m.gguf"
    model, given = write_family(kind, path, lambda name: Kind.Q8_0), tokens(6, 1)
    with torch.no_grad():
        theirs = model(torch.tensor([given])).logits[0]
    assert (engine(path, kv_cache_tokens=256, max_sequences=1).logits(given) - theirs).abs().max() < 1e-3


@pytest.fixture
def ranked(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with interpreted_on(FakeDevice(), monkeypatch):
        yield


@pytest.mark.parametrize(
    ("strategy", "size"),
    [
        ("ring-kv", 2),
        pytest.param("ring-q", 2, marks=pytest.mark.matrix),
        pytest.param("chain", 3, marks=pytest.mark.matrix),
    ],
)
def test_every_strategy_gives_one_ranks_bits(strategy: str, size: int, folder: Path, ranked: None) -> None:
    """Ranks hand on latents once; a batch on a prefix that lies on two of them, then a step of decoding."""
    decoder: Decoder = load_decoder(folder, "float32", device=torch.device("cpu"))
    truth = computed(ranks_of(decoder, 1), "single", 3)
    ours = computed(ranks_of(decoder, size), strategy, 3)
    assert len(ours) == len(truth) and all(torch.equal(x, y) for x, y in zip(ours, truth, strict=True))


def test_tensor_ranks_give_one_ranks_bits(tmp_path: Path, ranked: None) -> None:
    """Each has the latents, and multiplies those of its own heads."""
    path = make_checkpoint(KIND, tmp_path, **ALONE | dict(hidden_size=64, intermediate_size=64))
    load = partial(load_decoder, path, "float32", device=torch.device("cpu"))

    def states(group: TensorGroup | None) -> Tensor:
        if group is not None:
            group.transport = StagedTransport(HostLinks(hub, group.rank), device.current())
        decoder = load(tensor=group)
        storage = KVStorage(decoder.config.attention, 1, torch.float32)
        plan = build([Span(np.zeros(1, np.int32), 0, 3)])
        attend = PlanAttention(plan, storage, decoder.config.attention, backend_of("triton"))
        return decoder.forward(TokenBatch(torch.tensor([3, 1, 4]), torch.from_numpy(plan.positions)), attend)

    hub = LoopbackHub(2)
    one, two = on_ranks(2, states, hub)
    truth = states(None)
    assert torch.equal(one, truth) and torch.equal(two, truth)


def test_a_draft_model_with_latents(folder: Path, fake: FakeDevice) -> None:
    """Beside itself: it is always right."""
    llm, prompt = engine(folder, speculative=str(folder), max_sequences=1, num_speculative_tokens=2), tokens(3, 5)
    truth = launched(engine(folder, max_sequences=1), [prompt], replace(SIX, max_tokens=4))
    same(run(llm, [prompt], replace(SIX, max_tokens=4)), truth)
    told = llm.engine.stats().speculation
    assert told.accepted == told.drafted > 0
    given: Any = dict(model=str(folder), dtype="float32", attention_backend="triton", speculative=str(folder))
    assert draft_kv_bytes(EngineConfig(**given)) == llm.capacity.kv_bytes_per_token  # once, too
