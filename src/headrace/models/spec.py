"""What a decoder is made of, as plain records: read once from config.json, used by every room. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from headrace.config import AttentionSpec

CheckpointDType = Literal["float32", "bfloat16", "float16"]
Norm = Literal["rms", "layer"]
Block = Literal["pre", "post", "parallel"]
"""pre: x + f(norm(x)), attention then MLP. post: norm(x + f(x)). parallel: x + attention(norm(x)) + mlp(norm(x))."""
Activation = Literal["silu", "gelu", "gelu_tanh", "relu"]
Positions = Literal["rope", "learned", "alibi"]
RopeKind = Literal["default", "linear", "dynamic", "llama3", "yarn"]


@dataclass(frozen=True, slots=True)
class RopeSpec:
    """Rotary positions. `parameters` are transformers' rope_parameters (theta, factor, ...), sorted by name.

    `original_length` is the configuration's max_position_embeddings, before any extension.
    """

    kind: RopeKind
    parameters: tuple[tuple[str, Any], ...]
    original_length: int


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """The facts of one model. Sizes in elements; `embed_size` is the width of the embedding and of the head."""

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    embed_size: int
    layers: int
    max_model_len: int
    attention: AttentionSpec
    dtype: CheckpointDType
    positions: Positions
    norm: Norm
    norm_eps: float
    activation: Activation
    gated: bool
    rope: RopeSpec | None = None
    block: Block = "pre"
    norm_affine: bool = True
    mlp_norm: bool = True
    final_norm: bool = True
    qk_norm: bool = False
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    tied: bool = False
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()

    @property
    def rope_depends_on_length(self) -> bool:
        """Whether a token's rotation depends on the length of its sequence (dynamic NTK): see models.rope."""
        return self.rope is not None and self.rope.kind == "dynamic"
