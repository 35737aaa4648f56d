"""StableLM: a Llama with LayerNorm, of which a part of each head is rotated; where use_parallel_residual says so,
attention and MLP lie beside each other behind one norm."""

from __future__ import annotations

from typing import Any

from headrace.models.families.base import GATED_ACTIVATIONS, Family, activation, attention, rope, rope_reach
from headrace.models.families.llama import PREFIXES, names
from headrace.types import UnsupportedModel


def _facts(config: Any) -> dict[str, Any]:
    if config.qk_layernorm:
        raise UnsupportedModel("qk_layernorm true is not supported; only false is")
    heads, spec = config.num_attention_heads, rope(config, partial=True)
    return dict(
        intermediate_size=config.intermediate_size,
        embed_size=config.hidden_size,
        max_model_len=rope_reach(config, spec),
        attention=attention(config, kv_heads=config.num_key_value_heads, head_dim=config.hidden_size // heads),
        positions="rope",
        rope=spec,
        norm="layer",
        norm_eps=config.layer_norm_eps,
        activation=activation("hidden_act", config.hidden_act, GATED_ACTIVATIONS),
        gated=True,
        block="parallel" if config.use_parallel_residual else "pre",
        mlp_norm=not config.use_parallel_residual,
        qkv_bias=config.use_qkv_bias,
    )


STABLELM = Family(
    "stablelm", "transformers.models.stablelm.configuration_stablelm:StableLmConfig", _facts, names, PREFIXES
)
