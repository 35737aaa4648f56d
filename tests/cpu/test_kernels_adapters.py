"""What adapters add, in layers that are computed as a whole: the bits of single operations, for any kind of layer."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from headrace.config import Quantization
from headrace.kernels import cpu
from headrace.kernels.adapted_rows import AdaptedRows, rows_at
from headrace.kernels.block import Blocks
from headrace.kernels.quantized import Parts
from headrace.models.decoder import Decoder, TokenBatch
from headrace.models.layers import Layer, OneByOne
from headrace.models.spec import RopeSpec
from tests.support.adapters import drawn_adapters
from tests.support.layer_variants import VARIANTS, NoAttention, attend, both
from tests.support.small_decoders import BIASED, EXPERTS, Attention, AttentionOver, model, weights_of

pytestmark = [pytest.mark.skipif(not cpu.available(), reason=str(cpu.unavailable_reason()))]

ROWS = (1, 3, 70, 1100)
MIXED = [1, -1, 0]
ROPE = RopeSpec("default", (("rope_theta", 1e4), ("rope_type", "default")), 64)


def numbers_of(rows: int, kind: str) -> Tensor:
    """Adapters of so many rows."""
    if kind == "mixed":
        return torch.randint(-1, 3, (rows,), generator=torch.Generator().manual_seed(rows))
    if kind == "late":  # none in the first tile of rows
        return torch.where(torch.arange(rows) < rows - rows // 20 - 1, -1, 1)
    if kind == "falling":
        return torch.arange(rows).flip(0) % 3
    return torch.full((rows,), dict(first=0, second=1)[kind])


def adapted(*decoders: Decoder) -> None:
    for decoder in decoders:
        decoder.adapt(drawn_adapters(decoder))


def same_bits(fast: Decoder, slow: Decoder, rotary: int, kinds: tuple[str, ...], rows: tuple[int, ...] = ROWS) -> None:
    assert isinstance(fast.layers, Blocks) and isinstance(slow.layers, OneByOne)
    for count in rows:
        g = torch.Generator().manual_seed(count)
        x = torch.randn(count, fast.config.hidden_size, generator=g).bfloat16()
        cos_sin = torch.randn(count, rotary, generator=g) if rotary else None
        without = fast.layers(x.clone(), cos_sin, attend)
        for kind in kinds:
            changed = AdaptedRows(numbers_of(count, kind))
            want = slow.layers.adapted_by(changed)(x.clone(), cos_sin, attend)
            got = fast.layers.adapted_by(changed)(x.clone(), cos_sin, attend)
            assert want.isfinite().all() and torch.equal(got, want), (count, kind)
            assert torch.equal((got == without).all(dim=1), changed.numbers < 0)


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_bits_of_single_operations(variant: str, threads: None) -> None:
    fast, slow, rotary = both(variant)
    adapted(fast, slow)
    same_bits(fast, slow, rotary, ("mixed", "first"))


@pytest.mark.parametrize("kind", ["late", "second"])
def test_rows_of_a_few_adapters(kind: str, threads: None) -> None:
    """In one tile of rows and not in another; all of them of one adapter that leaves a matrix alone."""
    fast, slow, rotary = both("llama")
    adapted(fast, slow)
    same_bits(fast, slow, rotary, (kind,))


def test_all_rows_of_some_adapter(threads: None) -> None:
    """None is without one, but they come in another order than their adapters."""
    fast, slow, rotary = both("llama")
    adapted(fast, slow)
    same_bits(fast, slow, rotary, ("falling",))


@pytest.mark.parametrize("quantization", ["none", "int8", "int4", "w8a8"])
def test_gates_with_biases(quantization: Quantization, threads: None) -> None:
    """Outputs that lie in turn, and with them their biases."""
    config = model(**BIASED, activation="gelu_tanh", inner=256)
    fast = Decoder(config, weights_of(config), quantization)
    slow = Decoder(config, weights_of(config), quantization)
    slow.layers = OneByOne([layer for layer in fast.layers.layers if isinstance(layer, Layer)])
    up = fast.matrices["layers.0.up.weight"]
    assert not isinstance(up, Tensor) and getattr(up, "gated", False)
    adapted(fast, slow)
    same_bits(fast, slow, 32, ("mixed",))


@pytest.mark.parametrize("variant", ["llama", "experts", "latents, queries of a low rank"])
def test_on_every_instruction_set(isa: str, variant: str) -> None:
    fast, slow, rotary = both(variant)
    adapted(fast, slow)
    same_bits(fast, slow, rotary, ("mixed",), (1, 70))


def test_beside_matrices_in_parts(threads: None) -> None:
    fast, slow, rotary = both("latents")
    assert isinstance(fast.layers, Blocks)
    weights = weights_of(fast.config)

    def in_parts(layer: Layer) -> Layer:
        parts = {
            name: Parts([cpu.Packed(part) for part in weights[f"layers.{layer.index}.{name}"].split(40)])
            for name in ("latent.weight", "up.weight")
        }
        return layer.on(layer.matrices | parts)

    layers = [in_parts(layer) for layer in fast.layers.layers if isinstance(layer, Layer)]
    fast.layers, slow.layers = Blocks(fast.layers.shape, layers), OneByOne(layers)
    adapted(fast, slow)
    same_bits(fast, slow, rotary, ("mixed",), (3, 70))


@pytest.mark.parametrize("some", [None, [1], [0, 2], []])
@pytest.mark.parametrize("variant", ["llama", "gemma3", "latents and experts"])
def test_all_layers_in_one_call(variant: str, some: list[int] | None, threads: None) -> None:
    fast, slow, rotary = both(variant)
    adapted(fast, slow)
    g = torch.Generator().manual_seed(4)
    x = torch.randn(3, fast.config.hidden_size, generator=g).bfloat16()
    cos_sin = torch.randn(3, rotary, generator=g) if rotary else None
    rows, changed = None if some is None else torch.tensor(some, dtype=torch.int64), AdaptedRows(torch.tensor(MIXED))
    apart, at_once = (kind(fast.config, (None, None)) for kind in (Attention, AttentionOver))
    want = slow.layers.adapted_by(changed)(x.clone(), cos_sin, apart, rows)
    assert torch.equal(fast.layers.adapted_by(changed)(x.clone(), cos_sin, at_once, rows), want)
    for ours, theirs in zip(at_once.pools[0] + at_once.pools[1], apart.pools[0] + apart.pools[1], strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("facts", [{}, dict(experts=replace(EXPERTS, shared=96)), dict(block="sandwich")])
def test_from_tokens_to_logits_in_one_call(facts: dict[str, Any], threads: None) -> None:
    """Also in the steps behind, in which every row goes on by one position."""
    config = model(positions="rope", rope=ROPE, **facts)
    decoder = Decoder(config, weights_of(config))
    adapted(decoder)
    apart, plain, at_once = (kind(config, (None, None)) for kind in (Attention, Attention, AttentionOver))
    tokens, positions, numbers = torch.tensor([5, 95, 0]), torch.tensor([70, 71, 5]), torch.tensor([-1, 1, 0])
    step = decoder.prepare(positions, at_once, numbers)
    for further in range(3):
        (step.run_next if further else step.run)(tokens.tolist())
        apart.go_on(further)
        plain.go_on(further)
        want = decoder.logits(decoder.forward(TokenBatch(tokens, positions + further, None, numbers), apart))
        assert torch.equal(step.logits, want)
        without = decoder.logits(decoder.forward(TokenBatch(tokens, positions + further), plain))
        assert (want == without).all(dim=1).tolist() == [True, False, False]


class Kept(NoAttention):
    """Keeps what it is given of each layer."""

    def __init__(self) -> None:
        self.heads: list[tuple[Tensor, Tensor]] = []

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor, rows: Tensor | None = None) -> Tensor:
        self.heads.append((k.clone(), v.clone()))
        return super().__call__(layer, q, k, v, rows)


@pytest.mark.parametrize("variant", ["llama", "qwen2", "gemma3", "partial rotary", "latents"])
def test_keys_and_values_from_activations(variant: str, threads: None) -> None:
    """Also where queries do not fill blocks of the packed weight (partial rotary)."""
    fast, slow, rotary = both(variant)
    adapted(fast, slow)
    g = torch.Generator().manual_seed(1)
    x = torch.randn(70, fast.config.hidden_size, generator=g).bfloat16()
    cos_sin = torch.randn(70, rotary, generator=g) if rotary else None
    changed, kept, entered = AdaptedRows(numbers_of(70, "mixed")), Kept(), list[Tensor]()
    fast.layers.adapted_by(changed)(x, cos_sin, kept, None, lambda layer, x: entered.append(x.clone()))
    for layer, heads in enumerate(kept.heads):
        for decoder in (fast, slow):
            got = decoder.layers.adapted_by(changed).project(layer, entered[layer], cos_sin)
            plain = decoder.layers.project(layer, entered[layer], cos_sin)
            assert all(map(torch.equal, got, heads)) and not torch.equal(got[1], plain[1])


def test_which_positions_have_an_adapter() -> None:
    """Of one sequence, and of each row's."""
    positions = torch.tensor([0, 63, 64, 130])
    assert rows_at(positions, -1, 0) is None and rows_at(positions, 2, 131) is None
    one, each = rows_at(positions, 2, 64), rows_at(positions, torch.tensor([1, 0, -1, 1]), torch.tensor([1, 5, 0, 130]))
    assert one is not None and one.numbers.tolist() == [-1, -1, 2, 2]
    assert each is not None and each.numbers.tolist() == [-1, 0, -1, 1]


def test_refusals() -> None:
    fast, _, _ = both("llama")
    x, cos_sin = torch.randn(2, 128).bfloat16(), torch.randn(2, 32)
    adapted(fast)
    for numbers in ([0, 3], [-2, 0]):
        with pytest.raises(ValueError, match=r"row [01] has adapter (3|-2), of 3"):
            fast.layers.adapted_by(AdaptedRows(torch.tensor(numbers)))(x.clone(), cos_sin, attend)
    for bad in (torch.tensor([0]), torch.tensor([0, 1], dtype=torch.int32)):
        with pytest.raises(ValueError, match="adapters must be"):
            fast.layers.adapted_by(AdaptedRows(bad))(x.clone(), cos_sin, attend)
    whole, narrow = (drawn_adapters(fast).pairs["layers.0.qkv"], drawn_adapters(fast, 64).pairs["layers.0.qkv"])
    assert isinstance(fast.layers, Blocks)
    layer = fast.layers.layers[0]
    assert isinstance(layer, Layer)
    layer.pairs = {"qkv": [whole[0], narrow[1]]}
    with pytest.raises(ValueError, match="matrices of adapter 1 do not fit"):
        Blocks(fast.layers.shape, [layer])
