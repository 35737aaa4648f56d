"""Scores, log probabilities of prompts and embeddings of several ranks: the bits of one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from headrace import LLM
from headrace.engine.folders import model_folder
from headrace.types import PoolingKind
from tests.support.likelihoods import defined, reported, with_pooling

CHAIN: dict[str, Any] = {"context_parallel_size": 2, "prefill_strategy": "chain"}
RING: dict[str, Any] = {"context_parallel_size": 2, "prefill_strategy": "ring-kv"}
CASES: list[tuple[PoolingKind, dict[str, Any]]] = [
    ("last", CHAIN | {"tensor_parallel_size": 2, "kv_cache_dtype": "int8", "max_batch_tokens": 256}),
    ("mean", CHAIN | {"quantization": "int8"}),
    ("mean", RING | {"context_parallel_size": 3}),
    ("mean", {"tensor_parallel_size": 2}),
    ("cls", RING),
    *(("last", CHAIN | {"prefill_strategy": each}) for each in ("ring-q", "gather")),
]


@pytest.mark.matrix
@pytest.mark.parametrize(("pooling", "settings"), CASES)
def test_bits_of_one_rank(pooling: PoolingKind, settings: dict[str, Any], tmp_path: Path) -> None:
    folder = with_pooling(Path(model_folder("tiny")), tmp_path / "model", pooling, normalize=False)
    form = {name: settings[name] for name in ("quantization", "kv_cache_dtype") if name in settings}
    truth = defined(LLM(folder, kv_cache_tokens=8192, enable_prefix_caching=False, **form))
    ranks = LLM(folder, kv_cache_tokens=8192, **settings)
    try:
        assert reported(ranks) == truth
        assert reported(ranks) == truth, "cached"
        assert ranks.engine.cache.used == 0
    finally:
        ranks.close()
