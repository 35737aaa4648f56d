"""What one family adds to the common decoder: how its config.json is read and how its tensors are called."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass, replace
from typing import Any

from headrace.config import AttentionSpec
from headrace.models.spec import Activation, ModelConfig, RopeKind, RopeSpec
from headrace.types import UnsupportedModel

Names = Mapping[str, tuple[str, ...]]
"""Our module -> the checkpoint's modules whose rows, one after another, make it. Layers have a `{}` for their index, or
the index of a layer whose module has another name than most. A tensor that is called otherwise in its module there is
named itself, on both sides."""


@dataclass(frozen=True)
class Family:
    """`facts` turns a transformers configuration into ModelConfig fields; see ModelConfig and Names.

    `configuration` names the class of that configuration, "module:class": narrow modules, which import no models.
    `prefixes` are what may stand before a tensor's name. `other_names`: as `names`, of another form of the checkpoint.
    `in_memory`: as transformers' modules are called, and so adapters, where no form of the checkpoint has it so.
    `qkv_rows`, for families that interleave q, k and v in one matrix or rotate pairs of neighbours, lists the
    checkpoint's rows of q, k and v in our order: all of q, then k, then v. `rows`, for those that interleave more,
    lists those of our tensor of a name; None: as they are. `text_type`, of models with other parts: the model_type of
    text_config, which is what is computed; tensors whose names begin with `unread` belong to the other parts.
    other_texts: the same models with a text part of another type.
    fused_by_inputs: numbers of experts in one tensor lie as [E, inputs, outputs], not [E, outputs, inputs].
    fused_either_way: they lie either way, by outputs where their shape fits that. by_inputs: modules of a layer whose
    matrices lie as [inputs, outputs].
    published_as: another name that modules of the model's code had before transformers took them in.
    also_called: another model_type that published files have; of models with other parts, of text_config.
    renamed: parts of tensors' names in files, one after another, with what stands for them in `names`.
    completed: of models with other parts, fills in what a file leaves to their own class.
    layer_fields: what per_layer_config may set. unused: tensors that checkpoints have and the model does not read, as
    they are called behind the prefix.
    """

    model_type: str
    configuration: str
    facts: Callable[[Any], dict[str, Any]]
    names: Callable[[ModelConfig], Names]
    prefixes: tuple[str, ...]
    qkv_rows: Callable[[ModelConfig], list[int]] | None = None
    rows: Callable[[ModelConfig, str], list[int] | None] | None = None
    text_type: str | None = None
    other_texts: tuple[Family, ...] = ()
    completed: Callable[[dict[str, Any]], dict[str, Any]] = dict
    unread: tuple[str, ...] = ()
    other_names: Callable[[ModelConfig], Names] | None = None
    in_memory: Callable[[ModelConfig], Names] | None = None
    fused_by_inputs: bool = False
    fused_either_way: bool = False
    by_inputs: tuple[str, ...] = ()
    layer_fields: tuple[str, ...] = ()
    unused: Callable[[ModelConfig], frozenset[str]] | None = None
    published_as: str | None = None
    also_called: str | None = None
    renamed: tuple[tuple[str, str], ...] = ()

    def named(self, name: str) -> str:
        """The name that a file's tensor has in `names`, but for what all of them begin with."""
        for theirs, ours in self.renamed:
            name = name.replace(theirs, ours)
        return name

    @property
    def modules(self) -> tuple[str, ...]:
        """What its code may be called in a checkpoint's auto_map: never run, but of this model."""
        return (self.model_type,) if self.published_as is None else (self.model_type, self.published_as)

    @property
    def model_types(self) -> set[str]:
        """What files call it; of models with other parts, what they call the whole."""
        return {self.model_type} if self.text_type or not self.also_called else {self.model_type, self.also_called}

    @property
    def text_types(self) -> set[str]:
        """What files call the text part of a model with others."""
        return {name for name in (self.text_type, self.also_called) if name}

    @property
    def fields_of(self) -> str:
        """The model_type whose fields `facts` reads."""
        return self.text_type or self.model_type


def tied_unless_told(raw: dict[str, Any]) -> dict[str, Any]:
    """Of models with other parts (Family.completed): where a file does not say it, transformers ties the head; a stored
    head counts all the same."""
    return {"tie_word_embeddings": True} | raw


GATED_ACTIVATIONS: Mapping[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
}
PLAIN_ACTIVATIONS: Mapping[str, Activation] = {
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
    "relu2": "relu2",
    "xielu": "xielu",
}

