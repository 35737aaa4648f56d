"""config.json as transformers' classes would read it, without importing them: that takes more than a second.

For what is checked before an engine is started; the engine itself asks transformers, which refuses more.
tests/unit/test_plain_config.py compares the two.
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

from headrace.models import schema
from headrace.models.config import ModelConfig, read_with
from headrace.models.families import Family
from headrace.types import UnsupportedModel

COMMON: dict[str, Any] = dict(
    tie_word_embeddings=False, rope_parameters=None, bos_token_id=None, eos_token_id=None, dtype=None,
)  # fmt: skip
LLAMA: dict[str, Any] = COMMON | dict(
    vocab_size=32000, hidden_size=4096, intermediate_size=11008, num_hidden_layers=32, num_attention_heads=32,
    num_key_value_heads=None, hidden_act="silu", max_position_embeddings=2048, rms_norm_eps=1e-6, bos_token_id=1,
    eos_token_id=2, pretraining_tp=1, attention_bias=False, mlp_bias=False, head_dim=None,
)  # fmt: skip
QWEN: dict[str, Any] = COMMON | dict(
    vocab_size=151936, hidden_size=4096, intermediate_size=22016, num_hidden_layers=32, num_attention_heads=32,
    num_key_value_heads=32, hidden_act="silu", max_position_embeddings=32768, rms_norm_eps=1e-6,
    use_sliding_window=False, sliding_window=4096, max_window_layers=28, layer_types=None,
)  # fmt: skip
DEFAULTS: dict[str, dict[str, Any]] = {
    "llama": LLAMA,
    "mistral": LLAMA
    | dict(intermediate_size=14336, num_key_value_heads=8, max_position_embeddings=131072, sliding_window=4096),
    "qwen2": QWEN,
    "qwen3": QWEN | dict(head_dim=128, attention_bias=False),
    "qwen3_moe": LLAMA
    | dict(
        vocab_size=151936, hidden_size=2048, intermediate_size=6144, num_hidden_layers=24, num_key_value_heads=4,
        max_position_embeddings=32768, bos_token_id=None, eos_token_id=None, use_sliding_window=False,
        sliding_window=4096, decoder_sparse_step=1, moe_intermediate_size=768, num_experts_per_tok=8, num_experts=128,
        norm_topk_prob=False, mlp_only_layers=None,
    ),
    "mixtral": LLAMA
    | dict(
        intermediate_size=14336, num_key_value_heads=8, max_position_embeddings=131072, rms_norm_eps=1e-5,
        sliding_window=None, num_experts_per_tok=2, num_local_experts=8, default_theta=1e6,
    ),
    "olmoe": LLAMA
    | dict(
        vocab_size=50304, hidden_size=2048, intermediate_size=2048, num_hidden_layers=16, num_attention_heads=16,
        max_position_embeddings=4096, rms_norm_eps=1e-5, bos_token_id=None, eos_token_id=50279, clip_qkv=None,
        num_experts_per_tok=8, num_experts=64, norm_topk_prob=False,
    ),
    "opt": COMMON
    | dict(
        vocab_size=50272, hidden_size=768, num_hidden_layers=12, ffn_dim=3072, max_position_embeddings=2048,
        do_layer_norm_before=True, _remove_final_layer_norm=False, word_embed_proj_dim=None, num_attention_heads=12,
        activation_function="relu", bos_token_id=2, eos_token_id=2, enable_bias=True,
        layer_norm_elementwise_affine=True, tie_word_embeddings=True,
    ),
    "falcon": COMMON
    | dict(
        vocab_size=65024, hidden_size=4544, num_hidden_layers=32, num_attention_heads=71, num_ln_in_parallel_attn=None,
        layer_norm_epsilon=1e-5, num_kv_heads=None, alibi=False, new_decoder_architecture=False, multi_query=True,
        parallel_attn=True, bias=False, max_position_embeddings=2048, ffn_hidden_size=None, activation="gelu",
        bos_token_id=11, eos_token_id=11, tie_word_embeddings=True,
    ),
}  # fmt: skip
"""By model_type: the fields that transformers' class has, with what it puts where config.json says nothing."""

