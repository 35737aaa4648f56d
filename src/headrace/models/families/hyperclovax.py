"""HyperCLOVA X SEED: Granite's multipliers, in most models with norms behind attention and MLP too.

Logits are multiplied by logits_scaling, which divides them in Granite.
"""

from __future__ import annotations

from typing import Any

from headrace.models.families.base import Family, Names
from headrace.models.families.granite import multiplied
from headrace.models.families.llama import PREFIXES, names, uniform_windows
from headrace.models.spec import ModelConfig


def _facts(config: Any) -> dict[str, Any]:
    return multiplied(config, uniform_windows(config, None)) | dict(
        logit_scale=float(config.logits_scaling),
        mlp_bias=config.mlp_bias,
        block="sandwich" if config.use_post_norm else "pre",
    )


def _names(config: ModelConfig) -> Names:
    layer = "layers.{}."
    theirs = {"attention_out_norm": "post_norm1", "mlp_out_norm": "post_norm2"}
    return {**names(config), **{layer + ours: (layer + name,) for ours, name in theirs.items()}}


HYPERCLOVAX = Family(
    "hyperclovax", "transformers.models.hyperclovax.configuration_hyperclovax:HyperCLOVAXConfig", _facts, _names,
    PREFIXES,
)  # fmt: skip
