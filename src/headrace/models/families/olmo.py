"""OLMo 2 and 3: what attention and MLP make is normed, not what they take; queries and keys over all heads together.

OLMo 3 has windows in three of four layers, whose rotation is not stretched with that of the others. EXAONE 4 norms
queries and keys head by head, and where some layers have windows it rotates those alone; EXAONE 4.5 has images besides.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from headrace.models.families.base import Family, Names, rope, ropes_by_kind
from headrace.models.families.llama import PREFIXES, common, mixed_windows, names, uniform_windows
from headrace.models.spec import ModelConfig, RopeSpec


def _olmo2(config: Any) -> dict[str, Any]:
    return _facts(config, uniform_windows(config, None), rope(config))


def _olmo3(config: Any) -> dict[str, Any]:
    turned, local = ropes_by_kind(config)
    return _facts(config, mixed_windows(config), turned) | dict(local_rope=local)


def _facts(config: Any, windows: tuple[int | None, ...], turned: RopeSpec) -> dict[str, Any]:
    return common(config, windows, turned=turned) | dict(
        block="after",
        qk_norm=True,
        qk_norm_whole=True,
        qkv_bias=config.attention_bias,
        out_bias=config.attention_bias,
    )


def turned_in_windows(config: Any) -> tuple[tuple[int | None, ...], tuple[int, ...]]:
    """The windows of EXAONE's layers, and those that rotate nothing: where some have windows, the others."""
    windows = mixed_windows(config)
    unturned = () if config.sliding_window is None else (at for at, window in enumerate(windows) if window is None)
    return windows, tuple(unturned)


def _exaone4(config: Any) -> dict[str, Any]:
    windows, unturned = turned_in_windows(config)
    return common(config, windows) | dict(block="after", qk_norm=True, no_rope_layers=unturned)


def names_behind(config: ModelConfig) -> Names:
    """Names of a model whose norms are behind attention and MLP alone."""
    layer = "layers.{}."
    theirs = {"attention_out_norm": "post_attention_layernorm", "mlp_out_norm": "post_feedforward_layernorm"}
    return {**names(config), **{layer + ours: (layer + name,) for ours, name in theirs.items()}}


OLMO2 = Family("olmo2", "transformers.models.olmo2.configuration_olmo2:Olmo2Config", _olmo2, names_behind, PREFIXES)
OLMO3 = Family("olmo3", "transformers.models.olmo3.configuration_olmo3:Olmo3Config", _olmo3, names_behind, PREFIXES)
EXAONE4 = Family(
    "exaone4", "transformers.models.exaone4.configuration_exaone4:Exaone4Config", _exaone4, names_behind, PREFIXES
)


EXAONE4_5 = replace(
    EXAONE4, model_type="exaone4_5", text_type="exaone4", prefixes=("model.language_model.",),
    unread=("model.visual.",), also_called="exaone4_5_text",
)  # fmt: skip
"""Of which the text part is computed, and images are refused."""
