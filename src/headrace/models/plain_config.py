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
from headrace.models.families.base import LAYER_TYPES as KINDS
from headrace.types import UnsupportedModel

COMMON: dict[str, Any] = dict(
    tie_word_embeddings=False, rope_parameters=None, bos_token_id=None, eos_token_id=None, dtype=None,
)  # fmt: skip
LLAMA: dict[str, Any] = COMMON | dict(
    vocab_size=32000, hidden_size=4096, intermediate_size=11008, num_hidden_layers=32, num_attention_heads=32,
    num_key_value_heads=None, hidden_act="silu", max_position_embeddings=2048, rms_norm_eps=1e-6, bos_token_id=1,
    eos_token_id=2, pretraining_tp=1, attention_bias=False, mlp_bias=False, head_dim=None,
)  # fmt: skip
GRANITE: dict[str, Any] = LLAMA | dict(
    embedding_multiplier=1.0, logits_scaling=1.0, residual_multiplier=1.0, attention_multiplier=1.0,
)  # fmt: skip
QWEN: dict[str, Any] = COMMON | dict(
    vocab_size=151936, hidden_size=4096, intermediate_size=22016, num_hidden_layers=32, num_attention_heads=32,
    num_key_value_heads=32, hidden_act="silu", max_position_embeddings=32768, rms_norm_eps=1e-6,
    use_sliding_window=False, sliding_window=4096, max_window_layers=28, layer_types=None,
)  # fmt: skip
GLM: dict[str, Any] = COMMON | dict(
    vocab_size=151552, hidden_size=4096, intermediate_size=13696, num_hidden_layers=40, num_attention_heads=32,
    num_key_value_heads=2, head_dim=128, hidden_act="silu", max_position_embeddings=131072, rms_norm_eps=1.5625e-7,
    attention_bias=True,
)  # fmt: skip
GEMMA: dict[str, Any] = COMMON | dict(
    vocab_size=256000, hidden_size=2304, intermediate_size=9216, num_hidden_layers=26, num_attention_heads=8,
    num_key_value_heads=4, head_dim=256, hidden_activation="gelu_pytorch_tanh", max_position_embeddings=8192,
    rms_norm_eps=1e-6, eos_token_id=1, bos_token_id=2, tie_word_embeddings=True, attention_bias=False,
    query_pre_attn_scalar=256, sliding_window=4096, layer_types=None, final_logit_softcapping=30.0,
    attn_logit_softcapping=50.0, use_bidirectional_attention=None,
)  # fmt: skip
OLMO2: dict[str, Any] = LLAMA | dict(vocab_size=50304, rms_norm_eps=1e-5, bos_token_id=None, eos_token_id=50279)
GEMMA4: dict[str, Any] = COMMON | dict(
    vocab_size=262144, hidden_size=2304, intermediate_size=9216, num_hidden_layers=30, num_attention_heads=8,
    num_key_value_heads=4, head_dim=256, hidden_activation="gelu_pytorch_tanh", max_position_embeddings=131072,
    rms_norm_eps=1e-6, eos_token_id=1, bos_token_id=2, tie_word_embeddings=True, attention_bias=False,
    sliding_window=512, layer_types=None, final_logit_softcapping=None, use_bidirectional_attention=None,
    vocab_size_per_layer_input=262144, hidden_size_per_layer_input=256, attention_k_eq_v=False, num_kv_shared_layers=0,
    enable_moe_block=False, use_double_wide_mlp=False, num_experts=None, top_k_experts=None,
    moe_intermediate_size=None, global_head_dim=512, num_global_key_value_heads=None,
)  # fmt: skip
GEMMA4_ROPES = {
    "full_attention": dict(rope_type="proportional", partial_rotary_factor=0.25, rope_theta=1_000_000.0),
    "sliding_attention": dict(rope_type="default", rope_theta=10_000.0),
}
QWEN3_NEXT: dict[str, Any] = COMMON | dict(
    vocab_size=151936, hidden_size=2048, intermediate_size=5632, num_hidden_layers=48, num_attention_heads=16,
    num_key_value_heads=2, hidden_act="silu", max_position_embeddings=32768, rms_norm_eps=1e-6, attention_bias=False,
    head_dim=256, linear_conv_kernel_dim=4, linear_key_head_dim=128, linear_value_head_dim=128, linear_num_key_heads=16,
    linear_num_value_heads=32, layer_types=None, full_attention_interval=4, num_experts=512, num_experts_per_tok=10,
    moe_intermediate_size=512, shared_expert_intermediate_size=512, norm_topk_prob=True, decoder_sparse_step=1,
    mlp_only_layers=None,
)  # fmt: skip
DEFAULTS: dict[str, dict[str, Any]] = {
    "llama": LLAMA,
    "mistral": LLAMA
    | dict(intermediate_size=14336, num_key_value_heads=8, max_position_embeddings=131072, sliding_window=4096),
    "ministral3": LLAMA
    | dict(
        vocab_size=131072, intermediate_size=14336, num_hidden_layers=34, num_key_value_heads=8, head_dim=128,
        max_position_embeddings=262144, rms_norm_eps=1e-5, sliding_window=None,
    ),
    "qwen2": QWEN,
    "qwen3": QWEN | dict(head_dim=128, attention_bias=False),
    "qwen2_5_vl_text": QWEN
    | dict(
        vocab_size=152064, hidden_size=8192, intermediate_size=29568, num_hidden_layers=80, num_attention_heads=64,
        num_key_value_heads=8, rms_norm_eps=1e-5, max_window_layers=80, bos_token_id=151643, eos_token_id=151645,
    ),
    "qwen3_vl_text": COMMON
    | dict(
        vocab_size=151936, hidden_size=4096, intermediate_size=22016, num_hidden_layers=32, num_attention_heads=32,
        num_key_value_heads=32, head_dim=128, hidden_act="silu", max_position_embeddings=128000, rms_norm_eps=1e-6,
        attention_bias=False,
    ),
    "seed_oss": LLAMA
    | dict(
        vocab_size=155136, intermediate_size=27648, num_hidden_layers=64, num_attention_heads=80, num_key_value_heads=8,
        max_position_embeddings=524288, bos_token_id=0, attention_bias=True, attention_out_bias=False, head_dim=128,
    ),
    "arcee": LLAMA
    | dict(
        hidden_size=2560, intermediate_size=18432, hidden_act="relu2", max_position_embeddings=4096, rms_norm_eps=1e-5,
        bos_token_id=128000, eos_token_id=128001,
    ),
    "ernie4_5": LLAMA
    | dict(
        vocab_size=103424, hidden_size=1024, intermediate_size=3072, num_hidden_layers=18, num_attention_heads=16,
        num_key_value_heads=2, max_position_embeddings=131072, rms_norm_eps=1e-5, tie_word_embeddings=True,
        use_bias=False, head_dim=128,
    ),
    "hunyuan_v1_dense": LLAMA | dict(vocab_size=290943, rms_norm_eps=1e-5),
    "olmo2": OLMO2,
    "olmo3": OLMO2 | dict(sliding_window=4096, layer_types=None),
    "exaone4": LLAMA
    | dict(
        vocab_size=102400, intermediate_size=16384, num_key_value_heads=32, rms_norm_eps=1e-5, bos_token_id=0,
        sliding_window=4096, sliding_window_pattern=4, layer_types=None,
    ),
    "cohere2": COMMON
    | dict(
        vocab_size=256000, hidden_size=8192, intermediate_size=22528, logit_scale=0.0625, num_hidden_layers=40,
        num_attention_heads=64, num_key_value_heads=None, hidden_act="silu", max_position_embeddings=8192,
        layer_norm_eps=1e-5, bos_token_id=5, eos_token_id=255001, tie_word_embeddings=True, attention_bias=False,
        sliding_window=4096, layer_types=None,
    ),
    "qwen3_next": QWEN3_NEXT,
    "qwen3_5_text": QWEN3_NEXT
    | dict(
        vocab_size=248320, hidden_size=4096, intermediate_size=12288, num_hidden_layers=32, num_key_value_heads=4,
        num_experts=0,
    ),
    "qwen3_5_moe_text": QWEN3_NEXT
    | dict(vocab_size=248320, num_hidden_layers=40, num_experts_per_tok=8, num_experts=256),
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
        sliding_window=None, num_experts_per_tok=2, num_local_experts=8,
    ),
    "olmoe": LLAMA
    | dict(
        vocab_size=50304, hidden_size=2048, intermediate_size=2048, num_hidden_layers=16, num_attention_heads=16,
        max_position_embeddings=4096, rms_norm_eps=1e-5, bos_token_id=None, eos_token_id=50279, clip_qkv=None,
        num_experts_per_tok=8, num_experts=64, norm_topk_prob=False,
    ),
    "gpt_oss": LLAMA
    | dict(
        vocab_size=201088, hidden_size=2880, intermediate_size=2880, num_hidden_layers=36, num_attention_heads=64,
        num_key_value_heads=8, head_dim=64, max_position_embeddings=131072, rms_norm_eps=1e-5, bos_token_id=None,
        eos_token_id=None, attention_bias=True, sliding_window=128, layer_types=None, num_experts_per_tok=4,
        num_local_experts=128, swiglu_alpha=1.702, swiglu_limit=7.0,
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
    "phi3": COMMON
    | dict(
        vocab_size=32064, hidden_size=3072, intermediate_size=8192, num_hidden_layers=32, num_attention_heads=32,
        num_key_value_heads=None, hidden_act="silu", max_position_embeddings=4096, rms_norm_eps=1e-5, bos_token_id=1,
        original_max_position_embeddings=4096, eos_token_id=32000, sliding_window=None,
    ),
    "smollm3": COMMON
    | dict(
        vocab_size=128256, hidden_size=2048, intermediate_size=11008, num_hidden_layers=36, num_attention_heads=16,
        num_key_value_heads=4, hidden_act="silu", max_position_embeddings=32768, rms_norm_eps=1e-6, bos_token_id=128000,
        eos_token_id=128001, use_sliding_window=False, sliding_window=None, no_rope_layers=None,
        no_rope_layer_interval=4, layer_types=None, attention_bias=False, mlp_bias=False, tie_word_embeddings=True,
    ),
    "granite": GRANITE,
    "granitemoe": GRANITE | dict(num_local_experts=8, num_experts_per_tok=2),
    "granitemoeshared": GRANITE | dict(num_local_experts=8, num_experts_per_tok=2, shared_intermediate_size=0),
    "granitemoehybrid": GRANITE
    | dict(
        num_local_experts=8, num_experts_per_tok=2, shared_intermediate_size=1024, position_embedding_type=None,
        layer_types=None,
    ),
    "glm": GLM,
    "glm4": GLM,
    "gemma2": GEMMA,
    "gemma3_text": GEMMA
    | dict(
        vocab_size=262208, max_position_embeddings=131072, final_logit_softcapping=None, attn_logit_softcapping=None,
        use_bidirectional_attention=False,
    ),
    "gemma4_text": GEMMA4,
}  # fmt: skip
"""By model_type: the fields that transformers' class has, with what it puts where config.json says nothing."""

