"""What is too long is refused with the limit that bounds it, and with what lifts that."""

from __future__ import annotations

from typing import Any

import pytest

from headrace.engine.capacity import Capacity
from headrace.types import InvalidRequest, SamplingParams

pytestmark = pytest.mark.unit


def capacity(**more: Any) -> Capacity:
    sizes: dict[str, Any] = dict(kv_cache_tokens=8192, max_model_len=4096, model_len=16384) | more
    return Capacity(
        "m", "m", "bfloat16", "none", "cpu", "bfloat16", kv_bytes_per_token=1, max_sequences=1, vocab_size=10, **sizes
    )


PROMPT = "the prompt has 5,969 tokens; the context is 4,096, answer included, "
ANSWER = "max_tokens 5,000 after a prompt of 10 tokens; the context is 4,096, answer included, "
CASES: list[tuple[dict[str, Any], str, str]] = [
    ({"length_limit": "max_model_len"},
     "bounded by max_model_len: {}, or start the engine with --max-model-len 5970",
     "bounded by max_model_len: {}, or start the engine with --max-model-len 5010"),
    ({"length_limit": "max_model_len", "kv_cache_tokens": 4096},
     "bounded by max_model_len: {}, or start the engine with --max-model-len 5970 and --kv-cache-tokens 6016",
     "bounded by max_model_len: {}, or start the engine with --max-model-len 5010 and --kv-cache-tokens 5056"),
    ({"length_limit": "kv_cache_tokens", "kv_cache_tokens": 4096},
     "bounded by kv_cache_tokens: {}, or start the engine with --kv-cache-tokens 6016",
     "bounded by kv_cache_tokens: {}, or start the engine with --kv-cache-tokens 5056"),
    ({"length_limit": "kv_cache_tokens", "kv_cache_tokens": 4096, "context_parallel_size": 3},
     "bounded by kv_cache_tokens: {}, or start the engine with --kv-cache-tokens 2048",
     "bounded by kv_cache_tokens: {}, or start the engine with --kv-cache-tokens 1728"),
    ({"length_limit": "kv_cache_tokens", "kv_cache_tokens": 8192},  # of which a layer is staged, KV being outside
     "bounded by kv_cache_tokens: {}, or raise --kv-cache-tokens",
     "bounded by kv_cache_tokens: {}, or raise --kv-cache-tokens"),
    ({"length_limit": "kv_offloading_size"},
     "bounded by kv_offloading_size: {}, or raise --kv-offloading-size",
     "bounded by kv_offloading_size: {}, or raise --kv-offloading-size"),
    ({"model_len": 4096}, "which is the model's own: {}", "which is the model's own: {}"),
    ({"length_limit": "max_model_len", "model_len": 5000},
     "bounded by max_model_len, and the model's own is 5,000: {}",
     "bounded by max_model_len, and the model's own is 5,000: {}"),
]  # fmt: skip


@pytest.mark.parametrize(("sizes", "prompt", "answer"), CASES)
def test_too_long(sizes: dict[str, Any], prompt: str, answer: str) -> None:
    given = capacity(**sizes)
    with pytest.raises(InvalidRequest) as caught:
        given.check([1] * 5969, SamplingParams())
    assert str(caught.value) == PROMPT + prompt.format("shorten the prompt")
    assert (caught.value.param, caught.value.code) == ("prompt", "context_length_exceeded")
    with pytest.raises(InvalidRequest) as caught:
        given.check([1] * 10, SamplingParams(max_tokens=5000))
    assert str(caught.value) == ANSWER + answer.format("ask for at most 4,086")
    assert (caught.value.param, caught.value.code) == ("max_tokens", "context_length_exceeded")


def test_what_fits() -> None:
    assert capacity().check([1] * 4095, SamplingParams(max_tokens=1)).max_tokens == 1
    assert capacity().check([1] * 96, SamplingParams(max_tokens=None)).max_tokens == 4000
