"""A Llama of one layer whose weights are made by hand so that it finds a planted fact in a context of any length.

Vocabulary: filler, facts (name i, value j), questions (name i) and answers (value j). A fact's key is the code of its
name, a question's query is the same code, so that of all tokens before it the question attends to its fact alone; the
fact's value is one of VALUES directions of the residual stream, which the head reads as an answer. Keys lie in the
pairs of a head that rotate least: by less than a thousandth in a million tokens.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import torch
from torch import Tensor

NAMES, VALUES = 8, 16
FILLER = 1000
HIDDEN, HEADS, KV_HEADS, DIM = 128, 4, 1, 64
SCORE = 60.0
"""Of a question and its fact; any other token's is 0 at most: a softmax over e**14 tokens is the fact's alone."""
_CODE = slice(0, NAMES)
_QUERY = slice(NAMES, 2 * NAMES)
_VALUE = slice(2 * NAMES, 2 * NAMES + VALUES)
_NOISE = slice(2 * NAMES + VALUES, HIDDEN)
_KEYS = slice(DIM // 2 - NAMES, DIM // 2)
"""In a head, whose pairs are (i, i + DIM / 2): those that rotate least."""


def fact(name: int, value: int) -> int:
    """The token that plants a fact."""
    return FILLER + name * VALUES + value


def question(name: int) -> int:
    return FILLER + NAMES * VALUES + name


def answer(value: int) -> int:
    return FILLER + NAMES * VALUES + NAMES + value


VOCABULARY = answer(VALUES)


@dataclass(frozen=True, slots=True)
class Haystack:
    """A context with facts planted in it: tokens, and the value of each name."""

    tokens: list[int]
    values: list[int]

    def wrong(self, answers: list[int]) -> list[int]:
        """Names whose answer is another value's."""
        return [name for name, value in enumerate(self.values) if answers[name] != answer(value)]


def haystack(length: int, seed: int = 0) -> Haystack:
    """`length` tokens of filler with a fact for each name, the first at the beginning, the last at the end."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(FILLER, (length,), generator=generator).tolist()
    values = torch.randint(VALUES, (NAMES,), generator=generator).tolist()
    places = [round(x) for x in torch.linspace(0, length - 1, NAMES).tolist()]
    assert all(low < high for low, high in pairwise(places)), "a context for every fact"
    for name, (place, value) in enumerate(zip(places, values, strict=True)):
        tokens[place] = fact(name, value)
    return Haystack(tokens, values)


def write(folder: Path, context: int) -> Path:
    """The checkpoint, in bf16; returns the folder."""
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    named = {name: weight.bfloat16().contiguous() for name, weight in _weights().items()}
    save_file(named, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(_config(context)))
    return folder


def _config(context: int) -> dict[str, object]:
    return {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": HIDDEN, "num_hidden_layers": 1,
        "intermediate_size": HIDDEN, "num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS, "head_dim": DIM,
        "vocab_size": VOCABULARY, "max_position_embeddings": context, "rms_norm_eps": 1e-5, "rope_theta": 1e13,
        "tie_word_embeddings": False, "torch_dtype": "bfloat16", "bos_token_id": None, "eos_token_id": None,
    }  # fmt: skip


def _weights() -> dict[str, Tensor]:
    embed, code = _embeddings(), torch.eye(NAMES)
    q, k, v = torch.zeros(HEADS * DIM, HIDDEN), torch.zeros(KV_HEADS * DIM, HIDDEN), torch.zeros(KV_HEADS * DIM, HIDDEN)
    for begin in range(0, HEADS * DIM, DIM):
        q[begin + _KEYS.start : begin + _KEYS.stop, _QUERY] = code * SCORE * DIM**0.5
    k[_KEYS, _CODE] = code
    v[:VALUES, _VALUE] = torch.eye(VALUES)
    out = torch.zeros(HIDDEN, HEADS * DIM)
    out[_VALUE, :VALUES] = 4 * torch.eye(VALUES)
    head = torch.zeros(VOCABULARY, HIDDEN)
    head[answer(0) : answer(VALUES), _VALUE] = torch.eye(VALUES)
    layer = "model.layers.0."
    mlp = {f"{layer}mlp.{name}_proj.weight": torch.zeros(HIDDEN, HIDDEN) for name in ("gate", "up", "down")}
    norms = ("model.norm", layer + "input_layernorm", layer + "post_attention_layernorm")
    return mlp | {f"{name}.weight": torch.ones(HIDDEN) for name in norms} | {
        "model.embed_tokens.weight": embed, "lm_head.weight": head, f"{layer}self_attn.q_proj.weight": q,
        f"{layer}self_attn.k_proj.weight": k, f"{layer}self_attn.v_proj.weight": v,
        f"{layer}self_attn.o_proj.weight": out,
    }  # fmt: skip


def _embeddings() -> Tensor:
    """[V, H], all of the same norm, so that the layer's norm multiplies them alike: by 1, but for rounding."""
    embed = torch.zeros(VOCABULARY, HIDDEN)
    width = HIDDEN - _NOISE.start
    embed[:, _NOISE] = torch.randn(VOCABULARY, width, generator=torch.Generator().manual_seed(1))
    for name in range(NAMES):
        embed[question(name), _QUERY.start + name] = 1.0
        for value in range(VALUES):
            embed[fact(name, value), _CODE.start + name] = 1.0
            embed[fact(name, value), _VALUE.start + value] = 1.0
    rest = HIDDEN - embed[:, : _NOISE.start].pow(2).sum(-1, keepdim=True)
    noise = embed[:, _NOISE]
    embed[:, _NOISE] = noise * (rest / noise.pow(2).sum(-1, keepdim=True)).sqrt()
    return embed
