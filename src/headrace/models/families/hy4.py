"""HY4 (Hunyuan 4): GLM-5's sparse latent attention with gates and sinks, experts of clamped gates, four residual
streams (hyper-connections)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from headrace.models.families.base import Family, Names
from headrace.models.families.deepseek import latent_rows
from headrace.models.families.deepseek_sparse import indexed, names_apart, names_together, own_indexers, unused
from headrace.models.families.experts import given
from headrace.models.families.llama import PREFIXES
from headrace.models.layer_parts import HyperSpec
from headrace.models.spec import ModelConfig
from headrace.types import UnsupportedModel

CLAMPED_LIMIT = 10.0
"""Of gates in kernels.gates."""
IN_TEXT = {"mrope_section"}
"""Of rope_parameters, which turns text as any other does: its positions for time, height and width are alike."""
MOST_STREAMS = 8
"""That kernels.hyper takes."""
RENAMED = (
    (".hc_pre.hc_", ".hc_"), (".learnable_sink_param", ".sinks"), (".linear_gate", ".gate_proj"),
    (".hc_attn_layer.hc_", ".attn_hc."), (".hc_mlp_layer.hc_", ".ffn_hc."), (".hc_head_", ".hc_"),
)  # fmt: skip
"""As transformers' conversion_mapping has it. What it writes calls all gates linear_gate, in published files those of
attention are."""


def refuse_other_limits(config: Any) -> None:
    """Raises UnsupportedModel for gates that are held to other numbers."""
    if config.swiglu_limit != CLAMPED_LIMIT:
        raise UnsupportedModel(f"swiglu_limit {config.swiglu_limit} is not supported; only {CLAMPED_LIMIT} is")


def _facts(config: Any, paired: bool = False) -> dict[str, Any]:
    refuse_other_limits(config)
    if not 1 <= given(config, "hc_mult") <= MOST_STREAMS:
        raise UnsupportedModel(f"hc_mult {config.hc_mult} is not supported; 1 to {MOST_STREAMS} are")
    for kind in config.layer_types:
        if kind != "indexed_attention":
            raise UnsupportedModel(f"layer_types with {kind!r} is not supported; only 'indexed_attention' is")
    facts = indexed(config, own_indexers(config), paired, ignored=IN_TEXT)
    spec, experts = facts["attention"], facts["experts"]
    index = replace(spec.index, norm_eps=config.rms_norm_eps)
    return facts | dict(
        attention=replace(spec, index=index, sinks=True),
        attention_gate=True,
        experts=experts and replace(experts, activation="swiglu_clamped"),
        hyper=HyperSpec(config.hc_mult, config.hc_eps, config.hc_magnitude, post_least=config.hc_eps),
    )


def _facts_with_vision(config: Any) -> dict[str, Any]:
    """Neighbours are rotated, and the norms of latents have the epsilon of all norms."""
    facts = _facts(config, paired=True)
    return facts | dict(latent=replace(facts["latent"], norm_eps=config.rms_norm_eps))


def _own(names: Names) -> Names:
    layer = "layers.{}."
    theirs = {"attention_gates": "self_attn.gate_proj", "attention": "self_attn"}
    theirs |= {"attention_streams": "attn_hc", "mlp_streams": "ffn_hc"}
    head = {f"streams.{part}": (f"hc_head.hc_{part}",) for part in ("fn", "base", "scale")}
    return {**names, **{layer + ours: (layer + name,) for ours, name in theirs.items()}, **head}


def _apart(config: ModelConfig) -> Names:
    return _own(names_apart(config))


def _together(config: ModelConfig) -> Names:
    return _own(names_together(config))


def _rows(config: ModelConfig, name: str) -> list[int] | None:
    """latent_rows, and of an indexer's numbers those that are rotated first, which files have last."""
    index, latent = config.attention.index, config.latent
    assert index is not None and latent is not None, "the family has indexers"
    first = index.size - latent.rotated
    turned = range(first, index.size)
    one = [*((*turned[::2], *turned[1::2]) if latent.paired else turned), *range(first)]
    if ".index_queries." in name:
        return [head * index.size + row for head in range(index.heads) for row in one]
    return one if ".index_keys." in name or ".index_norm." in name else latent_rows(config, name)


def _unused(config: ModelConfig) -> frozenset[str]:
    """Also layers that guess further tokens."""
    return unused(config).union(("mtp_layers.",))


HY4 = Family(
    "hy_v4", "transformers.models.hy_v4.configuration_hy_v4:HYV4Config", _facts, _apart, PREFIXES, rows=_rows,
    other_names=_together, unused=_unused, renamed=RENAMED,
)  # fmt: skip
HY4_WITH_VISION = replace(
    HY4, model_type="hy_v4_vl", text_type="hy_v4_vl_text", facts=_facts_with_vision,
    configuration="transformers.models.hy_v4_vl.configuration_hy_v4_vl:HYV4VLTextConfig",
    prefixes=("model.language_model.", "model."), unread=("vit.", "model.vit.", "vision_tower.", "model.vision_tower."),
)  # fmt: skip
"""Of which the text part is computed, and images are refused."""
