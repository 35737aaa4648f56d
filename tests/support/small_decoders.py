"""Small models with drawn weights, and attention for three rows or more, made without an engine.

T: rows; Hq, Hkv: query and KV heads; D: head size.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from headrace.config import AttentionSpec
from headrace.kernels.backend import Attend
from headrace.kernels.cpu_step import Pools, Step, StepOver
from headrace.kernels.records import Pool, StepInputs
from headrace.models.slots import expected
from headrace.models.spec import ExpertsSpec, ModelConfig, RopeSpec

PLAIN = dict(norm="layer", gated=False, activation="gelu")
BIASED = dict(qkv_bias=True, out_bias=True, mlp_bias=True)
EXPERTS = ExpertsSpec(count=6, chosen=2, inner=64, normalised=True, layers=(True, True))


def model(
    *,
    heads: int = 4,
    kv_heads: int = 2,
    head_dim: int = 32,
    hidden: int = 128,
    inner: int = 192,
    rotary: int | None = None,
    **facts: Any,
) -> ModelConfig:
    """A model of two layers; a Llama where `facts` do not say otherwise. rotary: of a head's elements."""
    turned = rotary_of(head_dim if rotary is None else rotary, head_dim)
    spec = AttentionSpec(2, heads, kv_heads, head_dim, head_dim**-0.5, (None, None))
    common: dict[str, Any] = dict(
        architecture="", vocab_size=96, hidden_size=hidden, intermediate_size=inner, embed_size=hidden, layers=2,
        max_model_len=64, attention=spec, dtype="bfloat16", positions="rope" if turned else "alibi", norm="rms",
        norm_eps=1e-5, activation="silu", gated=True, rope=turned,
    )  # fmt: skip
    return ModelConfig(**common | facts)


def rotary_of(width: int, head_dim: int) -> RopeSpec | None:
    """A rotation of the first `width` elements of a head; None where there are none."""
    part = (("partial_rotary_factor", width / head_dim), ("rope_theta", 1e4))
    return RopeSpec("default", part, 64) if width else None


def weights_of(config: ModelConfig) -> dict[str, Tensor]:
    g = torch.Generator().manual_seed(0)

    def draw(name: str, shape: tuple[int, ...]) -> Tensor:
        noise = torch.randn(shape, generator=g)
        return (1 + 0.3 * noise if "norm" in name else noise / shape[-1] ** (0.5 * (len(shape) > 1))).bfloat16()

    drawn = {name: (draw(name, slot.shape(sum(slot.parts))), slot.wide) for name, slot in expected(config).items()}
    return {name: tensor.float() if wide else tensor for name, (tensor, wide) in drawn.items()}


SLOTS = 6


class Attention(Attend):
    """A Step over pools of its own, as attention.execute has it: three rows at positions 70, 71 and 5."""

    def __init__(self, config: ModelConfig, windows: tuple[int | None, ...], slots: int = SLOTS) -> None:
        spec = self.spec = config.attention
        g = torch.Generator().manual_seed(3)
        sizes = (slots, spec.kv_heads, spec.head_dim, 64), (slots, spec.kv_heads, 64, spec.head_dim)
        self.pools = [[torch.randn(size, generator=g).bfloat16() for _ in windows] for size in sizes]
        self.windows = windows
        self.sinks = list(torch.randn(len(windows), spec.heads, generator=g)) if spec.sinks else None
        self.calls = 0
        self.go_on(0)

    def go_on(self, further: int) -> None:
        """The rows so many positions further."""
        items = torch.tensor([[3, 0, 0, 2], [1, 64, 0, 2], [4, 0, 2, 3]], dtype=torch.int32)
        slots, offsets = torch.tensor([1, 1, 4], dtype=torch.int32), torch.tensor([6, 7, 5], dtype=torch.int32)
        self.place(items, torch.tensor([70, 71, 5]) + further, slots, offsets + further)

    def place(self, items: Tensor, positions: Tensor, slots: Tensor, offsets: Tensor) -> None:
        shape = (len(self.pools[0][0]), self.spec.kv_heads, self.spec.head_dim)
        inputs = StepInputs(
            {None: items, 7: items[1:]}, positions, slots, offsets,
            heads=self.spec.heads, shape=shape, dtype=torch.bfloat16, scale=0.2, cap=self.spec.score_cap,
        )  # fmt: skip
        self.step = Step(inputs)

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor, rows: Tensor | None = None) -> Tensor:
        self.calls += 1
        sinks = None if self.sinks is None else self.sinks[layer]
        out = self.step(Pool(self.pools[0][layer], self.pools[1][layer]), q, k, v, self.windows[layer], sinks)
        return out if rows is None else out[rows]


class AttentionOver(Attention):
    @property
    def prepared(self) -> StepOver:  # type: ignore[override]
        pools = Pools([Pool(k, v) for k, v in zip(*self.pools, strict=True)])
        return self.step.over(pools, self.windows, self.sinks)
