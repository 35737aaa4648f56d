"""Latent attention: what is stored of a token, what it costs, and what is refused. That its logits are transformers'
and its bits those of every schedule is asked where all kinds of models are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from headrace import LLM, SamplingParams
from headrace.models.config import read_config
from headrace.models.decoder import load_decoder
from headrace.models.latent import of_each_head
from headrace.models.slots import expected
from headrace.planner.machine import ModelShape
from tests.support.checkpoints import FolderOf, build_model, edit_json, make_checkpoint

KIND = "deepseek_v2_lora"


@pytest.mark.parametrize("kind", ["deepseek_v2", KIND])
def test_a_token_takes_its_latent_twice(kind: str, folder_of: FolderOf) -> None:
    """In the layouts of keys and of values: nothing by head."""
    config = read_config(folder_of(kind))
    assert config.latent is not None
    wide = config.latent.rotated + config.latent.rank
    assert config.attention.kv_bytes_per_token(2) == 2 * 2 * wide * config.layers
    assert config.attention.every_shape == ((1, wide),)


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
    ],
)
def test_what_is_not_computed_is_refused(fields: dict[str, Any], told: str, tmp_path: Path) -> None:
    folder = make_checkpoint(KIND, tmp_path)
    edit_json(folder / "config.json", **fields)
    with pytest.raises(ValueError, match=told):
        read_config(folder)


def test_on_a_gpu_it_is_refused(folder_of: FolderOf) -> None:
    with pytest.raises(ValueError, match="attention_backend 'triton': DeepseekV2ForCausalLM has latent attention"):
        LLM(str(folder_of(KIND)), attention_backend="triton")
