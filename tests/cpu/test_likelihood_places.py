"""Scores, log probabilities of prompts and embeddings have the bits of whole prompts, wherever KV and weights lie and
in every form of theirs."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest

from headrace import LLM
from headrace.pooling import PoolingKind
from tests.support.checkpoints import FolderOf
from tests.support.likelihoods import check_ranks, defined, reported
from tests.support.offloading import MIXES, counters, flush, offloading
from tests.support.thread_group import ranks_as_threads

pytestmark = pytest.mark.usefixtures("one_thread")

ROW: dict[str, Any] = {"offload_schedule": "row", "kv_offloading_size": 0.1}
COLUMN: dict[str, Any] = {"offload_schedule": "column", "kv_offloading_size": 0.1, "weight_offload": True}
INT8: dict[str, Any] = {"kv_cache_dtype": "int8"}
BASE: dict[str, Any] = {"kv_cache_tokens": 8192, "dtype": "bfloat16"}
PLACES = [
    ("mistral_window", {}, {"max_batch_tokens": 70}),
    ("llama_gqa", INT8, COLUMN),
    *(
        pytest.param(kind, form, place, marks=pytest.mark.matrix)
        for kind, forms, places in (
            ("llama_gqa", (INT8, {"quantization": "int8"}, {"quantization": "int4"}, {"dtype": "float32"}), (ROW, {})),
            ("llama_gqa", ({"attention_backend": "reference"},), ({},)),
            ("qwen2_window", ({},), (ROW, COLUMN, {})),
            ("llama_dynamic", ({},), (ROW, COLUMN, {})),
            ("falcon_rw", ({},), (ROW, COLUMN, {})),
            ("opt350", ({},), (ROW, COLUMN, {})),
        )
        for form in forms
        for place in places
    ),
]


@pytest.fixture(scope="module")
def truth_of(folder_of: FolderOf) -> Callable[..., dict[str, Any]]:
    """truth_of(kind, **form): by definition."""
    return lru_cache(None)(
        lambda kind, **form: defined(LLM(folder_of(kind), **{**BASE, **form}, enable_prefix_caching=False))
    )


@pytest.mark.parametrize(("kind", "form", "place"), PLACES)
def test_every_place_and_form(
    kind: str, form: dict[str, Any], place: dict[str, Any], folder_of: FolderOf, truth_of: Callable[..., dict[str, Any]]
) -> None:
    """form: what changes the bits, of both engines."""
    truth = truth_of(kind, **form)
    other = LLM(folder_of(kind), **{**BASE, **form}, **place)
    assert reported(other) == truth
    assert reported(other) == truth, "cached"
    assert other.engine.cache.used == 0
    other.close()


CHAIN: dict[str, Any] = {"context_parallel_size": 2, "prefill_strategy": "chain"}
RANKS: list[tuple[PoolingKind, dict[str, Any]]] = [
    ("mean", CHAIN | {"quantization": "int8"}),
    ("mean", {"tensor_parallel_size": 2}),
    ("cls", CHAIN | {"prefill_strategy": "ring-kv"}),
    *(("last", CHAIN | {"prefill_strategy": each}) for each in ("ring-q", "gather")),
]


@pytest.mark.matrix
@pytest.mark.parametrize(("pooling", "settings"), RANKS)
def test_several_ranks(pooling: PoolingKind, settings: dict[str, Any], tmp_path: Path) -> None:
    """As threads. As processes: tests/processes/test_likelihood_ranks.py."""
    with ranks_as_threads():
        check_ranks(pooling, settings | {"threads": 1}, tmp_path)


@pytest.mark.parametrize("mix", ["all three", *(pytest.param(m, marks=pytest.mark.matrix) for m in list(MIXES)[:3])])
def test_restored(mix: str, folder_of: FolderOf) -> None:
    """Chunks that left the pool are loaded, projected and recomputed."""
    llm = offloading(folder_of("llama_gqa"), mix)
    truth = defined(llm)
    assert reported(llm) == truth
    flush(llm)
    assert reported(llm) == truth
    assert counters(llm).restores or mix == "recompute"
    llm.close()
