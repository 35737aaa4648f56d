"""Kinds of models that take images too, of which the text part is computed, for tests.support.checkpoints."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from transformers import (
    AyaVisionConfig,
    AyaVisionForConditionalGeneration,
    Cohere2VisionConfig,
    Cohere2VisionForConditionalGeneration,
    Exaone4_5_Config,
    Exaone4_5_ForConditionalGeneration,
    HYV4VLConfig,
    HYV4VLForConditionalGeneration,
    Kimi_K25Config,
    Kimi_K25ForConditionalGeneration,
    MiniMaxM3SparseForConditionalGeneration,
    MiniMaxM3VLConfig,
    MuseGlimmerConfig,
    MuseGlimmerForConditionalGeneration,
    PreTrainedModel,
)

from tests.support.expert_kinds import INDEXED, LATENT
from tests.support.kind_sizes import GQA, LLAMA_SIZES, NO_TOKEN, QWEN_TOKENS, QWEN_VISION, WINDOW, Build

SIGLIP = dict(
    model_type="siglip_vision_model", hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2,
    image_size=28, patch_size=14, vision_use_head=False,
)  # fmt: skip
WINDOWS = dict(
    num_hidden_layers=3, sliding_window=WINDOW,
    layer_types=["sliding_attention", "full_attention", "sliding_attention"],
)  # fmt: skip


def _text(model_type: str, fields: dict[str, Any], **own: Any) -> tuple[dict[str, Any], bool]:
    """The text part, and whether the head is tied, which stands beside it."""
    text = {**LLAMA_SIZES, **GQA, **own, "model_type": model_type, **fields}
    return text, text.pop("tie_word_embeddings", False)


def _exaone4_5(**fields: Any) -> PreTrainedModel:
    text, tied = _text("exaone4", fields, **WINDOWS, head_dim=64)
    vision = QWEN_VISION | dict(fullatt_block_indexes=[0], num_key_value_heads=2)
    tokens = {name: token for name, token in QWEN_TOKENS.items() if name.endswith(("image_token_id", "video_token_id"))}
    config = Exaone4_5_Config(
        text_config=text, vision_config=vision, tie_word_embeddings=tied, eos_token_id=NO_TOKEN, **tokens
    )
    return Exaone4_5_ForConditionalGeneration(config)


def _cohere2_vision(**fields: Any) -> PreTrainedModel:
    """transformers leaves logit_scale out where there are images: it is 1 here, and test_facts asks for it."""
    text, tied = _text("cohere2", fields, **WINDOWS, head_dim=32, pad_token_id=0, logit_scale=1.0)
    config = Cohere2VisionConfig(
        text_config=text, vision_config=SIGLIP, tie_word_embeddings=tied, eos_token_id=NO_TOKEN, image_token_id=3,
        alignment_intermediate_size=64,
    )  # fmt: skip
    return Cohere2VisionForConditionalGeneration(config)


def _aya_vision(**fields: Any) -> PreTrainedModel:
    text, tied = _text("cohere2", fields, **WINDOWS, head_dim=32, pad_token_id=0, logit_scale=1.0)
    config = AyaVisionConfig(
        text_config=text, vision_config=SIGLIP, tie_word_embeddings=tied, eos_token_id=NO_TOKEN, image_token_index=3
    )
    return AyaVisionForConditionalGeneration(config)


def _kimi_k25(**fields: Any) -> PreTrainedModel:
    text, tied = _text("deepseek_v3", fields, **LATENT | dict(q_lora_rank=64))
    vision = dict(
        num_attention_heads=2, num_hidden_layers=1, hidden_size=32, intermediate_size=64, pos_emb_height=4,
        pos_emb_width=4,
    )  # fmt: skip
    config = Kimi_K25Config(
        text_config=text, vision_config=vision, tie_word_embeddings=tied, eos_token_id=NO_TOKEN,
        image_token_id=NO_TOKEN, video_token_id=NO_TOKEN, projection_hidden_size=64,
    )  # fmt: skip
    return Kimi_K25ForConditionalGeneration(config)


def _muse_glimmer(**fields: Any) -> PreTrainedModel:
    text = {**LLAMA_SIZES, **GQA, **WINDOWS, "head_dim": 64, "layer_rope_theta": [1e4, 0, 1e4], **fields}
    vision = dict(
        num_attention_heads=2, num_hidden_layers=1, hidden_size=32, intermediate_size=64, pos_emb_height=4,
        pos_emb_width=4, patch_size=14,
    )  # fmt: skip
    config = MuseGlimmerConfig(
        text_config=text, vision_config=vision, eos_token_id=NO_TOKEN, image_token_id=NO_TOKEN,
        video_token_id=NO_TOKEN, out_hidden_size=128, projector_hidden_size=64,
    )  # fmt: skip
    return MuseGlimmerForConditionalGeneration(config)


SPARSE_BLOCKS = dict(
    index_n_heads=2, index_head_dim=64, index_block_size=128, index_topk_blocks=1, index_local_blocks=1
)


def _minimax_m3(**fields: Any) -> PreTrainedModel:
    sparse = ["full_attention", "minimax_m3_sparse", "minimax_m3_sparse"]
    text: dict[str, Any] = {
        **LLAMA_SIZES, **GQA, **SPARSE_BLOCKS, "head_dim": 64, "num_hidden_layers": 3, "layer_types": sparse,
        "mlp_layer_types": ["dense", "sparse", "sparse"], "num_local_experts": 8, "num_experts_per_tok": 3,
        "intermediate_size": 64, "dense_intermediate_size": 192, "shared_intermediate_size": 128, "rotary_dim": 32,
        "rope_parameters": dict(rope_type="default", rope_theta=1e4, partial_rotary_factor=0.5), **fields,
    }  # fmt: skip
    vision = dict(
        hidden_size=32, intermediate_size=64, num_attention_heads=2, num_hidden_layers=1, patch_size=14, image_size=28
    )
    config = MiniMaxM3VLConfig(
        text_config=text, vision_config=vision, projector_hidden_size=64, merged_hidden_size=64, eos_token_id=NO_TOKEN,
        image_token_index=NO_TOKEN, video_token_index=NO_TOKEN,
    )  # fmt: skip
    return MiniMaxM3SparseForConditionalGeneration(config)


HY_VISION = dict(
    hidden_size=32, intermediate_size=64, num_attention_heads=2, num_hidden_layers=1, patch_size=14,
    out_hidden_size=128, max_image_size=28,
)  # fmt: skip


def _hy4_vision(**fields: Any) -> PreTrainedModel:
    own = {name: value for name, value in INDEXED.items() if name != "first_k_dense_replace"}
    kinds = dict(mlp_layer_types=["dense", "sparse", "sparse"], indexer_types=["full", "shared", "full"])
    turned = dict(rope_type="default", rope_theta=1e4, mrope_section=[4, 2, 2])
    text, tied = _text("hy_v4_vl_text", fields, **own | kinds, rope_parameters=turned)
    config = HYV4VLConfig(
        text_config=text, vision_config=HY_VISION, tie_word_embeddings=tied, eos_token_id=NO_TOKEN,
        image_token_id=NO_TOKEN, video_token_id=NO_TOKEN,
    )  # fmt: skip
    return HYV4VLForConditionalGeneration(config)


def published_kimi(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Names of its tensors [..] in published files, from those in memory: what transformers 5.24 writes in their place
    has text layers called blocks, as those of images are."""
    found: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        text = name.replace("model.language_model.", "language_model.model.").replace(
            "lm_head", "language_model.lm_head"
        )
        before, _, fused = text.partition(".mlp.experts.")
        for expert, rows in enumerate(tensor if fused else ()):
            parts = dict(zip(("gate", "up"), rows.chunk(2), strict=True)) if "up" in fused else {"down": rows}
            for part, weight in parts.items():
                found[f"{before}.mlp.experts.{expert}.{part}_proj.weight"] = weight.clone()
        found |= {} if fused else {text: tensor}
    return found


VISION: dict[str, tuple[Build, dict[str, Any]]] = {
    "exaone4_5": (_exaone4_5, {}),
    "cohere2_vision": (_cohere2_vision, {}),
    "aya_vision": (_aya_vision, dict(tie_word_embeddings=True)),
    "muse_glimmer": (_muse_glimmer, dict(post_norm_eps=0.1)),
    "minimax_m3": (_minimax_m3, dict(index_topk_blocks=2)),
    "hy4_vision": (_hy4_vision, {}),
    "kimi_k25": (_kimi_k25, dict(n_group=1, topk_group=1)),
}
