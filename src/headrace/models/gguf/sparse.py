"""GGUF files of DeepSeek-V3.2 and GLM-5: what config.json would say of indexers. Imports no torch.

Facts: llama.cpp's conversion/glm.py, src/models/deepseek32.cpp and glm-dsa.cpp. Layers without an indexer are told by a
flag of each layer; the first files of GLM-5.2, known by their length, do not tell.
"""

from __future__ import annotations

from typing import Any

from headrace.models.gguf.deepseek import SIGMOID, common, refuse_gating
from headrace.models.gguf.families import LAYER, Facts

NAMES = {
    "blk.{}.indexer.attn_q_b": LAYER + "self_attn.indexer.wq_b",
    "blk.{}.indexer.attn_k": LAYER + "self_attn.indexer.wk",
    "blk.{}.indexer.k_norm": LAYER + "self_attn.indexer.k_norm",
    "blk.{}.indexer.proj": LAYER + "self_attn.indexer.weights_proj",
}
SHARING = 1 << 20
"""Tokens of context of GLM-5.2, whose layers share what one of four has chosen; GLM-5 and 5.1 have fewer."""
EVERY_FOURTH = {"index_topk_freq": 4, "index_skip_topk_offset": 3}


def deepseek_v32(facts: Facts, rope: dict[str, Any]) -> dict[str, Any]:
    refuse_gating(facts, SIGMOID)
    return common(facts, rope) | {
        "norm_topk_prob": facts.flag("expert_weights_norm", False),
        "index_n_heads": facts.count("attention.indexer.head_count"),
        "index_head_dim": facts.count("attention.indexer.key_length"),
        "index_topk": facts.count("attention.indexer.top_k"),
    }


def glm_dsa(facts: Facts, rope: dict[str, Any]) -> dict[str, Any]:
    told = facts.each_layer("attention.indexer.types")
    if told is not None:
        shared: dict[str, Any] = {"indexer_types": ["full" if each else "shared" for each in told]}
    else:
        shared = EVERY_FOURTH if facts.count("context_length") >= SHARING else {}
    return deepseek_v32(facts, rope) | shared
