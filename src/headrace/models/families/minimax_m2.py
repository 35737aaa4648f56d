"""MiniMax-M2: experts chosen by sigmoids and corrections, queries and keys normed over all heads together, half of each
head rotated."""

from __future__ import annotations

from typing import Any

from headrace.config import RoutingSpec
from headrace.models.families.base import Family, Names
from headrace.models.families.experts import MIXTRALS, TOGETHER, everywhere, mixture
from headrace.models.families.llama import PREFIXES, common, names, uniform_windows
from headrace.models.spec import ModelConfig
from headrace.types import UnsupportedModel

ONLY: dict[str, Any] = {
    "use_qk_norm": True,
    "qk_norm_type": "per_layer",
    "scoring_func": "sigmoid",
    "use_routing_bias": True,
    "shared_intermediate_size": 0,
}
"""Fields of published files that transformers' class does not read, with the one value that is computed."""


def _facts(config: Any) -> dict[str, Any]:
    for field, value in ONLY.items():
        asked = getattr(config, field, None)
        if asked not in (None, value):
            raise UnsupportedModel(f"{field} {asked!r} is not supported; only {value!r} is")
    if 0 in (getattr(config, "attn_type_list", None) or ()):
        raise UnsupportedModel("attn_type_list with 0: layers with linear attention are not supported")
    routing = RoutingSpec("sigmoid", corrected=True)
    experts = mixture(
        config, config.num_local_experts, config.intermediate_size, True, everywhere(config), routing=routing
    )
    facts = common(config, uniform_windows(config, None), partial=True)
    return facts | experts | dict(qk_norm=True, qk_norm_whole=True)


def _names(config: ModelConfig) -> Names:
    return {**names(config), **MIXTRALS, "layers.{}.routing": ("layers.{}.block_sparse_moe",)}


def _names_together(config: ModelConfig) -> Names:
    return {**names(config), **TOGETHER, "layers.{}.routing": ("layers.{}.mlp",)}


MINIMAX_M2 = Family(
    "minimax_m2", "transformers.models.minimax_m2.configuration_minimax_m2:MiniMaxM2Config", _facts, _names, PREFIXES,
    other_names=_names_together,
)  # fmt: skip
