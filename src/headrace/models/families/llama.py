"""Llama and its kin: RMS norm, rotary positions, gated SiLU MLP. Mistral adds windows, Qwen2 biases, Qwen3 QK-norm;
Seed-OSS has biases each told by itself, Arcee an MLP of squared relus without gates; CWM and Ministral 8B
have windows in the layers that layer_types names."""

from __future__ import annotations

from typing import Any

from headrace.models.families.base import (
    GATED_ACTIVATIONS,
    LAYER_TYPES,
    PLAIN_ACTIVATIONS,
    Family,
    Names,
    activation,
    attention,
    head_dim_of,
    rope,
    rope_reach,
)
from headrace.models.spec import ModelConfig, RopeSpec
from headrace.types import UnsupportedModel


def common(
    config: Any,
    windows: tuple[int | None, ...],
    partial: bool = False,
    turned: RopeSpec | None = None,
    gated: bool = True,
    inner: int | None = None,
) -> dict[str, Any]:
    """What most families since Llama have in common. partial: whether a part of each head may be rotated; turned: the
    rotation, where it is not simply what rope_parameters say; gated: whether MLPs are; inner: their width, where
    intermediate_size does not say it."""
    spec = turned or rope(config, partial)
    head_dim = head_dim_of(config)
    return dict(
        intermediate_size=config.intermediate_size if inner is None else inner,
        embed_size=config.hidden_size,
        max_model_len=rope_reach(config, spec),
        attention=attention(config, kv_heads=config.num_key_value_heads, head_dim=head_dim, windows=windows),
        positions="rope",
        rope=spec,
        norm="rms",
        norm_eps=config.rms_norm_eps,
        activation=activation("hidden_act", config.hidden_act, GATED_ACTIVATIONS if gated else PLAIN_ACTIVATIONS),
        gated=gated,
    )


def uniform_windows(config: Any, window: int | None) -> tuple[int | None, ...]:
    """The same window in every layer; layer_types, which these families ignore, must not say otherwise."""
    kind = LAYER_TYPES[window is not None]
    for other in getattr(config, "layer_types", None) or ():
        if other != kind:
            raise UnsupportedModel(f"layer_types with {other!r} is not supported for model_type {config.model_type!r}")
    return (_window(window),) * config.num_hidden_layers


def mixed_windows(config: Any) -> tuple[int | None, ...]:
    """A window in the layers that layer_types names sliding_attention."""
    for kind in config.layer_types:
        if kind not in LAYER_TYPES:
            raise UnsupportedModel(f"layer_types with {kind!r} is not supported; supported: {', '.join(LAYER_TYPES)}")
    if LAYER_TYPES[1] in config.layer_types and config.sliding_window is None:
        raise UnsupportedModel("sliding_window is missing or unused, but layer_types names sliding_attention")
    return tuple(_window(config.sliding_window) if kind == LAYER_TYPES[1] else None for kind in config.layer_types)


def _window(window: int | None) -> int | None:
    if window is not None and window < 1:
        raise UnsupportedModel(f"sliding_window {window} is not supported; it must be at least 1, or null")
    return window


def _llama(config: Any) -> dict[str, Any]:
    if (config.pretraining_tp or 1) != 1:
        raise UnsupportedModel(f"pretraining_tp {config.pretraining_tp} is not supported; only 1 is")
    bias = dict(qkv_bias=config.attention_bias, out_bias=config.attention_bias, mlp_bias=config.mlp_bias)
    return common(config, uniform_windows(config, None)) | bias


def mistral(config: Any) -> dict[str, Any]:
    return common(config, uniform_windows(config, config.sliding_window))


def _some_windows(config: Any) -> dict[str, Any]:
    return common(config, mixed_windows(config)) | dict(mlp_bias=getattr(config, "mlp_bias", False))


def _qwen2(config: Any) -> dict[str, Any]:
    return common(config, mixed_windows(config)) | dict(qkv_bias=True)


def _qwen3(config: Any) -> dict[str, Any]:
    bias = dict(qkv_bias=config.attention_bias, out_bias=config.attention_bias)
    return common(config, mixed_windows(config)) | bias | dict(qk_norm=True)


def _seed_oss(config: Any) -> dict[str, Any]:
    bias = dict(qkv_bias=config.attention_bias, out_bias=config.attention_out_bias, mlp_bias=config.mlp_bias)
    return common(config, uniform_windows(config, None)) | bias


def _arcee(config: Any) -> dict[str, Any]:
    bias = dict(qkv_bias=config.attention_bias, out_bias=config.attention_bias, mlp_bias=config.mlp_bias)
    return common(config, uniform_windows(config, None), gated=False) | bias


def names(config: ModelConfig) -> Names:
    """The usual names, of fused matrices one by one."""
    layer = "layers.{}."
    return {
        "embed": ("embed_tokens",),
        "final_norm": ("norm",),
        "layers.{}.attention_norm": (layer + "input_layernorm",),
        "layers.{}.qkv": tuple(layer + f"self_attn.{part}_proj" for part in "qkv"),
        "layers.{}.q_norm": (layer + "self_attn.q_norm",),
        "layers.{}.k_norm": (layer + "self_attn.k_norm",),
        "layers.{}.out": (layer + "self_attn.o_proj",),
        "layers.{}.mlp_norm": (layer + "post_attention_layernorm",),
        "layers.{}.up": (layer + "mlp.gate_proj", layer + "mlp.up_proj"),
        "layers.{}.down": (layer + "mlp.down_proj",),
    }


def ungated_names(config: ModelConfig) -> Names:
    """The same of MLPs without gates."""
    return {**names(config), "layers.{}.up": ("layers.{}.mlp.up_proj",)}


GATED_QKV: Names = {"layers.{}.qkv": tuple(f"layers.{{}}.self_attn.{part}_proj" for part in ("q", "k", "v", "gate"))}
"""Of models whose attended heads go through gates (gated attention), with a matrix of their own."""
PREFIXES = ("model.", "")
LLAMA = Family("llama", "headrace.models.families.llama_config:LlamaConfig", _llama, names, PREFIXES)
MISTRAL = Family("mistral", "transformers.models.mistral.configuration_mistral:MistralConfig", mistral, names, PREFIXES)
MINISTRAL = Family(
    "ministral", "transformers.models.ministral.configuration_ministral:MinistralConfig", _some_windows, names, PREFIXES
)
CWM = Family("cwm", "transformers.models.cwm.configuration_cwm:CwmConfig", _some_windows, names, PREFIXES)
QWEN2 = Family("qwen2", "transformers.models.qwen2.configuration_qwen2:Qwen2Config", _qwen2, names, PREFIXES)
QWEN3 = Family("qwen3", "transformers.models.qwen3.configuration_qwen3:Qwen3Config", _qwen3, names, PREFIXES)
SEED_OSS = Family(
    "seed_oss", "transformers.models.seed_oss.configuration_seed_oss:SeedOssConfig", _seed_oss, names, PREFIXES
)
ARCEE = Family("arcee", "transformers.models.arcee.configuration_arcee:ArceeConfig", _arcee, ungated_names, PREFIXES)
