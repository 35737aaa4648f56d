"""Llama's kin with experts in place of MLPs. Qwen2-MoE: one beside them, behind a gate. Qwen3-MoE: QK-norm, dense
layers between; Mellum 2: so, with windows in some layers, which have a base of rotation of their own. Mixtral: eight
wide experts, two of which are met. OLMoE: queries and keys normed over all heads.

transformers writes experts one by one (as they are published) or fused: one tensor [E, 2 I, H] of all gates and ups.
"""

from __future__ import annotations

from typing import Any

from headrace.config import RoutingSpec
from headrace.config.routing import SOFTMAX
from headrace.models.families.base import Family, Names, ropes_by_kind
from headrace.models.families.llama import PREFIXES, common, mixed_windows, names, uniform_windows
from headrace.models.spec import ExpertsSpec
from headrace.types import UnsupportedModel

MOST_EXPERTS = 1 << 17
"""Of all layers: a model folder that claims more is damaged, or made to fill memory with names."""


def mixture(
    config: Any,
    count: int,
    inner: int,
    normalised: bool,
    layers: tuple[bool, ...],
    shared: int = 0,
    chosen: int | None = None,
    shared_gate: bool = True,
    routing: RoutingSpec = SOFTMAX,
) -> dict[str, Any]:
    """The experts, if any layer has them. Refuses more chosen ones than there are, and more than any model has."""
    chosen = config.num_experts_per_tok if chosen is None else chosen
    if count * sum(layers) > MOST_EXPERTS:
        raise UnsupportedModel(f"{count} experts in {sum(layers)} layers are not supported; {MOST_EXPERTS} in all are")
    if not 1 <= chosen <= count:
        raise UnsupportedModel(f"num_experts_per_tok {chosen} is not supported with {count} experts; 1 to {count} are")
    if inner == 0:
        raise UnsupportedModel("moe_intermediate_size 0 is not supported; 1 or more is")
    obstacle = routing.obstacle(count, chosen)
    if obstacle is not None:
        raise UnsupportedModel(f"n_group {routing.groups} with topk_group {routing.met_groups}: {obstacle}")
    spec = ExpertsSpec(count, chosen, inner, normalised, layers, shared, shared_gate, routing=routing)
    return dict(experts=spec if any(layers) else None)


def corrected(config: Any) -> RoutingSpec:
    """DeepSeek-V3's routing: sigmoids, corrections, and groups as good as their two best experts."""
    groups, met, scale = config.n_group, config.topk_group, float(config.routed_scaling_factor)
    summed = 2 if groups > 1 else 1
    return RoutingSpec("sigmoid", corrected=True, groups=groups, met_groups=met, summed=summed, scale=scale)


def beside(config: Any) -> Any:
    """Width of the expert that all rows meet, in classes that always have one."""
    width = config.shared_expert_intermediate_size
    if width == 0:
        raise UnsupportedModel("shared_expert_intermediate_size 0 is not supported here; 1 or more is")
    return width


def everywhere(config: Any) -> tuple[bool, ...]:
    """Every layer."""
    return (True,) * config.num_hidden_layers


def sparse_layers(config: Any) -> tuple[bool, ...]:
    """Which layers of Qwen's models have experts."""
    step, dense = config.decoder_sparse_step, set(config.mlp_only_layers)
    return tuple(index not in dense and (index + 1) % step == 0 for index in range(config.num_hidden_layers))


def given(config: Any, name: str) -> Any:
    """A field that must not be null."""
    value = getattr(config, name)
    if value is None:
        raise UnsupportedModel(f"{name} is null; download the file again")
    return value


MLP_TYPES = ("dense", "sparse")
"""Names of layers without and with experts."""


def kinds_of_mlp(config: Any) -> tuple[bool, ...]:
    """Which layers mlp_layer_types gives experts."""
    for kind in config.mlp_layer_types:
        if kind not in MLP_TYPES:
            raise UnsupportedModel(f"mlp_layer_types with {kind!r} is not supported; {' and '.join(MLP_TYPES)} are")
    if len(config.mlp_layer_types) != config.num_hidden_layers:
        told = f"{len(config.mlp_layer_types)} layers, num_hidden_layers is {config.num_hidden_layers}"
        raise UnsupportedModel(f"mlp_layer_types names {told}")
    return tuple(kind == MLP_TYPES[1] for kind in config.mlp_layer_types)


