"""Families whose queries and keys no single launch turns, norms that stand behind alone or behind experts, gates beside
keys and values, and squared relus, on a fake device: the logits of transformers, and decoding that is replayed."""

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
from tests.support.checkpoints import build_model, make_checkpoint
from tests.support.fake_device import FakeDevice
from tests.support.small_gpu_engines import launched, recorded_when_needed, small_buckets, tokens
from tests.support.traces import run, same

SIZES: dict[str, Any] = dict(
    hidden_size=32, intermediate_size=32, vocab_size=64, num_attention_heads=2, num_key_value_heads=1, head_dim=16,
    num_hidden_layers=2,
)  # fmt: skip
ROPE = dict(rope_type="yarn", rope_theta=1e4, factor=4.0, original_max_position_embeddings=4, llama_4_scaling_beta=0.5)
OWN: dict[str, dict[str, Any]] = {
    "ministral3": dict(rope_parameters=ROPE),
    "hunyuan": {},
    "olmo3": dict(sliding_window=8, layer_types=["sliding_attention", "full_attention"]),
    "arcee": {},
    "llama4": dict(attention_chunk_size=8, floor_scale=4, no_rope_layers=[1, 0], moe_layers=[1]),
    "apertus": {},
    "afmoe": dict(sliding_window=8, layer_types=["sliding_attention", "full_attention"], moe_intermediate_size=32),
    "muse_glimmer": dict(
        sliding_window=8, layer_types=["sliding_attention", "full_attention"], layer_rope_theta=[1e4, 0]
    ),
}
TWO = SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True)


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeDevice]:
    small_buckets(monkeypatch)
    with recorded_when_needed(monkeypatch) as device:
        yield device


def engine(folder: Path, **settings: Any) -> LLM:
    given = {"kv_cache_tokens": 256, "max_sequences": 2, "max_batch_tokens": 10, **settings}
    return LLM(str(folder), attention_backend="triton", dtype="float32", **given)


@pytest.mark.parametrize("kind", OWN)
def test_logits_are_those_of_transformers(kind: str, tmp_path: Path, fake: FakeDevice) -> None:
    sizes, prompt = SIZES | OWN[kind], tokens(10, 1)
    with torch.no_grad():
        theirs = build_model(kind, **sizes)(torch.tensor([prompt])).logits[0]
    assert (engine(make_checkpoint(kind, tmp_path, **sizes)).logits(prompt) - theirs).abs().max() <= 1e-4


@pytest.mark.parametrize("kind", ["ministral3", "afmoe", "muse_glimmer", "llama4"])
def test_decoding_is_replayed(kind: str, tmp_path: Path, fake: FakeDevice) -> None:
    """Rows of the table that hold queries' rotation too are looked up by a recording as others are."""
    llm = engine(make_checkpoint(kind, tmp_path, **SIZES | OWN[kind]))
    prompts = [tokens(1, 1), tokens(1, 2)]
    truth = launched(llm, prompts, TWO)
    same(run(llm, prompts, TWO), truth)
    assert (llm.engine.stats().graphs.replayed, llm.engine.stats().graphs.recorded) == (2, 1)
