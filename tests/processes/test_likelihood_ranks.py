"""Scores, log probabilities of prompts and embeddings of several processes: the bits of one. More kinds of ranks, as
threads: tests/cpu/test_likelihood_places.py."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from headrace.pooling import PoolingKind
from tests.support.likelihoods import check_ranks

CASES: list[tuple[PoolingKind, dict[str, Any]]] = [
    (
        "last",
        {
            "context_parallel_size": 2, "tensor_parallel_size": 2, "prefill_strategy": "chain",
            "kv_cache_dtype": "int8", "max_batch_tokens": 256,
        },
    ),
    ("mean", {"context_parallel_size": 3, "prefill_strategy": "ring-kv"}),
]  # fmt: skip


@pytest.mark.matrix
@pytest.mark.parametrize(("pooling", "settings"), CASES)
def test_bits_of_one_rank(pooling: PoolingKind, settings: dict[str, Any], tmp_path: Path) -> None:
    check_ranks(pooling, settings, tmp_path)
