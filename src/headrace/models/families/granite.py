"""Granite: a Llama with multipliers on embeddings, scores, what is added to the residual stream, and logits."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from headrace.models.families.base import Family
from headrace.models.families.llama import PREFIXES, common, names, uniform_windows


def _facts(config: Any) -> dict[str, Any]:
    facts = common(config, uniform_windows(config, None))
    return facts | dict(
        attention=replace(facts["attention"], scale=float(config.attention_multiplier)),
        embed_scale=float(config.embedding_multiplier),
        residual_scale=float(config.residual_multiplier),
        logit_scale=1.0 / config.logits_scaling,
        qkv_bias=config.attention_bias,
        out_bias=config.attention_bias,
        mlp_bias=config.mlp_bias,
    )


GRANITE = Family("granite", "transformers.models.granite.configuration_granite:GraniteConfig", _facts, names, PREFIXES)
