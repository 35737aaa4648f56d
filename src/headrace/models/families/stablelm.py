"""StableLM: a Llama with LayerNorm, of which a part of each head is rotated; where use_parallel_residual says so,
attention and MLP lie beside each other behind one norm."""

from __future__ import annotations

from typing import Any

from headrace.models.families.base import Family, layer_normed
from headrace.models.families.llama import PREFIXES, names
from headrace.types import UnsupportedModel


def _facts(config: Any) -> dict[str, Any]:
    if config.qk_layernorm:
        raise UnsupportedModel("qk_layernorm true is not supported; only false is")
    beside = bool(config.use_parallel_residual)
    facts = layer_normed(config, config.layer_norm_eps, config.num_key_value_heads, partial=True, gated=True)
    return facts | dict(block="parallel" if beside else "pre", mlp_norm=not beside, qkv_bias=config.use_qkv_bias)


STABLELM = Family(
    "stablelm", "transformers.models.stablelm.configuration_stablelm:StableLmConfig", _facts, names, PREFIXES
)
