"""Granite: a Llama with multipliers on embeddings, scores, what is added to the residual stream, and logits.

GraniteMoe has experts in place of MLPs, GraniteMoeShared one beside them that every row meets, without a gate. Their
router takes the softmax over the chosen experts alone: that over all of them, divided by the chosen ones' sum. All
experts of a layer lie in one tensor [E, 2 I, H], gates before ups.

Granite 4 (GraniteMoeHybrid) has Mamba-2 layers in place of attention in most layers, or none. It may have no experts:
what is called shared MLP is then the only one. It may rotate nothing.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from headrace.config import AttentionSpec, RecurrentSpec
from headrace.models.families.base import Family, Names, behind_convolutions
from headrace.models.families.experts import everywhere, expert_names, mixture
from headrace.models.families.llama import PREFIXES, common, names, uniform_windows
from headrace.models.spec import ModelConfig, RopeSpec
from headrace.types import UnsupportedModel


def _facts(config: Any) -> dict[str, Any]:
    return multiplied(config, uniform_windows(config, None)) | dict(mlp_bias=config.mlp_bias)


def multiplied(config: Any, windows: tuple[int | None, ...], turned: RopeSpec | None = None) -> dict[str, Any]:
    """What all Granites have. turned: see llama.common."""
    facts = common(config, windows, turned=turned)
    return facts | dict(
        attention=replace(facts["attention"], scale=number(config, "attention_multiplier")),
        embed_scale=number(config, "embedding_multiplier"),
        residual_scale=number(config, "residual_multiplier"),
        logit_scale=1.0 / number(config, "logits_scaling"),
        qkv_bias=config.attention_bias,
        out_bias=config.attention_bias,
    )


def number(config: Any, name: str) -> float:
    """A multiplier. Raises UnsupportedModel where there is none."""
    value = getattr(config, name)
    if value is None:
        raise UnsupportedModel(f"{name} is null; download the file again")
    return float(value)


def routed(config: Any, shared: int = 0) -> dict[str, Any]:
    """The experts of every layer, and one of this width beside them."""
    count, inner = config.num_local_experts, config.intermediate_size
    return mixture(config, count, inner, True, everywhere(config), shared, shared_gate=False)


def _moe(config: Any) -> dict[str, Any]:
    return multiplied(config, uniform_windows(config, None)) | routed(config)


def _moe_shared(config: Any) -> dict[str, Any]:
    return multiplied(config, uniform_windows(config, None)) | routed(config, config.shared_intermediate_size)


KINDS = ("linear_attention", "full_attention")
"""Of layers, as transformers calls what the files call mamba and attention."""


def _hybrid(config: Any) -> dict[str, Any]:
    inner, positions = config.shared_intermediate_size, config.position_embedding_type
    if positions not in (None, "rope", "nope"):
        raise UnsupportedModel(f"position_embedding_type {positions!r} is not supported; 'rope', 'nope' and null are")
    if not inner:
        raise UnsupportedModel("shared_intermediate_size 0 is not supported; 1 or more is")
    facts = multiplied(config, (None,) * config.num_hidden_layers)
    facts |= routed(config, inner) if config.num_local_experts else dict(intermediate_size=inner)
    facts |= dict(no_rope_layers=() if positions == "rope" else tuple(range(config.num_hidden_layers)))
    return facts | _mamba(config, facts["attention"])


def _mamba(config: Any, attention: AttentionSpec) -> dict[str, Any]:
    """Which layers are Mamba-2 layers, and what attention is of the others."""
    for kind in config.layer_types:
        if kind not in KINDS:
            raise UnsupportedModel(f"layer_types with {kind!r} is not supported; supported: mamba, attention")
    layers = tuple(layer for layer, kind in enumerate(config.layer_types) if kind == KINDS[0])
    if not layers:
        return {}
    behind_convolutions(config)
    if config.mamba_proj_bias:
        raise UnsupportedModel("mamba_proj_bias true is not supported; only false is")
    if len(layers) == config.num_hidden_layers:
        raise UnsupportedModel("layer_types without 'attention' are not supported")
    return dict(
        recurrent=mamba_spec(
            len(layers), config.mamba_n_groups, config.mamba_n_heads, config.mamba_d_state, config.mamba_d_head,
            config.mamba_d_conv,
        ),
        recurrent_layers=layers,
        attention=attention.first(config.num_hidden_layers - len(layers)),
        conv_bias=config.mamba_conv_bias,
    )  # fmt: skip


def mamba_spec(layers: int, groups: Any, heads: Any, state: Any, head_dim: Any, kernel: Any) -> RecurrentSpec:
    """Of so many Mamba-2 layers. Raises UnsupportedModel for sizes that do not fit each other, or are none."""
    if not all(isinstance(size, int) for size in (groups, heads, state, head_dim, kernel)):
        raise UnsupportedModel("a size of its mamba layers is missing; download the file again")
    if heads % groups:
        raise UnsupportedModel(f"{groups} groups of keys do not divide {heads} heads of Mamba-2 layers")
    if kernel < 2:
        raise UnsupportedModel(f"a convolution of {kernel} inputs is not supported; 2 or more is")
    return RecurrentSpec(layers, groups, heads, state, head_dim, kernel, "mamba2")


def mamba_rows(config: ModelConfig, name: str) -> list[int] | None:
    """Of in_proj the last rows gate the steps, the others are `mixed`."""
    if config.recurrent is None:
        return None
    begin, kind = sum(config.recurrent.mixed), name.split(".", 2)[-1]
    rows = {"mixed.weight": range(begin), "gates.weight": range(begin, begin + config.recurrent.gate_rows)}
    return list(rows[kind]) if kind in rows else None


MOE = "block_sparse_moe."
PUBLISHED = expert_names(
    MOE + "router.layer", (MOE + "experts.{}.input_linear",), MOE + "experts.{}.output_linear"
)  # fmt: skip
"""models.checkpoint shows the experts' tensors one by one under these names."""
RENAMED = expert_names(MOE + "router", (MOE + "experts.{}.gate_up_proj",), MOE + "experts.{}.down_proj")
"""As transformers calls them in memory, and may write them."""
SHARED: Names = {
    "layers.{}.shared.up": ("layers.{}.shared_mlp.input_linear",),
    "layers.{}.shared.down": ("layers.{}.shared_mlp.output_linear",),
}


