"""K-EXAONE: EXAONE 4's attention beside experts that are routed as DeepSeek-V3's, dense layers first.

Published checkpoints carry a layer more, which guesses further tokens; it is left unread, as are all called `mtp`.
"""

from __future__ import annotations

from typing import Any

from headrace.models.families.base import Family, Names
from headrace.models.families.experts import corrected, kinds_of_mlp, mixture
from headrace.models.families.glm4_moe import routed_names, routed_names_together
from headrace.models.families.llama import PREFIXES, common
from headrace.models.families.olmo import turned_in_windows
from headrace.models.spec import ModelConfig


def _facts(config: Any) -> dict[str, Any]:
    inner, shared = config.moe_intermediate_size, config.moe_intermediate_size * config.num_shared_experts
    experts = mixture(
        config, config.num_experts, inner, bool(config.norm_topk_prob), kinds_of_mlp(config), shared, shared_gate=False,
        routing=corrected(config),
    )  # fmt: skip
    windows, unturned = turned_in_windows(config)
    return common(config, windows) | experts | dict(qk_norm=True, no_rope_layers=unturned)


def _names(config: ModelConfig) -> Names:
    return {**routed_names(config), "layers.{}.routing": ("layers.{}.mlp",)}


EXAONE_MOE = Family(
    "exaone_moe", "transformers.models.exaone_moe.configuration_exaone_moe:ExaoneMoeConfig", _facts, _names, PREFIXES,
    other_names=routed_names_together,
)  # fmt: skip
