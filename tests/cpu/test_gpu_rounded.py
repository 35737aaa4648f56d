"""Products of rounded rows as a GPU has them, in Triton's interpreter: the numbers of the definition, and of C++.

tests/gpu/test_triton_rounded.py asks the GPU itself.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="Triton is built for Linux only")
if os.environ.get("TRITON_INTERPRET") != "1":  # see tests/conftest.py
    pytest.skip("there is a GPU: tests/gpu has the same kernels, compiled", allow_module_level=True)

from triton.runtime.errors import OutOfResources

from headrace import LLM, SamplingParams
from headrace.bench.shapes import CheckpointShape, write_checkpoint
from headrace.config import Quantization
from headrace.engine.runner import Runner
from headrace.kernels import cpu, dispatch, rounded_rows
from headrace.kernels import experts as truth_of
from headrace.kernels.formats import FORMATS, Coded
from headrace.kernels.quantized import Quantized, Rounded, linear
from headrace.kernels.triton import rounded, weights
from headrace.models.decoder import Decoder
from headrace.models.packing import StoredPacking
from headrace.models.sizes import weight_bytes
from headrace.models.weights import StoredMatrix
from tests.support.fake_device import fake_device
from tests.support.small_decoders import EXPERTS, model, weights_of
from tests.support.traces import run, same
from tools.gpu import rounded_products, timing

CPU = torch.device("cpu")


def random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def odd_rows(rows: int, inputs: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Among others one of zeros, one too small for a scale, two that are not finite, and halves of a step."""
    x = random(rows, inputs, dtype=dtype)
    x[0] = 0
    x[1] *= 1e-33
    x[2, 1], x[3, 0] = float("nan"), float("-inf")
    x[4] = torch.arange(inputs) % 254 / 2 - 63.5
    return x