DENSE: Names = {
    "layers.{}.up": SHARED["layers.{}.shared.up"],
    "layers.{}.down": SHARED["layers.{}.shared.down"],
}
"""The same as the only MLP of a layer."""


def moe_names(config: ModelConfig) -> Names:
    """As the files have them."""
    return {**names(config), **PUBLISHED, **SHARED}


def moe_names_renamed(config: ModelConfig) -> Names:
    """As transformers has them in memory."""
    return {**names(config), **RENAMED, **SHARED}


def _hybrid_names(config: ModelConfig) -> Names:
    found = {**names(config), **DENSE} if config.experts is None else moe_names(config)
    return {**found, **_mamba_names(config)}


def _hybrid_names_renamed(config: ModelConfig) -> Names:
    return {**moe_names_renamed(config), **_mamba_names(config)}


def mamba_names() -> dict[str, tuple[str, ...]]:
    """Of Mamba-2 layers but for what they make in the end."""
    mamba = "layers.{}.mamba"
    return {
        "layers.{}.mixed": (mamba + ".in_proj",),
        "layers.{}.gates": (mamba + ".in_proj",),
        "layers.{}.conv": (mamba + ".conv1d",),
        "layers.{}.delta": (mamba,),
        "layers.{}.delta_norm": (mamba + ".norm",),
    }


def _mamba_names(config: ModelConfig) -> Names:
    return mamba_names() | {f"layers.{i}.out": (f"layers.{i}.mamba.out_proj",) for i in config.recurrent_layers}


GRANITE = Family("granite", "transformers.models.granite.configuration_granite:GraniteConfig", _facts, names, PREFIXES)
GRANITE_MOE = Family(
    "granitemoe", "transformers.models.granitemoe.configuration_granitemoe:GraniteMoeConfig", _moe, moe_names,
    PREFIXES, other_names=moe_names_renamed,
)  # fmt: skip
GRANITE_MOE_SHARED = Family(
    "granitemoeshared", "transformers.models.granitemoeshared.configuration_granitemoeshared:GraniteMoeSharedConfig",
    _moe_shared, moe_names, PREFIXES, other_names=moe_names_renamed,
)  # fmt: skip
GRANITE_HYBRID = Family(
    "granitemoehybrid", "transformers.models.granitemoehybrid.configuration_granitemoehybrid:GraniteMoeHybridConfig",
    _hybrid, _hybrid_names, PREFIXES, rows=mamba_rows, other_names=_hybrid_names_renamed,
)  # fmt: skip
