"""What an engine will take of a host's memory, told before it is started."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from headrace import host
from headrace.config import EngineConfig
from headrace.engine import preflight
from headrace.engine.capacity import model_folder
from headrace.engine.footprint import Footprint, keeps_activations
from headrace.host import GIB
from headrace.kv.milestones import INTERVAL
from headrace.models.plain_config import plain_config
from headrace.types import CHUNK

pytestmark = pytest.mark.unit

TINY = plain_config(model_folder("tiny"))
TOO_MUCH = [
    (
        dict(kv_cache_tokens=10_000_000),
        "kv_cache_tokens 10,000,000 needs 14.3 GiB; 10.0 GiB are free, 0.3 of them for the weights: "
        "at most 6,812,032 tokens fit (12,110,336 with --kv-cache-dtype int8)",
    ),
    (
        dict(kv_cache_tokens=99_999_999_999, kv_cache_dtype="int8"),
        "kv_cache_tokens 99,999,999,999 needs 80,466.3 GiB; 10.0 GiB are free, 0.3 of them for the weights: "
        "at most 12,110,336 tokens fit",
    ),
    (
        dict(kv_cache_tokens=4_000_000, context_parallel_size=2),
        "kv_cache_tokens 4,000,000 needs 11.4 GiB on 2 ranks; 10.0 GiB are free, 0.5 of them for the weights: "
        "at most 3,316,800 tokens a rank fit (5,896,576 with --kv-cache-dtype int8)",
    ),
    (
        dict(kv_offloading_size=8, kv_cache_tokens=2_000_000),
        "kv_offloading_size 8 GiB is too much: 10.0 GiB are free, 0.3 of them for the weights and 2.9 GiB for the "
        "KV cache in the pool: at most 6.9 GiB fit",
    ),
    (
        dict(kv_offloading_size=5, kv_cache_tokens=1_000_000, tensor_parallel_size=2),
        "kv_offloading_size 5 GiB on each of 2 ranks is too much: 10.0 GiB are free, 0.5 of them for the weights and "
        "1.4 GiB for the KV cache in the pool: at most 4.0 GiB a rank fit",
    ),
    (
        dict(kv_offloading_size=12, offload_schedule="row", max_sequences=1000),
        "kv_offloading_size 12 GiB is too much: 10.0 GiB are free, 0.3 of them for the weights: at most 9.7 GiB fit",
    ),
    (
        dict(
            kv_offloading_size=12,
            offload_schedule="row",
            weight_offload=True,
            attention_backend="triton",
            max_sequences=1000,
        ),
        "kv_offloading_size 12 GiB is too much: 10.0 GiB are free, 0.3 of them for the weights: at most 9.7 GiB fit",
    ),
    (
        dict(kv_offloading_size=5, context_parallel_size=2, attention_backend="triton"),
        "kv_offloading_size 5 GiB on each of 2 ranks is too much: it is pinned, and 10.0 GiB are free: at most 4.8 GiB "
        "a rank fit",
    ),
    (
        dict(
            kv_offloading_size=5,
            offload_schedule="row",
            context_parallel_size=2,
            attention_backend="triton",
            max_sequences=1000,
        ),
        "kv_offloading_size 5 GiB on each of 2 ranks is too much: it is pinned, and 10.0 GiB are free: at most 4.8 GiB "
        "a rank fit",
    ),
]
FITS: list[dict[str, Any]] = [
    dict(),
    dict(kv_cache_tokens=6_812_032),
    dict(kv_cache_tokens=6_000_000, tensor_parallel_size=2),
    dict(kv_offloading_size=4),
    dict(kv_offloading_size=12, offload_schedule="row", kv_cache_tokens=4096),
    dict(kv_cache_tokens=10_000_000, attention_backend="triton"),
    dict(kv_offloading_size=4.7, context_parallel_size=2, attention_backend="triton"),
    dict(kv_offloading_size=12, offload_schedule="row", attention_backend="triton", max_sequences=4),
    dict(kv_cache_tokens=10_000_000, context_parallel_size=2, distributed_backend="ray"),
]


@pytest.mark.parametrize(("settings", "told"), TOO_MUCH, ids=str)
def test_what_does_not_fit_is_told_with_what_does(settings: dict[str, Any], told: str) -> None:
    with pytest.raises(ValueError) as refused:
        Footprint.of(EngineConfig(**settings), TINY, 10 * GIB).check()
    assert str(refused.value) == told


@pytest.mark.parametrize("settings", FITS, ids=str)
def test_what_fits_passes(settings: dict[str, Any]) -> None:
    Footprint.of(EngineConfig(**settings), TINY, 10 * GIB).check()


def test_the_most_that_is_told_fits_and_a_chunk_more_does_not() -> None:
    with pytest.raises(ValueError, match="6,812,032 tokens fit"):
        Footprint.of(EngineConfig(kv_cache_tokens=6_812_032 + 64), TINY, 10 * GIB).check()


def test_weights_that_do_not_fit() -> None:
    """Quantised ones are read whole first."""
    free = Footprint.of(EngineConfig(), TINY).loading
    for quantization in ("none", "int4", "w8a8"):
        config = EngineConfig(quantization=quantization)
        Footprint.of(config.replace(kv_cache_tokens=64), TINY, free + (1 << 20)).check()
        with pytest.raises(ValueError, match=r"the weights of tiny need 0\.3 GiB, but 0\.3 GiB are free: take"):
            Footprint.of(config, TINY, free - 1000).check()


def test_a_cache_of_no_given_size_leaves_room_for_the_weights() -> None:
    weights = Footprint.of(EngineConfig(), TINY).weights
    assert Footprint.of(EngineConfig(), TINY, 10 * GIB).auto_bytes() == 10 * GIB // 4
    assert Footprint.of(EngineConfig(), TINY, weights + 1000).auto_bytes() == 1000
    assert Footprint.of(EngineConfig(), TINY, weights - 1000).auto_bytes() == 0


def test_ranks_elsewhere_do_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    config = EngineConfig(kv_cache_tokens=4_000_000, context_parallel_size=2)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    Footprint.of(config, TINY, 10 * GIB).check()


def test_lengths() -> None:
    for settings, told in (
        (dict(max_model_len=16385), "max_model_len 16385 exceeds the model's 16384: lower it, or leave it out"),
        (
            dict(max_model_len=8192, kv_cache_tokens=4096),
            "kv_cache_tokens 4096 holds no sequence of max_model_len",
        ),
    ):
        with pytest.raises(ValueError, match=told):
            preflight.check(EngineConfig(**settings))
    preflight.check(EngineConfig(max_model_len=8192, kv_cache_tokens=4096, context_parallel_size=2))


@pytest.mark.parametrize(("settings", "kept"), [
    ({}, True), ({"kv_offload_activations": "off"}, False), ({"attention_backend": "triton"}, True),
    ({"context_parallel_size": 2}, False), ({"context_parallel_size": 2, "kv_offload_activations": "on"}, True),
], ids=str)  # fmt: skip
def test_where_activations_are_kept(settings: dict[str, Any], kept: bool) -> None:
    """Of a model whose X is smaller than its K and V: heads of their own. On ranks where it is asked for."""
    apart = replace(TINY, attention=replace(TINY.attention, kv_heads=TINY.attention.heads))
    assert keeps_activations(EngineConfig(kv_offloading_size=1.0, **settings), apart, 2, 2) is kept


@pytest.mark.parametrize(("dim", "kept"), [(256, False), (257, True)])
def test_latents_are_compared_as_tiers_have_them(dim: int, kept: bool) -> None:
    """Once; X is 256 numbers."""
    assert TINY.hidden_size == 256
    spec = replace(TINY.attention, kv_heads=1, head_dim=dim, once=True)
    config = EngineConfig(kv_offloading_size=1.0)
    assert keeps_activations(config, replace(TINY, attention=spec), 2, 2) is kept


def test_what_has_passed_is_not_looked_at_again(monkeypatch: pytest.MonkeyPatch) -> None:
    config = EngineConfig(kv_cache_tokens=123_456)
    preflight.check(config)
    monkeypatch.setattr(host, "memory_available", lambda: 1)
    preflight.check(config)
    with pytest.raises(ValueError, match="take a smaller model"):
        preflight.check(EngineConfig(kv_cache_tokens=123_457))


LFM2 = dict(
    architectures=["Lfm2ForCausalLM"], model_type="lfm2", hidden_size=2048, block_ff_dim=12288, num_hidden_layers=16,
    num_attention_heads=32, num_key_value_heads=8, full_attn_idxs=[2, 5, 8, 10, 12, 14], vocab_size=65536,
    torch_dtype="bfloat16",
)  # fmt: skip
"""LFM2-1.2B."""


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("tokens", [None, 64_000])
def test_small_states_are_as_many_as_chunks(tokens: int | None, ranks: int, tmp_path: Path) -> None:
    """And the pool is as much smaller: a token takes 12,288 bytes, a state 81,920, a ninth of its chunk."""
    (tmp_path / "config.json").write_text(json.dumps(LFM2))
    model = plain_config(tmp_path)
    assert model.recurrent is not None and model.recurrent.state_bytes(2) == 81_920
    config = EngineConfig(model=str(tmp_path), kv_cache_tokens=tokens, context_parallel_size=ranks)
    taken = Footprint.of(config, model, 40 * GIB)
    states, running = taken.states(), config.scheduler.max_sequences
    assert states is not None and taken.state_interval() == CHUNK
    chunks = taken.kv_bytes() // (12_288 * CHUNK)
    assert chunks <= states <= 1.02 * chunks + running
    if tokens is None:
        assert taken.kv_bytes() + taken.state_bytes() <= 10 * GIB <= 1.02 * (taken.kv_bytes() + taken.state_bytes())


def test_large_states_are_few(tmp_path: Path) -> None:
    """Of a gated delta net a state is larger than a chunk."""
    fields = dict(architectures=["Qwen3NextForCausalLM"], model_type="qwen3_next", torch_dtype="bfloat16")
    (tmp_path / "config.json").write_text(json.dumps(fields))
    config = EngineConfig(model=str(tmp_path))
    taken = Footprint.of(config, plain_config(tmp_path), 800 * GIB)
    assert taken.state_interval() == INTERVAL
    assert taken.states() == 4 * config.scheduler.max_sequences