NEVER_NULL = (
    "vocab_size", "hidden_size", "intermediate_size", "ffn_dim", "num_hidden_layers", "num_attention_heads",
    "max_position_embeddings", "max_window_layers", "num_experts", "num_local_experts", "num_experts_per_tok",
    "moe_intermediate_size", "shared_expert_intermediate_size", "shared_intermediate_size", "decoder_sparse_step",
)  # fmt: skip
ONE_NAME = ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text", "granitemoe", "granitemoeshared", "granitemoehybrid")
"""Classes that know the number of experts by one name alone."""
THETA = 10_000.0
THETAS = {"smollm3": 2_000_000.0, "gemma3_text": 1_000_000.0, "mixtral": 1_000_000.0, "gpt_oss": 150_000.0}
THETAS |= {"qwen2_5_vl_text": 1_000_000.0, "qwen3_vl_text": 500_000.0, "ernie4_5": 500_000.0, "olmo3": 500_000.0}
"""Where the class has another one."""
LOCAL_THETAS = {"gemma3_text": THETA, "olmo3": 500_000.0}
"""Of layers with a window, where they have a base of their own."""
PARTS = {"glm": 0.5, "glm4": 0.5, "qwen3_next": 0.25, "qwen3_5_text": 0.25, "qwen3_5_moe_text": 0.25}
"""Of each head that is rotated, where the class does not rotate all of it."""
GPT_OSS_ROPE = dict(
    rope_type="yarn", factor=32.0, beta_fast=32.0, beta_slow=1.0, truncate=False, original_max_position_embeddings=4096
)
MINISTRAL3_ROPE = dict(
    rope_type="yarn", rope_theta=1e6, factor=16.0, original_max_position_embeddings=16384, beta_fast=32.0,
    beta_slow=1.0, mscale_all_dim=1.0, mscale=1.0, llama_4_scaling_beta=0.1,
)  # fmt: skip
ROPES = {"gpt_oss": GPT_OSS_ROPE, "ministral3": MINISTRAL3_ROPE}
"""Where the class has more than a base."""
EVERY_FOURTH = ("olmo3", "exaone4", "cohere2")
"""Of their layers has no window, unless the file says otherwise."""
GRANITE_KINDS = {"mamba": "linear_attention", "attention": KINDS[0]}
"""What transformers calls the kinds of layers that Granite 4's files name."""
GLM_ENDS = [151329, 151336, 151338]


