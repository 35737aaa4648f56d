"""Profiles of one rank by the figures that restores go by."""

from __future__ import annotations

from collections.abc import Mapping

from headrace.planner.machine import Machine, ModelShape, PieceRate, TierLink
from headrace.planner.profile import Profile


def profile_of(
    layers: int,
    prefill: tuple[float, float, float],
    tiers: Mapping[str, PieceRate],
    project_s: float = 1e-6,
    cpu_s_per_byte: Mapping[str, float] | None = None,
) -> Profile:
    """prefill: floor_s, token_s and pair_s of a PrefillRate. project_s: a token's projection in one layer."""
    shape = ModelShape(layers=layers, hidden=1, heads=1, kv_heads=1, head_dim=1, mlp=1, vocab=1)
    floor_s, token_s, pair_s = (max(figure, 1e-30) for figure in prefill)
    weights = layers * (shape.qkv_weights + shape.rest_weights) * shape.element_bytes
    taken = cpu_s_per_byte or {}
    machine = Machine(
        name="a rank", cores=1, isa="any", date="", linear_flops_s=shape.linear_flops / token_s,
        attention_flops_s=((1, layers * shape.pair_flops / pair_s),), memory_bytes_s=weights / floor_s,
        link_bytes_s=1e9,
        tiers=tuple(TierLink(kind=kind, rate=rate, cpu_s_per_byte=taken.get(kind)) for kind, rate in tiers.items()),
        project=PieceRate(project_s),
    )  # fmt: skip
    return Profile(machine, shape)


def linked(profile: Profile, bytes_s: float | None, latency_s: float = 0.0) -> Profile:
    """The same, with all tiers beyond a link."""
    profile.behind(bytes_s, latency_s)
    return profile