NEVER_NULL = (
    "vocab_size", "hidden_size", "intermediate_size", "ffn_dim", "num_hidden_layers", "num_attention_heads",
    "max_position_embeddings", "max_window_layers", "num_experts", "num_local_experts", "num_experts_per_tok",
    "moe_intermediate_size", "decoder_sparse_step",
)  # fmt: skip
THETA = 10_000.0


def plain_config(folder: Path) -> ModelConfig:
    """As models.config.read_config, by our own defaults. Raises what that raises, but for what only transformers
    refuses; UnsupportedModel also where a field is null that must not be."""
    return read_with(folder, _normalised)


def _normalised(raw: dict[str, Any], family: Family) -> Any:
    known = schema.known(raw)
    values = DEFAULTS[family.model_type] | known
    null = next((name for name in NEVER_NULL if name in values and values[name] is None), None)
    if null is not None:
        raise UnsupportedModel(f"{null} is null; download the file again")
    _fill_in(values, family.model_type)
    _fill_in_experts(values, known, "num_experts" in DEFAULTS[family.model_type])
    _fill_in_rope(values, known)
    values["model_type"] = family.model_type
    return SimpleNamespace(**values)


def _fill_in(values: dict[str, Any], model_type: str) -> None:
    """What the classes work out from other fields."""
    heads = values["num_attention_heads"]
    if "head_dim" in values and values["head_dim"] is None:
        values["head_dim"] = values["hidden_size"] // heads
    if "num_key_value_heads" in values and values["num_key_value_heads"] is None:
        values["num_key_value_heads"] = heads
    if "use_sliding_window" in values:
        _fill_in_windows(values)
    if "mlp_only_layers" in values and values["mlp_only_layers"] is None:
        values["mlp_only_layers"] = []
    if model_type == "opt" and values["word_embed_proj_dim"] is None:
        values["word_embed_proj_dim"] = values["hidden_size"]
    if model_type == "falcon":
        values["hidden_size"] = values.get("n_embed") or values["hidden_size"]
        if values["num_kv_heads"] is None:
            values["num_kv_heads"] = heads
        if values["ffn_hidden_size"] is None:
            values["ffn_hidden_size"] = values["hidden_size"] * 4


def _fill_in_experts(values: dict[str, Any], given: dict[str, Any], is_num_experts: bool) -> None:
    """The number of experts has two names, of which a class has one as its own; the other one overrides it."""
    own, other = ("num_experts", "num_local_experts") if is_num_experts else ("num_local_experts", "num_experts")
    if own in values and other in given:
        values[own] = given[other]


def _fill_in_windows(values: dict[str, Any]) -> None:
    if not values["use_sliding_window"]:
        values["sliding_window"] = None
    if "max_window_layers" in values and values["layer_types"] is None:
        full = values["num_hidden_layers"] if values["sliding_window"] is None else values["max_window_layers"]
        kinds = ("full_attention", "sliding_attention")
        values["layer_types"] = [kinds[layer >= full] for layer in range(values["num_hidden_layers"])]


def _fill_in_rope(values: dict[str, Any], given: dict[str, Any]) -> None:
    """All that is said of the rotation, in one place."""
    rope = dict(given.get("rope_scaling") or given.get("rope_parameters") or {})
    rope.setdefault("rope_theta", given.get("rope_theta", values.get("default_theta", THETA)))
    if given.get("partial_rotary_factor") is not None:
        rope.setdefault("partial_rotary_factor", given["partial_rotary_factor"])
    rope.setdefault("rope_type", rope.get("type", "default"))
    if rope["rope_type"] in ("llama3", "yarn"):
        rope.setdefault("original_max_position_embeddings", values["max_position_embeddings"])
    values["rope_parameters"] = rope
