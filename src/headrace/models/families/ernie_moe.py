"""ERNIE 4.5 with experts: chosen by a softmax and corrections, shared ones beside them without a gate, dense layers
first, neighbours of a head rotated together.

Published checkpoints carry layers that guess further tokens; they are left unread.
"""

from __future__ import annotations

from typing import Any

from headrace.config import RoutingSpec
from headrace.models.families.base import Family, Names, paired_rows
from headrace.models.families.experts import APART, TOGETHER, mixture
from headrace.models.families.glm4_moe import SHARED
from headrace.models.families.llama import PREFIXES, common, names, uniform_windows
from headrace.models.spec import ModelConfig
from headrace.types import UnsupportedModel

NUMBERS = (
    "moe_num_experts", "moe_num_shared_experts", "moe_k", "moe_layer_start_index", "moe_layer_end_index",
    "moe_layer_interval",
)  # fmt: skip
"""Fields that transformers' configuration takes as null, and its model does not."""


def _facts(config: Any) -> dict[str, Any]:
    for name in NUMBERS:
        if getattr(config, name) is None:
            raise UnsupportedModel(f"{name} is null; download the file again")
    if config.use_bias:
        raise UnsupportedModel("use_bias True is not supported with experts; only False is")
    inner = config.moe_intermediate_size
    experts = mixture(
        config, config.moe_num_experts, inner, True, _sparse_layers(config), inner * config.moe_num_shared_experts,
        chosen=config.moe_k, shared_gate=False, routing=RoutingSpec(corrected=True),
    )  # fmt: skip
    return common(config, uniform_windows(config, None)) | experts


def _sparse_layers(config: Any) -> tuple[bool, ...]:
    count, first, last = config.num_hidden_layers, config.moe_layer_start_index, config.moe_layer_end_index
    last = count - 1 if last == -1 else last
    return tuple(first <= layer <= last and (layer + 1) % config.moe_layer_interval == 0 for layer in range(count))


def _rows(config: ModelConfig) -> list[int]:
    return paired_rows(config.attention, config.rotation(0)[1])


def _names(config: ModelConfig) -> Names:
    return {**names(config), **APART, **SHARED, "layers.{}.routing": ("layers.{}.mlp.moe_statics",)}


def _names_together(config: ModelConfig) -> Names:
    return {**names(config), **TOGETHER, **SHARED, "layers.{}.routing": ("layers.{}.mlp.gate.moe_statics",)}


ERNIE_MOE = Family(
    "ernie4_5_moe", "transformers.models.ernie4_5_moe.configuration_ernie4_5_moe:Ernie4_5_MoeConfig", _facts, _names,
    PREFIXES, qkv_rows=_rows, other_names=_names_together, unread=("model.mtp_",),
)  # fmt: skip
