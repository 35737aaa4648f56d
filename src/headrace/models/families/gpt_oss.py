"""gpt-oss: experts with biases and a clamped gate, attention sinks, windows in every other layer.

Its router takes the softmax over the chosen experts alone, which is the softmax over all of them divided by the chosen
ones' sum. All experts of a layer lie in one tensor, in bf16 by inputs [E, H, 2 I], as MXFP4 by outputs [E, 2 I, ...];
gates and ups are in turn there.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from typing import Any

from headrace.models.families.base import Family, Names
from headrace.models.families.experts import expert_names, mixture
from headrace.models.families.llama import PREFIXES, common, mixed_windows, names
from headrace.models.spec import ModelConfig
from headrace.types import UnsupportedModel

SWIGLU = {"swiglu_alpha": 1.702, "swiglu_limit": 7.0}
"""What the gate is made of in all published models, and in kernels.ops.swiglu_oai_mul. Older releases of transformers
(5.17 for one) have no such fields."""


def refuse_other_gates(config: Any) -> None:
    """Raises UnsupportedModel for a clamped gate of other numbers."""
    for field, value in SWIGLU.items():
        asked = getattr(config, field, value)
        if asked != value:
            raise UnsupportedModel(f"{field} {asked} is not supported; only {value} is")


def _facts(config: Any) -> dict[str, Any]:
    refuse_other_gates(config)
    facts, layers = common(config, mixed_windows(config)), config.num_hidden_layers
    return {
        **facts,
        **mixture(config, config.num_local_experts, config.intermediate_size, True, (True,) * layers),
        "attention": replace(facts["attention"], sinks=True),
        "activation": "swiglu_oai",
        "qkv_bias": config.attention_bias,
        "out_bias": config.attention_bias,
        "mlp_bias": True,
    }


def _names(config: ModelConfig) -> Names:
    experts = expert_names("mlp.router", ("mlp.experts.{}.gate_up_proj",), "mlp.experts.{}.down_proj")
    return {**names(config), **experts, "layers.{}.attention": ("layers.{}.self_attn",)}


def _rows(config: ModelConfig, name: str) -> list[int] | None:
    """All gates, then all ups."""
    return _apart(config.intermediate_size) if ".up." in name else None


@lru_cache(4)
def _apart(inner: int) -> list[int]:
    return [*range(0, 2 * inner, 2), *range(1, 2 * inner, 2)]


GPT_OSS = Family(
    "gpt_oss", "transformers.models.gpt_oss.configuration_gpt_oss:GptOssConfig", _facts, _names, PREFIXES, rows=_rows,
    fused_by_inputs=True,
)  # fmt: skip