def plain_config(folder: Path) -> ModelConfig:
    """As models.config.read_config, by our own defaults. Raises what that raises, but for what only transformers
    refuses; UnsupportedModel also where a field is null that must not be."""
    return read_with(folder, _normalised)


def _normalised(raw: dict[str, Any], family: Family) -> Any:
    known = schema.known(raw)
    model_type = family.fields_of
    values = DEFAULTS[model_type] | known
    never_null = [name for name in NEVER_NULL if DEFAULTS[model_type].get(name) is not None]
    null = next((name for name in never_null if values[name] is None), None)
    if null is not None:
        raise UnsupportedModel(f"{null} is null; download the file again")
    _fill_in(values, model_type)
    if model_type not in ONE_NAME:
        _fill_in_experts(values, known, "num_experts" in DEFAULTS[model_type])
    _fill_in_rope(values, known, model_type)
    values["model_type"] = model_type
    return SimpleNamespace(**values)


def _fill_in(values: dict[str, Any], model_type: str) -> None:
    """What the classes work out from other fields."""
    heads = values["num_attention_heads"]
    if "head_dim" in values and values["head_dim"] is None:
        values["head_dim"] = values["hidden_size"] // heads
    if "num_key_value_heads" in values and values["num_key_value_heads"] is None:
        values["num_key_value_heads"] = heads
    if "max_window_layers" in values:
        _fill_in_windows(values)
    if values.get("mlp_only_layers", ()) is None:
        values["mlp_only_layers"] = []
    if model_type == "qwen3_moe":
        _fill_in_qwen3_moe(values)
    if model_type == "smollm3":
        _fill_in_smollm3(values)
    if model_type.startswith("glm") and values["eos_token_id"] is None:
        values["eos_token_id"] = GLM_ENDS
    if model_type.startswith("gemma") and values["layer_types"] is None:
        _fill_in_layer_types(values, 2 if model_type == "gemma2" else values.get("sliding_window_pattern", 6))
    if model_type == "granitemoehybrid":
        given = values["layer_types"]
        kinds = ["mamba"] * values["num_hidden_layers"] if given is None else given
        values["layer_types"] = [GRANITE_KINDS.get(kind, kind) for kind in kinds]
    if model_type in EVERY_FOURTH and values["layer_types"] is None:
        untold = model_type == "exaone4" and values["sliding_window"] is None
        every = 0 if untold else 4 if model_type == "olmo3" else values.get("sliding_window_pattern", 4)
        _fill_in_layer_types(values, every)
    if model_type == "gpt_oss" and values["layer_types"] is None:
        values["layer_types"] = [KINDS[(layer + 1) % 2] for layer in range(values["num_hidden_layers"])]
    if "full_attention_interval" in values and values["layer_types"] is None:
        interval, kinds = values["full_attention_interval"], ("full_attention", "linear_attention")
        values["layer_types"] = [kinds[bool((layer + 1) % interval)] for layer in range(values["num_hidden_layers"])]
    if model_type == "gemma4_text":
        _fill_in_gemma4(values)
    if model_type == "opt" and values["word_embed_proj_dim"] is None:
        values["word_embed_proj_dim"] = values["hidden_size"]
    if model_type == "falcon":
        values["hidden_size"] = values.get("n_embed") or values["hidden_size"]
        if values["num_kv_heads"] is None:
            values["num_kv_heads"] = heads
        if values["ffn_hidden_size"] is None:
            values["ffn_hidden_size"] = values["hidden_size"] * 4


