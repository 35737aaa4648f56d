"""Settings that a GPU cannot follow are refused by name."""

from __future__ import annotations

from typing import Any

import pytest

from headrace.config import EngineConfig


@pytest.mark.parametrize(
    "given",
    [
        {"context_parallel_size": 2},
        {"tensor_parallel_size": 2},
        {"weight_offload": True, "offload_schedule": "auto", "kv_offloading_size": 1.0},
    ],
)
def test_without(given: dict[str, Any]) -> None:
    name = next(iter(given))
    with pytest.raises(ValueError, match=f"it works on the CPU only. Leave out attention_backend or {name}"):
        EngineConfig(attention_backend="triton", **given)


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


def test_alone() -> None:
    assert EngineConfig(attention_backend="triton").model.backend == "triton"
