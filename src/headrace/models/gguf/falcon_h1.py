"""GGUF files of Falcon-H1: what config.json would say of them, and what their tensors are. Imports no torch.

Facts: llama.cpp's conversion/falcon_h1.py and mamba.py, and src/models/falcon-h1.cpp. Matrices are multiplied by what
config.json has multipliers for, so there are none left.
"""

from __future__ import annotations

from typing import Any

from headrace.models.gguf.families import LAYER, Facts
from headrace.models.gguf.granite_hybrid import mamba_names, mamba_sizes

NAMES = {
    **mamba_names(LAYER + "mamba."),
    "output_norm": "model.final_layernorm",
    "blk.{}.ffn_norm": LAYER + "pre_ff_layernorm",
    "blk.{}.ffn_gate": LAYER + "feed_forward.gate_proj",
    "blk.{}.ffn_up": LAYER + "feed_forward.up_proj",
    "blk.{}.ffn_down": LAYER + "feed_forward.down_proj",
}


def fields(facts: Facts, rope: dict[str, Any]) -> dict[str, Any]:
    def has(tensor: str) -> bool:
        return any(name.endswith(f".{tensor}") for name in facts.tensors)

    return mamba_sizes(facts) | {
        "mamba_d_ssm": facts.count("ssm.inner_size"),
        "mamba_rms_norm": has("ssm_norm.weight"),
        "mamba_norm_before_gate": False,
        "attention_bias": has("attn_q.bias"),
        "mlp_bias": has("ffn_up.bias"),
    }
