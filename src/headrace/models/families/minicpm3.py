"""MiniCPM3: latent attention with dense MLPs; embeddings, residual stream and logits have multipliers."""

from __future__ import annotations

import math
from typing import Any

from headrace.models.families.base import Family
from headrace.models.families.deepseek import latent_facts, latent_names, latent_rows
from headrace.models.families.llama import PREFIXES


def _facts(config: Any) -> dict[str, Any]:
    return latent_facts(config, paired=False) | dict(
        mlp_bias=config.mlp_bias,
        embed_scale=float(config.scale_emb),
        residual_scale=config.scale_depth / math.sqrt(config.num_hidden_layers),
        logit_scale=config.dim_model_base / config.hidden_size,
    )


MINICPM3 = Family(
    "minicpm3", "transformers.models.minicpm3.configuration_minicpm3:MiniCPM3Config", _facts, latent_names, PREFIXES,
    rows=latent_rows, published_as="minicpm",
)  # fmt: skip
