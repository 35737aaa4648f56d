"""Which setting bounds the context of a loaded model, and that raising it as told makes the request fit."""

from __future__ import annotations

import re
from typing import Any

import pytest

from headrace import LLM, InvalidRequest, SamplingParams

pytestmark = pytest.mark.cpu


@pytest.mark.parametrize(
    ("settings", "limit"),
    [
        ({"kv_cache_tokens": 32768}, ""),
        ({"kv_cache_tokens": 256}, "kv_cache_tokens"),
        ({"kv_cache_tokens": 256, "max_model_len": 100}, "max_model_len"),
        ({"kv_cache_tokens": 256, "kv_offloading_size": 0.001, "offload_schedule": "row"}, "kv_offloading_size"),
        ({"kv_offloading_size": 0.001, "offload_schedule": "row"}, "kv_offloading_size"),
    ],
)
def test_limit(settings: dict[str, Any], limit: str) -> None:
    llm = LLM("tiny", **settings)
    assert (llm.capacity.length_limit, llm.capacity.model_len) == (limit, 16384)
    llm.close()


def test_the_remedy_lifts_the_limit() -> None:
    asked = [7] * 300, SamplingParams(max_tokens=30)
    with pytest.raises(InvalidRequest, match="--kv-cache-tokens") as told:
        LLM("tiny", kv_cache_tokens=256).generate([asked[0]], asked[1])
    (tokens,) = re.findall(r"--kv-cache-tokens (\d+)", str(told.value))
    assert LLM("tiny", kv_cache_tokens=int(tokens)).capacity.check([7] * 300, SamplingParams(max_tokens=1))
