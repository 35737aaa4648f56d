"""Our LlamaConfig against transformers' own: what it gives, and what it refuses."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import pytest
from transformers import LlamaConfig as Theirs

from headrace.models import schema
from headrace.models.families.llama_config import LlamaConfig

pytestmark = pytest.mark.cpu

LLAMA3 = dict(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=64)
GIVEN: list[dict[str, Any]] = [
    {},
    dict(hidden_size=64, num_attention_heads=4),
    dict(hidden_size=64, num_attention_heads=4, num_key_value_heads=2, head_dim=32),
    dict(attention_bias=True, mlp_bias=True, tie_word_embeddings=True, hidden_act="gelu", rms_norm_eps=1e-5),
    dict(eos_token_id=[1, 2], bos_token_id=None, pad_token_id=0, dtype="bfloat16", architectures=["LlamaForCausalLM"]),
    dict(torch_dtype="float16", layer_types=["full_attention"] * 32, sliding_window=7, max_window_layers=3),
    dict(rope_theta=5e5, max_position_embeddings=4096),
    dict(rope_theta=5e5, rope_scaling=dict(type="linear", factor=2.0)),
    dict(rope_scaling=dict(rope_type="dynamic", factor=2), original_max_position_embeddings=512),
    dict(rope_parameters=dict(rope_type="llama3", rope_theta=5e5, **LLAMA3), max_position_embeddings=512),
    dict(rope_scaling=dict(rope_type="yarn", factor=4.0), partial_rotary_factor=0.5),
    dict(rope_parameters=dict(rope_type="default", rope_theta=None)),
]
REFUSED: list[dict[str, Any]] = [
    dict(hidden_size=65, num_attention_heads=4),
    dict(vocab_size=None),
    dict(mlp_bias=None),
    dict(attention_bias=None, hidden_act=None),
    dict(num_hidden_layers=None),
    dict(num_attention_heads=None),
    dict(rms_norm_eps=1),
    dict(bos_token_id=[1]),
    dict(pretraining_tp=None, head_dim=None, hidden_size=None),
    dict(rope_parameters=dict(rope_type="linear")),
    dict(rope_parameters=dict(rope_type="dynamic")),
    dict(rope_parameters=dict(rope_type="llama3", factor=8.0)),
]
REFUSED += [{name: "x"} for name in LlamaConfig.__annotations__ if name != "hidden_act"]


FIELDS = [name for name in schema.ConfigFields.__struct_fields__ if name != "per_layer_config"]
"""Of a model whose layers are alike that is a view of the whole, which equals no other."""


def outcome(kind: type, raw: dict[str, Any]) -> tuple[str, Any]:
    """What reading `raw` gives: the fields that ours has, or the kind and the words of the error."""
    try:
        config = kind.from_dict(schema.known(raw))
    except Exception as error:
        return type(error).__name__, str(error)
    names = [*FIELDS, *(field.name for field in fields(LlamaConfig))]
    return "config", {name: getattr(config, name, "absent") for name in names}


@pytest.mark.parametrize("raw", GIVEN, ids=str)
def test_it_reads_what_transformers_reads(raw: dict[str, Any]) -> None:
    kind, values = outcome(LlamaConfig, raw)
    assert (kind, values) == outcome(Theirs, raw) and kind == "config"


@pytest.mark.parametrize("raw", REFUSED, ids=str)
def test_it_refuses_what_transformers_refuses(raw: dict[str, Any]) -> None:
    kind, words = outcome(LlamaConfig, raw)
    assert (kind, words) == outcome(Theirs, raw) and kind != "config"


def test_its_fields_are_those_of_transformers_that_are_read() -> None:
    theirs = {field.name: field.default for field in fields(Theirs)}
    ours = {field.name: field.default for field in fields(LlamaConfig)}
    assert ours.items() <= theirs.items()
    assert set(theirs) - set(ours) == {"initializer_range", "use_cache", "attention_dropout"}
    assert not (set(theirs) - set(ours)) & set(schema.ConfigFields.__struct_fields__)
