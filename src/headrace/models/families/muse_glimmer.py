"""Muse Glimmer, of which the text part is computed: Gemma 2's sandwich of norms, and gated attention.

Queries and keys are normed without weights, and so are embeddings. Norms behind attention and MLP have an epsilon of
their own, and the last norm multiplies by its weight, not by 1 + weight. Layers without a window rotate nothing.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from headrace.models.families.base import Family, Names, rope, rope_parameters, rope_theta
from headrace.models.families.gemma import sandwich_names, sandwiched
from headrace.models.families.llama import GATED_QKV
from headrace.models.spec import ModelConfig
from headrace.types import UnsupportedModel


def _facts(config: Any) -> dict[str, Any]:
    for name in ("attention_bias", "tie_word_embeddings"):
        if getattr(config, name):
            raise UnsupportedModel(f"{name} true is not supported; only false is")
    facts = sandwiched(config, rope(config))
    spec = facts["attention"]
    return facts | dict(
        attention=replace(spec, scale=spec.scale * config.qk_scale_factor),
        no_rope_layers=_unturned(config),
        out_norm_eps=config.post_norm_eps,
        final_offset=0.0,
        embed_norm=True,
        qk_norm=True,
        qk_norm_affine=False,
        attention_gate=True,
        gate_apart=True,
        logit_scale=config.output_multiplier,
    )


def _unturned(config: Any) -> tuple[int, ...]:
    """Layers that rotate nothing: those of base 0. The others have the base of rope_parameters, as in transformers."""
    bases, own = config.layer_rope_theta, rope_theta(rope_parameters(config))
    if len(bases) != config.num_hidden_layers:
        told = f"{len(bases)} layers, num_hidden_layers is {config.num_hidden_layers}"
        raise UnsupportedModel(f"layer_rope_theta names {told}")
    for base in bases:
        if base not in (0, own):
            raise UnsupportedModel(f"layer_rope_theta with {base} is not supported; 0 and rope_theta {own} are")
    return tuple(layer for layer, base in enumerate(bases) if not base)


def _names(config: ModelConfig) -> Names:
    return {**sandwich_names(config), **GATED_QKV}


MUSE_GLIMMER = Family(
    "muse_glimmer", "transformers.models.muse_glimmer.configuration_muse_glimmer:MuseGlimmerTextConfig", _facts, _names,
    ("model.language_model.",), text_type="muse_glimmer_text",
    unread=("model.vision_tower.", "model.vision_adapter.", "model.vision_projection."),
)  # fmt: skip
"""Images are refused."""
