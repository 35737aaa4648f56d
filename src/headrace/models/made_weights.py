"""Weights in another form than files have them, as a decoder is made: of norms without any, of activations."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from headrace.kernels import ops
from headrace.kernels.layer_shape import ALPHAS
from headrace.models.layers import Weights
from headrace.models.sizes import EMBED
from headrace.models.spec import ModelConfig
from headrace.types import UnsupportedModel

AT_ONCE = 4096
"""Embeddings that are normed together."""


def made_weights(config: ModelConfig, weights: Weights) -> Weights:
    """The weights of a decoder, with those that norms of queries and keys lack [D], which change nothing, with
    embeddings [V, H] as they are once they are normed, and with the two numbers of each layer's xIELU, fp32 [2]. Raises
    UnsupportedModel where embeddings that are normed are codes."""
    if config.embed_norm and EMBED not in weights:
        raise UnsupportedModel("embeddings that are normed cannot be codes")
    if config.embed_norm:
        weights = weights | {EMBED: _normed(weights[EMBED], config.norm_eps)}
    if config.qk_norm and not config.qk_norm_affine:
        dtype, device = weights["final_norm.weight"].dtype, weights["final_norm.weight"].device
        same = torch.full((config.attention.head_dim,), 1.0 - config.norm_offset, dtype=dtype, device=device)
        layers = [
            n for n in range(config.layers) if not config.qk_norm_local or config.attention.windows[n] is not None
        ]
        weights = weights | {f"layers.{layer}.{each}_norm.weight": same for layer in layers for each in "qk"}
    if config.activation == "xielu":
        weights = weights | {f"layers.{layer}.{ALPHAS}": _alphas(weights, layer) for layer in range(config.layers)}
    return weights


def _alphas(weights: Weights, layer: int) -> Tensor:
    """p and n of ops.xielu: files have numbers whose softplus they are, n but for a half."""
    above, below = (weights[f"layers.{layer}.activation.alpha_{each}"].float() for each in "pn")
    return torch.cat([F.softplus(above), F.softplus(below) + 0.5])


def _normed(table: Tensor, eps: float) -> Tensor:
    ones, made = table.new_ones(table.shape[1]), torch.empty_like(table)
    for some, into in zip(table.split(AT_ONCE), made.split(AT_ONCE), strict=True):
        into.copy_(ops.rms_norm(some.contiguous(), ones, eps))
    return made
