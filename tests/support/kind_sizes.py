"""Sizes of the small models of tests.support.checkpoints, and how one is built of a class of transformers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from transformers import PreTrainedConfig, PreTrainedModel

VOCAB = 320


NO_TOKEN = VOCAB
"""For families whose configuration puts an end of its own where none is given."""


WINDOW = 100


MODEL_LENGTH = 512


LONGROPE_LENGTH = 256
"""The length up to which longrope rotates by its short factors: no generation of the tests passes it on its way."""


SHORT_LENGTH = 128
"""The model's own length where the rotation is to be stretched beyond it."""


LLAMA_SIZES: dict[str, Any] = dict(
    vocab_size=VOCAB,
    hidden_size=128,
    intermediate_size=192,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=4,
    max_position_embeddings=MODEL_LENGTH,
    bos_token_id=None,
    eos_token_id=None,
    pad_token_id=None,
)


GQA = dict(num_key_value_heads=2)


def rope(kind: str, **parameters: Any) -> dict[str, Any]:
    return dict(rope_parameters=dict(rope_type=kind, rope_theta=10000.0, **parameters))


MIXED_WINDOWS = dict(
    num_hidden_layers=3,
    use_sliding_window=True,
    sliding_window=WINDOW,
    layer_types=["full_attention", "sliding_attention", "full_attention"],
)


Build = Callable[..., PreTrainedModel]


def of(model: type[PreTrainedModel], config: type[PreTrainedConfig], **own: Any) -> Build:
    """Builds models of a class with the sizes of a small Llama, grouped heads and its `own` fields."""
    return lambda **fields: model(config(**{**LLAMA_SIZES, **GQA, **own, **fields}))


YARN_ROPE = rope("yarn", factor=4.0, original_max_position_embeddings=SHORT_LENGTH)


MULTIPLIERS = dict(
    embedding_multiplier=12.0, attention_multiplier=0.02, residual_multiplier=0.22, logits_scaling=8.0
)  # fmt: skip


QWEN_TOKENS = dict(image_token_id=3, video_token_id=4, vision_start_token_id=1, vision_end_token_id=2)


QWEN_VISION = dict(depth=1, hidden_size=32, intermediate_size=64, num_heads=2, out_hidden_size=128, patch_size=14)
