"""Layers in two calls beside attention, or all in one with it: the bits of single operations, for any kind of layer.

T: rows; Hq, Hkv: query and KV heads; D: head size; N: elements of a head that are rotated.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from headrace.config import AttentionSpec, Quantization
from headrace.kernels import cpu, table
from headrace.kernels.block import Blocks
from headrace.kernels.step import Pools, Step, StepOver
from headrace.models.decoder import Decoder, OneByOne, TokenBatch
from headrace.models.spec import ModelConfig, RopeSpec
from headrace.models.weights import expected

pytestmark = [pytest.mark.skipif(not cpu.available(), reason=str(cpu.unavailable_reason()))]

PLAIN = dict(norm="layer", gated=False, activation="gelu")
BIASED = dict(qkv_bias=True, out_bias=True, mlp_bias=True)
VARIANTS: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": dict(qkv_bias=True),
    "qwen3": dict(qk_norm=True, head_dim=64),
    "opt": PLAIN | BIASED | dict(activation="relu", kv_heads=4, rotary=0),
    "opt350": PLAIN | BIASED | dict(activation="relu", block="post", rotary=0),
    "opt without affine norms": PLAIN | dict(norm_affine=False, rotary=0),
    "rms without weights": dict(norm_affine=False),
    "falcon7": PLAIN | dict(block="parallel", mlp_norm=False, kv_heads=1),
    "falcon40": PLAIN | BIASED | dict(block="parallel", activation="gelu_tanh"),
    "odd width": dict(inner=191),
    "partial rotary": dict(head_dim=20, hidden=72, inner=90, heads=6, rotary=6),
}
ROWS = (1, 3, 64, 300, 1100)


def model(
    *, heads: int = 4, kv_heads: int = 2, head_dim: int = 32, hidden: int = 128, inner: int = 192, **facts: Any
) -> ModelConfig:
    """A model of two layers; a Llama where `facts` do not say otherwise."""
    spec = AttentionSpec(2, heads, kv_heads, head_dim, head_dim**-0.5, (None, None))
    common: dict[str, Any] = dict(
        architecture="", vocab_size=96, hidden_size=hidden, intermediate_size=inner, embed_size=hidden, layers=2,
        max_model_len=64, attention=spec, dtype="bfloat16", positions="alibi", norm="rms", norm_eps=1e-5,
        activation="silu", gated=True,
    )  # fmt: skip
    return ModelConfig(**common | facts)


def weights_of(config: ModelConfig) -> dict[str, Tensor]:
    g = torch.Generator().manual_seed(0)

    def draw(name: str, shape: tuple[int, ...]) -> Tensor:
        noise = torch.randn(shape, generator=g)
        return (1 + 0.3 * noise if "norm" in name else noise / shape[-1] ** (0.5 * (len(shape) > 1))).bfloat16()

    return {name: draw(name, slot.shape(sum(slot.parts))) for name, slot in expected(config).items()}


def both(variant: str, quantization: Quantization = "none") -> tuple[Decoder, Decoder, int]:
    """The model's decoder by blocks and op by op, and how many elements of a head are rotated."""
    facts = dict(VARIANTS[variant])
    rotary = facts.pop("rotary", facts.get("head_dim", 32))
    config = model(**facts)
    fast = Decoder(config, weights_of(config), quantization)
    with table.force("ops"):
        return fast, Decoder(config, weights_of(config), quantization), rotary