def _fill_in_layer_types(values: dict[str, Any], every: Any) -> None:
    """A window in all layers but each `every`th."""
    if not isinstance(every, int) or every < 1:
        raise UnsupportedModel("layer_types is missing, and sliding_window_pattern does not tell them")
    values["layer_types"] = [KINDS[(layer + 1) % every != 0] for layer in range(values["num_hidden_layers"])]


def _fill_in_experts(values: dict[str, Any], given: dict[str, Any], is_num_experts: bool) -> None:
    """The number of experts has two names, of which a class has one as its own; the other one overrides it."""
    own, other = ("num_experts", "num_local_experts") if is_num_experts else ("num_local_experts", "num_experts")
    if own in values and other in given:
        values[own] = given[other]


def _fill_in_windows(values: dict[str, Any]) -> None:
    if not values["use_sliding_window"]:
        values["sliding_window"] = None
    if values["layer_types"] is None:
        full = values["num_hidden_layers"] if values["sliding_window"] is None else values["max_window_layers"]
        values["layer_types"] = [KINDS[layer >= full] for layer in range(values["num_hidden_layers"])]


def _fill_in_qwen3_moe(values: dict[str, Any]) -> None:
    if not values["use_sliding_window"]:
        values["sliding_window"] = None


def _fill_in_smollm3(values: dict[str, Any]) -> None:
    layers, every = range(values["num_hidden_layers"]), values["no_rope_layer_interval"]
    if values["no_rope_layers"] is None:
        values["no_rope_layers"] = [int((layer + 1) % every != 0) for layer in layers]
    if values["layer_types"] is None:
        windows = values["use_sliding_window"] and values["sliding_window"] is not None
        turned = [*values["no_rope_layers"], *layers]
        values["layer_types"] = [KINDS[windows and not turned[layer]] for layer in layers]


