"""GGUF files of gpt-oss as llama.cpp's converter writes them (conversion/gpt_oss.py): gates and ups of experts, in turn
in the checkpoint, are two tensors by outputs, and so are their biases.

Nothing here is taken from headrace's reader.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from gguf import GGUFWriter
from torch import Tensor

from tests.support.gguf_deepseek import write_each
from tests.support.gguf_files import KindOf
from tests.support.kind_sizes import rope

ROPE = rope("yarn", factor=4.0, original_max_position_embeddings=128, beta_fast=32.0, beta_slow=1.0, truncate=False)
KINDS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "gpt_oss": ("gpt-oss", "gpt_oss", ROPE | {"intermediate_size": 96})
}
NAMES = {"mlp.router": "ffn_gate_inp"}


def describe(writer: GGUFWriter, config: Any) -> None:
    """The keys beside those of all families."""
    writer.add_sliding_window(config.sliding_window)
    writer.add_expert_feed_forward_length(config.intermediate_size)
    writer.add_expert_count(config.num_local_experts)
    writer.add_expert_used_count(config.num_experts_per_tok)


def add(writer: GGUFWriter, name: str, parameter: Tensor, kind_of: KindOf) -> bool:
    """Writes a parameter that lies otherwise than elsewhere, and into it what is written; whether it is one."""
    prefix = f"blk.{name.split('.')[2]}." if ".layers." in name else ""
    if name.endswith("self_attn.sinks"):
        _vector(writer, prefix + "attn_sinks.weight", parameter)
        return True
    if ".experts." not in name:
        return False
    both = (("gate", parameter[..., ::2]), ("up", parameter[..., 1::2]))
    for part, own in both if "gate_up" in name else (("down", parameter),):
        if name.endswith("_bias"):
            _vector(writer, f"{prefix}ffn_{part}_exps.bias", own)
        else:
            write_each(writer, f"{prefix}ffn_{part}_exps.weight", own, kind_of, lambda each: each.swapaxes(1, 2))
    return True


def _vector(writer: GGUFWriter, name: str, value: Tensor) -> None:
    writer.add_tensor(name, np.ascontiguousarray(value.detach().to(torch.float32).numpy()))