LAYER_TYPES = ("full_attention", "sliding_attention")
"""Names of layers without and with a window."""

ROPE_KEYS: dict[RopeKind, set[str]] = {
    "default": set(),
    "linear": {"factor"},
    "dynamic": {"factor"},
    "llama3": {"factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"},
    "yarn": {
        "factor", "original_max_position_embeddings", "attention_factor", "beta_fast", "beta_slow", "mscale",
        "mscale_all_dim", "truncate",
    },
    "longrope": {"factor", "original_max_position_embeddings", "attention_factor", "short_factor", "long_factor"},
    "proportional": {"factor"},
}  # fmt: skip
IGNORED_ROPE_KEYS = {"type", "finetuned"}
"""Left over from older forms of config.json."""
NEEDED_ROPE_KEYS: dict[str, tuple[str, ...]] = {
    "default": (),
    "longrope": ("short_factor", "long_factor"),
    "proportional": (),
}
"""Of other kinds: factor."""


def rope(
    config: Any,
    partial: bool = False,
    parameters: Mapping[str, Any] | None = None,
    ignored: Set[str] = frozenset(),
    head_dim: int | None = None,
) -> RopeSpec:
    """The rotation that the configuration asks for. Refuses parameters that it does not use, but for those `ignored`.

    partial: whether a part of each head may be rotated; parameters: those of the layers that are meant, if not of all;
    head_dim: theirs, if not the model's.
    """
    given = rope_parameters(config) if parameters is None else parameters
    left_out = IGNORED_ROPE_KEYS | ignored
    values = {name: value for name, value in given.items() if value is not None and name not in left_out}
    share = values.pop("partial_rotary_factor", 1.0)
    if share != 1.0 and not partial:
        raise UnsupportedModel("partial_rotary_factor other than 1 is not supported")
    kind = values.get("rope_type", "default")
    refuse_rope(kind, values)
    _refuse_nulls(given, partial or kind != "default")
    unknown = sorted(set(values) - ROPE_KEYS[kind] - {"rope_type", "rope_theta"})
    if unknown:
        raise UnsupportedModel(f"rope_parameters.{unknown[0]} is not supported with rope_type {kind!r}")
    dim = head_dim or head_dim_of(config)
    width = int(dim * share)
    if not 2 <= width <= dim or (share != 1.0 and width % 2):
        raise UnsupportedModel(f"partial_rotary_factor {share} rotates {width} elements of a head; use an even number")
    if share != 1.0:
        values["partial_rotary_factor"] = share
    own = config.max_position_embeddings
    if kind == "longrope":
        own = _complete_longrope(values, own, width)
    return RopeSpec(kind, tuple(sorted(values.items())), own)


def rope_parameters(config: Any) -> Mapping[str, Any]:
    """What the configuration says of the rotation."""
    if config.rope_parameters is None:
        raise UnsupportedModel("rope_parameters is null; download the file again")
    found: Mapping[str, Any] = config.rope_parameters
    return found


def rope_parameters_of(config: Any, kind: str) -> Mapping[str, Any]:
    """The same of a kind of layers."""
    found: Mapping[str, Any] | None = rope_parameters(config).get(kind)
    if not found:
        raise UnsupportedModel(f"rope_parameters.{kind} is missing")
    return found


def rope_theta(given: Mapping[str, Any]) -> float:
    """The base of a rotation, without which transformers computes none."""
    if given.get("rope_theta") is None:
        raise UnsupportedModel("rope_parameters.rope_theta is missing; download the file again")
    return float(given["rope_theta"])


def _refuse_nulls(given: Mapping[str, Any], shared: bool) -> None:
    """shared: whether the share of each head that is rotated is read."""
    for kind in LAYER_TYPES:
        if kind in given:
            raise UnsupportedModel(f"rope_parameters.{kind} is not supported here")
    rope_theta(given)
    if shared and given.get("partial_rotary_factor", 1.0) is None:
        raise UnsupportedModel("rope_parameters.partial_rotary_factor is null; download the file again")


BETA = "llama_4_scaling_beta"


def tempered(config: Any, ignored: Set[str] = frozenset(), head_dim: int | None = None) -> RopeSpec:
    """`rope` of a model whose queries are multiplied by a factor of their position (RopeSpec.query_beta)."""
    spec = rope(config, ignored={BETA, "max_position_embeddings", *ignored}, head_dim=head_dim)
    for needed in (BETA, "original_max_position_embeddings"):
        if rope_parameters(config).get(needed) is None:
            raise UnsupportedModel(f"rope_parameters.{needed} is missing; download the file again")
    return replace(spec, query_beta=float(config.rope_parameters[BETA]))


