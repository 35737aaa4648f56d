"""Products with codes, and experts, in Triton: near what codes stand for, and a row's bits whatever rows ride along."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from headrace import LLM
from headrace.kernels import experts as truth_of
from headrace.kernels.formats import FORMATS, Coded
from headrace.kernels.quantized import Rounded
from headrace.offload.weights.streamed import ends_of
from tests.support.checkpoints import make_checkpoint
from tests.support.coded_weights import coded
from tests.support.traces import alone, prompts_of, run, same

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

CUDA = torch.device("cuda", 0)
ROWS = [1, 2, 16, 17, 32, 33, 64, 65, 300]
BLOCKS = {name: form for name, form in FORMATS.items() if form.block}


def weight_of(name: str, outputs: int) -> Coded:
    if name in ("int8", "int4"):
        return Rounded(torch.randn(outputs, 1152), name)
    return coded(FORMATS[name], outputs, 1536 // FORMATS[name].block)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("name", ["int8", *BLOCKS])
def test_products(name: str, dtype: torch.dtype) -> None:
    from headrace.kernels.triton import weights

    torch.manual_seed(1)
    given = weight_of(name, 200)
    weight, dense = weights.GpuQuantized(given, CUDA), given.dequantised().double().cuda()
    x, bias = torch.randn(ROWS[-1], dense.shape[1], device="cuda").to(dtype), torch.randn(200, device="cuda").to(dtype)
    every = weights.linear(x, weight, bias, wide=True)
    truth, terms = x.double() @ dense.T + bias.double(), x.double().abs() @ dense.abs().T + 1.0
    assert ((every - truth).abs() <= (2**-8 if dtype == torch.bfloat16 else 2e-6) * terms).all()
    for rows in ROWS:
        for first in (0, ROWS[-1] - rows):
            part = slice(first, first + rows)
            assert torch.equal(weights.linear(x[part], weight, bias, wide=True), every[part])


def rows_of(given: Coded, mine: slice | torch.Tensor) -> Coded:
    subs, minima, smalls = (x if x is None else x[mine] for x in (given.subs, given.minima, given.smalls))
    return Coded(given.format, given.codes[mine], given.scales[mine], subs, minima, smalls)


@pytest.mark.parametrize("name", ["int8", "int4", "Q4_K", "MXFP4"])
def test_a_tensor_ranks_share_has_the_bits_of_the_whole(name: str) -> None:
    """By products: its outputs lie elsewhere in tiles, and it has fewer programs."""
    from headrace.kernels.triton import weights

    torch.manual_seed(1)
    given = weight_of(name, 608)
    whole, x = weights.GpuQuantized(given, CUDA), torch.randn(ROWS[-1], given.shape[1], device="cuda").bfloat16()
    for mine in (slice(0, 192), slice(192, 384), slice(288, 608)):
        share = weights.GpuQuantized(rows_of(given, mine), CUDA, 608)
        assert share.segments == whole.segments
        for rows in ROWS:
            part = x[:rows]
            assert torch.equal(weights.linear(part, share), weights.linear(part, whole)[:, mine])


@pytest.mark.parametrize("form", ["numbers", "int8", "int4"])
def test_a_tensor_ranks_experts_have_the_bits_of_the_whole(form: str) -> None:
    """Two ranks with a part of each matrix; what they gather goes from one call to the next."""
    from headrace.kernels.triton import weights

    torch.manual_seed(1)
    count, hidden, inner, half = 8, 256, 192, 96
    numbers = [
        [torch.randn(*shape).bfloat16() for _ in range(count)] for shape in ((2 * inner, hidden), (hidden, inner))
    ]
    codes: list[list[torch.Tensor | Coded]] = [list(part) for part in numbers]
    if form in ("int8", "int4"):
        codes = [[Rounded(each, form) for each in part] for part in numbers]

    def mixture(ups: torch.Tensor, downs: slice) -> truth_of.Mixture:
        given = [
            [each[rows] if isinstance(each, torch.Tensor) else rows_of(each, rows) for each in part]
            for part, rows in zip(codes, (ups, downs), strict=True)
        ]
        packed = [[weights.pack_parts([each], torch.bfloat16, CUDA) for each in part] for part in given]
        return truth_of.mixture(packed[0], None, packed[1], None, "silu", 2, True)

    both = torch.arange(inner).view(2, half)
    ranks = [mixture(torch.cat((own, own + inner)), slice(at * 128, at * 128 + 128)) for at, own in enumerate(both)]
    whole = mixture(torch.arange(2 * inner), slice(None))
    for rows in (1, 33, 500):
        x, logits = torch.randn(rows, hidden, device="cuda").bfloat16(), torch.randn(rows, count, device="cuda")
        parts: list[torch.Tensor] = []

        def kept(part: torch.Tensor, parts: list[torch.Tensor] = parts) -> torch.Tensor:
            parts.append(part)
            return torch.cat((part, part), 1)

        for rank in ranks:
            rank(x, logits, gather=kept)
        ours = [rank(x, logits, gather=lambda part, parts=parts: torch.cat(parts[:2], 1)) for rank in ranks]  # type: ignore[misc]
        assert torch.equal(torch.cat(ours, 1), whole(x, logits))


@pytest.mark.parametrize("gate", ["silu", "swiglu_oai"])
@pytest.mark.parametrize("form", ["numbers", "int8", "int4"])
def test_experts(form: str, gate: str) -> None:
    """Every row alone, and with all others; with gpt-oss's gate they have biases."""
    from headrace.kernels.triton import weights

    torch.manual_seed(1)
    count, chosen, hidden, inner = 8, 2, 256, 192
    x, logits = torch.randn(700, hidden, device="cuda").bfloat16(), torch.randn(700, count, device="cuda")
    logits[:, 3] -= 100.0
    given, dense, biases = [], [], []
    for outputs, inputs in ((2 * inner, hidden), (hidden, inner)):
        numbers = [torch.randn(outputs, inputs).bfloat16() / inputs**0.5 for _ in range(count)]
        codes: list[torch.Tensor | Coded] = list(numbers)
        if form in ("int8", "int4"):
            codes = [Rounded(each, form) for each in numbers]
        given.append([weights.pack_parts([each], torch.bfloat16, CUDA) for each in codes])
        dense.append([each.dequantised() if isinstance(each, Coded) else each.float() for each in codes])
        biases.append(None if gate == "silu" else [torch.randn(outputs).bfloat16() for _ in range(count)])
    there = [None if each is None else [bias.cuda() for bias in each] for each in biases]
    wide = [None if each is None else [bias.float() for bias in each] for each in biases]
    mixture = truth_of.mixture(given[0], there[0], given[1], there[1], gate, chosen, True)
    every = mixture(x, logits)
    routes = truth_of.route(logits.cpu(), chosen, True)
    middle = truth_of.gated_linear(x.cpu().float()[routes.order // chosen], dense[0], routes.begin, gate, wide[0])
    truth = truth_of.combine(truth_of.linear(middle, dense[1], routes.begin, biases=wide[1]), routes)
    assert (every.cpu() - truth).abs().max() <= 3e-2 * truth.abs().max()
    for rows in (1, 2, 33, 500):
        for first in (0, 700 - rows):
            part = slice(first, first + rows)
            assert torch.equal(mixture(x[part], logits[part]), every[part])


@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_the_promise_with_rounded_weights(quantization: str) -> None:
    llm = LLM("tiny", dtype="bfloat16", attention_backend="triton", quantization=quantization, kv_cache_tokens=40_000)
    prompts = prompts_of(llm)
    truth = alone(llm)
    llm.engine.cache.tree.clear()
    same(run(llm, prompts), truth)
    cut = LLM(
        "tiny", dtype="bfloat16", attention_backend="triton", quantization=quantization, kv_cache_tokens=40_000,
        max_batch_tokens=96,
    )  # fmt: skip
    same(run(cut, prompts), truth)


@pytest.mark.parametrize("quantization", ["none", "int8"])
def test_experts_in_a_file_have_the_bits_of_those_in_memory(quantization: str, tmp_path: Path) -> None:
    """Slots for 10 of 16: each layer's come as others go. A tier has the engine measure products at the start."""
    folder = make_checkpoint("qwen3_moe", tmp_path / "model")
    tokens = torch.randint(0, 60, (90,), generator=torch.Generator().manual_seed(1)).tolist()
    settings = dict(dtype="bfloat16", kv_cache_tokens=1024, quantization=quantization, attention_backend="triton")
    resident = LLM(str(folder), **settings)
    truth, matrices = resident.logits(tokens), resident.engine.loaded.decoder.matrices
    size = sum(ends_of([{part: matrices[f"layers.0.experts.0.{part}.weight"] for part in ("up", "down")}]).values())
    settings |= dict(expert_offload_path=str(tmp_path), expert_memory_size=10.5 * size / 2**30)
    llm = LLM(str(folder), **settings, kv_offloading_size=0.05)
    assert torch.equal(llm.logits(tokens), truth) and torch.equal(llm.logits(tokens[:33]), truth[:33])
    told = llm.engine.stats().experts
    assert 0 < told.hits < told.met


@pytest.mark.parametrize("quantization", ["none", "int8"])
@pytest.mark.parametrize("kind", ["qwen3_moe", "glm4_moe_groups"])
def test_the_promise_with_experts(kind: str, quantization: str, tmp_path: Path) -> None:
    folder = make_checkpoint(kind, tmp_path)
    tokens = torch.randint(0, 60, (300,), generator=torch.Generator().manual_seed(1)).tolist()
    settings = dict(dtype="float32", kv_cache_tokens=1024, quantization=quantization)
    llm = LLM(str(folder), attention_backend="triton", **settings)
    ours, truth = llm.logits(tokens), LLM(str(folder), **settings).logits(tokens)
    assert (ours - truth).abs().max() <= 1e-3
    assert torch.equal(llm.logits(tokens[:33]), ours[:33])
