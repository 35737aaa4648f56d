"""The model: a small LlamaForCausalLM whose first two layers start as a lookup circuit.

From random weights, training soon copies the only fact of a document but does not learn to choose among several by
name. So attention starts out with the parts that such a choice needs (figures: hidden 256, heads of 32):

  layer 0, heads 0-5   attend exactly 1 ... 6 tokens back, and write what they find to a block of the residual each:
                       S1 = the token 1 back, ... S6 = the token 6 back.
  layer 1, 4 heads     head d seeks keys whose S(d+1) equals its own S(d), and copies the token found there.
                       At 'is' S1 is the name; at the first digit of the fact S2 is the name: digit 1 is copied.
                       At digit 1 S2 is the name; at digit 2 of the fact S3 is: digit 2 is copied; and so on.

Matching uses the slow rotary dimensions (about constant over the context), attending back the fast ones. Everything
stays trainable; the presets only choose the starting point.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from .vocab import MAX_POSITIONS

HEAD = 32
FAST = 8  # rotary pairs 0-7 tell neighbours apart; pairs 8-15 turn by at most 1e-4 a token
BACK = 6  # offsets preset in layer 0
CONSTANT = 0.5  # value of residual dimension 0, the same for every token: the query and key of a fixed offset
EMBED_STD = 1 / 16
SHARP, BLOCK_GAIN, MATCH, COPY = 8.0, 0.17, 1.7, 0.5


def tiny_config(vocab: int, bos: int, end: int, pad: int) -> LlamaConfig:
    return LlamaConfig(
        vocab_size=vocab,
        hidden_size=256,
        intermediate_size=704,
        num_hidden_layers=3,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=HEAD,
        max_position_embeddings=MAX_POSITIONS,
        rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": 1e8},
        tie_word_embeddings=True,
        attention_bias=False,
        bos_token_id=bos,
        eos_token_id=end,
        pad_token_id=pad,
    )


@torch.no_grad()
def build(config: LlamaConfig, seed: int) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    model = LlamaForCausalLM(config)
    for name, p in model.named_parameters():
        if p.dim() == 2:
            scale = 0.1 if name.endswith(("o_proj.weight", "down_proj.weight")) else 1.0
            nn.init.normal_(p, std=scale / math.sqrt(p.shape[1]))
    embed = model.get_input_embeddings().weight
    nn.init.normal_(embed, std=EMBED_STD)
    embed[:, 0] = CONSTANT
    layers = model.model.layers
    _attend_back(layers[0].self_attn, config)
    _match_and_copy(layers[1].self_attn, config)
    return model


def _block(back: int) -> slice:
    """Residual dimensions that hold the token `back` positions back."""
    return slice(64 + HEAD * (back - 1), 64 + HEAD * back)


def _head(h: int) -> slice:
    return slice(HEAD * h, HEAD * (h + 1))


def _projection(width: int) -> Tensor:
    """[HEAD, width] with orthonormal rows that ignore the constant dimension."""
    q, _ = torch.linalg.qr(torch.randn(width - 1, HEAD))
    return torch.cat([torch.zeros(HEAD, 1), q.T], dim=1)


def _attend_back(attn: nn.Module, config: LlamaConfig) -> None:
    rms = math.sqrt((CONSTANT**2 + config.hidden_size * EMBED_STD**2) / config.hidden_size)
    unit = SHARP / (CONSTANT / rms)  # weight on the constant that gives a query or key entry of SHARP
    freq = 1e8 ** -(torch.arange(FAST) / (HEAD // 2))
    half, project = HEAD // 2, _projection(config.hidden_size)
    for back in range(1, BACK + 1):
        q, k = attn.q_proj.weight[_head(back - 1)], attn.k_proj.weight[_head((back - 1) // 2)]
        for w in (q, k):
            w.zero_()
        k[:FAST, 0] = unit
        q[:FAST, 0] = unit * torch.cos(freq * back)
        q[half : half + FAST, 0] = -unit * torch.sin(freq * back)
        attn.v_proj.weight[_head((back - 1) // 2)] = project
        attn.o_proj.weight[:, _head(back - 1)] = 0
        attn.o_proj.weight[_block(back), _head(back - 1)] = BLOCK_GAIN * torch.eye(HEAD)


def _match_and_copy(attn: nn.Module, config: LlamaConfig) -> None:
    half = HEAD // 2
    slow = [*range(FAST, half), *range(half + FAST, HEAD)]
    for kv in range(config.num_key_value_heads):
        back, h = kv + 1, 2 * kv  # the other query head of each pair stays random
        q, k = attn.q_proj.weight[_head(h)], attn.k_proj.weight[_head(kv)]
        for w, block in ((q, _block(back)), (k, _block(back + 1))):
            w.zero_()
            w[slow, list(range(block.start, block.start + len(slow)))] = MATCH
        project = _projection(config.hidden_size)
        attn.v_proj.weight[_head(kv)] = project
        attn.o_proj.weight[:, _head(h)] = COPY * project.T
