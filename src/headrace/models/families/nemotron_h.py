"""Nemotron-H, Nemotron Nano 2 and Nemotron 3 (NVIDIA): Mamba-2 layers, attention without positions, MLPs or experts.

Files count each of them as a layer of its own, with one norm. Here an MLP belongs to the Mamba-2 layer or the attention
before it, which may have none. MLPs and experts square relu and have no gates; routing is DeepSeek-V3's, with an expert
that every row meets.
"""

from __future__ import annotations

from typing import Any

from headrace.config import AttentionSpec
from headrace.models.families.base import PLAIN_ACTIVATIONS, Family, Names, activation, attention
from headrace.models.families.experts import corrected, mixture
from headrace.models.families.granite import mamba_rows, mamba_spec
from headrace.models.spec import ModelConfig
from headrace.types import UnsupportedModel

MAMBA, ATTENTION, MLP, EXPERTS = KINDS = ("linear_attention", "full_attention", "mlp", "moe")
UNUSED: dict[str, Any] = dict(
    use_bias=False, attention_bias=False, mamba_hidden_act="silu", sliding_window=None, moe_latent_size=None
)
"""Fields that say nothing but this."""


def _facts(config: Any) -> dict[str, Any]:
    for name, usual in UNUSED.items():
        if (value := getattr(config, name)) != usual:
            raise UnsupportedModel(f"{name} {value!r} is not supported; only {usual!r} is")
    layers = _layers(config.layers_block_type)
    mamba = tuple(index for index, (mixer, _) in enumerate(layers) if mixer == MAMBA)
    if len(mamba) in (0, len(layers)):
        raise UnsupportedModel(f"layers_block_type without {(ATTENTION if mamba else MAMBA)!r} is not supported")
    found = attention(config, kv_heads=config.num_key_value_heads, head_dim=config.head_dim)
    full = len(layers) - len(mamba)
    sparse = tuple(behind == EXPERTS for _, behind in layers)
    return dict(
        layers=len(layers),
        apart=True,
        without_mlp=tuple(index for index, (_, behind) in enumerate(layers) if behind is None),
        intermediate_size=config.intermediate_size,
        embed_size=config.hidden_size,
        max_model_len=config.max_position_embeddings,
        attention=AttentionSpec(full, found.heads, found.kv_heads, found.head_dim, found.scale, (None,) * full),
        recurrent=mamba_spec(
            len(mamba), config.n_groups, config.mamba_num_heads, config.ssm_state_size, config.mamba_head_dim,
            config.conv_kernel,
        ),
        recurrent_layers=mamba,
        conv_bias=config.use_conv_bias,
        positions="rope",
        norm="rms",
        norm_eps=config.layer_norm_epsilon,
        activation=activation("mlp_hidden_act", config.mlp_hidden_act, PLAIN_ACTIVATIONS),
        gated=False,
        mlp_bias=config.mlp_bias,
        **_experts(config, sparse),
    )  # fmt: skip


def _experts(config: Any, layers: tuple[bool, ...]) -> dict[str, Any]:
    if not any(layers):
        return {}
    if config.mlp_bias:
        raise UnsupportedModel("mlp_bias true is not supported with experts; only false is")
    sizes = (config.n_routed_experts, config.moe_intermediate_size, config.moe_shared_expert_intermediate_size)
    if not all(isinstance(size, int) for size in sizes):
        raise UnsupportedModel("a size of its experts is missing; download the file again")
    count, inner, shared = sizes
    return mixture(
        config, count, inner, config.norm_topk_prob, layers, shared, shared_gate=False, routing=corrected(config)
    )


def _layers(kinds: list[str]) -> list[tuple[str, str | None]]:
    """(What mixes the rows of a layer, the MLP behind it or None) of each of ours."""
    layers: list[tuple[str, str | None]] = []
    for kind in kinds:
        if kind not in KINDS:
            raise UnsupportedModel(f"layers_block_type with {kind!r} is not supported; supported: {', '.join(KINDS)}")
        if kind in (MAMBA, ATTENTION):
            layers.append((kind, None))
        elif layers and layers[-1][1] is None:
            layers[-1] = (layers[-1][0], kind)
        else:
            raise UnsupportedModel(f"layers_block_type with {kind!r} behind no mamba or attention is not supported")
    return layers


def _names(config: ModelConfig) -> Names:
    named: dict[str, tuple[str, ...]] = {"embed": ("embeddings",), "final_norm": ("norm_f",)}
    for layer in range(config.layers):
        block = config.block_of(layer)
        mixer = f"layers.{block}.mixer"
        own = _mamba if layer in config.recurrent_layers else _attention
        parts = {"attention_norm": (f"layers.{block}.norm",), **own(mixer)}
        if layer not in config.without_mlp:
            parts |= {"mlp_norm": (f"layers.{block + 1}.norm",), **_mlp(config, layer, f"layers.{block + 1}.mixer")}
        named |= {f"layers.{layer}.{ours}": theirs for ours, theirs in parts.items()}
    return named


def _mamba(mixer: str) -> Names:
    return {
        "mixed": (f"{mixer}.in_proj",),
        "gates": (f"{mixer}.in_proj",),
        "conv": (f"{mixer}.conv1d",),
        "delta": (mixer,),
        "delta_norm": (f"{mixer}.norm",),
        "out": (f"{mixer}.out_proj",),
    }


def _attention(mixer: str) -> Names:
    return {"qkv": tuple(f"{mixer}.{part}_proj" for part in "qkv"), "out": (f"{mixer}.o_proj",)}


def _mlp(config: ModelConfig, layer: int, mixer: str) -> Names:
    spec = config.experts_of(layer)
    if spec is None:
        return _up_and_down("", mixer)
    named: dict[str, tuple[str, ...]] = {"router": (f"{mixer}.gate",), "routing": (f"{mixer}.gate",)}
    named |= _up_and_down("shared.", f"{mixer}.shared_experts")
    for expert in range(spec.count):
        named |= _up_and_down(f"experts.{expert}.", f"{mixer}.experts.{expert}")
    return named


def _up_and_down(ours: str, theirs: str) -> dict[str, tuple[str, ...]]:
    return {f"{ours}up": (f"{theirs}.up_proj",), f"{ours}down": (f"{theirs}.down_proj",)}


NEMOTRON_H = Family(
    "nemotron_h", "transformers.models.nemotron_h.configuration_nemotron_h:NemotronHConfig", _facts, _names,
    ("backbone.", "model."), rows=mamba_rows,
)  # fmt: skip
