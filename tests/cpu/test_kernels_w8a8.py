"""Products of rows rounded to int8: whole numbers, the same bits on every instruction set and in every company.

T: rows, N: outputs, K: inputs.
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from headrace import LLM, SamplingParams
from headrace.kernels import cpu, dispatch, ops
from headrace.kernels.quantized import Quantized, Rounded, linear
from tests.support.checkpoints import FolderOf

needs_extension = pytest.mark.skipif(not cpu.available(), reason=str(cpu.unavailable_reason()))
pytestmark = [pytest.mark.cpu, needs_extension]

few = settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def truth(x: Tensor, weight: Rounded) -> Tensor:
    """Rows rounded to 127 steps of their own, whole numbers summed, both scales, each rounded to fp32: [T, N]."""
    top = x.float().abs().amax(-1, keepdim=True)
    inverse = torch.where(top > 0, torch.tensor(127.0) / top, 0)  # (127 / top is another number: torch inverts first)
    sums = (x.float() * inverse).round().double() @ weight.codes.double().T
    return sums.float() * (top / 127) * weight.scales.view(-1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@given(st.integers(1, 150), st.integers(1, 200), st.integers(1, 200), st.integers(0, 99))
@few
def test_whole_numbers(isa: str, dtype: torch.dtype, rows: int, outputs: int, quads: int, seed: int) -> None:
    x, weight = random(rows, 4 * quads, seed=seed, dtype=dtype), Rounded(random(outputs, 4 * quads, seed=1), "w8a8")
    x[rows // 2] = 0
    assert torch.equal(linear(x, Quantized(weight), wide=True), truth(x, weight))


def test_the_most_that_sums_hold(isa: str) -> None:
    """All codes 127, with every sign, over as many inputs as models have."""
    for sign in (1, -1):
        x, weight = torch.full((7, 32_768), 3.0), Rounded(sign * torch.ones(64, 32_768), "w8a8")
        assert torch.equal(linear(x, Quantized(weight)), truth(x, weight))


def test_what_is_not_finite_stays_so(isa: str) -> None:
    x, weight = random(5, 64), Quantized(Rounded(random(70, 64, seed=1), "w8a8"))
    others = linear(x, weight)[2:]
    x[0, 3], x[1, 60] = float("nan"), float("-inf")
    found = linear(x, weight)
    assert found[:2].isnan().all() and torch.equal(found[2:], others)
    x[2] *= 1e-38  # too small for a scale's inverse
    assert linear(x, weight)[2].eq(0).all()


def test_it_needs_the_kernels() -> None:
    with dispatch.force("torch"), pytest.raises(ValueError, match=r"w8a8 needs the C\+\+ kernels or a GPU"):
        ops.pack(random(64, 64), "w8a8")
    with pytest.raises(ValueError, match="multiple of 4"):
        ops.pack(random(64, 66), "w8a8")


@pytest.mark.parametrize("kind", ["llama", "opt", "falcon_rw"])
def test_a_model(folder_of: FolderOf, kind: str) -> None:
    """The same answers alone, together and again, from what is cached."""
    llm = LLM(str(folder_of(kind)), quantization="w8a8", dtype="bfloat16", kv_cache_tokens=4096, max_model_len=512)
    prompts = [[5 + (7 * i + j) % 90 for j in range(70 + 30 * i)] for i in range(3)]
    greedy = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True, logprobs=3)
    alone = [llm.generate([prompt], greedy)[0].outputs[0] for prompt in prompts]
    for _ in range(2):
        together = [each.outputs[0] for each in llm.generate(prompts, greedy)]
        assert [(each.token_ids, each.logprobs) for each in together] == [(e.token_ids, e.logprobs) for e in alone]
