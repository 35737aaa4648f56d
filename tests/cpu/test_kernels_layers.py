"""Layers in two calls beside attention, or all in one with it: the bits of single operations, for any kind of layer.

T: rows; Hq, Hkv: query and KV heads; D: head size; N: elements of a head that are rotated.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from headrace.config import Quantization
from headrace.kernels import cpu, dispatch
from headrace.kernels.block import Blocks
from headrace.kernels.cpu_step import Pools, StepOver
from headrace.kernels.quantized import Parts
from headrace.kernels.records import Pool
from headrace.models.decoder import Decoder
from headrace.models.layers import Layer, OneByOne
from headrace.offload.weights.layers import layers_of
from tests.support.layer_variants import ROWS, VARIANTS, NoAttention, attend, both
from tests.support.small_decoders import (
    Attention,
    AttentionOver,
    model,
    weights_of,
)

pytestmark = [pytest.mark.skipif(not cpu.available(), reason=str(cpu.unavailable_reason()))]


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_bits_of_single_operations(variant: str, threads: None) -> None:
    same_bits(*both(variant))


def test_layers_without_the_corrections_of_their_routing_are_refused() -> None:
    config = model(**VARIANTS["experts by sigmoids"])
    weights = {name: weight for name, weight in weights_of(config).items() if not name.endswith("correction_bias")}
    with pytest.raises(ValueError, match="corrections of 6 experts do not fit"):
        Decoder(config, weights)


@pytest.mark.parametrize("quantization", ["int8", "int4", "w8a8"])
@pytest.mark.parametrize("variant", ["llama", "opt", "experts", "gpt-oss", "ministral3", "olmo2", "arcee", "latents"])
def test_the_bits_of_single_operations_on_rounded_weights(variant: str, quantization: Quantization) -> None:
    same_bits(*both(variant, quantization))


def same_bits(fast: Decoder, slow: Decoder, rotary: int) -> None:
    assert isinstance(fast.layers, Blocks) and isinstance(slow.layers, OneByOne)
    for rows in ROWS:
        g = torch.Generator().manual_seed(rows)
        x = torch.randn(rows, fast.config.hidden_size, generator=g).bfloat16()
        cos_sin = torch.randn(rows, rotary, generator=g) if rotary else None
        want = slow.layers(x.clone(), cos_sin, attend)
        assert want.isfinite().all() and want.float().std() > 0.1
        assert torch.equal(fast.layers(x.clone(), cos_sin, attend), want), rows


@pytest.mark.parametrize(
    ("variant", "quantization"),
    [*((variant, "none") for variant in VARIANTS), ("qwen2", "int8"), ("qwen3", "int4"), ("partial rotary", "int8")],
)
def test_keys_and_values_from_activations(variant: str, quantization: Quantization, threads: None) -> None:
    """The bits that attention gets, also where queries do not fill blocks of the packed weight (partial rotary: 6 heads
    of 20)."""
    fast, slow, rotary = both(variant, quantization)
    assert isinstance(fast.layers, Blocks)
    assert (fast.layers.without_queries is None) == (variant == "partial rotary")
    for rows in ROWS:
        g = torch.Generator().manual_seed(rows)
        cos_sin = torch.randn(rows, rotary, generator=g) if rotary else None
        into: list[Tensor] = []
        heads: list[tuple[Tensor, Tensor]] = []

        class Keep(NoAttention):
            def __call__(
                self, layer: int, q: Tensor, k: Tensor, v: Tensor, rows: Any = None, heads: Any = heads
            ) -> Tensor:
                heads.append((k.clone(), v.clone()))
                return attend(layer, q, k, v)

        def watch(layer: int, x: Tensor, into: Any = into) -> None:
            into.append(x.clone())

        x, Keep.heads = torch.randn(rows, fast.config.hidden_size, generator=g).bfloat16(), heads
        fast.layers(x, cos_sin, Keep(), None, watch)
        for layers in (fast.layers, slow.layers):
            for layer, (k, v) in enumerate(heads):
                got = layers.project(layer, into[layer], cos_sin)
                assert torch.equal(got[0], k) and torch.equal(got[1], v), (rows, layer)


@pytest.mark.parametrize("some", [None, [1], [0, 2], []])
@pytest.mark.parametrize("windows", [(None, None), (7, None)])
@pytest.mark.parametrize(
    "variant",
    [
        "llama",
        "qwen3",
        "opt350",
        "falcon7",
        "granite",
        "gemma3",
        "smollm3",
        "dense and experts",
        "olmoe",
        "ministral3",
        "olmo2",
        "hunyuan",
        "latents, queries of a low rank",
        "latents and experts",
    ],
)
def test_all_layers_in_one_call(
    isa: str, variant: str, windows: tuple[int | None, ...], some: list[int] | None, threads: None
) -> None:
    fast, _, rotary = both(variant)
    g = torch.Generator().manual_seed(4)
    x = torch.randn(3, fast.config.hidden_size, generator=g).bfloat16()
    cos_sin = torch.randn(3, rotary, generator=g) if rotary else None
    rows = None if some is None else torch.tensor(some, dtype=torch.int64)
    apart, at_once = Attention(fast.config, windows), AttentionOver(fast.config, windows)
    want = fast.layers(x.clone(), cos_sin, apart, rows)
    assert torch.equal(fast.layers(x.clone(), cos_sin, at_once, rows), want)
    assert apart.calls == 2 and at_once.calls == (0 if rows is None else 1)
    for kind in (0, 1):
        for ours, theirs in zip(at_once.pools[kind], apart.pools[kind], strict=True):
            assert torch.equal(ours, theirs)
    watched: list[Tensor] = []
    again = AttentionOver(fast.config, windows)
    got = fast.layers(x.clone(), cos_sin, again, rows, lambda layer, x: watched.append(x.clone()))
    assert torch.equal(got, want) and again.calls == 2 and torch.equal(watched[0], x)


def test_pools_that_do_not_fit() -> None:
    config = model()
    attention = Attention(config, (None, None))
    pools = [Pool(k, v) for k, v in zip(*attention.pools, strict=True)]
    with pytest.raises(ValueError, match="k_pool must be"):
        Pools([pools[0], replace(pools[1], k=pools[1].k[:4])])
    with pytest.raises(ValueError, match="v_pool must be"):
        Pools([pools[0], replace(pools[1], v=pools[1].v.float())])
    with pytest.raises(ValueError, match="2 layers need pools"):
        attention.step.over(Pools(pools[:1]), (None, None))
    with pytest.raises(ValueError, match="need pools of"):
        attention.step.over(Pools([Pool(x.k[:4], x.v[:4]) for x in pools]), (None, None))
    over = attention.step.over(Pools(pools), (None, None))
    fast, _, _ = both("qwen3")
    with pytest.raises(ValueError, match="the step is of"):  # heads of another size
        fast.layers(torch.randn(3, 128).bfloat16(), torch.randn(3, 64), _With(over))
    fast, _, _ = both("llama")
    with pytest.raises(ValueError, match="must be"):  # a row more than the step has
        fast.layers(torch.randn(4, 128).bfloat16(), torch.randn(4, 32), _With(over))


class _With(NoAttention):
    def __init__(self, over: StepOver) -> None:
        self.prepared = over


def test_no_rows() -> None:
    fast, _, _ = both("llama")
    assert fast.layers(torch.empty(0, 128).bfloat16(), torch.empty(0, 32), attend).shape == (0, 128)


def test_attended_rows_may_lie_anyhow() -> None:
    fast, slow, _ = both("opt")
    x = torch.randn(5, 128).bfloat16()

    class Turned(NoAttention):
        def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor, rows: Tensor | None = None) -> Tensor:
            return attend(layer, q, k, v).transpose(0, 1).contiguous().transpose(0, 1)

    assert torch.equal(fast.layers(x.clone(), None, Turned()), slow.layers(x.clone(), None, attend))


@pytest.mark.parametrize("variant", ["llama", "odd width", "experts", "experts of an odd width", "latents"])
def test_every_instruction_set(isa: str, variant: str) -> None:
    same_bits(*both(variant))


@pytest.mark.skipif(not cpu.has_pairs(), reason="this processor has no AVX-512 BF16")
def test_pairs_are_refused_where_there_are_none() -> None:
    fast, _, _ = both("llama")
    x, before = torch.randn(2, 128).bfloat16(), cpu.isa()
    cpu.use_isa("portable")
    try:
        with pytest.raises(ValueError, match="packed for another instruction set"):
            fast.layers(x, None, attend)
    finally:
        cpu.use_isa(before)


def test_float32_goes_op_by_op() -> None:
    config = model()
    weights = {name: weight.float() for name, weight in weights_of(config).items()}
    assert isinstance(Decoder(config, weights).layers, OneByOne)


def test_forced_to_torch_goes_op_by_op() -> None:
    with dispatch.force("torch"):
        assert str(dispatch.layer_choice()) == "ops: forced"
        assert isinstance(Decoder(model(), weights_of(model())).layers, OneByOne)


class OneHead(NoAttention):
    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor, rows: Tensor | None = None) -> Tensor:
        return q[:, :1]


def test_refusals() -> None:
    fast, _, _ = both("llama")
    x, cos_sin = torch.randn(2, 128).bfloat16(), torch.randn(2, 32)
    for bad in (x.float(), x[:, :64], torch.randn(2, 256).bfloat16()[:, ::2]):
        with pytest.raises(ValueError, match="x must be"):
            fast.layers(bad, cos_sin, attend)
    for angles in (cos_sin[:1], cos_sin.double()):
        with pytest.raises(ValueError, match="cos_sin must be"):
            fast.layers(x, angles, attend)
    with pytest.raises(ValueError, match="rows of 31 elements, the layers rotate by the first 32"):
        fast.layers(x, torch.randn(2, 31), attend)
    with pytest.raises(ValueError, match="cannot rotate 5 of 32"):
        Decoder(model(rotary=5), weights_of(model(rotary=5)))
    with pytest.raises(ValueError, match="attended must be"):
        fast.layers(x, cos_sin, OneHead())


def test_latents_by_a_matrix_in_parts(threads: None) -> None:
    """As where a file has its outputs in several formats: each part goes to its place beside the queries."""
    fast, slow, rotary = both("latents")
    assert isinstance(fast.layers, Blocks)
    weights = weights_of(fast.config)

    def in_parts(layer: Layer) -> Layer:
        parts = weights[f"layers.{layer.index}.latent.weight"].split(40)
        return layer.on(layer.matrices | {"latent.weight": Parts([cpu.Packed(part) for part in parts])})

    fast.layers = Blocks(fast.layers.shape, [in_parts(layer) for layer in layers_of(slow)])
    same_bits(fast, slow, rotary)


@pytest.mark.parametrize(
    ("variant", "name"),
    [
        *(("llama", name) for name in ("qkv.weight", "down.weight", "attention_norm.weight")),
        *(("latents", name) for name in ("latent.weight", "queries.weight", "latent_norm.weight")),
    ],
)
def test_weights_of_another_shape_are_refused(variant: str, name: str) -> None:
    config = model(**VARIANTS[variant])
    weights = weights_of(config)
    weights[f"layers.1.{name}"] = weights[f"layers.1.{name}"][:-2].contiguous()
    with pytest.raises(ValueError, match=name):
        Decoder(config, weights)