@pytest.mark.parametrize("kind", rounded.TYPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_rows_are_rounded_as_defined(dtype: torch.dtype, kind: rounded_rows.Codes) -> None:
    x = odd_rows(7, 300, dtype)
    x[5] *= torch.logspace(-6, 0, 300)  # down to subnormal codes and below
    codes, scales = rounded.round_rows(x, kind)
    want, by = rounded_rows.round_rows(x, kind)
    assert codes.dtype == want.dtype and codes.shape == (7, 384)
    assert torch.equal(codes[:, :300].view(torch.int8), want.view(torch.int8)) and not codes[:, 300:].float().any()
    assert torch.equal(scales.nan_to_num(-1), by.nan_to_num(-1)) and scales.isnan().tolist()[2:4] == [True, True]


def test_rows_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    x = odd_rows(6, 300)
    whole = rounded.round_rows(x)
    monkeypatch.setattr(rounded, "BLOCK", 128)
    for part, other in zip(rounded.round_rows(x), whole, strict=True):
        assert torch.equal(part.nan_to_num(-1), other.nan_to_num(-1))


def test_every_code_is_its_own() -> None:
    """Of e4m3, in halves between two neighbours too, which go to the even one."""
    values = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    x = torch.stack((values, -values, torch.cat([(values[1:] + values[:-1]) / 2, values[-1:]])))
    codes, scales = rounded.round_rows(x, "e4m3")
    assert torch.equal(scales, torch.ones(3)) and torch.equal(codes[0, :127].float(), values)
    assert torch.equal(codes[:, :127].view(torch.int8), x.to(torch.float8_e4m3fn).view(torch.int8))


TILES = rounded.TILES["int8"]
LARGE = [pytest.param(tile, marks=pytest.mark.matrix) for tile in TILES[:2]]


@pytest.mark.parametrize("tile", [*LARGE, *TILES[2:]], ids=str)
def test_every_tile_has_the_numbers_of_the_definition(tile: rounded.Tile, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rounded, "agreeing", lambda device, kind: (tile,))
    x, coded = odd_rows(tile.rows + 5, 132), Rounded(random(tile.columns + 6, 132, seed=1), "w8a8")
    ours = weights.linear(x, weights.pack(coded, CPU))
    truth = rounded_rows.product(x, coded.codes, coded.scales.view(-1))
    assert torch.equal(ours.nan_to_num(7), truth.nan_to_num(7))
    assert ours.isnan().any(1).nonzero().flatten().tolist() == [2, 3] and not ours[:2].any()


@pytest.mark.skipif(not cpu.available(), reason=str(cpu.unavailable_reason()))
def test_the_numbers_of_the_cpu() -> None:
    x, coded = odd_rows(9, 132), Rounded(random(70, 132, seed=1), "w8a8")
    for given in (x, x[5:, :].bfloat16().float()):
        ours, theirs = weights.linear(given, weights.pack(coded, CPU)), linear(given, Quantized(coded))
        assert torch.equal(ours.nan_to_num(7), theirs.nan_to_num(7))


def test_bias_types_and_rows_apart() -> None:
    weight, bias = weights.pack(Rounded(random(65, 64), "w8a8"), CPU), random(65, seed=3)
    x = random(4, 2, 64)[:, 1]
    plain = weights.linear(x, weight)
    assert torch.equal(plain, weights.linear(x.contiguous(), weight))
    assert (weights.linear(x, weight, bias) - plain - bias).abs().max() <= 1e-6 * plain.abs().max()
    half = weights.linear(x.half(), weight)
    assert half.dtype == torch.float16 and torch.equal(weights.linear(x.half(), weight, wide=True).half(), half)
    assert weights.linear(x[:0], weight).shape == (0, 65)
    assert weight.nbytes == 65 * 128 + 65 * 4


def test_parts_of_a_weight() -> None:
    coded, numbers = Rounded(random(24, 64), "w8a8"), random(9, 64, seed=2)
    x = random(3, 64, seed=4)
    ours = weights.linear(x, weights.pack_parts([coded, numbers], torch.float32, CPU))  # type: ignore[arg-type]
    assert torch.equal(ours[:, :24], rounded_rows.product(x, coded.codes, coded.scales.view(-1)))
    assert (ours[:, 24:] - x @ numbers.T).abs().max() < 1e-5


@pytest.mark.parametrize("biased", [False, pytest.param(True, marks=pytest.mark.matrix)])
def test_a_mixture(biased: bool) -> None:
    """Some experts have more rows than one tile, some none; rows are rounded before each of the two products."""
    count, chosen, hidden, inner, rows = 4, 2, 64, 32, 21
    x, logits = random(rows, hidden), random(rows, count)
    logits[:, 3] -= 100.0
    logits[:, 1] += 3.0
    given, biases = [], []
    for outputs, inputs in ((2 * inner, hidden), (hidden, inner)):
        given.append([Rounded(random(outputs, inputs, seed=e + inputs), "w8a8") for e in range(count)])
        biases.append([random(outputs, seed=e) for e in range(count)] if biased else None)
    packed = [[weights.pack_parts([each], torch.float32, CPU) for each in matrices] for matrices in given]
    ours = truth_of.mixture(packed[0], biases[0], packed[1], biases[1], "silu", chosen, True)(x, logits)
    routes = truth_of.route(logits, chosen, True)

    def each_expert(rows: Tensor, matrices: list[Rounded], added: list[Tensor] | None) -> Tensor:
        parts = []
        for e, coded in enumerate(matrices):
            mine = rows[routes.begin[e] : routes.begin[e + 1]]
            made = rounded_rows.product(mine, coded.codes, coded.scales.view(-1))
            parts.append(made if added is None else made + added[e])
        return torch.cat(parts)

    with dispatch.force("torch"):
        gate, up = each_expert(x[routes.order // chosen], given[0], biases[0]).chunk(2, 1)
        middle = torch.nn.functional.silu(gate) * up
        truth = truth_of.combine(each_expert(middle, given[1], biases[1]), routes)
    # An activation that differs in its last bit may be rounded to the code beside it: a step of its row.
    assert (ours - truth).abs().max() <= 2e-2 * truth.abs().max()
    assert ((ours - truth).abs() > 1e-5 * truth.abs().max()).float().mean() < 0.2


def test_tiles_by_rows_and_outputs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headrace.kernels.triton.attention.processors", lambda device: 132)

    def taken(rows: int, outputs: int) -> tuple[int, int]:
        weight = rounded.GpuRounded(Coded(FORMATS["w8a8"], *(torch.zeros(outputs, n) for n in (4, 1))), CPU)
        tile = rounded.tile_for(rows, weight, CPU)
        return tile.columns, tile.rows

    assert [taken(rows, 28_672) for rows in (1, 16, 17, 64, 100, 2000)] == [
        (64, 16), (64, 16), (64, 32), (64, 64), (128, 128), (128, 256)
    ]  # fmt: skip
    assert [taken(rows, 4096) for rows in (16, 40, 64, 100)] == [(32, 16), (64, 32), (64, 32), (64, 64)]


@pytest.mark.parametrize("scheme", ["w8a8", "fp8_rowwise"])
def test_tiles_of_other_numbers_are_left_alone(
    scheme: Quantization, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """One too large, one with other numbers; and where rows or all products are others, every tile."""
    launch, x = rounded._launch, random(3, 64, seed=1)
    weight = rounded.GpuRounded(Rounded(random(64, 64), scheme), CPU)
    tiles = rounded.TILES[weight.kind]

    def broken(tile: rounded.Tile, x: Tensor, weight: rounded.GpuRounded, bias: None, out: Tensor, among: None) -> None:
        if tile == tiles[0]:
            raise OutOfResources(300_000, 232_448, "shared memory")
        launch(tiles[-1], x, weight, bias, out, among)
        if tile in wrong:
            out[-1, -1] *= 1.1

    monkeypatch.setattr(rounded, "_launch", broken)
    wrong = {tiles[1]}
    assert rounded.agreeing_on(x, weight) == tiles[2:] and "is left alone" in caplog.text
    wrong = {*tiles}
    assert rounded.agreeing_on(x, weight) == ()
    monkeypatch.setattr(rounded, "_launch", launch)
    monkeypatch.setattr(rounded_rows, "LEAST", 1e30)
    assert rounded.agreeing_on(x, weight) == () and "rows are rounded otherwise" in caplog.text


@pytest.mark.parametrize("tile", rounded.TILES["e4m3"][1:], ids=str)
def test_products_of_fp8(tile: rounded.Tile, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rounded, "agreeing", lambda device, kind: (tile,))
    x, coded = odd_rows(tile.rows + 5, 132), Rounded(random(tile.columns + 6, 132, seed=1), "fp8_rowwise")
    weight = rounded.pack(coded, CPU)
    ours, truth = weights.linear(x, weight), rounded_rows.product(x, weight.codes[:, :132], weight.scales, "e4m3")
    assert ((ours - truth).abs() <= 1e-6 * (x.abs() @ coded.dequantised().abs().T))[4:].all()
    assert ours.isnan().any(1).nonzero().flatten().tolist() == [2, 3] and not ours[:2].any()


def test_weights_of_fp8() -> None:
    """Near the numbers, a scale for each output, and no code is NaN."""
    numbers = random(9, 64) * torch.logspace(-8, 8, 9)[:, None]
    coded = Rounded(numbers, "fp8_rowwise")
    assert ((coded.dequantised() - numbers).abs() <= numbers.abs() / 16 + numbers.abs().amax(1)[:, None] * 2e-6).all()
    assert coded.codes.view(torch.float8_e4m3fn).float().abs().amax(1).tolist() == [448.0] * 9


def test_feed_forward_layers_alone_are_in_fp8(monkeypatch: pytest.MonkeyPatch) -> None:
    config = model(experts=EXPERTS)
    given = {name: weight.float() for name, weight in weights_of(config).items()}
    with dispatch.force("torch"):
        with pytest.raises(ValueError, match="only a GPU multiplies FP8; use w8a8"):
            Decoder(config, dict(given), "fp8_rowwise")
        monkeypatch.setattr(dispatch, "on_gpu", lambda x: True)
        matrices = Decoder(config, dict(given), "fp8_rowwise").matrices
    told = weight_bytes(config, "float32", "fp8_rowwise") - weight_bytes(config, "float32")
    in_fp8 = {name: weight.shape for name, weight in matrices.items() if isinstance(weight, rounded.GpuRounded)}
    assert told == sum(outputs * (4 - 3 * inputs) for outputs, inputs in in_fp8.values())
    rounding = {name.rsplit(".", 2)[1] for name in in_fp8}
    others = {name.rsplit(".", 2)[-2] for name, weight in matrices.items() if isinstance(weight, Tensor)}
    assert rounding == {"up", "down"} and others == {"qkv", "out", "router", "head"}


def test_files_that_ask_for_rounded_rows() -> None:
    coded = Coded(FORMATS["w8a8"], random(16, 64).mul(40).char(), torch.ones(16, 1))
    stored = {"layers.0.out.weight": StoredMatrix((16, 64), partial(list, [coded]), coded=True)}
    matrices = StoredPacking(torch.bfloat16, torch.device("meta"), False, "none", None).all_of(stored, None)
    assert isinstance(matrices["layers.0.out.weight"], rounded.GpuRounded)


@pytest.mark.parametrize("scheme", ["w8a8", pytest.param("fp8_rowwise", marks=pytest.mark.matrix)])
def test_an_engine(scheme: Quantization, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Alone and together, in steps that are replayed: the same bits."""
    monkeypatch.setattr(Runner, "record", lambda self: None)
    shape = CheckpointShape(hidden=32, layers=1, heads=2, kv_heads=1, head_dim=16, mlp=32, vocab=64, context=256)
    folder, params = write_checkpoint(shape, tmp_path), SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True)
    with fake_device(monkeypatch):
        llm = LLM(
            str(folder), attention_backend="triton", dtype="float32", quantization=scheme, kv_cache_tokens=512,
            max_sequences=2,
        )  # fmt: skip
        matrices = llm.engine.loaded.decoder.matrices
        rounding = {name for name, weight in matrices.items() if isinstance(weight, rounded.GpuRounded)}
        assert len(rounding) == (4 if scheme == "w8a8" else 2)
        assert isinstance(matrices["head.weight"], weights.GpuQuantized if scheme == "w8a8" else Tensor)
        prompts = [[5 + (7 * i + j) % 50 for j in range(3 + 4 * i)] for i in range(2)]
        alone = [run(llm, [prompt], params)[0] for prompt in prompts]
        same(run(llm, prompts, params), alone)
        assert llm.engine.stats().graphs.replayed > 0


def test_the_table_of_times(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """tools/gpu/rounded_products.py, on a GPU before FP8."""

    def in_turns(runs: dict[str, Callable[[], Tensor]], rounds: int) -> dict[str, float]:
        return {name: run().shape[1] / 1e3 for name, run in runs.items()}

    monkeypatch.setattr(timing, "in_turns", in_turns)
    monkeypatch.setattr(timing, "CUDA", CPU)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (8, 0))
    monkeypatch.setattr(rounded_products, "MATRICES", {"out": (64, 32)})
    monkeypatch.setattr(rounded_products, "ROWS", (1, 3))
    with fake_device(monkeypatch):
        rounded_products.main()
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert found == {"out": {rows: {"none": 32.0, "int8": 32.0, "w8a8": 32.0} for rows in ("1", "3")}}