def _mellum(config: Any) -> dict[str, Any]:
    turned, local = ropes_by_kind(config)
    bias = dict(qkv_bias=config.attention_bias, out_bias=config.attention_bias)
    inner, normalised = config.moe_intermediate_size, config.norm_topk_prob
    experts = mixture(config, config.num_experts, inner, normalised, kinds_of_mlp(config))
    facts = common(config, mixed_windows(config), turned=turned) | bias | experts
    return facts | dict(qk_norm=True, local_rope=local)


def _qwen3_moe(config: Any) -> dict[str, Any]:
    bias = dict(qkv_bias=config.attention_bias, out_bias=config.attention_bias)
    normalised, layers = config.norm_topk_prob, sparse_layers(config)
    experts = mixture(config, config.num_experts, config.moe_intermediate_size, normalised, layers)
    return common(config, uniform_windows(config, config.sliding_window)) | bias | experts | dict(qk_norm=True)


def _qwen2_moe(config: Any) -> dict[str, Any]:
    inner, normalised = config.moe_intermediate_size, config.norm_topk_prob
    experts = mixture(config, config.num_experts, inner, normalised, sparse_layers(config), beside(config))
    return common(config, mixed_windows(config)) | experts | dict(qkv_bias=config.qkv_bias)


def _mixtral(config: Any) -> dict[str, Any]:
    experts = mixture(config, config.num_local_experts, config.intermediate_size, True, everywhere(config))
    return common(config, uniform_windows(config, config.sliding_window)) | experts


def _olmoe(config: Any) -> dict[str, Any]:
    if config.clip_qkv is not None:
        raise UnsupportedModel(f"clip_qkv {config.clip_qkv} is not supported; only null is")
    bias = dict(qkv_bias=config.attention_bias, out_bias=config.attention_bias)
    experts = mixture(config, config.num_experts, config.intermediate_size, config.norm_topk_prob, everywhere(config))
    return common(config, uniform_windows(config, None)) | bias | experts | dict(qk_norm=True, qk_norm_whole=True)


def expert_names(router: str, up: tuple[str, ...], down: str) -> Names:
    """Names of a router and of what each expert has, by those that they have in a layer; `{}`: the expert."""
    return {
        "layers.{}.router": ("layers.{}." + router,),
        "layers.{}.experts.{}.up": tuple("layers.{}." + each for each in up),
        "layers.{}.experts.{}.down": ("layers.{}." + down,),
    }


APART = expert_names(
    "mlp.gate", ("mlp.experts.{}.gate_proj", "mlp.experts.{}.up_proj"), "mlp.experts.{}.down_proj"
)  # fmt: skip
SHARED: Names = {
    "layers.{}.shared_gate": ("layers.{}.mlp.shared_expert_gate",),
    "layers.{}.shared.up": ("layers.{}.mlp.shared_expert.gate_proj", "layers.{}.mlp.shared_expert.up_proj"),
    "layers.{}.shared.down": ("layers.{}.mlp.shared_expert.down_proj",),
}
"""The expert that all rows meet, and what lets it through."""
TOGETHER = expert_names("mlp.gate", ("mlp.experts.{}.gate_up_proj",), "mlp.experts.{}.down_proj")
"""Experts [E, ...] in one tensor, which models.checkpoint shows one by one."""
MIXTRALS = expert_names(
    "block_sparse_moe.gate", ("block_sparse_moe.experts.{}.w1", "block_sparse_moe.experts.{}.w3"),
    "block_sparse_moe.experts.{}.w2",
)  # fmt: skip


def _family(model_type: str, configuration: str, facts: Any, own: Names) -> Family:
    module = f"transformers.models.{model_type}.configuration_{model_type}:{configuration}"
    apart, together = (lambda config: {**names(config), **own}), (lambda config: {**names(config), **own, **TOGETHER})
    return Family(model_type, module, facts, apart, PREFIXES, other_names=together)


QWEN2_MOE = _family("qwen2_moe", "Qwen2MoeConfig", _qwen2_moe, {**APART, **SHARED})
QWEN3_MOE = _family("qwen3_moe", "Qwen3MoeConfig", _qwen3_moe, APART)
MELLUM = _family("mellum", "MellumConfig", _mellum, APART)
MIXTRAL = _family("mixtral", "MixtralConfig", _mixtral, MIXTRALS)
OLMOE = _family("olmoe", "OlmoeConfig", _olmoe, APART)
