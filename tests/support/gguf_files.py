"""GGUF files of small random models, and transformers' models with just the weights that such a file stands for.

The gguf package writes the files and says what quantised rows stand for. It quantises to the simple types; rows of the
k-quants are drawn as blocks of random codes, as wide as the weights that they take the place of.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType as Kind
from gguf import GGUFWriter, quants
from transformers import PreTrainedModel

from tests.support.checkpoints import KINDS

SIZES: dict[str, Any] = dict(
    vocab_size=320, hidden_size=256, intermediate_size=512, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, head_dim=64, max_position_embeddings=512, bos_token_id=None, eos_token_id=None,
    pad_token_id=None,
)  # fmt: skip
"""Widths in whole blocks of every type."""
ARCHITECTURES = {"llama": "llama", "mistral": "llama", "qwen2": "qwen2", "qwen3": "qwen3"}
ARCHITECTURES |= {"mixtral": "llama", "qwen3_moe": "qwen3moe", "olmoe": "olmoe"}
NAMES = {
    "model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output",
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output", "self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm", "mlp.gate": "ffn_gate_inp",
}  # fmt: skip
KindOf = Callable[[str], Kind]
"""The type in which a matrix is stored, by its name in the file."""
Array = np.ndarray[Any, Any]


def theirs(family: str = "llama", **more: Any) -> PreTrainedModel:
    """A model of transformers in these sizes, with random weights."""
    build, fields = KINDS[family]
    torch.manual_seed(5)
    model = build(**{**fields, **SIZES, **more}).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter) * 0.1)
            else:
                parameter.normal_(std=0.08 if "embed" not in name else 0.5)
    return model


def tokens_of(count: int, seed: int = 1) -> list[int]:
    """Random ones."""
    return torch.randint(0, 320, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def q4_k_m(name: str) -> Kind:
    """As llama.cpp's mixture of that name: values, some of the layers' last matrices and the head in six bits."""
    better = name in ("output.weight", "token_embd.weight") or "attn_v" in name or name == "blk.0.ffn_down.weight"
    return Kind.Q6_K if better else Kind.Q4_K


def write_gguf(
    model: PreTrainedModel,
    path: Path,
    kind_of: KindOf,
    *,
    tied: bool = False,
    parts: int = 1,
    apart: bool = False,
    claims: Mapping[str, int] | None = None,
) -> Path:
    """Writes the model, and puts into it what the file's weights stand for. Returns the file, of several the first.

    apart: each expert's matrices in tensors of their own, as older files have them. claims: entries of the metadata
    that say something else than the model does."""
    names = (
        [path.with_name(f"{path.stem}-{i + 1:05}-of-{parts:05}.gguf") for i in range(parts)] if parts > 1 else [path]
    )
    writers = [GGUFWriter(str(name), ARCHITECTURES[model.config.model_type]) for name in names]
    describe(writers[0], model.config)
    for key, value in (claims or {}).items():
        writers[0].add_uint32(key, value)
    with torch.no_grad():
        for index, (name, parameter) in enumerate(model.named_parameters()):
            if ".experts." in name:
                _add_experts(writers[index % parts], name, parameter, kind_of, apart)
            elif not (tied and name == "lm_head.weight"):
                _add(writers[index % parts], name, parameter, model.config, kind_of)
    for writer in writers:
        finish(writer)
    return names[0]


def describe(writer: GGUFWriter, config: Any) -> None:
    """The facts of a model."""
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(
        config.head_dim if hasattr(config, "head_dim") else config.hidden_size // config.num_attention_heads
    )
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    rope = config.rope_parameters
    if rope["rope_type"] in ("linear", "yarn"):
        writer.add_rope_scaling_type(gguf.RopeScalingType(rope["rope_type"]))
        writer.add_rope_scaling_factor(rope["factor"])
    if rope["rope_type"] == "yarn":
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
    if rope["rope_type"] == "llama3":
        writer.add_tensor("rope_freqs.weight", divisors(rope, config.head_dim))
    if getattr(config, "sliding_window", None) and config.model_type in ("mistral", "mixtral"):
        writer.add_sliding_window(config.sliding_window)
    if hasattr(config, "num_experts_per_tok"):
        _describe_experts(writer, config)


def _describe_experts(writer: GGUFWriter, config: Any) -> None:
    """Whether shares are normalised, where that is not what llama.cpp does for the architecture."""
    mixtral = config.model_type == "mixtral"
    writer.add_expert_count(config.num_local_experts if mixtral else config.num_experts)
    writer.add_expert_used_count(config.num_experts_per_tok)
    if config.model_type == "qwen3_moe":
        writer.add_expert_feed_forward_length(config.moe_intermediate_size)
    if not mixtral and config.norm_topk_prob != (config.model_type == "qwen3_moe"):
        writer.add_expert_weights_norm(config.norm_topk_prob)


def divisors(rope: dict[str, Any], head_dim: int) -> Array:
    """What llama.cpp divides the frequencies by, where transformers has llama3's rotation."""
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    config = LlamaConfig(hidden_size=head_dim, num_attention_heads=1, rope_parameters=rope)
    turned, _ = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
    plain = 1.0 / rope["rope_theta"] ** (torch.arange(0, head_dim, 2).float() / head_dim)
    return (plain / turned).numpy().astype(np.float32)


