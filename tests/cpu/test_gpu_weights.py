"""Products with codes, and experts, as a GPU has them: in Triton's interpreter, in fp32, against what codes stand for.

tests/gpu/test_triton_weights.py asks for the bits.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="Triton is built for Linux only")
if os.environ.get("TRITON_INTERPRET") != "1":  # see tests/conftest.py
    pytest.skip("there is a GPU: tests/gpu has the same kernels, compiled", allow_module_level=True)

from triton.runtime.errors import OutOfResources

from headrace.config import Quantization, RoutingSpec
from headrace.kernels import dispatch, formats, quantized
from headrace.kernels import experts as truth_of
from headrace.kernels.backend import Attend
from headrace.kernels.formats import FORMATS, Coded
from headrace.kernels.quantized import Rounded
from headrace.kernels.triton import experts, weights
from headrace.models.decoder import Decoder, TokenBatch
from headrace.models.packing import StoredPacking, pack_all
from headrace.models.shards import Share
from headrace.models.slots import expected
from headrace.models.spec import ExpertsSpec, ModelConfig
from headrace.models.weights import StoredMatrix
from tests.support.coded_weights import coded
from tests.support.small_decoders import EXPERTS, PLAIN, model, weights_of

CPU = torch.device("cpu")
BOUND = 2e-6
"""Of a product, as a share of the sum of absolute terms."""
IN_BLOCKS = {name: form for name, form in FORMATS.items() if form.block and name != "NF4"} | {
    "W4 wide": FORMATS["W4 zeros"].grouped(48, "fp16"),
    "NVFP4": FORMATS["NVFP4"].of_rows(336),
}


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def check(weight: weights.GpuWeight, dense: Tensor, rows: int, bias: Tensor | None = None) -> None:
    x = random(rows, dense.shape[1], seed=rows)
    ours = weights.linear(x, weight, bias)
    added = 0.0 if bias is None else bias.double()
    truth, terms = x.double() @ dense.double().T + added, x.double().abs() @ dense.double().abs().T + 1.0
    assert ours.shape == truth.shape and ours.dtype == x.dtype
    assert ((ours - truth).abs() <= BOUND * terms).all()


def test_numbers_of_no_unit_are_widened() -> None:
    assert weights.obstacle([coded(FORMATS["NF4"], 64, 2)]) == "NF4"
    with pytest.raises(ValueError, match="a GPU has no product of NF4"):
        weights.GpuQuantized(coded(FORMATS["NF4"], 64, 2), CPU)


@pytest.mark.parametrize("rows", [1, 17])
@pytest.mark.parametrize("name", IN_BLOCKS)
def test_codes_in_blocks(name: str, rows: int) -> None:
    form = IN_BLOCKS[name]
    given = coded(form, 70, 768 // form.block if rows == 1 else 1)
    check(weights.GpuQuantized(given, CPU), given.dequantised(), rows, random(70))


@pytest.mark.parametrize(("scheme", "inputs"), [("int8", 64), ("int8", 130), ("int4", 128), ("int4", 192)])
def test_weights_that_are_rounded(scheme: Quantization, inputs: int) -> None:
    given = Rounded(random(65, inputs), scheme)
    check(weights.GpuQuantized(given, CPU), given.dequantised(), 3)


def test_scales_for_whole_tiles() -> None:
    """Behind the inputs lie codes and scales that are zero, up to where the last tile ends."""
    weight = weights.GpuQuantized(Rounded(random(65, 192), "int4"), CPU)
    assert weight.codes.shape == (65, 32) and weight.scales.shape == (4, 65)
    assert weight.scales[:3].all() and not weight.scales[3].any()


@pytest.mark.parametrize("few", [0, 64], ids=["by one program", "by several"])
@pytest.mark.parametrize("scheme", ["int8", "int4"])
def test_inputs_in_segments(scheme: Quantization, few: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weights, "FEW", few)
    monkeypatch.setattr(weights, "LEAST_SEGMENT", 128)
    given = Rounded(random(70, 448), scheme)
    weight = weights.GpuQuantized(given, CPU)
    assert weight.segments == 3
    check(weight, given.dequantised(), 3, random(70))


def test_segments_go_by_the_weight_alone() -> None:
    shapes = [(4096, 4096), (28672, 4096), (4096, 14336), (1024, 1024), (128256, 4096)]
    assert [weights.segments_of(*shape) for shape in shapes] == [8, 1, 8, 2, 1]


LLAMA_8B = model(heads=32, kv_heads=8, head_dim=128, hidden=4096, inner=14336)
QWEN_MOE = model(
    heads=32, kv_heads=4, head_dim=128, hidden=2048,
    experts=ExpertsSpec(count=2, chosen=1, inner=768, normalised=True, layers=(True, True)),
)  # fmt: skip
PYTHIA = model(heads=32, kv_heads=32, head_dim=80, hidden=2560, inner=10240, **PLAIN)


@pytest.mark.parametrize(
    ("config", "otherwise"),
    [(LLAMA_8B, {"qkv", "up"}), (QWEN_MOE, set()), (PYTHIA, {"up"})],
    ids=["Llama-3-8B", "Qwen3-30B-A3B", "Pythia-2.8B"],
)
def test_a_share_has_the_segments_of_the_whole(
    config: ModelConfig, otherwise: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of models of real sizes, on every rank that there may be. Numbers are nowhere. otherwise: by themselves some
    shares would have other segments."""
    monkeypatch.setattr(dispatch, "on_gpu", lambda x: True)
    monkeypatch.setattr(formats, "_finite", lambda scales: True)
    monkeypatch.setattr(quantized, "_check", lambda weight, scheme: None)
    meta, others = torch.device("meta"), set[str]()
    columns = {name: slot.columns for name, slot in expected(config).items() if name.startswith("layers.0.")}
    for share in [Share(config, rank, size) for size in (2, 4, 8) for rank in range(size)]:
        rows = {name: share.rows(name) for name in columns}
        held = {name: share.outputs[name] if own is None else sum(map(len, own)) for name, own in rows.items()}
        given = {name: torch.empty(held[name], width, device=meta) for name, width in columns.items() if width}
        for name, weight in pack_all(given, "int8", True, None, meta, outputs=share.outputs).items():
            if isinstance(weight, weights.GpuQuantized):
                assert weight.segments == weights.segments_of(share.outputs[name], weight.shape[1])
                others |= {name} if weight.segments != weights.segments_of(*weight.shape) else set()
    assert {name.split(".")[2] for name in others} == otherwise


