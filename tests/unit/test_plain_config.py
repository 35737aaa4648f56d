"""config.json read without transformers, against transformers' own reading."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from headrace.models.config import read_config
from headrace.models.families import FAMILIES
from headrace.models.plain_config import plain_config
from headrace.types import UnsupportedModel
from tests.support.config_files import written
from tests.support.plain_configs import EXAONE_MOE, GEMMA4, GIVEN, GRANITE4, MAMBA, MELLUM, NEMOTRON

pytestmark = pytest.mark.unit


@pytest.mark.parametrize("given", GIVEN, ids=str)
def test_it_reads_and_refuses_what_transformers_does(given: dict[str, Any], tmp_path: Path) -> None:
    folder = written(tmp_path, given)
    try:
        theirs: Any = read_config(folder)
    except UnsupportedModel as error:
        with pytest.raises(UnsupportedModel) as refused:
            plain_config(folder)
        assert str(refused.value) == str(error)
    else:
        assert plain_config(folder) == theirs


LEFT_OVER: dict[str, Any] = dict(
    max_window_layers=28, use_sliding_window=False, full_attention_interval=4, indexer_types=None, n_embd=96, n_head=3,
    n_layer=5, n_positions=77, n_embed=96, mlp_only_layers=None, mlp_layer_types=None, layer_types=None,
    no_rope_layers=None, full_attn_idxs=[1], tie_embedding=True, sliding_window_pattern=3, rope_local_base_freq=777.0,
    rotary_pct=0.5, num_experts=8, num_local_experts=8, n_routed_experts=8, moe_k=2, moe_topk=2,
    first_k_dense_replace=2, rotary_dim=64,
)  # fmt: skip
"""Fields that some classes have."""


@pytest.mark.parametrize("name", LEFT_OVER)
def test_fields_count_for_the_classes_that_have_them(name: str, tmp_path: Path) -> None:
    for architecture in FAMILIES:
        folder = written(tmp_path, {"architectures": [architecture], name: LEFT_OVER[name]})
        try:
            theirs: Any = read_config(folder)
        except UnsupportedModel as error:
            if "transformers does not accept" not in str(error):
                with pytest.raises(UnsupportedModel):
                    plain_config(folder)
        else:
            assert plain_config(folder) == theirs, architecture


@pytest.mark.parametrize(
    ("architecture", "name", "value", "refused"),
    [
        ("Phi3ForCausalLM", "AutoTokenizer", "Xenova/gpt-4o", False),  # Phi-4 mini
        ("Phi3ForCausalLM", "AutoModelForCausalLM", "Xenova/gpt-4o", True),
        ("HunYuanMoEV1ForCausalLM", "AutoModelForCausalLM", "hunyuan.HunYuanMoEV1ForCausalLM", False),
        ("LlamaForCausalLM", "AutoModelForCausalLM", "hunyuan.LlamaForCausalLM", True),
    ],
)
def test_code_that_files_name(architecture: str, name: str, value: str, refused: bool, tmp_path: Path) -> None:
    folder = written(tmp_path, dict(architectures=[architecture], auto_map={name: value}))
    for read in (read_config, plain_config):
        if not refused:
            read(folder)
            continue
        with pytest.raises(UnsupportedModel, match=f"auto_map names {value}: remote code is never run"):
            read(folder)


def test_quantisation_stands_beside_the_text_part(tmp_path: Path) -> None:
    given = dict(architectures=["Qwen3_5ForConditionalGeneration"], text_config=dict(model_type="qwen3_5_text"))
    folder = written(tmp_path, given | dict(quantization_config=dict(quant_method="gptq", bits=3)))
    for read in (read_config, plain_config):
        with pytest.raises(UnsupportedModel, match="gptq of 3 bits"):
            read(folder)


@pytest.mark.parametrize(
    ("steps", "told"),
    [
        ([0.0, float("inf")], None),
        (None, None),
        ([0.001, 0.1], r"time_step_limit \[0.001, 0.1\]"),
        (3, "time_step_limit 3"),
    ],
)
def test_steps_of_mamba_layers_have_no_limits(steps: Any, told: str | None, tmp_path: Path) -> None:
    folder = written(tmp_path, dict(architectures=[GRANITE4], time_step_limit=steps, **MAMBA))
    for read in (read_config, plain_config):
        if told is None:
            assert read(folder).recurrent is not None
            continue
        with pytest.raises(UnsupportedModel, match=told):
            read(folder)


@pytest.mark.parametrize(
    "given",
    [
        dict(architectures=["Exaone4ForCausalLM"], sliding_window=None),
        dict(architectures=["ExaoneMoeForCausalLM"], sliding_window=None),
        dict(architectures=["Exaone4ForCausalLM"], sliding_window_pattern="LLLG"),
        dict(architectures=["Cohere2ForCausalLM"], sliding_window_pattern=0),
        dict(architectures=["Gemma3ForCausalLM"], sliding_window_pattern=0),
    ],
)
def test_layers_that_nothing_tells_apart(given: dict[str, Any], tmp_path: Path) -> None:
    folder = written(tmp_path, given)
    for read, told in ((read_config, "transformers does not accept"), (plain_config, "layer_types is missing")):
        with pytest.raises(UnsupportedModel, match=told):
            read(folder)


@pytest.mark.parametrize(
    ("given", "told"),
    [
        (dict(layers_block_type=["mamba", "sliding_attention"]), "layers_block_type with 'sliding_attention'"),
        (dict(hybrid_override_pattern="M?*"), "hybrid_override_pattern is no pattern of M, E, \\* and -"),
        (dict(architectures=[MELLUM], mlp_layer_types=["dense"]), "names 1 layers, num_hidden_layers is 28"),
        (dict(architectures=[EXAONE_MOE], mlp_layer_types=["dense", "routed"]), "mlp_layer_types with 'routed'"),
    ],
)
def test_kinds_of_layers_that_no_such_model_has(given: dict[str, Any], told: str, tmp_path: Path) -> None:
    folder = written(tmp_path, dict(architectures=[NEMOTRON]) | given)
    for read, expected in ((read_config, "transformers does not accept"), (plain_config, told)):
        with pytest.raises(UnsupportedModel, match=expected):
            read(folder)


@pytest.mark.parametrize(
    ("layers", "told"),
    [
        (["05", "11"], None),
        (["4", "04"], "per_layer_config names layer 4 twice"),
        (["04", "12"], "per_layer_config names layer 12, num_hidden_layers is 12"),
    ],
)
def test_layers_with_heads_of_their_own_are_numbered(layers: list[str], told: str | None, tmp_path: Path) -> None:
    own = {layer: dict(head_dim=512) for layer in layers}
    folder = written(tmp_path, dict(architectures=[GEMMA4], num_hidden_layers=12, per_layer_config=own))
    for read in (read_config, plain_config):
        if told is None:
            assert [layer for layer, (_, dim) in enumerate(read(folder).attention.shapes) if dim == 512] == [5, 11]
            continue
        with pytest.raises(UnsupportedModel, match=told):
            read(folder)


@pytest.mark.parametrize("name", ["hidden_size", "num_attention_heads", "num_hidden_layers", "max_position_embeddings"])
@pytest.mark.parametrize("architecture", FAMILIES)
def test_null_where_a_number_is_needed(architecture: str, name: str, tmp_path: Path) -> None:
    folder = written(tmp_path, {"architectures": [architecture], name: None})
    if (architecture, name) == (NEMOTRON, "num_hidden_layers"):  # its kinds of layers tell it
        assert plain_config(folder) == read_config(folder)
        return
    with pytest.raises(UnsupportedModel, match=rf"config.json: {name} is null; download the file again"):
        plain_config(folder)