def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Not attention, but every element of q, k and v shows in it."""
    group = q.shape[1] // k.shape[1]
    return q - k.repeat_interleave(group, 1) + v.repeat_interleave(group, 1) * (layer + 1)


@pytest.fixture(params=[1, 2])
def threads(request: pytest.FixtureRequest) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_bits_of_single_operations(variant: str, threads: None) -> None:
    same_bits(*both(variant))


@pytest.mark.parametrize("quantization", ["int8", "int4"])
@pytest.mark.parametrize("variant", ["llama", "opt"])
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

        def keep(layer: int, q: Tensor, k: Tensor, v: Tensor, heads: Any = heads) -> Tensor:
            heads.append((k.clone(), v.clone()))
            return attend(layer, q, k, v)

        def watch(layer: int, x: Tensor, into: Any = into) -> None:
            into.append(x.clone())

        x = torch.randn(rows, fast.config.hidden_size, generator=g).bfloat16()
        fast.layers(x, cos_sin, keep, None, watch)
        for layers in (fast.layers, slow.layers):
            for layer, (k, v) in enumerate(heads):
                got = layers.project(layer, into[layer], cos_sin)
                assert torch.equal(got[0], k) and torch.equal(got[1], v), (rows, layer)


SLOTS = 6


class Attention:
    """A Step over pools of its own, as attention.execute has it: three rows at positions 70, 71 and 5."""

    def __init__(self, config: ModelConfig, windows: tuple[int | None, ...], slots: int = SLOTS) -> None:
        spec = self.spec = config.attention
        g = torch.Generator().manual_seed(3)
        sizes = (slots, spec.kv_heads, spec.head_dim, 64), (slots, spec.kv_heads, 64, spec.head_dim)
        self.pools = [[torch.randn(size, generator=g).bfloat16() for _ in windows] for size in sizes]
        self.windows = windows
        self.calls = 0
        self.go_on(0)

    def go_on(self, further: int) -> None:
        """The rows so many positions further."""
        items = torch.tensor([[3, 0, 0, 2], [1, 64, 0, 2], [4, 0, 2, 3]], dtype=torch.int32)
        slots, offsets = torch.tensor([1, 1, 4], dtype=torch.int32), torch.tensor([6, 7, 5], dtype=torch.int32)
        self.place(items, torch.tensor([70, 71, 5]) + further, slots, offsets + further)

    def place(self, items: Tensor, positions: Tensor, slots: Tensor, offsets: Tensor) -> None:
        shape = (len(self.pools[0][0]), self.spec.kv_heads, self.spec.head_dim)
        self.step = Step(
            {None: items, 7: items[1:]}, positions, slots, offsets,
            heads=self.spec.heads, shape=shape, dtype=torch.bfloat16, scale=0.2,
        )  # fmt: skip

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor, rows: Tensor | None = None) -> Tensor:
        self.calls += 1
        out = self.step(self.pools[0][layer], self.pools[1][layer], q, k, v, self.windows[layer])
        return out if rows is None else out[rows]


class AttentionOver(Attention):
    @property
    def over(self) -> StepOver:
        return self.step.over(Pools(*self.pools), self.windows)


@pytest.mark.parametrize("some", [None, [1], [0, 2], []])
@pytest.mark.parametrize("windows", [(None, None), (7, None)])
@pytest.mark.parametrize("variant", ["llama", "qwen3", "opt350", "falcon7"])
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


ROPE = RopeSpec("default", (("rope_theta", 1e4), ("rope_type", "default")), 64)
DYNAMIC = RopeSpec("dynamic", (("factor", 2.0), ("rope_theta", 1e4), ("rope_type", "dynamic")), 64)
WHOLE: dict[str, dict[str, Any]] = {
    "llama": dict(positions="rope", rope=ROPE, vocab_size=130),
    "qwen3": dict(positions="rope", rope=ROPE, qk_norm=True, head_dim=64),
    "falcon7": PLAIN | dict(block="parallel", mlp_norm=False, kv_heads=1, positions="rope", rope=ROPE),
    "no rotation": PLAIN | BIASED | dict(norm_affine=False),
}


def whole(variant: str, quantization: Quantization = "none") -> tuple[Decoder, TokenBatch]:
    config = model(**WHOLE[variant])
    batch = TokenBatch(torch.tensor([5, config.vocab_size - 1, 0]), torch.tensor([70, 71, 5]))
    return Decoder(config, weights_of(config), quantization), batch


@pytest.mark.parametrize(("variant", "quantization"), [*((each, "none") for each in WHOLE), ("llama", "int8")])
def test_from_tokens_to_logits_in_one_call(
    isa: str, variant: str, quantization: Quantization, threads: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoder, batch = whole(variant, quantization)
    apart, at_once = Attention(decoder.config, (None, None)), AttentionOver(decoder.config, (None, None))
    want = decoder.logits(decoder.forward(batch, apart))
    assert want.isfinite().all() and want.std() > 0.1 and want.dtype == torch.float32
    for rows, watch in ((torch.tensor([2]), None), (None, lambda layer, x: None)):
        got = decoder.step(batch, AttentionOver(decoder.config, (None, None)), rows, watch)
        assert torch.equal(got, want if rows is None else want[rows])
    assert torch.equal(decoder.step(batch, Attention(decoder.config, (None, None))), want)
    monkeypatch.setattr(decoder, "forward", None)  # not by this way
    assert torch.equal(decoder.step(batch, at_once), want)
    for ours, theirs in zip(at_once.pools[0] + at_once.pools[1], apart.pools[0] + apart.pools[1], strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("token", [130, -1])
def test_tokens_that_are_in_no_table(token: int) -> None:
    decoder, batch = whole("llama")
    batch.token_ids[1] = token
    with pytest.raises(ValueError, match=f"token of row 1 is {token}, of 130"):
        decoder.step(batch, AttentionOver(decoder.config, (None, None)))


def test_steps_of_another_model() -> None:
    decoder, batch = whole("llama")
    for other, windows in ((whole("qwen3")[0], (None, None)), (decoder, (None,))):
        with pytest.raises(ValueError, match="the step is of"):
            decoder.step(batch, AttentionOver(other.config, windows))
    batch.token_ids = batch.token_ids[:2]
    with pytest.raises(ValueError, match="2 tokens for 3 rows"):
        decoder.step(batch, AttentionOver(decoder.config, (None, None)))


def apart(config: ModelConfig, rows: int) -> AttentionOver:
    """Rows at position 5 of a sequence and a slot each."""
    attention = AttentionOver(config, (None, None), max(rows, SLOTS))
    at, places = torch.full((rows,), 5), torch.arange(rows, dtype=torch.int32)
    items = torch.stack((places, places * 0, places, places + 1), dim=1).contiguous()
    attention.place(items, at, places, at.int())
    return attention


@pytest.mark.parametrize(
    ("quantization", "broken"), [("none", False), ("none", True), ("int8", False), ("int4", False)]
)
@pytest.mark.parametrize("rows", [1, 3, 16, 17, 70])
def test_the_greatest_come_with_the_logits(
    isa: str, rows: int, quantization: Quantization, broken: bool, threads: None
) -> None:
    """Where tokens in other blocks of 64 are as great, and where some are NaN."""
    config = model(positions="rope", rope=ROPE, vocab_size=330)
    weights = weights_of(config)
    head = weights["head.weight"]
    head[70] = head[200] = head[71] = 8 * head[3]
    if broken:
        head[[329, 129, 131]] = torch.nan
    decoder = Decoder(config, weights, quantization)
    attention = apart(config, rows)
    step = decoder.prepare(torch.full((rows,), 5), attention)
    assert step is not None
    got = step.run([(7 * row + 3) % 330 for row in range(rows)])
    values, tokens = cpu.greatest(step.logits)
    assert got.tokens == tokens.tolist()
    if broken:
        assert set(got.tokens) == {129} and all(value != value for value in got.values)
    else:
        assert got.values == values.tolist() and (rows < 16 or 70 in got.tokens) and not {71, 200} & set(got.tokens)


def test_going_on_by_one_gives_the_bits_of_a_new_step(isa: str) -> None:
    decoder, batch = whole("llama")
    ours, theirs = (AttentionOver(decoder.config, (None, None)) for _ in range(2))
    step = decoder.prepare(batch.positions, ours)
    assert step is not None
    for further in range(57):
        tokens = [(further * 11 + row) % 130 for row in range(3)]
        (step.run_next if further else step.run)(tokens)
        if further in (0, 1, 2, 56):
            theirs.go_on(further)
            batch = TokenBatch(torch.tensor(tokens), torch.tensor([70, 71, 5]) + further)
            assert torch.equal(step.logits, decoder.step(batch, theirs))
        theirs.pools = [[each.clone() for each in pools] for pools in ours.pools]
    before = step.logits.clone()
    with pytest.raises(ValueError, match="offset 64"):
        step.run_next(tokens)
    step.run(tokens)
    assert torch.equal(step.logits, before), "a refusal changed something"


def test_models_that_need_more_than_one_call() -> None:
    for facts in (dict(positions="learned"), dict(final_norm=False), dict(positions="rope", rope=DYNAMIC)):
        config = model(**facts)
        decoder = Decoder(config, weights_of(config))
        length = torch.tensor([80, 80, 80])
        batch = TokenBatch(torch.tensor([5, 95, 0]), torch.tensor([0, 1, 2]), length)
        ways = [kind(config, (None, None)) for kind in (Attention, AttentionOver)]
        assert torch.equal(*(decoder.step(batch, way) for way in ways))


def test_other_layers_are_used() -> None:
    """A decoder whose layers were replaced goes by these, not by those that it began with."""
    decoder, batch = whole("llama")
    calls: list[int] = []
    layers = decoder.layers

    def replaced(*arguments: Any) -> Tensor:
        calls.append(1)
        return layers(*arguments)

    decoder.layers = replaced  # type: ignore[assignment]
    decoder.step(batch, AttentionOver(decoder.config, (None, None)))
    assert calls


def test_pools_that_do_not_fit() -> None:
    config = model()
    attention = Attention(config, (None, None))
    k, v = attention.pools
    with pytest.raises(ValueError, match="k_pool must be"):
        Pools([k[0], k[1][:4]], v)
    with pytest.raises(ValueError, match="v_pool must be"):
        Pools(k, [v[0], v[1].float()])
    with pytest.raises(ValueError, match="2 layers need pools"):
        attention.step.over(Pools(k[:1], v[:1]), (None, None))
    with pytest.raises(ValueError, match="need pools of"):
        attention.step.over(Pools([x[:4] for x in k], [x[:4] for x in v]), (None, None))
    over = attention.step.over(Pools(k, v), (None, None))
    fast, _, _ = both("qwen3")
    with pytest.raises(ValueError, match="qkv must be"):  # heads of another size
        fast.layers(torch.randn(3, 128).bfloat16(), torch.randn(3, 64), _With(over))
    fast, _, _ = both("llama")
    with pytest.raises(ValueError, match="must be"):  # a row more than the step has
        fast.layers(torch.randn(4, 128).bfloat16(), torch.randn(4, 32), _With(over))


class _With:
    def __init__(self, over: StepOver) -> None:
        self.over = over


def test_no_rows() -> None:
    fast, _, _ = both("llama")
    assert fast.layers(torch.empty(0, 128).bfloat16(), torch.empty(0, 32), attend).shape == (0, 128)


def test_attended_rows_may_lie_anyhow() -> None:
    fast, slow, _ = both("opt")
    x = torch.randn(5, 128).bfloat16()

    def turned(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attend(layer, q, k, v).transpose(0, 1).contiguous().transpose(0, 1)

    assert torch.equal(fast.layers(x.clone(), None, turned), slow.layers(x.clone(), None, attend))


@pytest.mark.parametrize("variant", ["llama", "odd width"])
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
    with table.force("torch"):
        assert str(table.layer_choice()) == "ops: forced"
        assert isinstance(Decoder(model(), weights_of(model())).layers, OneByOne)


def test_refusals() -> None:
    fast, _, _ = both("llama")
    x, cos_sin = torch.randn(2, 128).bfloat16(), torch.randn(2, 32)
    for bad in (x.float(), x[:, :64], torch.randn(2, 256).bfloat16()[:, ::2]):
        with pytest.raises(ValueError, match="x must be"):
            fast.layers(bad, cos_sin, attend)
    for angles in (cos_sin[:1], cos_sin.double()):
        with pytest.raises(ValueError, match="cos_sin must be"):
            fast.layers(x, angles, attend)
    for width in (31, 34):
        with pytest.raises(ValueError, match="cannot rotate"):
            fast.layers(x, torch.randn(2, width), attend)
    with pytest.raises(ValueError, match="attended must be"):
        fast.layers(x, cos_sin, lambda layer, q, k, v: q[:, :1])


@pytest.mark.parametrize("name", ["qkv.weight", "down.weight", "attention_norm.weight"])
def test_weights_of_another_shape_are_refused(name: str) -> None:
    config = model()
    weights = weights_of(config)
    weights[f"layers.1.{name}"] = weights[f"layers.1.{name}"][:-2].contiguous()
    with pytest.raises(ValueError, match=name):
        Decoder(config, weights)
