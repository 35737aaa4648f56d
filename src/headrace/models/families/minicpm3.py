"""MiniCPM3 and Youtu-LLM: latent attention with dense MLPs. MiniCPM3's embeddings, residual stream and logits have
multipliers."""

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


def _youtu(config: Any) -> dict[str, Any]:
    return latent_facts(config, bool(config.rope_interleave))


YOUTU = Family(
    "youtu", "transformers.models.youtu.configuration_youtu:YoutuConfig", _youtu, latent_names, PREFIXES,
    rows=latent_rows,
)  # fmt: skip
MINICPM3 = Family(
    "minicpm3", "transformers.models.minicpm3.configuration_minicpm3:MiniCPM3Config", _facts, latent_names, PREFIXES,
    rows=latent_rows, published_as="minicpm",
)  # fmt: skip
