"""Gemma 4 on a fake device: layers that differ in their heads, share keys and values, and have inputs of their own."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="Triton is built for Linux only")
if os.environ.get("TRITON_INTERPRET") != "1":  # see tests/conftest.py
    pytest.skip("there is a GPU: tests/gpu has such models, compiled", allow_module_level=True)

from headrace import LLM, SamplingParams
from headrace.engine.runner import Runner
from tests.support.checkpoints import build_model, make_checkpoint
from tests.support.fake_device import FakeDevice
from tests.support.small_gpu_engines import launched, recorded_when_needed, small_buckets, tokens
from tests.support.traces import run, same

SIZES: dict[str, Any] = dict(
    hidden_size=32, intermediate_size=32, vocab_size=64, vocab_size_per_layer_input=64, num_attention_heads=2,
    num_key_value_heads=2, head_dim=16, global_head_dim=32, num_global_key_value_heads=1, attention_k_eq_v=True,
    sliding_window=8, hidden_size_per_layer_input=16, num_kv_shared_layers=1, use_double_wide_mlp=True,
    num_hidden_layers=3, layer_types=["sliding_attention", "full_attention", "full_attention"],
)  # fmt: skip
"""A layer with a window and 2 KV heads of 16; one without, with one KV head of 32, whose keys are values too; and one
that attends to the keys and values of that."""
ONE = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)
TWO = SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The first two layers alone: each layer of a step takes long in an interpreter."""
    two = dict(num_kv_shared_layers=0, num_hidden_layers=2, layer_types=SIZES["layer_types"][:2])
    return make_checkpoint("gemma4_small", tmp_path_factory.mktemp("mixed"), **SIZES | two)


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeDevice]:
    small_buckets(monkeypatch)
    with recorded_when_needed(monkeypatch) as device:
        yield device


def engine(folder: Path, **settings: Any) -> LLM:
    given = {"kv_cache_tokens": 256, "max_sequences": 2, "max_batch_tokens": 8, **settings}
    return LLM(str(folder), attention_backend="triton", dtype="float32", **given)


@pytest.mark.parametrize("kind", ["gemma4_small", pytest.param("gemma4_experts", marks=pytest.mark.matrix)])
def test_logits_are_those_of_transformers(kind: str, tmp_path: Path, fake: FakeDevice) -> None:
    """Rows that see less than all of the ones before, through a window."""
    sizes = SIZES if kind == "gemma4_small" else SIZES | dict(hidden_size_per_layer_input=0, num_kv_shared_layers=0)
    folder, prompt = make_checkpoint(kind, tmp_path, **sizes), tokens(10, 1)
    with torch.no_grad():
        theirs = build_model(kind, **sizes)(torch.tensor([prompt])).logits[0]
    assert (engine(folder, max_batch_tokens=10).logits(prompt) - theirs).abs().max() <= 1e-4


def test_decoding_is_replayed(folder: Path, fake: FakeDevice) -> None:
    """Two sequences from a recording, whose index data is that of both shapes of heads. Prompts of one token are steps
    of decoding, too."""
    llm, prompts = engine(folder), [tokens(1, 1), tokens(1, 2)]
    truth = launched(llm, prompts, TWO)
    same(run(llm, prompts, TWO), truth)
    assert (llm.engine.stats().graphs.replayed, llm.engine.stats().graphs.recorded) == (2, 1)


@pytest.mark.matrix
def test_prompts_are_replayed(folder: Path, fake: FakeDevice) -> None:
    """In slices, beside one another; what nobody has written is no number."""
    llm, prompts = engine(folder, max_batch_tokens=3), [tokens(4, 1), tokens(1, 2)]
    truth = launched(llm, prompts, ONE)
    runner = llm.engine.loaded.executor
    assert isinstance(runner, Runner)
    for x in (x for pool in runner.storage.pools for x in pool.tensors):
        x.fill_(float("nan"))
    same(run(llm, prompts, ONE), truth)
    stats = llm.engine.stats().graphs
    assert stats.prompts == 2 and not stats.eager
