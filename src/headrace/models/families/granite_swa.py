"""Granite with windows in most layers, an attention sink in each head, and a base of rotation that each layer names, or
none. With experts: GraniteMoeShared's, of which the shared one may be left out."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from headrace.models.families.base import Family, Names, rope
from headrace.models.families.granite import moe_names, moe_names_renamed, multiplied, routed
from headrace.models.families.llama import PREFIXES, mixed_windows, names
from headrace.models.spec import ModelConfig, RopeSpec
from headrace.types import UnsupportedModel


def _facts(config: Any) -> dict[str, Any]:
    return _multiplied(config) | dict(mlp_bias=config.mlp_bias)


def _moe(config: Any) -> dict[str, Any]:
    return _multiplied(config) | routed(config, config.shared_intermediate_size)


def _multiplied(config: Any) -> dict[str, Any]:
    windows, thetas = mixed_windows(config), config.layer_rope_theta
    if len(thetas) != config.num_hidden_layers:
        told = f"{len(thetas)} layers, num_hidden_layers is {config.num_hidden_layers}"
        raise UnsupportedModel(f"layer_rope_theta names {told}")
    turned, local = (
        _rope(config, [theta for theta, window in zip(thetas, windows, strict=True) if (window is None) == full])
        for full in (True, False)
    )
    facts = multiplied(config, windows, turned or local or rope(config))
    return facts | dict(
        attention=replace(facts["attention"], sinks=True),
        no_rope_layers=tuple(layer for layer, theta in enumerate(thetas) if not theta),
        local_rope=local if local != turned and None not in (local, turned) else None,
    )


def _rope(config: Any, thetas: list[float]) -> RopeSpec | None:
    """The rotation of layers of one kind; None where they rotate nothing."""
    bases = sorted({theta for theta in thetas if theta})
    if len(bases) > 1:
        raise UnsupportedModel(
            f"layer_rope_theta with {bases[0]} and {bases[1]} for layers of one kind is not supported; one base for "
            "those with a window and one for the others are"
        )
    return rope(config, parameters=config.rope_parameters | dict(rope_theta=float(bases[0]))) if bases else None


def _with_sinks(theirs: Names) -> Names:
    return {**theirs, "layers.{}.attention": ("layers.{}.self_attn",)}


def _names(config: ModelConfig) -> Names:
    return _with_sinks(names(config))


def _moe_names(config: ModelConfig) -> Names:
    return _with_sinks(moe_names(config))


def _moe_names_renamed(config: ModelConfig) -> Names:
    return _with_sinks(moe_names_renamed(config))


GRANITE_SWA = Family(
    "granite_swa",
    "transformers.models.granite_swa.configuration_granite_swa:GraniteSWAConfig",
    _facts,
    _names,
    PREFIXES,
)
GRANITE_MOE_SWA = Family(
    "granitemoe_swa", "transformers.models.granitemoe_swa.configuration_granitemoe_swa:GraniteMoeSWAConfig", _moe,
    _moe_names, PREFIXES, other_names=_moe_names_renamed,
)  # fmt: skip
