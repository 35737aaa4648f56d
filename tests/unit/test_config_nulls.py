"""Numbers of config.json that are null, missing or 0: a model is read, or refused by file and field."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from headrace.models.config import read_config
from headrace.models.families import FAMILIES
from headrace.models.nulls import NEVER_NULL
from headrace.models.plain_config import DEFAULTS, plain_config
from headrace.types import UnsupportedModel
from tests.support.config_files import written
from tests.support.plain_configs import GEMMA4, GRANITE4, MAMBA, QWEN2_5_VL, ROUTED

pytestmark = pytest.mark.unit

FULL, LOCAL = "full_attention", "sliding_attention"
ROPE: dict[str, Any] = dict(
    rope_theta=1e4, factor=2.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=64
)
ROPES: list[dict[str, Any]] = [
    {},
    dict(rope_theta=None),
    dict(rope_type="default", partial_rotary_factor=None),
    *(ROPE | dict(rope_type=kind, rope_theta=None) for kind in ("linear", "dynamic", "yarn", "llama3")),
    *(dict(rope_type=kind, rope_theta=1e4, factor=2.0, partial_rotary_factor=None) for kind in ("linear", "yarn")),
    {FULL: None, LOCAL: None},
    {FULL: {}, LOCAL: {}},
    {FULL: dict(rope_type="default", rope_theta=None), LOCAL: dict(rope_type="default", rope_theta=1e4)},
    {FULL: dict(rope_type="default", rope_theta=1e4), LOCAL: dict(rope_type="linear", factor=2.0)},
    {FULL: dict(rope_type="proportional", rope_theta=1e6, partial_rotary_factor=None), LOCAL: dict(rope_theta=1e4)},
]


def outcome(read: Any, folder: Path) -> Any:
    """What is read, or None for a refusal that names the file."""
    try:
        return read(folder)
    except UnsupportedModel as error:
        assert str(error).startswith(f"{folder / 'config.json'}: ")
        return None


@pytest.mark.parametrize("architecture", FAMILIES)
def test_a_null_is_read_or_refused_by_file(architecture: str, tmp_path: Path) -> None:
    """What the engine reads, the check before it reads alike."""
    own = DEFAULTS[FAMILIES[architecture].fields_of]
    given = [{name: None} for name in (*NEVER_NULL, "head_dim", "rope_theta", "rope_scaling") if name in own]
    for fields in (*given, *(dict(rope_parameters=each) for each in ROPES), dict(head_dim=2)):
        folder = written(tmp_path, {"architectures": [architecture], **fields})
        theirs, plain = (outcome(read, folder) for read in (read_config, plain_config))
        assert theirs is None or theirs == plain, fields


ANY_THETA, NULL = "rope_parameters.rope_theta is missing", "is null; download the file again"
TWO = {FULL: dict(rope_type="default", rope_theta=None), LOCAL: dict(rope_type="default", rope_theta=1e4)}
HUNYUAN, MELLUM = "HunYuanDenseV1ForCausalLM", "MellumForCausalLM"
NAMED: list[tuple[str, dict[str, Any], str]] = [
    *((name, dict(rope_parameters=dict(rope_theta=None)), ANY_THETA) for name in ("LlamaForCausalLM", HUNYUAN)),
    ("LlamaForCausalLM", dict(rope_parameters=ROPE | dict(rope_type="linear", rope_theta=None)), ANY_THETA),
    ("LlamaForCausalLM", dict(rope_parameters=ROPE | dict(rope_type="yarn", rope_theta=None)), ANY_THETA),
    *((name, dict(rope_parameters=TWO), ANY_THETA) for name in (GEMMA4, MELLUM, "Gemma3ForCausalLM")),
    ("GlmForCausalLM", dict(num_key_value_heads=None), f"num_key_value_heads {NULL}"),
    ("Qwen2MoeForCausalLM", dict(num_key_value_heads=None), f"num_key_value_heads {NULL}"),
    ("Ernie4_5_MoeForCausalLM", dict(num_key_value_heads=None), f"num_key_value_heads {NULL}"),
    ("Qwen3MoeForCausalLM", dict(num_experts_per_tok=None), "num_experts_per_tok"),
    ("Qwen3MoeForCausalLM", dict(num_experts_per_tok=0), "num_experts_per_tok 0 is not supported"),
    ("Qwen3MoeForCausalLM", dict(moe_intermediate_size=0), "moe_intermediate_size 0 is not supported"),
    *(
        (name, dict(shared_expert_intermediate_size=0), "shared_expert_intermediate_size 0 is not supported")
        for name in ("Qwen2MoeForCausalLM", "Qwen3NextForCausalLM")
    ),
    ("CohereForCausalLM", dict(layer_norm_eps=None), f"layer_norm_eps {NULL}"),
    ("CohereForCausalLM", dict(logit_scale=None), f"logit_scale {NULL}"),
    ("FalconForCausalLM", dict(layer_norm_epsilon=None), f"layer_norm_epsilon {NULL}"),
    ("DeepseekV3ForCausalLM", dict(v_head_dim=None), f"v_head_dim {NULL}"),
    ("YoutuForCausalLM", dict(v_head_dim=None), f"v_head_dim {NULL}"),
    ("Mistral4ForCausalLM", dict(v_head_dim=None), f"v_head_dim {NULL}"),
    ("DeepseekV3ForCausalLM", dict(kv_lora_rank=None), "kv_lora_rank"),
    ("Dots1ForCausalLM", ROUTED | dict(n_group=None), "n_group"),
    (
        HUNYUAN,
        dict(head_dim=2, rope_scaling=dict(type="dynamic", alpha=9.0, factor=1.0)),
        "head_dim 2 is not supported",
    ),
    (GEMMA4, dict(rope_scaling=None), f"rope_parameters {NULL}"),
    (MELLUM, dict(rope_parameters={}), "rope_parameters.full_attention is missing"),
    *(
        (
            name,
            dict(rope_parameters=dict(rope_type="default", partial_rotary_factor=None)),
            f"partial_rotary_factor {NULL}",
        )
        for name in ("PhiForCausalLM", "StableLmForCausalLM", "GlmForCausalLM", "GPTNeoXForCausalLM")
    ),
    ("GPTNeoXForCausalLM", dict(rotary_pct=None), f"partial_rotary_factor {NULL}"),
    *(
        (name, dict(head_dim=48), "head_dim 48 is not supported; 64 is")
        for name in ("YoutuForCausalLM", "DeepseekV3ForCausalLM", "KimiK25ForConditionalGeneration")
    ),
    ("Mistral4ForCausalLM", dict(head_dim=64), "head_dim 64 is not supported; 128 is"),
]


@pytest.mark.parametrize(("architecture", "fields", "told"), NAMED, ids=str)
def test_the_field_is_named(architecture: str, fields: dict[str, Any], told: str, tmp_path: Path) -> None:
    folder = written(tmp_path, {"architectures": [architecture], **fields})
    for read in (read_config, plain_config):
        with pytest.raises(UnsupportedModel, match=rf"config.json: .*{told}"):
            read(folder)


READ: list[dict[str, Any]] = [
    dict(architectures=["ApertusForCausalLM"], rope_parameters=dict(rope_type="default")),
    dict(architectures=["ApertusForCausalLM"], rope_parameters={}),
    dict(architectures=[GEMMA4], per_layer_config=None),
    dict(architectures=[QWEN2_5_VL], max_window_layers=None),
    dict(architectures=["Dots1ForCausalLM"], max_window_layers=None, sliding_window=None, **ROUTED),
    dict(architectures=["Qwen3_5MoeForCausalLM"], intermediate_size=None),
    dict(architectures=[GRANITE4], num_local_experts=0, num_experts_per_tok=None, **MAMBA),
    dict(architectures=[GRANITE4], num_local_experts=None, **MAMBA),
    dict(architectures=[GRANITE4], num_local_experts=0, num_experts_per_tok=0, **MAMBA),
    dict(architectures=["Qwen3MoeForCausalLM"], shared_expert_intermediate_size=0, qkv_bias=False),
    dict(architectures=["Qwen3_5ForCausalLM"], num_experts_per_tok=0, moe_intermediate_size=0),
    dict(architectures=["Mistral4ForCausalLM"], partial_rotary_factor=1.0),
    dict(architectures=["Lfm3ForCausalLM"], rope_parameters={FULL: dict(factor=2.0, type="linear"), LOCAL: {}}),
    dict(architectures=["DeepseekV32ForCausalLM"], head_dim=48),
    dict(architectures=["Glm4MoeLiteForCausalLM"], head_dim=32),
]


@pytest.mark.parametrize("given", READ, ids=str)
def test_both_read_what_the_engine_takes(given: dict[str, Any], tmp_path: Path) -> None:
    folder = written(tmp_path, given)
    assert plain_config(folder) == read_config(folder)
