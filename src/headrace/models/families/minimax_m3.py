"""MiniMax-M3, the text part: grouped attention to blocks of keys that an indexer chooses, experts chosen by corrected
sigmoids beside a shared one, gpt-oss's clamped gates without biases, norms that multiply by 1 + weight."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from headrace.config import IndexSpec, RoutingSpec
from headrace.models.families.base import Family, Names
from headrace.models.families.experts import MIXTRALS, TOGETHER, kinds_of_mlp, mixture
from headrace.models.families.gpt_oss import refuse_other_gates
from headrace.models.families.llama import common, names
from headrace.models.spec import ModelConfig
from headrace.types import CHUNK, UnsupportedModel

ATTENTION_TYPES = ("full_attention", "minimax_m3_sparse")
"""Names of layers whose rows attend to all keys, and of those whose rows choose."""


def _facts(config: Any) -> dict[str, Any]:
    refuse_other_gates(config)
    facts = common(config, (None,) * config.num_hidden_layers, partial=True)
    turned = facts["rope"].width(config.head_dim)
    if config.rotary_dim != turned:
        raise UnsupportedModel(f"rotary_dim {config.rotary_dim} does not fit partial_rotary_factor: it makes {turned}")
    experts = mixture(
        config, config.num_local_experts, config.intermediate_size, True, kinds_of_mlp(config),
        config.shared_intermediate_size, shared_gate=False,
        routing=RoutingSpec("sigmoid", corrected=True, scale=config.routed_scaling_factor),
    )  # fmt: skip
    spec, index = facts["attention"], _index(config, turned)
    if index is not None:
        spec = replace(spec, head_dim=spec.head_dim + index.size // spec.kv_heads, index=index)
    own = dict(activation="swiglu_oai", qk_norm=True, norm_offset=1.0, intermediate_size=config.dense_intermediate_size)
    return facts | experts | own | dict(attention=spec)


def _index(config: Any, turned: int) -> IndexSpec | None:
    """None: rows of all layers attend to all keys."""
    kinds, layers = config.layer_types, config.num_hidden_layers
    for kind in kinds:
        if kind not in ATTENTION_TYPES:
            raise UnsupportedModel(f"layer_types with {kind!r} is not supported; {' and '.join(ATTENTION_TYPES)} are")
    if len(kinds) != layers:
        raise UnsupportedModel(f"layer_types names {len(kinds)} layers, num_hidden_layers is {layers}")
    heads, size, block = config.index_n_heads, config.index_head_dim, config.index_block_size
    if heads != config.num_key_value_heads or size % (2 * heads) or size < turned:
        raise UnsupportedModel(
            f"index_n_heads {heads} of index_head_dim {size} do not fit num_key_value_heads "
            f"{config.num_key_value_heads} and {turned} numbers that are rotated"
        )
    if block % CHUNK or config.index_local_blocks > config.index_topk_blocks:
        raise UnsupportedModel(
            f"index_block_size {block} with index_local_blocks {config.index_local_blocks} is not supported; blocks of "
            f"whole chunks of {CHUNK} are, as many local ones as index_topk_blocks at most"
        )
    own = tuple(kind == ATTENTION_TYPES[1] for kind in kinds)
    index = IndexSpec(heads, size, block * config.index_topk_blocks, own, block, config.index_local_blocks)
    return index if any(own) else None


def _names(config: ModelConfig) -> Names:
    """Of published files."""
    layer = "layers.{}."
    theirs = {"queries": "index_q_proj", "keys": "index_k_proj", "q_norm": "index_q_norm", "k_norm": "index_k_norm"}
    shared = layer + "block_sparse_moe.shared_experts."
    return {
        **names(config),
        **MIXTRALS,
        **{f"{layer}index_{ours}": (f"{layer}self_attn.{name}",) for ours, name in theirs.items()},
        layer + "routing": (layer + "block_sparse_moe",),
        layer + "shared.up": (shared + "gate_proj", shared + "up_proj"),
        layer + "shared.down": (shared + "down_proj",),
    }


def _in_memory(config: ModelConfig) -> Names:
    """As transformers calls them: gates and ups in one matrix, all experts of a layer in one tensor."""
    layer = "layers.{}."
    theirs = {f"index_{part}": f"self_attn.indexer.{part}" for part in ("q_norm", "k_norm")}
    theirs |= {"index_queries": "self_attn.indexer.q_proj", "index_keys": "self_attn.indexer.k_proj"}
    theirs |= {"up": "mlp.gate_up_proj", "routing": "mlp.gate", "shared.up": "mlp.shared_experts.gate_up_proj"}
    theirs |= {"shared.down": "mlp.shared_experts.down_proj"}
    return {**names(config), **TOGETHER, **{layer + ours: (layer + name,) for ours, name in theirs.items()}}


MINIMAX_M3 = Family(
    "minimax_m3_vl", "transformers.models.minimax_m3_vl.configuration_minimax_m3_vl:MiniMaxM3VLTextConfig", _facts,
    _names, ("language_model.model.", "model.language_model.", "language_model."),
    text_type="minimax_m3_vl_text",
    other_names=_in_memory,
    unread=(
        "vision_tower.", "multi_modal_projector.", "patch_merge_mlp.", "mtp.", "language_model.mtp.",
        "model.vision_tower.", "model.multi_modal_projector.",
    ),
)  # fmt: skip
"""Images are refused."""
