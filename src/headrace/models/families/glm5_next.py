"""GLM-5.3-Flash, the text part: Kimi Delta Attention with bounded decays in three layers of four, sparse latent
attention without positions in the others, whose rows choose pools of keys; clamped gates in all MLPs and experts; four
residual streams, which mix (manifold-constrained hyper-connections)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from headrace.config import IndexSpec, RecurrentSpec
from headrace.models.families.base import Family, Names, behind_convolutions
from headrace.models.families.deepseek import latent_rows, unturned_facts
from headrace.models.families.deepseek_sparse import names_apart, names_together
from headrace.models.families.experts import corrected, given, kinds_of_mlp, mixture
from headrace.models.families.hy4 import MOST_STREAMS, refuse_other_limits
from headrace.models.layer_parts import HyperSpec
from headrace.models.spec import ModelConfig
from headrace.types import CHUNK, UnsupportedModel

KINDS = ("linear_attention", "indexed_attention")
RENAMED = (
    (".hc_attn_", ".attn_hc."), (".hc_ffn_", ".ffn_hc."), (".self_attn.forget_gate.", ".self_attn."),
    (".index_kpool_compress_gate", ".index_kpool_compress_gate.weight"),
)  # fmt: skip
"""As transformers' conversion_mapping has it, and one matrix that is called as a vector."""
MOST_ROUNDS = 1000


def _facts(config: Any) -> dict[str, Any]:
    refuse_other_limits(config)
    behind_convolutions(config)
    linear = _linear_layers(config)
    facts = unturned_facts(config, paired=False)
    index, spec = _index(config, config.num_hidden_layers - len(linear)), facts["attention"]
    attention = replace(spec.first(len(index.own)), head_dim=spec.head_dim + index.stored, index=index)
    heads, size, inner = config.linear_num_heads, config.linear_head_dim, given(config, "moe_intermediate_size")
    kernel, bound = config.linear_conv_kernel_dim, config.linear_lower_bound
    if bound is not None and bound >= 0:
        raise UnsupportedModel(f"linear_lower_bound {bound} is not supported; null, or a number below 0, is")
    return facts | dict(
        max_model_len=config.max_position_embeddings,
        activation="swiglu_clamped",
        attention=attention,
        latent=replace(facts["latent"], norm_eps=config.rms_norm_eps),
        rope=None,
        recurrent=RecurrentSpec(len(linear), heads, heads, size, size, kernel, "kda", bound=bound or 0.0),
        recurrent_layers=linear,
        hyper=_streams(config),
        **mixture(
            config, given(config, "n_routed_experts"), inner, bool(config.norm_topk_prob), kinds_of_mlp(config),
            given(config, "n_shared_experts") * inner, shared_gate=False, routing=corrected(config),
        ),
    )  # fmt: skip


def _linear_layers(config: Any) -> tuple[int, ...]:
    """Numbers of the layers with Kimi Delta Attention."""
    kinds = config.layer_types
    for kind in kinds:
        if kind not in KINDS:
            raise UnsupportedModel(f"layer_types with {kind!r} is not supported; {' and '.join(KINDS)} are")
    if len(kinds) != config.num_hidden_layers or len(set(kinds)) < len(KINDS):
        raise UnsupportedModel(
            f"layer_types names {len(kinds)} layers of {len(set(kinds))} kinds; num_hidden_layers is "
            f"{config.num_hidden_layers}, and there must be layers of both kinds"
        )
    if config.linear_conv_kernel_dim < 2:
        raise UnsupportedModel(f"linear_conv_kernel_dim {config.linear_conv_kernel_dim} is not supported; 2 or more is")
    return tuple(layer for layer, kind in enumerate(kinds) if kind == KINDS[0])


def _index(config: Any, layers: int) -> IndexSpec:
    told = config.indexer_types
    if len(told) != config.num_hidden_layers:
        raise UnsupportedModel(f"indexer_types names {len(told)} layers, num_hidden_layers {config.num_hidden_layers}")
    shared = [n for n, kind in enumerate(config.layer_types) if kind == KINDS[1] and told[n] != "full"]
    if shared:
        raise UnsupportedModel(f"indexer_types {told[shared[0]]!r} of layer {shared[0]} is not supported; full is")
    if config.qk_rope_head_dim or not config.index_kpool_always_select_tail:
        raise UnsupportedModel("qk_rope_head_dim above 0, or index_kpool_always_select_tail false, is not supported")
    given(config, "q_lora_rank")
    pool, chosen = config.index_kpool, config.index_topk
    if pool < 2 or CHUNK % pool or chosen % pool:
        raise UnsupportedModel(
            f"index_kpool {pool} with index_topk {chosen} is not supported; 2 to 64 that divides both is"
        )
    return IndexSpec(config.index_n_heads, config.index_head_dim, chosen, (True,) * layers, pool=pool)


def _streams(config: Any) -> HyperSpec:
    if not 1 <= given(config, "hc_mult") <= MOST_STREAMS:
        raise UnsupportedModel(f"hc_mult {config.hc_mult} is not supported; 1 to {MOST_STREAMS} are")
    if not 1 <= given(config, "hc_sinkhorn_iters") <= MOST_ROUNDS:
        raise UnsupportedModel(f"hc_sinkhorn_iters {config.hc_sinkhorn_iters} is not supported; 1 to {MOST_ROUNDS} are")
    return HyperSpec(config.hc_mult, config.hc_eps, 2.0, rounds=config.hc_sinkhorn_iters, learned_end=False)


def _own(names: Names, convolutions: tuple[str, ...]) -> Names:
    layer, own = "layers.{}.", "layers.{}.self_attn."
    indexer = own + "indexer."
    return {
        **names,
        layer + "mixed": tuple(own + f"{part}_proj" for part in ("q", "k", "v", "f_a", "g_a")),
        layer + "conv": tuple(own + each for each in convolutions),
        layer + "gates": (own + "b_proj",),
        layer + "decays": (own + "f_b_proj",),
        layer + "out_gates": (own + "g_b_proj",),
        layer + "delta": (own.removesuffix("."),),
        layer + "delta_norm": (own + "o_norm",),
        layer + "attention_streams": (layer + "attn_hc",),
        layer + "mlp_streams": (layer + "ffn_hc",),
        layer + "index_keys": (indexer + "wk", indexer + "index_kpool_compress_gate"),
        layer + "index.places": (indexer + "index_kpool_compress_ape",),
    }


def _apart(config: ModelConfig) -> Names:
    return _own(names_apart(config), tuple(f"{part}_conv1d" for part in "qkv"))


def _together(config: ModelConfig) -> Names:
    return _own(names_together(config), ("conv1d",))


def _unused(config: ModelConfig) -> frozenset[str]:
    """The layer behind the last one, which guesses a further token."""
    return frozenset((f"layers.{config.layers}.",))


GLM5_NEXT = Family(
    "glm5_next", "transformers.models.glm5_next.configuration_glm5_next:Glm5NextTextConfig", _facts, _apart,
    ("model.language_model.", "model."), rows=latent_rows, text_type="glm5_next_text", other_names=_together,
    unused=_unused, unread=("model.visual.", "visual."), renamed=RENAMED,
)  # fmt: skip
"""Images are refused."""