@pytest.mark.parametrize("name", ["int8", "Q4_K"])
def test_a_share_of_the_outputs_has_their_bits(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of a rank are multiplied as among all: in three segments, where by themselves they would be in six."""
    monkeypatch.setattr(weights, "LEAST_SEGMENT", 64)
    monkeypatch.setattr(weights, "PROGRAMS", 6)
    given: Coded = Rounded(random(128, 512), "int8")
    if name != "int8":
        given = coded(IN_BLOCKS[name], 128, 512 // IN_BLOCKS[name].block)
    mine = slice(64, 128)
    subs, minima, smalls = (x if x is None else x[mine] for x in (given.subs, given.minima, given.smalls))
    part = Coded(given.format, given.codes[mine], given.scales[mine], subs, minima, smalls)
    share = weights.GpuQuantized(part, CPU, 128)
    assert (share.segments, weights.GpuQuantized(part, CPU).segments) == (3, 6)
    x = random(3, 512)
    assert torch.equal(weights.linear(x, share), weights.linear(x, weights.GpuQuantized(given, CPU))[:, mine])


def test_tiles_of_other_bits_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    _, small, medium, large, largest = weights.TILES

    def run(tile: weights.Tile) -> Tensor:
        if tile == largest:
            raise OutOfResources(300_000, 232_448, "shared memory")
        return torch.full((2,), 1.0 if tile == medium else 0.0)

    agreed = weights.alike(run)
    assert agreed == (weights.EXACT, small, large)
    monkeypatch.setattr(weights, "agreeing", lambda device, plain: agreed)
    taken = [weights.tile_for(rows, torch.bfloat16, CPU, plain=False) for rows in (1, 16, 17, 40, 90, 2000)]
    assert taken == [weights.EXACT, weights.EXACT, small, small, large, large]


def test_tiles_by_the_number_of_rows() -> None:
    taken = [weights.tile_for(rows, torch.bfloat16, CPU, plain=False).rows for rows in (1, 16, 17, 33, 65, 300, 512)]
    assert taken == [16, 16, 32, 64, 128, 128, 256]
    assert weights.tile_for(2000, torch.bfloat16, CPU, plain=False, segments=2).rows == 128  # two sums are under way
    assert weights.tile_for(2000, torch.float32, CPU, plain=False) == weights.NUMBERS


def test_inputs_in_an_order_of_their_own() -> None:
    order = torch.randperm(256, generator=torch.Generator().manual_seed(1)).int()
    given = coded(FORMATS["W4"], 16, 2, order=order)
    check(weights.GpuQuantized(given, CPU), given.dequantised(), 2)


def test_outputs_in_several_formats() -> None:
    parts: list[Tensor | Coded] = [coded(FORMATS["Q4_K"], 24, 1), coded(FORMATS["Q6_K"], 40, 1), random(9, 256)]
    weight = weights.pack_parts(parts, torch.float32, CPU)
    assert isinstance(weight, weights.GpuParts) and weight.shape == (73, 256)
    dense = torch.cat([part.dequantised() if isinstance(part, Coded) else part for part in parts])
    check(weight, dense, 2, random(73))
    alike = weights.pack_parts([coded(FORMATS["Q8_0"], 8, 2, seed=seed) for seed in (1, 2)], torch.float32, CPU)
    assert isinstance(alike, weights.GpuQuantized) and alike.shape == (16, 64)


def test_no_rows_and_wide_ones() -> None:
    weight = weights.GpuQuantized(Rounded(random(65, 64), "int8"), CPU)
    assert weights.linear(random(0, 64), weight).shape == (0, 65)
    apart = random(3, 2, 64)[:, 1]
    assert torch.equal(weights.linear(apart, weight), weights.linear(apart.contiguous(), weight))
    assert weights.linear(apart.half(), weight, wide=True).dtype == torch.float32


@pytest.mark.parametrize("counted", [0, 4096], ids=["sorted", "counted"])
@pytest.mark.parametrize("normalised", [True, False])
def test_routes(normalised: bool, counted: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(experts, "COUNTED", counted)
    logits = random(30, 11)
    logits[:, 7] = logits[:, 2]  # of equal ones the first
    ours, truth = (each.route(logits, 3, normalised) for each in (experts, truth_of))
    assert torch.equal(ours.expert, truth.expert) and (ours.share - truth.share).abs().max() <= 1e-6
    assert torch.equal(ours.order, truth.order.int()) and torch.equal(ours.place, truth.place)
    assert ours.begin.tolist() == truth.begin


@pytest.mark.parametrize("normalised", [True, False])
@pytest.mark.parametrize(
    "routing",
    [
        RoutingSpec("sigmoid", corrected=True, scale=1.5),
        RoutingSpec("sigmoid", corrected=True, groups=3, met_groups=2, summed=2, scale=2.5),
        RoutingSpec(groups=3, met_groups=1, scale=16.0),
    ],
    ids=["sigmoid", "v3", "v2"],
)
def test_routes_by_other_scores(routing: RoutingSpec, normalised: bool) -> None:
    """Groups of four, of which the second and the third are equally good."""
    logits, correction = random(30, 12), random(12, seed=5) * 0.3
    logits[:, 8:], correction[8:] = logits[:, 4:8], correction[4:8]
    given = correction if routing.corrected else None
    ours, truth = (each.route(logits, 3, normalised, routing, given) for each in (experts, truth_of))
    assert torch.equal(ours.expert, truth.expert)
    assert (ours.share - truth.share).abs().max() <= 1e-6 * routing.scale
    with pytest.raises(ValueError, match="13 of 12 experts"):
        experts.route(logits, 13, normalised, routing, given)


@pytest.mark.filterwarnings("ignore:All-NaN slice")
def test_a_row_that_is_no_number_stays_for_itself() -> None:
    logits = random(3, 5)
    logits[1, 2] = float("nan")
    routes, before = experts.route(logits, 2, True), experts.route(logits[[0, 2]], 2, True)
    assert routes.share[1].isnan().all() and routes.expert.max() < 5
    assert torch.equal(routes.share[[0, 2]], before.share) and torch.equal(routes.expert[[0, 2]], before.expert)
    with pytest.raises(ValueError, match="6 of 5 experts"):
        experts.route(logits, 6, True)


@pytest.mark.parametrize("form", ["numbers", "int8", "Q8_0"])
def test_a_mixture(form: str) -> None:
    """Some experts have more rows than one tile, some none."""
    count, chosen, hidden, inner, rows = 4, 2, 64, 32, 21
    x, logits = random(rows, hidden), random(rows, count)
    logits[:, 3] -= 100.0
    logits[:, 1] += 3.0
    shapes = {"up": (2 * inner, hidden), "down": (hidden, inner)}
    dense, given = {}, {}
    for seed, (part, (outputs, inputs)) in enumerate(shapes.items()):
        seeds = range(10 * seed, 10 * seed + count)
        codes: list[Tensor | Coded] = [random(outputs, inputs, seed=each) for each in seeds]
        if form == "int8":
            codes = [Rounded(random(outputs, inputs, seed=each), "int8") for each in seeds]
        elif form == "Q8_0":
            codes = [coded(FORMATS[form], outputs, inputs // 32, seed=each) for each in seeds]
        dense[part] = [each.dequantised() if isinstance(each, Coded) else each for each in codes]
        given[part] = [weights.pack_parts([each], torch.float32, CPU) for each in codes]
    biases = {part: [random(outputs, seed=e) for e in range(count)] for part, (outputs, _) in shapes.items()}
    ours = truth_of.mixture(given["up"], biases["up"], given["down"], biases["down"], "silu", chosen, True)(x, logits)
    with dispatch.force("torch"):
        routes = truth_of.route(logits, chosen, True)
        middle = truth_of.gated_linear(x[routes.order // chosen], dense["up"], routes.begin, "silu", biases["up"])
        truth = truth_of.combine(truth_of.linear(middle, dense["down"], routes.begin, biases=biases["down"]), routes)
    assert (ours - truth).abs().max() <= 3e-6 * truth.abs().max()


def test_experts_of_several_formats_are_refused() -> None:
    parts = [weights.GpuQuantized(coded(FORMATS[name], 16, 1), CPU) for name in ("Q4_K", "Q6_K")]
    with pytest.raises(ValueError, match="differ in their formats"):
        experts.GpuExperts(parts, None)
    with pytest.raises(ValueError, match="differ in their formats"):
        experts.GpuExperts([weights.GpuParts(parts), weights.GpuParts(parts)], None)


def test_what_has_no_product_is_widened_and_told(caplog: pytest.LogCaptureFixture) -> None:
    odd = coded(FORMATS["W4"].grouped(24, "fp16"), 16, 4)
    with pytest.raises(ValueError, match="no product of W4 in groups of 24 inputs"):
        weights.GpuQuantized(odd, CPU)
    mixed = [coded(FORMATS["Q4_K"], 16, 1), coded(FORMATS["Q6_K"], 16, 1)]
    turned = coded(FORMATS["W4"], 16, 2, order=torch.arange(256, dtype=torch.int32).flip(0))
    parts: dict[str, list[Tensor | Coded]] = {
        "layers.0.out.weight": [odd], "layers.0.qkv.weight": [*mixed], "layers.0.down.weight": [turned],
        "layers.0.experts.0.up.weight": [*mixed], "layers.0.experts.0.down.weight": [turned],
    }  # fmt: skip
    stored = {name: StoredMatrix((16, 256), partial(list, each), coded=True) for name, each in parts.items()}
    matrices = StoredPacking(torch.bfloat16, torch.device("meta"), False, "none", None).all_of(stored, None)
    forms = [type(each).__name__ for each in matrices.values()]
    assert forms == ["Tensor", "GpuParts", "GpuQuantized", "Tensor", "Tensor"]
    for reason in ("W4 in groups of 24 inputs", "experts in several formats", "experts whose inputs are in an order"):
        assert any(text.startswith(reason) and "widened to" in text for text in caplog.messages)


class Passed(Attend):
    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor, rows: Tensor | None = None) -> Tensor:
        return q


@pytest.mark.parametrize(
    ("quantization", "routing"),
    [("int8", RoutingSpec()), ("int4", RoutingSpec("sigmoid", corrected=True, groups=2, summed=2, scale=2.5))],
)
def test_a_model_with_experts(
    quantization: Quantization, routing: RoutingSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As it is loaded for a GPU, against torch's products."""
    config = model(experts=replace(EXPERTS, routing=routing))
    batch = TokenBatch(torch.tensor([5, 90]), torch.tensor([0, 1]))

    def decoder() -> Decoder:
        return Decoder(config, {name: weight.float() for name, weight in weights_of(config).items()}, quantization)

    def logits(decoder: Decoder) -> Tensor:
        return decoder.logits(decoder.forward(batch, Passed()))

    with dispatch.force("torch"):
        truth = logits(decoder())
        monkeypatch.setattr(dispatch, "on_gpu", lambda x: True)
        ours = decoder()
        numbers = {name.rpartition("layers.")[2][2:] for name, w in ours.matrices.items() if isinstance(w, Tensor)}
        assert numbers == {"router.weight"}
        assert (logits(ours) - truth).abs().max() <= 1e-5 * truth.abs().max()


@pytest.mark.matrix
def test_all_of_it_compiles_for_gpus(tmp_path: Path) -> None:
    """Which need not be there: products are tensor cores' own instructions."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path)
    command = [sys.executable, "-m", "tests.support.compiled_weights"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert len(found) == 27 and all(found.values()), found
