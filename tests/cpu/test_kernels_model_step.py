"""Steps from tokens to logits in one call, and those that go on from them: the bits of one operation after another."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from headrace.config import AttentionSpec, Quantization
from headrace.kernels import cpu
from headrace.kernels.formats import FORMATS
from headrace.kernels.model_step import ModelStep
from headrace.kernels.quantized import Quantized
from headrace.models.decoder import Decoder, TokenBatch
from headrace.models.layer_parts import LatentSpec
from headrace.models.sizes import EMBED, HEAD
from headrace.models.spec import ModelConfig, RopeSpec
from headrace.models.weights import StoredMatrix
from tests.support.coded_weights import coded
from tests.support.small_decoders import BIASED, PLAIN, SLOTS, Attention, AttentionOver, model, weights_of

pytestmark = [pytest.mark.skipif(not cpu.available(), reason=str(cpu.unavailable_reason()))]

ROPE = RopeSpec("default", (("rope_theta", 1e4), ("rope_type", "default")), 64)
DYNAMIC = RopeSpec("dynamic", (("factor", 2.0), ("rope_theta", 1e4), ("rope_type", "dynamic")), 64)
VARIANTS: dict[str, dict[str, Any]] = {
    "llama": dict(positions="rope", rope=ROPE, vocab_size=130),
    "qwen3": dict(positions="rope", rope=ROPE, qk_norm=True, head_dim=64),
    "falcon7": PLAIN | dict(block="parallel", mlp_norm=False, kv_heads=1, positions="rope", rope=ROPE),
    "phi": PLAIN | BIASED | dict(block="parallel", mlp_norm=False, head_bias=True, positions="rope", rope=ROPE),
    "no rotation": PLAIN | BIASED | dict(norm_affine=False, rotary=0),
    "gpt-oss": dict(qkv_bias=True, attention=AttentionSpec(2, 4, 2, 32, 0.2, (None, None), sinks=True)),
    "latents": dict(
        positions="rope",
        rope=ROPE,
        attention=AttentionSpec(2, 4, 1, 64, 0.2, (None, None), once=True),
        latent=LatentSpec(rank=48, rotated=16, plain=24, value=40),
    ),
    "granite": dict(embed_scale=12.0, residual_scale=0.22, logit_scale=0.125),
    "gemma2": dict(
        block="sandwich",
        norm_offset=1.0,
        activation="gelu_tanh",
        embed_scale=11.3125,
        logit_cap=2.0,
        vocab_size=130,
        attention=AttentionSpec(2, 4, 2, 32, 0.2, (None, None), score_cap=2.0),
    ),
    "muse glimmer": dict(
        block="sandwich",
        norm_offset=1.0,
        final_offset=0.0,
        out_norm_eps=0.1,
        embed_norm=True,
        qk_norm=True,
        qk_norm_affine=False,
        attention_gate=True,
        gate_apart=True,
        logit_scale=0.5,
        logit_cap=2.0,
    ),
}


def model_of(variant: str, quantization: Quantization = "none") -> tuple[Decoder, TokenBatch]:
    config = model(**VARIANTS[variant])
    batch = TokenBatch(torch.tensor([5, config.vocab_size - 1, 0]), torch.tensor([70, 71, 5]))
    return Decoder(config, weights_of(config), quantization), batch


def prepared(decoder: Decoder, batch: TokenBatch, attend: AttentionOver) -> ModelStep:
    return decoder.prepare(batch.positions, attend)


def at_once(decoder: Decoder, batch: TokenBatch, attend: AttentionOver) -> Tensor:
    """Logits by one call."""
    step = prepared(decoder, batch, attend)
    step.run(batch.token_ids.tolist())
    return step.logits


@pytest.mark.parametrize(("variant", "quantization"), [*((each, "none") for each in VARIANTS), ("llama", "int8")])
def test_from_tokens_to_logits_in_one_call(isa: str, variant: str, quantization: Quantization, threads: None) -> None:
    decoder, batch = model_of(variant, quantization)
    apart, over = Attention(decoder.config, (None, None)), AttentionOver(decoder.config, (None, None))
    want = decoder.logits(decoder.forward(batch, apart))
    assert want.isfinite().all() and want.std() > 0.1 and want.dtype == torch.float32
    for rows, watch in ((torch.tensor([2]), None), (None, lambda layer, x: None)):
        got = decoder.logits(decoder.forward(batch, AttentionOver(decoder.config, (None, None)), rows, watch))
        assert torch.equal(got, want if rows is None else want[rows])
    assert torch.equal(at_once(decoder, batch, over), want)
    for ours, theirs in zip(over.pools[0] + over.pools[1], apart.pools[0] + apart.pools[1], strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("variant", ["llama", "granite", "gemma2"])
def test_a_head_that_is_the_table(isa: str, variant: str, threads: None) -> None:
    """The bits of a model with both, embeddings that are multiplied by a number too."""
    config, batch = model(**VARIANTS[variant]), model_of(variant)[1]
    weights = weights_of(config)
    both = weights | {HEAD: weights[EMBED].clone()}
    tied = Decoder(config, weights | {HEAD: weights[EMBED]})
    assert tied.tables[EMBED] is tied.matrices[HEAD]
    want = at_once(Decoder(config, both), batch, AttentionOver(config, (None, None)))
    assert torch.equal(at_once(tied, batch, AttentionOver(config, (None, None))), want)
    assert torch.equal(tied.logits(tied.forward(batch, Attention(config, (None, None)))), want)


@pytest.mark.parametrize("variant", ["llama", "gemma2"])
def test_a_table_of_codes(isa: str, variant: str) -> None:
    """An embedding is rounded before it is multiplied, as one that was multiplied out is."""
    config, batch = model(**VARIANTS[variant]), model_of(variant)[1]
    weights, table = weights_of(config), coded(FORMATS["Q5_0"], config.vocab_size, config.hidden_size // 32)
    apart = Decoder(config, weights | {EMBED: table.dequantised(torch.bfloat16)})
    stored = {EMBED: StoredMatrix(table.shape, lambda: [table], coded=True)}
    ours = Decoder(config, {name: w for name, w in weights.items() if name != EMBED}, stored=stored)
    assert ours.runs_whole and isinstance(ours.tables[EMBED], Quantized)
    want = at_once(apart, batch, AttentionOver(config, (None, None)))
    assert torch.equal(at_once(ours, batch, AttentionOver(config, (None, None))), want)
    assert torch.equal(ours.logits(ours.forward(batch, Attention(config, (None, None)))), want)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("token", [130, -1])
def test_tokens_that_are_in_no_table(token: int, tied: bool) -> None:
    decoder, batch = model_of("llama")
    if tied:
        weights = weights_of(decoder.config)
        decoder = Decoder(decoder.config, weights | {HEAD: weights[EMBED]})
    batch.token_ids[1] = token
    with pytest.raises(ValueError, match=f"token of row 1 is {token}, of 130"):
        at_once(decoder, batch, AttentionOver(decoder.config, (None, None)))


def test_steps_of_another_model() -> None:
    decoder, batch = model_of("llama")
    for other, windows in ((model_of("qwen3")[0], (None, None)), (decoder, (None,))):
        with pytest.raises(ValueError, match=r"the step (is of|has attention in)"):
            at_once(decoder, batch, AttentionOver(other.config, windows))
    batch.token_ids = batch.token_ids[:2]
    with pytest.raises(ValueError, match="2 tokens for 3 rows"):
        at_once(decoder, batch, AttentionOver(decoder.config, (None, None)))


def apart(config: ModelConfig, rows: int) -> AttentionOver:
    """Rows at position 5 of a sequence and a slot each."""
    attention = AttentionOver(config, (None, None), max(rows, SLOTS))
    at, places = torch.full((rows,), 5), torch.arange(rows, dtype=torch.int32)
    items = torch.stack((places, places * 0, places, places + 1), dim=1).contiguous()
    attention.place(items, at, places, at.int())
    return attention


@pytest.mark.parametrize(
    ("quantization", "broken"), [("none", False), ("none", True), ("int8", False), ("int4", False), ("w8a8", False)]
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
    tokens = [(7 * row + 3) % 330 for row in range(rows)]
    step = prepared(decoder, TokenBatch(torch.tensor(tokens), torch.full((rows,), 5)), attention)
    got = step.run(tokens)
    values, places = cpu.greatest(step.logits)
    assert got.tokens == places.tolist()
    if broken:
        assert set(got.tokens) == {129} and all(value != value for value in got.values)
    else:
        assert got.values == values.tolist() and (rows < 16 or 70 in got.tokens) and not {71, 200} & set(got.tokens)


def test_the_decode_fast_path_gives_the_bits_of_a_new_step(isa: str) -> None:
    decoder, batch = model_of("llama")
    ours, theirs = (AttentionOver(decoder.config, (None, None)) for _ in range(2))
    step = prepared(decoder, batch, ours)
    for further in range(57):
        tokens = [(further * 11 + row) % 130 for row in range(3)]
        (step.run_next if further else step.run)(tokens)
        if further in (0, 1, 2, 56):
            theirs.go_on(further)
            batch = TokenBatch(torch.tensor(tokens), torch.tensor([70, 71, 5]) + further)
            assert torch.equal(step.logits, decoder.logits(decoder.forward(batch, theirs)))
        theirs.pools = [[each.clone() for each in pools] for pools in ours.pools]
    before = step.logits.clone()
    with pytest.raises(ValueError, match="offset 64"):
        step.run_next(tokens)
    step.run(tokens)
    assert torch.equal(step.logits, before), "a refusal changed something"


def test_models_that_need_more_than_one_call() -> None:
    for facts in (dict(positions="learned", rope=None), dict(final_norm=False), dict(positions="rope", rope=DYNAMIC)):
        config = model(**facts)
        decoder = Decoder(config, weights_of(config))
        length = torch.tensor([80, 80, 80])
        batch = TokenBatch(torch.tensor([5, 95, 0]), torch.tensor([0, 1, 2]), length)
        ways = [kind(config, (None, None)) for kind in (Attention, AttentionOver)]
        assert not decoder.runs_whole
        for way in ways:
            with pytest.raises(ValueError, match="as a whole"):
                decoder.prepare(batch.positions, way)
        assert torch.equal(*(decoder.logits(decoder.forward(batch, way)) for way in ways))


def test_other_layers_are_used() -> None:
    """A decoder whose layers were replaced goes by these, not by those that it began with."""
    decoder, _ = model_of("llama")
    decoder.layers = Decoder(decoder.config, weights_of(decoder.config)).layers.__call__  # type: ignore[assignment]
    assert not decoder.runs_whole
