"""Latent attention: what is stored of a token, what it costs, and what is refused. That its logits are transformers'
and its bits those of every schedule is asked where all kinds of models are."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from headrace import LLM, SamplingParams
from headrace.config import Quantization
from headrace.engine.programs import InCpp
from headrace.engine.runner import Runner
from headrace.engine.sequence import SequenceState
from headrace.kernels import cpu, dispatch, ops
from headrace.kernels.block import Blocks
from headrace.kv.storage import KVStorage
from headrace.models.config import read_config
from headrace.models.decoder import load_decoder
from headrace.models.latent import of_each_head
from headrace.models.slots import expected, is_of_heads
from headrace.offload.chunk_codec import ChunkCodec
from headrace.planner.machine import ModelShape
from headrace.types import CHUNK
from tests.support.checkpoints import FolderOf, build_model, edit_json, make_checkpoint
from tests.support.traces import Trace, run, same

KIND = "deepseek_v2_lora"


@pytest.mark.parametrize("kind", ["deepseek_v2", KIND])
def test_a_token_takes_its_latent_once(kind: str, folder_of: FolderOf) -> None:
    """Which is key and value: nothing by head. As int8 it has one scale."""
    config = read_config(folder_of(kind))
    assert config.latent is not None
    wide, spec = config.latent.rotated + config.latent.rank, config.attention
    assert spec.every_shape == ((1, wide),)
    for dtype, size in ((torch.bfloat16, 2 * wide), (torch.int8, wide + 4)):
        held = sum(each.nbytes for pool in KVStorage(spec, 2, dtype).pools for each in pool.tensors)
        assert held == 2 * CHUNK * size * config.layers
        assert KVStorage.bytes_per_token(spec, dtype) == size * config.layers


@pytest.mark.parametrize("kind", ["deepseek_v2", "deepseek_v3", "glm_lite"])
def test_tiers_keep_a_latent_once(kind: str, folder_of: FolderOf) -> None:
    spec = read_config(folder_of(kind)).attention
    codec = ChunkCodec(KVStorage(spec, 2, torch.bfloat16), spec, bytes(32), torch.bfloat16, "plain")
    assert codec.section_bytes("k", "raw") == CHUNK * spec.head_dim * 2


@pytest.mark.parametrize("kind", ["deepseek_v2", KIND])
def test_the_planner_counts_the_matrices_that_there_are(kind: str, folder_of: FolderOf) -> None:
    config = read_config(folder_of(kind))
    shape, slots = ModelShape.of(config), expected(config)
    own = ("queries", "query_in", "latent", "heads", "out")
    there = sum(slots[name].count for name in (f"layers.0.{each}.weight" for each in own) if name in slots)
    mlp = 3 * config.hidden_size * config.mlp_width
    assert shape.qkv_weights + shape.rest_weights == there + mlp
    assert config.latent is not None
    per_head = config.latent.plain * config.latent.rank
    halved = ModelShape.of(config, tensor_ranks=2)
    assert shape.qkv_weights - halved.qkv_weights == 2 * (
        per_head + (config.latent.query_rank or config.hidden_size) * config.latent.query
    )


def test_each_head_has_its_part_of_the_matrix(folder_of: FolderOf) -> None:
    """Keys' part transposed, values' as it is; other weights as they are."""
    config = read_config(folder_of(KIND))
    spec, heads = config.latent, config.attention.heads
    assert spec is not None
    whole = torch.randn(heads * (spec.plain + spec.value), spec.rank)
    other = torch.zeros(3)
    cut = of_each_head(spec, {"layers.2.heads.weight": whole, "layers.2.latent_norm.weight": other})
    assert cut.pop("layers.2.latent_norm.weight") is other
    again = [
        part
        for head in range(heads)
        for part in (cut.pop(f"layers.2.keys.{head}.weight").t(), cut.pop(f"layers.2.values.{head}.weight"))
    ]
    assert torch.equal(torch.cat(again), whole) and not cut


@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_what_heads_make_of_latents_is_not_rounded(quantization: Quantization, folder_of: FolderOf) -> None:
    """It is used transposed, and small beside the rest."""
    plain, rounded = (load_decoder(folder_of(KIND), "bfloat16", quantization=each) for each in ("none", quantization))
    of_heads = [name for name in plain.matrices if is_of_heads(name)]
    assert len(of_heads) == 2 * 4 * plain.config.layers
    for name in of_heads:
        one, other = plain.matrices[name], rounded.matrices[name]
        x = torch.randn(3, one.shape[1], dtype=torch.bfloat16)
        assert torch.equal(ops.linear(x, one), ops.linear(x, other))


@pytest.mark.parametrize("settings", [{"kv_cache_dtype": "int8"}, {"quantization": "int8"}], ids=str)
def test_rounded_it_is_near(settings: dict[str, Any], folder_of: FolderOf) -> None:
    """Keys, values and weights in int8: the likelihoods of a text stay near those that are not rounded."""
    text = [[(7 * n + 3) % 320 for n in range(200)]]
    asked = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0)

    def of(**more: Any) -> list[float]:
        with LLM(str(folder_of("deepseek_v2")), kv_cache_tokens=4096, dtype="bfloat16", **more) as llm:
            (answer,) = llm.generate(text, asked)
        found = answer.prompt_logprobs
        assert found is not None
        return [next(iter(each.values())).logprob for each in found[1:] if each is not None]

    plain, rounded = of(), of(**settings)
    far = sum(abs(one - other) for one, other in zip(plain, rounded, strict=True)) / len(plain)
    spread = sum(abs(each - sum(plain) / len(plain)) for each in plain) / len(plain)
    assert 0 < far < spread / 4


@pytest.mark.skipif(not cpu.available(), reason=str(cpu.unavailable_reason()))
@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        (KIND, {}),
        ("deepseek_v3", {"quantization": "int4"}),
        ("glm_lite", {"quantization": "w8a8"}),
        ("deepseek_v2", {"kv_cache_dtype": "int8", "quantization": "int8"}),
    ],
    ids=str,
)
def test_whole_layers_have_the_bits_of_single_operations(
    kind: str, settings: dict[str, Any], folder_of: FolderOf
) -> None:
    """In the engine: together, in pieces of prompts, and decoded by one call of C++ a step where the pool allows it."""
    prompts = [[(7 * n + seed) % 320 for n in range(length)] for seed, length in enumerate((5, 64, 130))]

    def traces(whole: bool) -> list[Trace]:
        llm = LLM(str(folder_of(kind)), dtype="bfloat16", kv_cache_tokens=2048, max_batch_tokens=96, **settings)
        executor = llm.engine.loaded.executor
        assert isinstance(executor, Runner) and isinstance(executor.decoder.layers, Blocks) == whole
        assert isinstance(executor.decoding, InCpp) == (whole and settings.keys() <= {"quantization"})
        return run(llm, prompts, SamplingParams(temperature=0.0, max_tokens=70, ignore_eos=True))

    fast = traces(True)
    with dispatch.force("ops"):
        same(fast, traces(False))


@pytest.mark.parametrize("kind", [KIND, "deepseek_v3"])
def test_streamed_whole_layers_have_the_bits_of_single_operations(kind: str, folder_of: FolderOf) -> None:
    """KV and weights outside the fast memory: keys are made of stored activations while the other weights come."""
    prompts = [[(7 * n + seed) % 320 for n in range(length)] for seed, length in enumerate((5, 130, 300))]
    streamed = dict(offload_schedule="column", weight_offload=True, kv_offloading_size=0.1, kv_offload_activations="on")

    def logits(**settings: Any) -> dict[tuple[str, int], Tensor]:
        kept: dict[tuple[str, int], Tensor] = {}

        def keep(sequence: SequenceState, position: int, found: Tensor) -> None:
            name = sequence.request.request_id.rpartition("-")[2]
            kept[name, position + len(found) - 1] = found[-1].clone()

        with LLM(str(folder_of(kind)), dtype="bfloat16", kv_cache_tokens=2048, **settings) as llm:
            with llm._observed(keep):
                llm.generate(prompts, SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True))
            return kept

    whole = logits(**streamed)
    with dispatch.force("ops"):
        single = logits()
    assert whole.keys() == single.keys() and len(whole) == 20 * len(prompts)
    assert all(torch.equal(whole[each], single[each]) for each in single)


def test_a_layer_behind_the_last_is_not_read(tmp_path: Path) -> None:
    """As published checkpoints have one, to guess a further token: the same logits without its weights."""
    whole = make_checkpoint(KIND, tmp_path / "whole", num_hidden_layers=4)
    edit_json(whole / "config.json", num_hidden_layers=3)
    decoder = load_decoder(whole, "float32")
    assert decoder.config.layers == 3 and not any(name.startswith("layers.3.") for name in decoder.weights)


def test_scores_are_scaled_where_positions_are_stretched() -> None:
    """yarn's mscale_all_dim, as transformers' own class has it."""
    theirs = build_model("deepseek_v2").model.layers[0].self_attn.scaling
    plain = build_model(KIND).model.layers[0].self_attn.scaling
    assert theirs > plain * 1.1  # else the kind would not try it


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        (dict(num_experts_per_tok=None), "num_experts_per_tok is null"),
        (dict(mlp_bias=True), "mlp_bias true is not supported"),
        (dict(scoring_func="sigmoid"), "scoring_func 'sigmoid' is not supported; softmax is"),
        (dict(moe_layer_freq=2), "moe_layer_freq 2 is not supported; 1 is"),
        (dict(num_key_value_heads=2), "num_key_value_heads 2 is not supported; 4 is"),
        (dict(topk_method="noaux_tc"), "topk_method 'noaux_tc' is not supported"),
        (dict(auto_map={"AutoModel": "modeling_other.Model"}), "remote code is never run"),
    ],
)
def test_what_is_not_computed_is_refused(fields: dict[str, Any], told: str, tmp_path: Path) -> None:
    folder = make_checkpoint(KIND, tmp_path)
    edit_json(folder / "config.json", **fields)
    with pytest.raises(ValueError, match=told):
        read_config(folder)


PUBLISHED: dict[str, dict[str, Any]] = {
    "DeepSeek-V2-Lite": dict(
        architectures=["DeepseekV2ForCausalLM"], model_type="deepseek_v2", hidden_size=2048, intermediate_size=10944,
        kv_lora_rank=512, q_lora_rank=None, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128, n_group=1,
        topk_group=1, topk_method="greedy", scoring_func="softmax", moe_layer_freq=1, first_k_dense_replace=1,
        n_routed_experts=64, n_shared_experts=2, num_experts_per_tok=6, moe_intermediate_size=1408,
        norm_topk_prob=False, num_hidden_layers=27, num_attention_heads=16, num_key_value_heads=16, vocab_size=102400,
        max_position_embeddings=163840, routed_scaling_factor=1.0, rope_theta=10000, torch_dtype="bfloat16",
        rope_scaling=dict(
            type="yarn", factor=40, beta_fast=32, beta_slow=1, mscale=0.707, mscale_all_dim=0.707,
            original_max_position_embeddings=4096,
        ),
        auto_map={
            "AutoConfig": "configuration_deepseek.DeepseekV2Config",
            "AutoModelForCausalLM": "modeling_deepseek.DeepseekV2ForCausalLM",
        },
    ),
    "DeepSeek-V3": dict(
        architectures=["DeepseekV3ForCausalLM"], model_type="deepseek_v3", topk_method="noaux_tc",
        scoring_func="sigmoid", moe_layer_freq=1, num_nextn_predict_layers=1, max_position_embeddings=163840,
        rope_theta=10000, torch_dtype="bfloat16",
        rope_scaling=dict(
            type="yarn", factor=40, beta_fast=32, beta_slow=1, mscale=1.0, mscale_all_dim=1.0,
            original_max_position_embeddings=4096,
        ),
        auto_map={"AutoConfig": "configuration_deepseek.DeepseekV3Config"},
    ),
    "GLM-4.7-Flash": dict(
        architectures=["Glm4MoeLiteForCausalLM"], model_type="glm4_moe_lite", topk_method="noaux_tc",
        partial_rotary_factor=1.0, rope_theta=1000000, rope_scaling=None, num_nextn_predict_layers=1,
        eos_token_id=[154820, 154827, 154829], first_k_dense_replace=1, dtype="bfloat16",
    ),
}  # fmt: skip
"""Fields of published files that matter here; of others the defaults of their classes."""


MINICPM3 = dict(
    architectures=["MiniCPM3ForCausalLM"], model_type="minicpm3", hidden_size=2560, intermediate_size=6400,
    num_hidden_layers=62, num_attention_heads=40, num_key_value_heads=40, max_position_embeddings=32768,
    q_lora_rank=768, kv_lora_rank=256, qk_nope_head_dim=64, qk_rope_head_dim=32, scale_emb=12, dim_model_base=256,
    scale_depth=1.4, torch_dtype="bfloat16", vocab_size=73448, rms_norm_eps=1e-5, eos_token_id=[2, 73440],
    rope_scaling=dict(
        type="longrope", original_max_position_embeddings=32768, long_factor=[1.0] * 16, short_factor=[1.0] * 16
    ),
    auto_map={
        "AutoConfig": "configuration_minicpm.MiniCPM3Config",
        "AutoModelForCausalLM": "modeling_minicpm.MiniCPM3ForCausalLM",
    },
)  # fmt: skip


def test_the_published_file_of_minicpm3_is_read(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(MINICPM3))
    config = read_config(tmp_path)
    assert config.attention.kv_bytes_per_token(1) == 288 * 62 and config.experts is None
    assert (config.embed_scale, config.logit_scale) == (12.0, 0.1)
    assert config.residual_scale == pytest.approx(1.4 / 62**0.5) and config.max_model_len == 32768


@pytest.mark.parametrize(
    ("model", "experts", "numbers", "scale"),
    [
        ("DeepSeek-V2-Lite", 26, 15_552, 0.1147),
        ("DeepSeek-V3", 58, 35_136, 0.1352),
        ("GLM-4.7-Flash", 46, 27_072, 0.0625),
    ],
)
def test_published_files_are_read(model: str, experts: int, numbers: int, scale: float, tmp_path: Path) -> None:
    """`numbers`: what a token takes of the pool; scale: of scores, sqrt(192) or 16 and the stretch of positions."""
    (tmp_path / "config.json").write_text(json.dumps(PUBLISHED[model]))
    config = read_config(tmp_path)
    assert config.attention.kv_bytes_per_token(1) == numbers == 576 * config.layers
    assert config.experts is not None and sum(config.experts.layers) == experts
    assert config.attention.scale == pytest.approx(scale, abs=1e-4)
    assert config.rope is not None and not config.rope_depends_on_length
