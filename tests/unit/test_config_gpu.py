"""Settings that a GPU cannot follow are refused by name."""

from __future__ import annotations

from typing import Any

import pytest

from headrace.config import EngineConfig


@pytest.mark.parametrize(
    ("name", "value", "why"),
    [
        ("kv_cache_dtype", "int8", "an engine with both ended by an illegal access of memory on an H200"),
    ],
)
def test_without(name: str, value: str, why: str) -> None:
    with pytest.raises(ValueError, match=f"exclude each other: {why}. Leave out .*attention_backend.*") as refused:
        EngineConfig(attention_backend="triton", **{name: value})
    assert name in str(refused.value)


@pytest.mark.parametrize(
    "given",
    [
        {"kv_offloading_size": 1.0},
        {"kv_offload_path": "/tmp/kv"},
        {"kv_remote_url": "redis://127.0.0.1:6379"},
        {"kv_offloading_size": 1.0, "kv_offload_activations": "on"},
    ],
)
def test_tiers_are_taken(given: dict[str, Any]) -> None:
    assert EngineConfig(attention_backend="triton", **given).tiers is not None


@pytest.mark.parametrize("schedule", ["row", "column"])
@pytest.mark.parametrize("x", ["on", "off"])
def test_streaming_is_taken(schedule: str, x: str) -> None:
    given = {"offload_schedule": schedule, "kv_offloading_size": 1.0, "kv_offload_activations": x}
    assert EngineConfig(attention_backend="triton", **given).streaming is not None


@pytest.mark.parametrize("size", ["context_parallel_size", "tensor_parallel_size"])
def test_ranks_are_taken(size: str) -> None:
    assert EngineConfig(attention_backend="triton", **{size: 2}).ranks.count == 2


def test_weights_outside_are_taken() -> None:
    given: dict[str, Any] = {"weight_offload": True, "offload_schedule": "row", "kv_offloading_size": 1.0}
    assert EngineConfig(attention_backend="triton", **given).streaming is not None


def test_alone() -> None:
    assert EngineConfig(attention_backend="triton").model.backend == "triton"
