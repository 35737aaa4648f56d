"""From the facts of a GGUF file to the fields of a config.json, and from its tensors' names to the checkpoint's.

What config.json would say then goes through the same checks and the same families as a folder's. Imports no torch.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from headrace.logs import shown
from headrace.models.gguf.header import GgufFile, TensorInfo
from headrace.types import UnsupportedModel

EMBED, HEAD, ROPE_FACTORS = "token_embd.weight", "output.weight", "rope_freqs.weight"
LLAMA_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "blk.{}.attn_norm": "model.layers.{}.input_layernorm",
    "blk.{}.attn_q": "model.layers.{}.self_attn.q_proj",
    "blk.{}.attn_k": "model.layers.{}.self_attn.k_proj",
    "blk.{}.attn_v": "model.layers.{}.self_attn.v_proj",
    "blk.{}.attn_q_norm": "model.layers.{}.self_attn.q_norm",
    "blk.{}.attn_k_norm": "model.layers.{}.self_attn.k_norm",
    "blk.{}.attn_output": "model.layers.{}.self_attn.o_proj",
    "blk.{}.ffn_norm": "model.layers.{}.post_attention_layernorm",
    "blk.{}.ffn_gate": "model.layers.{}.mlp.gate_proj",
    "blk.{}.ffn_up": "model.layers.{}.mlp.up_proj",
    "blk.{}.ffn_down": "model.layers.{}.mlp.down_proj",
}
"""The file's modules and the checkpoint's."""
ROUTER = "blk.{}.ffn_gate_inp"


def _with_experts(mlp: str, parts: tuple[str, str, str]) -> Mapping[str, str]:
    """Those, and a router and experts of that name, whose matrices are called `parts`: gate, up, down. The file has all
    experts of a layer in one tensor, or as older ones do each in its own."""
    layer = "model.layers.{}." + mlp
    names = {ROUTER: f"{layer}.gate"}
    for theirs, ours in zip(("gate", "up", "down"), parts, strict=True):
        expert = f"{layer}.experts.{{}}.{ours}"
        names |= {f"blk.{{}}.ffn_{theirs}_exps": expert, f"blk.{{}}.ffn_{theirs}.{{}}": expert}
    return LLAMA_NAMES | names


EXPERT_NAMES = _with_experts("mlp", ("gate_proj", "up_proj", "down_proj"))


@dataclass(frozen=True, slots=True)
class Architecture:
    """What general.architecture names. turned: rows of queries and keys lie as llama.cpp rotates them, elements 2 i and
    2 i + 1 of a head, where the checkpoint's halves do: i and i + D / 2."""

    architecture: str
    model_type: str
    names: Mapping[str, str]
    turned: bool = False

    def modules(self, module: str) -> tuple[str, bool] | None:
        """What the checkpoint calls a module of the file, and whether that is one of each expert, with a `{}` for its
        number; None for one that it has not."""
        numbers = NUMBER.findall(module)
        theirs = self.names.get(NUMBER.sub("{}", module))
        if theirs is None:
            return None
        apart = theirs.count("{}") > len(numbers)
        return theirs.format(*numbers, *["{}"] * apart), apart


ARCHITECTURES = {
    "llama": Architecture("LlamaForCausalLM", "llama", LLAMA_NAMES, turned=True),
    "qwen2": Architecture("Qwen2ForCausalLM", "qwen2", LLAMA_NAMES),
    "qwen3": Architecture("Qwen3ForCausalLM", "qwen3", LLAMA_NAMES),
    "qwen3moe": Architecture("Qwen3MoeForCausalLM", "qwen3_moe", EXPERT_NAMES),
    "olmoe": Architecture("OlmoeForCausalLM", "olmoe", EXPERT_NAMES),
}
WINDOWED = Architecture("MistralForCausalLM", "mistral", LLAMA_NAMES, turned=True)
"""A llama whose layers all have a window."""
MIXTRAL = Architecture(
    "MixtralForCausalLM", "mixtral", _with_experts("block_sparse_moe", ("w1", "w3", "w2")), turned=True
)
"""A llama with experts."""
NUMBER = re.compile(r"(?<=\.)\d+(?=\.|$)")


def architecture_of(file: GgufFile) -> Architecture:
    """Raises UnsupportedModel naming an architecture that is not read."""
    name = file.metadata.get("general.architecture")
    if not isinstance(name, str) or name not in ARCHITECTURES:
        raise UnsupportedModel(
            f"{file.path}: architecture {shown(str(name))} is not read from GGUF; these are: {', '.join(ARCHITECTURES)}"
        )
    if name == "llama" and file.metadata.get("llama.expert_count"):
        return MIXTRAL
    windowed = name == "llama" and file.metadata.get("llama.attention.sliding_window")
    return WINDOWED if windowed else ARCHITECTURES[name]


