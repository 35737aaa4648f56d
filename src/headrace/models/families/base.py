"""What one family adds to the common decoder: how its config.json is read and how its tensors are called."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from headrace.config import AttentionSpec
from headrace.models.spec import Activation, ModelConfig, RopeKind, RopeSpec
from headrace.types import UnsupportedModel

Names = Mapping[str, tuple[str, ...]]
"""Our module -> the checkpoint's modules whose rows, one after another, make it. Layers have a `{}` for their index."""


@dataclass(frozen=True)
class Family:
    """`facts` turns a transformers configuration into ModelConfig fields; see ModelConfig and Names.

    `configuration` names the class of that configuration, "module:class": narrow modules, which import no models.
    `prefixes` are what may stand before a tensor's name. `other_names`: as `names`, of another form of the checkpoint.
    `qkv_rows`, for families that interleave q, k and v in one
    matrix, lists the rows of that matrix in our order: all of q, then k, then v.
    """

    model_type: str
    configuration: str
    facts: Callable[[Any], dict[str, Any]]
    names: Callable[[ModelConfig], Names]
    prefixes: tuple[str, ...]
    qkv_rows: Callable[[AttentionSpec], list[int]] | None = None
    other_names: Callable[[ModelConfig], Names] | None = None


GATED_ACTIVATIONS: Mapping[str, Activation] = {"silu": "silu", "swish": "silu"}
PLAIN_ACTIVATIONS: Mapping[str, Activation] = {
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
}

ROPE_KEYS: dict[RopeKind, set[str]] = {
    "default": set(),
    "linear": {"factor"},
    "dynamic": {"factor"},
    "llama3": {"factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"},
    "yarn": {
        "factor", "original_max_position_embeddings", "attention_factor", "beta_fast", "beta_slow", "mscale",
        "mscale_all_dim", "truncate",
    },
}  # fmt: skip
IGNORED_ROPE_KEYS = {"type", "finetuned"}
"""Left over from older forms of config.json."""


def rope(config: Any) -> RopeSpec:
    """The rotation that the configuration asks for. Refuses parameters that it does not use."""
    given = config.rope_parameters.items()
    parameters = {name: value for name, value in given if value is not None and name not in IGNORED_ROPE_KEYS}
    if parameters.pop("partial_rotary_factor", 1.0) != 1.0:
        raise UnsupportedModel("partial_rotary_factor other than 1 is not supported")
    kind = parameters.get("rope_type", "default")
    refuse_rope(kind, parameters)
    unknown = sorted(set(parameters) - ROPE_KEYS[kind] - {"rope_type", "rope_theta"})
    if unknown:
        raise UnsupportedModel(f"rope_parameters.{unknown[0]} is not supported with rope_type {kind!r}")
    return RopeSpec(kind, tuple(sorted(parameters.items())), config.max_position_embeddings)


def refuse_rope(kind: str, parameters: Mapping[str, Any]) -> None:
    """Refuses unknown kinds of rotation, and known ones without a factor."""
    if kind not in ROPE_KEYS:
        raise UnsupportedModel(f"rope_type {kind!r} is not supported; supported: {', '.join(ROPE_KEYS)}")
    if kind != "default" and not parameters.get("factor"):
        raise UnsupportedModel(f"rope_parameters.factor is missing for rope_type {kind!r}")


def rope_reach(spec: RopeSpec) -> int:
    """Longest sequence that the rotation was stretched for."""
    values = dict(spec.parameters)
    if spec.kind in ("linear", "dynamic"):
        return int(spec.original_length * values["factor"])
    if spec.kind == "yarn":
        return max(spec.original_length, int(values["original_max_position_embeddings"] * values["factor"]))
    return spec.original_length


def attention(
    config: Any,
    *,
    kv_heads: int,
    head_dim: int,
    windows: tuple[int | None, ...] | None = None,
    alibi: bool = False,
) -> AttentionSpec:
    """AttentionSpec of a configuration. Refuses head counts that do not divide."""
    heads = config.num_attention_heads
    if kv_heads < 1 or heads % kv_heads:
        raise UnsupportedModel(f"num_key_value_heads {kv_heads} does not divide num_attention_heads {heads}")
    if head_dim < 1:
        raise UnsupportedModel(f"num_attention_heads {heads} is more than hidden_size {config.hidden_size}")
    if not alibi and head_dim % 2:
        raise UnsupportedModel(f"head_dim {head_dim} is odd")
    layers = config.num_hidden_layers
    return AttentionSpec(layers, heads, kv_heads, head_dim, head_dim**-0.5, windows or (None,) * layers, alibi)


def activation(field: str, name: str, known: Mapping[str, Activation]) -> Activation:
    """Our name of an activation. Refuses others, naming the configuration's field."""
    if name not in known:
        raise UnsupportedModel(f"{field} {name!r} is not supported; supported: {', '.join(known)}")
    return known[name]