def _fill_in_gemma4(values: dict[str, Any]) -> None:
    values["layer_types"] = [*values["layer_types"][:-1], KINDS[0]]
    own = values.get("per_layer_config")
    if own is None:
        heads = values["num_global_key_value_heads"] if values["attention_k_eq_v"] else None
        found = dict(head_dim=values["global_head_dim"]) | ({} if heads is None else dict(num_key_value_heads=heads))
        own = {str(layer): found for layer, kind in enumerate(values["layer_types"]) if kind == KINDS[0]}
    every = {name: values[name] for name in ("head_dim", "num_key_value_heads")}
    layers = range(values["num_hidden_layers"])
    values["per_layer_config"] = {layer: SimpleNamespace(**every | own.get(str(layer), {})) for layer in layers}


def _fill_in_rope(values: dict[str, Any], given: dict[str, Any], model_type: str) -> None:
    """All that is said of the rotation, in one place."""
    if model_type == "gemma4_text":
        values["rope_parameters"] = given.get("rope_parameters") or GEMMA4_ROPES
        return None
    if model_type in LOCAL_THETAS:
        return _fill_in_two_ropes(values, given, model_type)
    rope = dict(given.get("rope_scaling") or given.get("rope_parameters") or {})
    if not rope:
        rope = dict(ROPES.get(model_type, {}))
    rope.setdefault("rope_theta", given.get("rope_theta", THETAS.get(model_type, THETA)))
    part = given.get("partial_rotary_factor", PARTS.get(model_type))
    if part is not None:
        rope.setdefault("partial_rotary_factor", part)
    _complete(rope, values)
    if model_type == "phi3" and rope["rope_type"] == "longrope":
        rope["original_max_position_embeddings"] = values["original_max_position_embeddings"]
    values["rope_parameters"] = rope


def _fill_in_two_ropes(values: dict[str, Any], given: dict[str, Any], model_type: str) -> None:
    """The same by kind of layer, as Gemma 3 and OLMo 3 have it."""
    told = given.get("rope_parameters") or {}
    ropes = {kind: dict(told.get(kind) or {}) for kind in KINDS}
    ropes[KINDS[0]].update(given.get("rope_scaling") or {})
    ropes[KINDS[0]].setdefault("rope_theta", given.get("rope_theta", THETAS[model_type]))
    ropes[KINDS[1]].setdefault("rope_theta", given.get("rope_local_base_freq", LOCAL_THETAS[model_type]))
    for rope in ropes.values():
        _complete(rope, values)
    values["rope_parameters"] = told | ropes


def _complete(rope: dict[str, Any], values: dict[str, Any]) -> None:
    rope.setdefault("rope_type", rope.get("type", "default"))
    if rope["rope_type"] in ("llama3", "yarn", "longrope"):
        rope.setdefault("original_max_position_embeddings", values["max_position_embeddings"])