def ropes_by_kind(config: Any) -> tuple[RopeSpec, RopeSpec]:
    """The rotations of layers without a window and of those with one. Refuses what is said of neither, which
    transformers leaves out."""
    given = rope_parameters(config)
    other = sorted(name for name, value in given.items() if value is not None and name not in LAYER_TYPES)
    if other:
        told = " and ".join(LAYER_TYPES)
        raise UnsupportedModel(f"rope_parameters.{other[0]} is not supported here; rope_parameters has {told}")
    turned, local = (rope(config, parameters=rope_parameters_of(config, kind)) for kind in LAYER_TYPES)
    return turned, local


def _complete_longrope(values: dict[str, Any], longest: int, width: int) -> int:
    """Fills in the factor, which is that of the lengths where it is not given. Returns the shorter length."""
    own = int(values.setdefault("original_max_position_embeddings", longest))
    values.setdefault("factor", longest / own)
    for name in ("short_factor", "long_factor"):
        values[name] = tuple(values[name])
        if len(values[name]) != width // 2:
            raise UnsupportedModel(f"rope_parameters.{name} has {len(values[name])} numbers, {width // 2} are needed")
    return own


def head_dim_of(config: Any) -> int:
    """Elements of a head."""
    return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)


def paired_rows(spec: AttentionSpec, width: int) -> list[int]:
    """Rows of (q, k, v) in our order, for families that rotate neighbours, elements 2 i and 2 i + 1 of a head, where
    ours are i and i + width / 2. width: elements of a head that are rotated. Scores are the same: both q and k move."""
    turned = [*range(0, width, 2), *range(1, width, 2), *range(width, spec.head_dim)]
    heads = [head * spec.head_dim + row for head in range(spec.heads + spec.kv_heads) for row in turned]
    return [*heads, *range(len(heads), len(heads) + spec.kv_heads * spec.head_dim)]


def refuse_rope(kind: str, parameters: Mapping[str, Any]) -> None:
    """Refuses unknown kinds of rotation, and known ones without what they need."""
    if kind not in ROPE_KEYS:
        raise UnsupportedModel(f"rope_type {kind!r} is not supported; supported: {', '.join(ROPE_KEYS)}")
    for name in NEEDED_ROPE_KEYS.get(kind, ("factor",)):
        if not parameters.get(name):
            raise UnsupportedModel(f"rope_parameters.{name} is missing for rope_type {kind!r}")


def rope_reach(config: Any, spec: RopeSpec) -> int:
    """Longest sequence that the rotation was stretched for."""
    values = dict(spec.parameters)
    if spec.kind in ("linear", "dynamic"):
        return int(spec.original_length * values["factor"])
    if spec.kind == "yarn":
        return max(spec.original_length, int(values["original_max_position_embeddings"] * values["factor"]))
    return int(config.max_position_embeddings)


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


def behind_convolutions(config: Any) -> Activation:
    """That of models whose convolutions have it too: these are computed with silu alone."""
    found = activation("hidden_act", config.hidden_act, GATED_ACTIVATIONS)
    if found != "silu":
        raise UnsupportedModel(f"hidden_act {config.hidden_act!r} is not supported here; silu is, in convolutions too")
    return found


def layer_normed(
    config: Any,
    norm_eps: float,
    kv_heads: int,
    windows: tuple[int | None, ...] | None = None,
    partial: bool = False,
    gated: bool = False,
) -> dict[str, Any]:
    """What families with LayerNorm and rotary positions have in common. partial: whether a part of each head may be
    rotated; gated: whether MLPs are. Refuses a width that is no multiple of the heads."""
    if head_dim_of(config) * config.num_attention_heads != config.hidden_size and not hasattr(config, "head_dim"):
        told = f"num_attention_heads {config.num_attention_heads}"
        raise UnsupportedModel(f"hidden_size {config.hidden_size} is not a multiple of {told}")
    turned = rope(config, partial)
    return dict(
        intermediate_size=config.intermediate_size,
        embed_size=config.hidden_size,
        max_model_len=rope_reach(config, turned),
        attention=attention(config, kv_heads=kv_heads, head_dim=head_dim_of(config), windows=windows),
        positions="rope",
        rope=turned,
        norm="layer",
        norm_eps=norm_eps,
        activation=activation("hidden_act", config.hidden_act, GATED_ACTIVATIONS if gated else PLAIN_ACTIVATIONS),
        gated=gated,
    )