def checkpoint_tensors(
    architecture: Architecture, file: GgufFile, info: TensorInfo, experts: int
) -> dict[str, TensorInfo]:
    """A tensor of the file by what the checkpoint calls it, one of all experts as one of each; by its own name where
    the checkpoint has none like it. Raises ValueError for one of another number of experts than the model has."""
    module, _, kind = info.name.rpartition(".")
    found = architecture.modules(module)
    if found is None:
        return {info.name: info}
    name, apart = found
    if not apart:
        return {f"{name}.{kind}": info}
    if len(info.shape) != 3 or info.shape[0] != experts:
        raise ValueError(
            f"{file.path}: {shown(info.name)} is of shape {list(info.shape)} where matrices of {experts} experts are "
            f"expected; download it again"
        )
    return {f"{name.format(expert)}.{kind}": each for expert, each in enumerate(info.apart())}


def config_fields(file: GgufFile) -> dict[str, Any]:
    """What config.json would say. Raises UnsupportedModel for what is not read, naming it."""
    facts = _Facts(file)
    found = architecture_of(file)
    heads, hidden = facts.count("attention.head_count"), facts.count("embedding_length")
    head_dim = facts.count("attention.key_length", hidden // max(1, heads))
    for name in ("attention.value_length", "rope.dimension_count"):
        if facts.count(name, head_dim) != head_dim:
            raise UnsupportedModel(f"{file.path}: {name} other than the head size, {head_dim}, is not supported")
    tensors = file.tensors
    if EMBED not in tensors:
        raise ValueError(f"{file.path}: there is no {EMBED}; download it again")
    fields = {
        "architectures": [found.architecture],
        "model_type": found.model_type,
        "vocab_size": tensors[EMBED].shape[0],
        "hidden_size": hidden,
        "intermediate_size": facts.count("feed_forward_length"),
        "num_hidden_layers": facts.count("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": facts.count("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "max_position_embeddings": facts.count("context_length"),
        "rms_norm_eps": facts.number("attention.layer_norm_rms_epsilon"),
        "rope_theta": facts.number("rope.freq_base", 10_000.0),
        "tie_word_embeddings": HEAD not in tensors,
        "dtype": _dtype(file),
        "bos_token_id": facts.token("bos_token_id"),
        "eos_token_id": facts.ends(),
    }
    if found.model_type in ("llama", "qwen3"):
        fields["attention_bias"] = "blk.0.attn_q.bias" in tensors
    if found.model_type == "llama":
        fields["mlp_bias"] = "blk.0.ffn_gate.bias" in tensors
    if found is WINDOWED:
        fields["sliding_window"] = facts.count("attention.sliding_window")
    rope = _rope(facts, head_dim)
    return fields | _experts(facts, found) | ({"rope_scaling": rope} if rope else {})


class _Facts:
    """The metadata of an architecture, by the end of the key."""

    def __init__(self, file: GgufFile) -> None:
        self.file = file
        self.prefix = f"{file.metadata.get('general.architecture')}."

    def value(self, name: str) -> Any:
        return self.file.metadata.get(self.prefix + name)

    def count(self, name: str, default: int | None = None) -> int:
        return int(self._typed(name, default, int))

    def number(self, name: str, default: float | None = None) -> float:
        return float(self._typed(name, default, (int, float)))

    def flag(self, name: str, default: bool) -> bool:
        value = self.value(name)
        if not isinstance(value, bool | None):
            raise ValueError(f"{self.file.path}: {self.prefix}{name} is neither true nor false; download it again")
        return default if value is None else value

    def _typed(self, name: str, default: Any, kind: Any) -> Any:
        value = self.value(name)
        value = default if value is None else value
        if isinstance(value, np.ndarray):
            raise UnsupportedModel(f"{self.file.path}: {self.prefix}{name} differs from layer to layer: not supported")
        if not isinstance(value, kind) or isinstance(value, bool):
            raise ValueError(f"{self.file.path}: {self.prefix}{name} is {shown(repr(value))}; download it again")
        return value

    def token(self, name: str) -> int | None:
        value = self.file.metadata.get(f"tokenizer.ggml.{name}")
        return value if isinstance(value, int) and not isinstance(value, bool) else None

    def ends(self) -> list[int] | None:
        """Tokens that end an answer."""
        found = [self.token(name) for name in ("eos_token_id", "eot_token_id")]
        return list(dict.fromkeys(token for token in found if token is not None)) or None


def _dtype(file: GgufFile) -> str:
    """The type computed in: that of numbers where all are numbers, else bfloat16."""
    kinds = {info.type.name for info in file.tensors.values() if len(info.shape) > 1}
    return {frozenset({"F32"}): "float32", frozenset({"F16"}): "float16"}.get(frozenset(kinds), "bfloat16")


# ---- experts ---------------------------------------------------------------------------------------------------------

READ = {"expert_count", "expert_used_count", "expert_feed_forward_length", "expert_weights_norm"}
SAYS_NOTHING = (0, 1)
"""Of the other keys on experts: softmax, shares as they are, one group, none that all rows meet."""


def _experts(facts: _Facts, found: Architecture) -> dict[str, Any]:
    """What config.json would say of experts. Raises UnsupportedModel for a routing that is not read."""
    if ROUTER not in found.names:
        if facts.count("expert_count", 0):
            raise UnsupportedModel(f"{facts.file.path}: {found.model_type} with experts is not supported")
        return {}
    for key in facts.file.metadata:
        name = key.removeprefix(facts.prefix)
        if name.startswith("expert_") and name not in READ and (value := facts.number(name)) not in SAYS_NOTHING:
            raise UnsupportedModel(f"{facts.file.path}: {shown(key)} {value:g} is not supported")
    count, chosen = facts.count("expert_count"), facts.count("expert_used_count")
    if found is MIXTRAL:
        window = facts.count("attention.sliding_window", 0) or None
        return dict(num_local_experts=count, num_experts_per_tok=chosen, sliding_window=window)
    fields = dict(num_experts=count, num_experts_per_tok=chosen, attention_bias=False)
    if found.model_type == "olmoe":
        if facts.number("attention.clamp_kqv", 0.0):
            raise UnsupportedModel(f"{facts.file.path}: {facts.prefix}attention.clamp_kqv is not supported")
        return fields | dict(norm_topk_prob=facts.flag("expert_weights_norm", False))
    inner = facts.count("expert_feed_forward_length", facts.count("feed_forward_length") // max(1, chosen))
    return fields | dict(moe_intermediate_size=inner, norm_topk_prob=facts.flag("expert_weights_norm", True))


# ---- rotations -------------------------------------------------------------------------------------------------------

SCALING = {"type", "factor", "original_context_length", "finetuned"}
"""Of the keys under rope.scaling, those that are read."""
IMPLIED = {
    "attn_factor": 1.0,
    "yarn_attn_factor": 1.0,
    "yarn_ext_factor": 1.0,
    "yarn_beta_fast": 32.0,
    "yarn_beta_slow": 1.0,
}
"""Others, and the value that says nothing new."""


def _rope(facts: _Facts, head_dim: int) -> dict[str, Any] | None:
    """rope_scaling, None where rotations are plain."""
    if ROPE_FACTORS in facts.file.tensors:
        return _llama3(facts, head_dim)
    prefix = facts.prefix + "rope.scaling."
    for key in facts.file.metadata:
        name = key.removeprefix(prefix)
        if key.startswith(prefix) and name not in SCALING and facts.number(f"rope.scaling.{name}") != IMPLIED.get(name):
            raise UnsupportedModel(f"{facts.file.path}: {shown(key)} is not supported")
    kind = facts.value("rope.scaling.type") or "none"
    if kind == "none":
        return None
    rope = {"rope_type": kind, "factor": facts.number("rope.scaling.factor")}
    if kind == "yarn":
        length = facts.count("rope.scaling.original_context_length", facts.count("context_length"))
        rope["original_max_position_embeddings"] = length
    return rope


def _llama3(facts: _Facts, head_dim: int) -> dict[str, Any]:
    """The parameters of llama3's rotation that gave the divisors in the file: it has these alone."""
    info = facts.file.tensors[ROPE_FACTORS]
    if info.type.name != "F32" or info.shape != (head_dim // 2,):
        raise UnsupportedModel(f"{facts.file.path}: {ROPE_FACTORS} is not F32 of half a head's size")
    given = np.frombuffer(facts.file.bytes_of(info), np.float32).astype(np.float64)
    theta, factor = facts.number("rope.freq_base", 10_000.0), float(given.max())
    lengths = 2 * math.pi * theta ** (2 * np.arange(head_dim // 2) / head_dim)
    for exponent in range(5, 21):
        made = _divisors(lengths, factor, 2**exponent)
        if np.allclose(made, given, rtol=1e-4):
            return {
                "rope_type": "llama3", "factor": factor, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                "original_max_position_embeddings": 2**exponent,
            }  # fmt: skip
    raise UnsupportedModel(f"{facts.file.path}: {ROPE_FACTORS} is not as llama3's rotation makes it; use safetensors")


def _divisors(lengths: np.ndarray[Any, Any], factor: float, original: int) -> np.ndarray[Any, Any]:
    """Of each wave length: 1 for short ones, `factor` for those beyond the original length, between them a blend."""
    smooth = np.clip((original / lengths - 1.0) / (4.0 - 1.0), 0.0, 1.0)
    return 1.0 / ((1.0 - smooth) / factor + smooth)
