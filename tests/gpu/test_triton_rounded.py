"""Products of rounded rows on a GPU: to the bit the numbers of the definition and of the C++ kernels, whatever the
tile and whatever rows ride along."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from headrace import LLM
from headrace.config import Quantization
from headrace.kernels import cpu, rounded_rows
from headrace.kernels import experts as truth_of
from headrace.kernels.quantized import Quantized, Rounded, linear
from tests.support.checkpoints import make_checkpoint
from tests.support.traces import alone, prompts_of, run, same

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

CUDA = torch.device("cuda", 0)
needs_fp8 = pytest.mark.skipif(
    torch.cuda.is_available() and torch.cuda.get_device_capability() < (8, 9), reason="needs a GPU that multiplies FP8"
)
SCHEMES = ["w8a8", pytest.param("fp8_rowwise", marks=needs_fp8)]
ROWS = [1, 2, 16, 17, 33, 64, 65, 300]


def odd_rows(rows: int, inputs: int, dtype: torch.dtype) -> torch.Tensor:
    x = torch.randn(rows, inputs, generator=torch.Generator().manual_seed(1)).to(dtype)
    x[0] = 0
    x[1] *= 1e-33
    x[2, 1], x[3, 0] = float("nan"), float("-inf")
    x[4] = (torch.arange(inputs) % 254 / 2 - 63.5).to(dtype)
    return x.cuda()


@pytest.mark.parametrize("kind", rounded_rows.LARGEST)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_rows_are_rounded_as_defined(dtype: torch.dtype, kind: rounded_rows.Codes) -> None:
    from headrace.kernels.triton import rounded

    for inputs in (64, 1156, 11_008):
        x = odd_rows(70, inputs, dtype)
        x[5] *= torch.logspace(-6, 0, inputs, device="cuda").to(dtype)  # down to subnormal codes of FP8 and below
        codes, scales = rounded.round_rows(x, kind)
        want, by = rounded_rows.round_rows(x.cpu(), kind)
        codes, want = codes.view(torch.int8), want.view(torch.int8)
        assert torch.equal(codes[:, :inputs].cpu(), want) and not codes[:, inputs:].any()
        assert torch.equal(scales.cpu().nan_to_num(-1), by.nan_to_num(-1))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_the_numbers_of_the_cpu(dtype: torch.dtype) -> None:
    """Without a bias; with one C++ may round twice where it has no multiply-add."""
    from headrace.kernels.triton import weights

    coded = Rounded(torch.randn(200, 1156), "w8a8")
    x, weight = odd_rows(ROWS[-1], 1156, dtype), weights.pack(coded, CUDA)
    every = weights.linear(x, weight, wide=True)
    truth = rounded_rows.product(x.cpu(), coded.codes, coded.scales.view(-1))
    assert torch.equal(every.cpu().nan_to_num(7), truth.nan_to_num(7))
    if cpu.available():
        theirs = linear(x.cpu(), Quantized(coded), wide=True)
        assert torch.equal(every.cpu().nan_to_num(7), theirs.nan_to_num(7))
    bias = torch.randn(200, device="cuda").to(dtype)
    added = weights.linear(x, weight, bias, wide=True)
    assert ((added - every - bias).abs() <= 1e-6 * (every.abs() + 1))[5:].all()
    for rows in ROWS:
        for first in (0, ROWS[-1] - rows):
            part = slice(first, first + rows)
            ours = weights.linear(x[part], weight, bias, wide=True)
            assert torch.equal(ours.nan_to_num(7), added[part].nan_to_num(7))


@needs_fp8
def test_products_of_fp8() -> None:
    """Near the definition, and a row has its bits whatever rows ride along."""
    from headrace.kernels.triton import rounded, weights

    coded = Rounded(torch.randn(200, 4100), "fp8_rowwise")
    x, weight = odd_rows(ROWS[-1], 4100, torch.bfloat16), rounded.pack(coded, CUDA)
    every = weights.linear(x, weight, wide=True)
    truth = rounded_rows.product(x, weight.codes[:, :4100], weight.scales, "e4m3")
    sizes = x.double().abs() @ coded.dequantised().cuda().double().abs().T
    assert ((every - truth).abs() <= 2**-11 * sizes)[4:].all() and every[2:4].isnan().all() and not every[:2].any()
    for rows in ROWS:
        for first in (0, ROWS[-1] - rows):
            part = slice(first, first + rows)
            ours = weights.linear(x[part], weight, wide=True)
            assert torch.equal(ours.nan_to_num(7), every[part].nan_to_num(7))


@pytest.mark.parametrize("kind", ["int8", pytest.param("e4m3", marks=needs_fp8)])
def test_all_tiles_agree(kind: rounded_rows.Codes) -> None:
    """On a GPU that has room for them."""
    from headrace.kernels.triton import rounded

    assert rounded.agreeing(CUDA, kind) == rounded.TILES[kind]


@pytest.mark.parametrize("scheme", SCHEMES)
def test_experts(scheme: Quantization) -> None:
    """Every row alone, and with all others."""
    from headrace.kernels.triton import weights

    torch.manual_seed(1)
    count, chosen, hidden, inner = 8, 2, 256, 192
    x, logits = torch.randn(700, hidden, device="cuda").bfloat16(), torch.randn(700, count, device="cuda")
    logits[:, 3] -= 100.0
    given = [
        [weights.pack(Rounded(torch.randn(outputs, inputs) / inputs**0.5, scheme), CUDA) for _ in range(count)]
        for outputs, inputs in ((2 * inner, hidden), (hidden, inner))
    ]
    mixture = truth_of.mixture(given[0], None, given[1], None, "silu", chosen, True)
    every = mixture(x, logits)
    assert every.isfinite().all()
    for rows in (1, 2, 33, 500):
        for first in (0, 700 - rows):
            part = slice(first, first + rows)
            assert torch.equal(mixture(x[part], logits[part]), every[part])


@pytest.mark.parametrize("scheme", SCHEMES)
def test_the_promise_with_rounded_rows(scheme: Quantization) -> None:
    def engine(**more: int) -> LLM:
        settings = dict(dtype="bfloat16", attention_backend="triton", quantization=scheme, kv_cache_tokens=40_000)
        return LLM("tiny", **settings, **more)

    llm = engine()
    prompts = prompts_of(llm)
    truth = alone(llm)
    llm.engine.cache.tree.clear()
    same(run(llm, prompts), truth)
    same(run(engine(max_batch_tokens=96), prompts), truth)


def test_experts_in_an_engine(tmp_path: Path) -> None:
    """Rows are rounded as on the CPU; sums of attention and norms differ in last bits, and some codes with them."""
    folder = make_checkpoint("qwen3_moe", tmp_path)
    tokens = torch.randint(0, 60, (300,), generator=torch.Generator().manual_seed(1)).tolist()
    settings = dict(dtype="float32", kv_cache_tokens=1024, quantization="w8a8")
    llm = LLM(str(folder), attention_backend="triton", **settings)
    ours, truth = llm.logits(tokens), LLM(str(folder), **settings).logits(tokens)
    assert (ours - truth).norm() <= 0.05 * truth.norm()
    assert torch.equal(llm.logits(tokens[:33]), ours[:33])
