"""Llama 4, of which the text part is computed: three of four layers rotate pairs of neighbours and attend within blocks
of 8,192 keys (chunked attention), the others rotate nothing, attend to all keys and temper their queries by position.

Queries and keys that are rotated are then normed, without weights. An expert's share multiplies what enters it.
"""

from __future__ import annotations

from typing import Any

from headrace.config import RoutingSpec
from headrace.models.families.base import Family, Names, paired_rows, rope
from headrace.models.families.experts import expert_names, mixture
from headrace.models.families.llama import PREFIXES, common, names
from headrace.models.spec import LENGTH_DEPENDENT, ModelConfig, RopeSpec
from headrace.types import UnsupportedModel

KINDS = ("full_attention", "chunked_attention")
"""Names of layers that rotate nothing, and of those that attend within blocks."""


def _facts(config: Any) -> dict[str, Any]:
    local, turned = _blocks(config), rope(config)
    if turned.kind in LENGTH_DEPENDENT:
        raise UnsupportedModel(f"rope_type {turned.kind!r} is not supported with chunked_attention")
    windows = tuple(-config.attention_chunk_size if each else None for each in local)
    facts = common(config, windows, turned=turned, inner=config.intermediate_size_mlp)
    facts |= dict(qkv_bias=config.attention_bias, out_bias=config.attention_bias)
    facts |= mixture(
        config, config.num_local_experts, config.intermediate_size, False, _sparse_layers(config),
        config.intermediate_size, shared_gate=False, routing=RoutingSpec("sigmoid", weighs_inputs=True),
    )  # fmt: skip
    if config.attn_temperature_tuning:
        facts |= dict(rope=_tempered(config), local_rope=turned)
    else:
        facts |= dict(no_rope_layers=tuple(layer for layer, each in enumerate(local) if not each))
    normed = bool(config.use_qk_norm) and any(local)
    return facts | dict(qk_norm=normed, qk_norm_affine=False, qk_norm_local=normed, turn_before_norm=normed)


def _blocks(config: Any) -> list[bool]:
    """Which layers attend within blocks: those that are rotated, as in all published models."""
    turned, kinds = config.no_rope_layers, config.layer_types
    for kind in kinds:
        if kind not in KINDS:
            raise UnsupportedModel(f"layer_types with {kind!r} is not supported; {' and '.join(KINDS)} are")
    for name, each in (("no_rope_layers", turned), ("layer_types", kinds)):
        if len(each) != config.num_hidden_layers:
            raise UnsupportedModel(f"{name} names {len(each)} layers, num_hidden_layers is {config.num_hidden_layers}")
    local = [kind == KINDS[1] for kind in kinds]
    if not config.attention_chunk_size:
        raise UnsupportedModel("attention_chunk_size null is not supported; a number of keys is")
    if local != [bool(each) for each in turned]:
        raise UnsupportedModel(f"layer_types must name {KINDS[1]} where no_rope_layers has 1, and {KINDS[0]} elsewhere")
    return local


def _sparse_layers(config: Any) -> tuple[bool, ...]:
    return tuple(layer in set(config.moe_layers) for layer in range(config.num_hidden_layers))


def _tempered(config: Any) -> RopeSpec:
    """Of layers that rotate nothing: a rotation by no angle, with the factor of queries in it."""
    still = (("original_max_position_embeddings", config.floor_scale), ("partial_rotary_factor", 0.0))
    parameters = (*still, ("rope_theta", 1.0))
    return RopeSpec(
        "proportional", parameters, config.max_position_embeddings, query_beta=config.attn_scale, query_ahead=1
    )


def _rows(config: ModelConfig) -> list[int]:
    """Of layers that rotate nothing too: queries and keys move alike."""
    return paired_rows(config.attention, config.attention.head_dim)


def _names(config: ModelConfig) -> Names:
    """Experts one by one, as files of quantised weights have them."""
    part = "feed_forward.experts.{}."
    return _with_experts(config, (f"{part}gate_proj", f"{part}up_proj"))


def _names_together(config: ModelConfig) -> Names:
    return _with_experts(config, ("feed_forward.experts.{}.gate_up_proj",))


def _with_experts(config: ModelConfig, up: tuple[str, ...]) -> Names:
    fed = "layers.{}.feed_forward."
    return {
        **names(config),
        **expert_names("feed_forward.router", up, "feed_forward.experts.{}.down_proj"),
        "layers.{}.up": (fed + "gate_proj", fed + "up_proj"),
        "layers.{}.down": (fed + "down_proj",),
        "layers.{}.shared.up": (fed + "shared_expert.gate_proj", fed + "shared_expert.up_proj"),
        "layers.{}.shared.down": (fed + "shared_expert.down_proj",),
    }


def _completed(raw: dict[str, Any]) -> dict[str, Any]:
    """The first files say by a number that queries are tempered."""
    text, name = dict(raw.get("text_config") or {}), "attn_temperature_tuning"
    return raw | {"text_config": text | {name: bool(text[name])}} if text.get(name) is not None else raw


CONFIGURATION = "transformers.models.llama4.configuration_llama4:Llama4TextConfig"
LLAMA4 = Family(
    "llama4_text", CONFIGURATION, _facts, _names, PREFIXES, qkv_rows=_rows, other_names=_names_together,
    fused_by_inputs=True,
)  # fmt: skip
LLAMA4_WITH_VISION = Family(
    "llama4", CONFIGURATION, _facts, _names, ("language_model.model.", "model.language_model."),
    qkv_rows=_rows, text_type="llama4_text", completed=_completed, other_names=_names_together, fused_by_inputs=True,
    unread=("vision_model.", "multi_modal_projector.", "model.vision_model.", "model.multi_modal_projector."),
)  # fmt: skip
"""Images are refused."""
