"""Llama's kin with experts in place of MLPs. Qwen3-MoE: QK-norm, dense layers between. Mixtral: eight wide experts of
which two are met. OLMoE: queries and keys normed over all heads together.

transformers writes experts one by one (as they are published) or fused: one tensor [E, 2 I, H] of all gates and ups.
"""

from __future__ import annotations

from typing import Any

from headrace.models.families.base import Family, Names
from headrace.models.families.llama import PREFIXES, common, names, uniform_windows
from headrace.models.spec import ExpertsSpec, ModelConfig
from headrace.types import UnsupportedModel

MOST_EXPERTS = 1 << 17
"""Of all layers: a model folder that claims more is damaged, or made to fill memory with names."""


def _experts(config: Any, count: int, inner: int, normalised: bool, layers: tuple[bool, ...]) -> dict[str, Any]:
    """The experts, if any layer has them. Refuses more chosen ones than there are, and more than any model has."""
    chosen = config.num_experts_per_tok
    if count * sum(layers) > MOST_EXPERTS:
        raise UnsupportedModel(f"{count} experts in {sum(layers)} layers are not supported; {MOST_EXPERTS} in all are")
    if not 1 <= chosen <= count:
        raise UnsupportedModel(f"num_experts_per_tok {chosen} is not supported with {count} experts; 1 to {count} are")
    return dict(experts=ExpertsSpec(count, chosen, inner, normalised, layers) if any(layers) else None)


def _everywhere(config: Any) -> tuple[bool, ...]:
    return (True,) * config.num_hidden_layers


def _qwen3_moe(config: Any) -> dict[str, Any]:
    bias = dict(qkv_bias=config.attention_bias, out_bias=config.attention_bias)
    step, dense = config.decoder_sparse_step, set(config.mlp_only_layers)
    layers = tuple(index not in dense and (index + 1) % step == 0 for index in range(config.num_hidden_layers))
    experts = _experts(config, config.num_experts, config.moe_intermediate_size, config.norm_topk_prob, layers)
    return common(config, uniform_windows(config, config.sliding_window)) | bias | experts | dict(qk_norm=True)


def _mixtral(config: Any) -> dict[str, Any]:
    experts = _experts(config, config.num_local_experts, config.intermediate_size, True, _everywhere(config))
    return common(config, uniform_windows(config, config.sliding_window)) | experts


def _olmoe(config: Any) -> dict[str, Any]:
    if config.clip_qkv is not None:
        raise UnsupportedModel(f"clip_qkv {config.clip_qkv} is not supported; only null is")
    bias = dict(qkv_bias=config.attention_bias, out_bias=config.attention_bias)
    experts = _experts(config, config.num_experts, config.intermediate_size, config.norm_topk_prob, _everywhere(config))
    return common(config, uniform_windows(config, None)) | bias | experts | dict(qk_norm=True, qk_norm_whole=True)


def _one_by_one(config: ModelConfig) -> Names:
    expert = "layers.{}.mlp.experts.{}."
    return _names(config, "mlp.gate", (expert + "gate_proj", expert + "up_proj"), expert + "down_proj")


def _fused(config: ModelConfig) -> Names:
    """Experts [E, ...] in one tensor, which models.checkpoint shows one by one."""
    expert = "layers.{}.mlp.experts.{}."
    return _names(config, "mlp.gate", (expert + "gate_up_proj",), expert + "down_proj")


def _mixtral_names(config: ModelConfig) -> Names:
    expert = "layers.{}.block_sparse_moe.experts.{}."
    return _names(config, "block_sparse_moe.gate", (expert + "w1", expert + "w3"), expert + "w2")


def _names(config: ModelConfig, router: str, up: tuple[str, ...], down: str) -> Names:
    return {
        **names(config),
        "layers.{}.router": ("layers.{}." + router,),
        "layers.{}.experts.{}.up": up,
        "layers.{}.experts.{}.down": (down,),
    }


def _family(model_type: str, configuration: str, facts: Any, own_names: Any) -> Family:
    module = f"transformers.models.{model_type}.configuration_{model_type}:{configuration}"
    return Family(model_type, module, facts, own_names, PREFIXES, other_names=_fused)


QWEN3_MOE = _family("qwen3_moe", "Qwen3MoeConfig", _qwen3_moe, _one_by_one)
MIXTRAL = _family("mixtral", "MixtralConfig", _mixtral, _mixtral_names)
OLMOE = _family("olmoe", "OlmoeConfig", _olmoe, _one_by_one)
