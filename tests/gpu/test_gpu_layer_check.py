"""Attention with sinks, caps, int8 pools or large heads, compiled, beside plain torch: what a starting engine asks."""

from __future__ import annotations

import pytest
import torch

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.mark.parametrize("window", [None, 128])
@pytest.mark.parametrize("feature", ["sinks", "cap", "int8"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_attention_is_that_of_plain_torch(feature: str, window: int | None, dtype: torch.dtype) -> None:
    """gpt-oss's heads: 64, 8 of KV, of 64; and the shipped model's."""
    from headrace.kernels.triton import layer_check
    from headrace.kernels.triton.heads import Heads

    stored = torch.int8 if feature == "int8" else dtype
    cap, sinks = 30.0 if feature == "cap" else None, feature == "sinks"
    for heads in (Heads(64, 8, 64), Heads(8, 4, 32)):
        variant = layer_check.Variant(heads, dtype, stored, window, cap, sinks, heads.dim**-0.5)
        layer_check.check(variant, torch.device("cuda", 0))


@pytest.mark.parametrize("heads", [(8, 1, 512), (32, 4, 512)], ids=str)
def test_heads_of_512(heads: tuple[int, int, int]) -> None:
    """Gemma 4's: E2B and 31B."""
    from headrace.kernels.triton import layer_check
    from headrace.kernels.triton.heads import Heads

    bf16 = torch.bfloat16
    variant = layer_check.Variant(Heads(*heads), bf16, bf16, window=None, cap=None, sinks=False, scale=1.0)
    assert variant.features == ["heads of 512"]
    layer_check.check(variant, torch.device("cuda", 0))