def finish(writer: GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


DRAWN: dict[Kind, tuple[int, float]] = {
    Kind.Q2_K: (80, 13.9), Kind.Q3_K: (108, 43.4), Kind.Q4_K: (0, 32 * 4.6), Kind.Q5_K: (0, 32 * 9.2),
    Kind.Q6_K: (208, 64 * 18.0), Kind.IQ4_NL: (0, 67.1), Kind.IQ4_XS: (0, 1250.0), Kind.IQ3_S: (0, 140.0),
    Kind.IQ3_XXS: (0, 142.0), Kind.IQ2_S: (0, 56.4), Kind.IQ2_XS: (0, 56.1), Kind.IQ2_XXS: (0, 53.6),
    Kind.IQ1_S: (0, 7.2), Kind.IQ1_M: (48, 7.2), Kind.Q1_0: (0, 1.0),
}  # fmt: skip
"""Types that are drawn: where a block's scale lies, and the standard deviation of random blocks under a scale of 1."""
LEAST = {Kind.Q2_K: 1.5, Kind.Q4_K: 7.5, Kind.Q5_K: 15.5}
"""Of those with minima: scales that the second one is, so that numbers lie around 0."""


def raw_rows(value: Array, kind: Kind) -> Array:
    """Rows of that type, fp32 as they are, what the gguf package does not write drawn."""
    if kind == Kind.NVFP4:
        return drawn_nvfp4(value.shape)
    if kind not in DRAWN:
        return quants.quantize(np.ascontiguousarray(value), kind)
    return drawn(value.shape, kind, float(value.std()))


def meaning(rows: Array, kind: Kind) -> Array:
    """fp32 of rows of that type. The package does not read Q1_0: a scale for 128 inputs, with the sign of each."""
    if kind != Kind.Q1_0:
        return quants.dequantize(rows, kind)
    each = rows.reshape(-1, 18)
    scales = each[:, :2].copy().view(np.float16).astype(np.float32)
    signs = np.where(np.unpackbits(each[:, 2:], axis=1, bitorder="little"), np.float32(1), np.float32(-1))
    return (scales * signs).reshape(len(rows), -1)


def drawn_nvfp4(shape: tuple[int, ...], seed: int = 0) -> Array:
    """uint8 [rows, bytes]: random codes under scales of 28 to 448; numbers deviate by about 700."""
    made = np.random.default_rng([seed, shape[0], shape[1]])
    rows = made.integers(0, 256, (shape[0], shape[1] // 64, 36), dtype=np.uint8)
    rows[..., :4] = made.integers(0x5E, 0x7F, rows[..., :4].shape, dtype=np.uint8)
    return rows.reshape(shape[0], -1)


def drawn(shape: tuple[int, ...], kind: Kind, width: float, seed: int = 0) -> Array:
    """uint8 [rows, bytes]: blocks of random codes that stand for numbers of about this standard deviation around 0."""
    made = np.random.default_rng([seed, shape[0], shape[1]])
    block, size = gguf.GGML_QUANT_SIZES[kind]
    rows = made.integers(0, 256, (shape[0], shape[1] // block, size), dtype=np.uint8)

    def put(at: int, scale: float) -> None:
        scales = (scale * made.uniform(0.5, 1.0, rows.shape[:2])).astype(np.float16)
        if kind == Kind.IQ1_M:  # in the highest four bits of four words
            nibbles = scales.view(np.uint16)[..., None] >> np.array([0, 4, 8, 12], dtype=np.uint16) & 15
            rows[..., at + 1 : at + 8 : 2] = rows[..., at + 1 : at + 8 : 2] & 15 | nibbles.astype(np.uint8) << 4
        else:
            rows[..., at : at + 2] = scales.view(np.uint8).reshape(*rows.shape[:2], 2)

    at, deviation = DRAWN[kind]
    put(at, width / deviation)
    if kind in LEAST:
        put(at + 2, width / deviation * LEAST[kind])
    return rows.reshape(shape[0], -1)


def _add(writer: GGUFWriter, name: str, parameter: torch.Tensor, config: Any, kind_of: KindOf) -> None:
    layer = re.match(r"model\.layers\.(\d+)\.(.*)", name)
    module, _, end = (layer[2] if layer else name).rpartition(".")
    theirs = f"blk.{layer[1]}.{NAMES[module]}.{end}" if layer else f"{NAMES[module]}.{end}"
    value = parameter.numpy().astype(np.float32)
    turned = ARCHITECTURES[config.model_type] == "llama" and module in ("self_attn.q_proj", "self_attn.k_proj")
    heads = config.num_attention_heads if "q_proj" in module else config.num_key_value_heads
    value = _in_pairs(value, heads) if turned else value
    if value.ndim == 1:
        writer.add_tensor(theirs, value)
        return
    kind = kind_of(theirs)
    rows = raw_rows(value, kind)
    writer.add_tensor(theirs, rows, raw_dtype=kind)
    stored = meaning(rows, kind)
    if kind == Kind.NVFP4:  # one number that all are multiplied by, as llama.cpp's converter writes it
        scale = np.float32(value.std() / stored.std())
        writer.add_tensor(theirs.replace("weight", "scale"), np.array([scale]))
        writer.add_tensor(theirs.replace("weight", "input_scale"), np.array([0.5], np.float32))
        stored = stored * scale
    parameter.copy_(torch.from_numpy(_in_halves(stored, heads) if turned else stored))


def _add_experts(writer: GGUFWriter, name: str, parameter: torch.Tensor, kind_of: KindOf, apart: bool) -> None:
    """Matrices [E, outputs, inputs] of all experts, gates and ups in one."""
    layer, parts = name.split(".")[2], ("gate", "up") if name.endswith("gate_up_proj") else ("down",)
    for part, value in zip(parts, parameter.chunk(len(parts), dim=1), strict=True):
        named = {f"blk.{layer}.ffn_{part}_exps.weight": value}
        if apart:
            named = {f"blk.{layer}.ffn_{part}.{e}.weight": own for e, own in enumerate(value)}
        for theirs, own in named.items():
            kind = kind_of(theirs)
            rows = raw_rows(own.reshape(-1, own.shape[-1]).numpy().astype(np.float32), kind)
            writer.add_tensor(theirs, rows.reshape(*own.shape[:-1], -1), raw_dtype=kind)
            stored = torch.from_numpy(meaning(rows, kind)).view(own.shape)
            if kind == Kind.NVFP4 and not apart:  # a number of each expert
                scales = (own.std() / stored.std() * torch.linspace(0.8, 1.2, len(own))).numpy()
                writer.add_tensor(theirs.replace("weight", "scale"), scales)
                writer.add_tensor(theirs.replace("weight", "input_scale"), scales)
                stored = stored * torch.from_numpy(scales)[:, None, None]
            own.copy_(stored)


def _in_pairs(value: Array, heads: int) -> Array:
    """Rows of each head as llama.cpp rotates them: neighbours, where transformers rotates halves."""
    return value.reshape(heads, 2, len(value) // heads // 2, *value.shape[1:]).swapaxes(1, 2).reshape(value.shape)


def _in_halves(value: Array, heads: int) -> Array:
    return value.reshape(heads, len(value) // heads // 2, 2, *value.shape[1:]).swapaxes(1, 2).reshape(value.shape)
