"""Decoders of every kind of layer, by C++ blocks and one operation at a time, and attention that is none.

T: rows; Hq, Hkv: query and KV heads; D: head size; N: elements of a head that are rotated.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import Tensor

from headrace.config import AttentionSpec, Quantization, RoutingSpec
from headrace.kernels import dispatch
from headrace.kernels.backend import Attend
from headrace.models.decoder import Decoder
from headrace.models.layer_parts import LatentSpec
from headrace.models.rope import Rope
from headrace.models.spec import RopeSpec
from tests.support.small_decoders import BIASED, EXPERTS, PLAIN, model, rotary_of, weights_of

LOCAL: dict[str, Any] = dict(
    attention=AttentionSpec(2, 4, 2, 32, 0.2, (7, None), score_cap=2.0), local_rope=rotary_of(16, 32)
)
SIGMOIDS = RoutingSpec("sigmoid", corrected=True, scale=2.5)
WEIGHTED = RoutingSpec("sigmoid", weighs_inputs=True)
GROUPS = RoutingSpec("sigmoid", corrected=True, groups=2, met_groups=1, summed=2, scale=1.5)
YARN = (("factor", 4.0), ("original_max_position_embeddings", 32), ("rope_theta", 1e4))
MINISTRAL3 = RopeSpec("yarn", YARN, 64, 0.5)
LATENT = LatentSpec(rank=48, rotated=16, plain=24, value=32)
LATENTS: dict[str, Any] = dict(
    attention=AttentionSpec(2, 4, 1, 64, 0.2, (None, None), once=True), latent=LATENT, rope=rotary_of(16, 16)
)
GATES: dict[str, Any] = dict(block="sandwich", qk_norm=True, attention_gate=True, gate_apart=True)
VARIANTS: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": dict(qkv_bias=True),
    "qwen3": dict(qk_norm=True, head_dim=64),
    "opt": PLAIN | BIASED | dict(activation="relu", kv_heads=4, rotary=0),
    "opt350": PLAIN | BIASED | dict(activation="relu", block="post", rotary=0),
    "opt without affine norms": PLAIN | dict(norm_affine=False, rotary=0),
    "rms without weights": dict(norm_affine=False),
    "falcon7": PLAIN | dict(block="parallel", mlp_norm=False, kv_heads=1),
    "cohere2": dict(norm="layer", norm_bias=False, block="parallel", mlp_norm=False, no_rope_layers=(1,)),
    "falcon40": PLAIN | BIASED | dict(block="parallel", activation="gelu_tanh"),
    "odd width": dict(inner=191),
    "granite": dict(residual_scale=0.22),
    "glm4": dict(block="sandwich", qkv_bias=True, rotary=16),
    "gemma3": dict(block="sandwich", activation="gelu_tanh", norm_offset=1.0, qk_norm=True, **LOCAL),
    "gemma odd width": dict(inner=191, activation="gelu_tanh"),
    "smollm3": dict(no_rope_layers=(1,)),
    "ministral3": dict(rope=MINISTRAL3),
    "olmo2": dict(block="after", qk_norm=True, qk_norm_whole=True),
    "hunyuan": dict(qk_norm=True, turn_before_norm=True, head_dim=64),
    "arcee": dict(gated=False, activation="relu2"),
    "apertus": dict(gated=False, activation="xielu", qk_norm=True),
    "experts": dict(experts=EXPERTS),
    "experts of an odd width": dict(experts=replace(EXPERTS, inner=90, normalised=False)),
    "scaled experts": dict(experts=EXPERTS, residual_scale=0.22),
    "shared expert": dict(experts=replace(EXPERTS, shared=96)),
    "shared expert without a gate": dict(experts=replace(EXPERTS, shared=96, shared_gate=False), residual_scale=0.22),
    "experts by sigmoids": dict(experts=replace(EXPERTS, shared=96, shared_gate=False, routing=SIGMOIDS)),
    "experts of weighted inputs": dict(experts=replace(EXPERTS, shared=96, shared_gate=False, routing=WEIGHTED)),
    "experts by groups": dict(experts=replace(EXPERTS, routing=GROUPS, layers=(False, True)), residual_scale=0.22),
    "dense and experts": dict(experts=replace(EXPERTS, layers=(False, True)), inner=700),
    "olmoe": dict(experts=EXPERTS, qk_norm=True, qk_norm_whole=True),
    "gpt-oss": BIASED | dict(experts=EXPERTS, activation="swiglu_oai"),
    "gpt-oss of an odd width": BIASED | dict(experts=replace(EXPERTS, inner=90), activation="swiglu_oai"),
    "latents": LATENTS,
    "latents, queries of a low rank": LATENTS
    | dict(
        attention=AttentionSpec(2, 4, 1, 60, 0.2, (None, None), once=True),  # queries fill no blocks of 64 outputs
        latent=replace(LATENT, rank=44, query_rank=56, value=72),
        qkv_bias=True,
        out_bias=True,
    ),
    "latents and experts": LATENTS
    | dict(
        experts=replace(EXPERTS, layers=(False, True), shared=96, shared_gate=False, routing=GROUPS),
        rope=rotary_of(8, 16),
    ),
    "gates, norms behind experts": GATES
    | dict(
        experts=replace(EXPERTS, layers=(False, True), shared=96, shared_gate=False, routing=SIGMOIDS),
        residual_scale=0.22,
    ),
    "norms behind experts alone": dict(experts=EXPERTS, block="after"),
    "norms without weights": GATES | dict(qk_norm_affine=False, norm_offset=1.0, out_norm_eps=0.1),
    "partial rotary": dict(head_dim=20, hidden=72, inner=90, heads=6, rotary=6),
}
ROWS = (1, 3, 64, 300, 1100)


def both(variant: str, quantization: Quantization = "none") -> tuple[Decoder, Decoder, int]:
    """The model's decoder by blocks and op by op, and how many elements of a head are rotated."""
    facts = dict(VARIANTS[variant])
    config = model(**facts)
    dim, local_dim = config.rotated_heads
    rotary = Rope(config.rope, dim, config.local_rope, local_dim).width if config.rope else 0
    fast = Decoder(config, weights_of(config), quantization)
    with dispatch.force("ops"):
        return fast, Decoder(config, weights_of(config), quantization), rotary


class NoAttention(Attend):
    """Not attention, but every element of q, k and v shows in it."""

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor, rows: Tensor | None = None) -> Tensor:
        group = q.shape[1] // k.shape[1]
        return q - k.repeat_interleave(group, 1) + v.repeat_interleave(group, 1) * (layer + 1)


attend = NoAttention()
