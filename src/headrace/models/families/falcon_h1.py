"""Falcon-H1 (TII, arXiv 2507.22448): attention and a Mamba-2 layer side by side in every layer, then a gated MLP.

Numbers are multiplied on their way (maximal update parametrization, muP). What multiplies keys, and queries and keys
alike, multiplies the scores here; what multiplies values, what attention makes of them.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from headrace.models.families.base import Family, Names, behind_convolutions
from headrace.models.families.granite import mamba_names, mamba_rows, mamba_spec, number
from headrace.models.families.llama import PREFIXES, common, names
from headrace.models.layer_parts import Multipliers
from headrace.models.spec import ModelConfig
from headrace.types import UnsupportedModel

SIZES = ("mamba_n_groups", "mamba_n_heads", "mamba_d_state", "mamba_d_head", "mamba_d_conv")
UNUSED: dict[str, Any] = dict(mamba_proj_bias=False, projectors_bias=False)
"""Fields that say nothing but this."""


def _facts(config: Any) -> dict[str, Any]:
    for name, usual in UNUSED.items():
        if (value := getattr(config, name)) != usual:
            raise UnsupportedModel(f"{name} {value!r} is not supported; only {usual!r} is")
    if config.mamba_rms_norm and config.mamba_norm_before_gate:
        raise UnsupportedModel("mamba_norm_before_gate true is not supported with mamba_rms_norm; only false is")
    behind_convolutions(config)
    facts = common(config, (None,) * config.num_hidden_layers)
    of_rows, keys = number(config, "attention_in_multiplier"), number(config, "key_multiplier")
    if config.attention_bias and of_rows != 1.0:
        raise UnsupportedModel(f"attention_in_multiplier {of_rows:g} is not supported with attention_bias; only 1 is")
    attention = facts["attention"]
    for name in SIZES:
        if not isinstance(value := getattr(config, name), int):
            raise UnsupportedModel(f"{name} {value!r} is no size; download the file again")
    recurrent = mamba_spec(config.num_hidden_layers, *(getattr(config, name) for name in SIZES))
    return facts | dict(
        attention=replace(attention, scale=attention.scale * keys * of_rows * of_rows),
        recurrent=replace(recurrent, normed=config.mamba_rms_norm),
        recurrent_layers=tuple(range(config.num_hidden_layers)),
        side_by_side=True,
        multipliers=_multipliers(config, of_rows),
        conv_bias=config.mamba_conv_bias,
        embed_scale=number(config, "embedding_multiplier"),
        logit_scale=number(config, "lm_head_multiplier"),
        qkv_bias=config.attention_bias,
        out_bias=config.attention_bias,
        mlp_bias=config.mlp_bias,
    )


def _multipliers(config: Any, of_rows: float) -> Multipliers | None:
    """None where all are 1."""
    z, *channels, steps = (
        each * number(config, "ssm_in_multiplier") for each in _numbers(config, "ssm_multipliers", 5)
    )
    up, down = _numbers(config, "mlp_multipliers", 2)
    out = of_rows * number(config, "attention_out_multiplier")
    made = number(config, "ssm_out_multiplier")
    if all(each == 1.0 for each in (z, *channels, steps, out, made, up, down)):
        return None
    return Multipliers(z, tuple(channels), steps, out, made, up, down)


def _numbers(config: Any, name: str, count: int) -> list[float]:
    values = getattr(config, name)
    if values is None or len(values) != count:
        raise UnsupportedModel(f"{name} are not {count} numbers; download the file again")
    return [float(value) for value in values]


def _names(config: ModelConfig) -> Names:
    layer = "layers.{}."
    return {
        **names(config),
        **mamba_names(),
        "final_norm": ("final_layernorm",),
        layer + "recurrent_out": (layer + "mamba.out_proj",),
        layer + "mlp_norm": (layer + "pre_ff_layernorm",),
        layer + "up": (layer + "feed_forward.gate_proj", layer + "feed_forward.up_proj"),
        layer + "down": (layer + "feed_forward.down_proj",),
    }


FALCON_H1 = Family(
    "falcon_h1", "transformers.models.falcon_h1.configuration_falcon_h1:FalconH1Config", _facts, _names, PREFIXES,
    rows=mamba_rows,
)  # fmt: skip
