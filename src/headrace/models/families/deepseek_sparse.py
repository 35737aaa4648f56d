"""DeepSeek-V3.2 and GLM-5: DeepSeek-V3's layers, whose rows attend to the keys that an indexer chooses (DSA)."""

from __future__ import annotations

from collections.abc import Set
from dataclasses import replace
from typing import Any

from headrace.config import IndexSpec
from headrace.models.families.base import Family, Names
from headrace.models.families.deepseek import latent_names, latent_rows, routed_by_sigmoids
from headrace.models.families.deepseek import unused as behind_the_last
from headrace.models.families.experts import APART, TOGETHER, given, kinds_of_mlp
from headrace.models.families.llama import PREFIXES
from headrace.models.spec import ModelConfig
from headrace.types import UnsupportedModel

INDEXER_TYPES = ("full", "shared")
"""Names of layers whose rows choose, and of those that take what was chosen before."""


def _v32(config: Any) -> dict[str, Any]:
    return indexed(config, (True,) * config.num_hidden_layers, paired=True)


def _glm(config: Any) -> dict[str, Any]:
    if not getattr(config, "indexer_rope_interleave", True):
        raise UnsupportedModel("indexer_rope_interleave false is not supported for glm_moe_dsa; true is")
    return indexed(config, own_indexers(config), paired=True)


def own_indexers(config: Any) -> tuple[bool, ...]:
    """Which layers choose by an indexer of their own."""
    kinds, layers = config.indexer_types, config.num_hidden_layers
    for kind in kinds:
        if kind not in INDEXER_TYPES:
            raise UnsupportedModel(f"indexer_types with {kind!r} is not supported; {' and '.join(INDEXER_TYPES)} are")
    if len(kinds) != layers or kinds[0] != "full":
        raise UnsupportedModel(
            f"indexer_types names {len(kinds)} layers, the first {kinds[:1]}; num_hidden_layers is {layers}, "
            f"and the first must be full"
        )
    return tuple(kind == "full" for kind in kinds)


def indexed(config: Any, own: tuple[bool, ...], paired: bool, ignored: Set[str] = frozenset()) -> dict[str, Any]:
    """Of DeepSeek-V3.2 and those that choose alike. own: layers with an indexer; the others: see latent_facts."""
    given(config, "q_lora_rank")
    facts = routed_by_sigmoids(config, kinds_of_mlp(config), paired, ignored)
    index = IndexSpec(config.index_n_heads, config.index_head_dim, config.index_topk, own)
    if index.size < config.qk_rope_head_dim:
        raise UnsupportedModel(f"index_head_dim {index.size} is less than qk_rope_head_dim {config.qk_rope_head_dim}")
    spec = facts["attention"]
    return facts | dict(attention=replace(spec, head_dim=spec.head_dim + index.stored, index=index))


def _names(config: ModelConfig, experts: Names) -> Names:
    layer, theirs = "layers.{}.", "layers.{}.self_attn.indexer."
    parts = {"queries": "wq_b", "keys": "wk", "norm": "k_norm", "weights": "weights_proj"}
    indexer = {f"{layer}index_{ours}": (theirs + name,) for ours, name in parts.items()}
    return {**latent_names(config, experts), **indexer}


def names_apart(config: ModelConfig) -> Names:
    """Of files that have experts one by one."""
    return _names(config, APART)


def names_together(config: ModelConfig) -> Names:
    """Of files that have all experts of a layer in one tensor."""
    return _names(config, TOGETHER)


def _paired_rows(config: ModelConfig, name: str) -> list[int] | None:
    """latent_rows, where files have the numbers that an indexer rotates side by side too."""
    index, latent = config.attention.index, config.latent
    assert index is not None and latent is not None, "the family has indexers"
    one = [*range(0, latent.rotated, 2), *range(1, latent.rotated, 2), *range(latent.rotated, index.size)]
    if ".index_queries." in name:
        return [head * index.size + row for head in range(index.heads) for row in one]
    return one if ".index_keys." in name or ".index_norm." in name else latent_rows(config, name)


def unused(config: ModelConfig) -> frozenset[str]:
    """Also indexers of layers that take what one before them has chosen, where a checkpoint has them."""
    assert config.attention.index is not None, "the family has indexers"
    shared = (layer for layer, own in enumerate(config.attention.index.own) if not own)
    return behind_the_last(config).union(f"layers.{layer}.self_attn.indexer." for layer in shared)


DEEPSEEK_V32 = Family(
    "deepseek_v32", "transformers.models.deepseek_v32.configuration_deepseek_v32:DeepseekV32Config", _v32, names_apart,
    PREFIXES, rows=latent_rows, other_names=names_together, unused=behind_the_last, published_as="deepseek",
)  # fmt: skip
GLM_DSA = Family(
    "glm_moe_dsa", "transformers.models.glm_moe_dsa.configuration_glm_moe_dsa:GlmMoeDsaConfig", _glm, names_apart,
    PREFIXES, rows=_paired_rows, other_names=names_together, unused=unused,
)  # fmt: skip
