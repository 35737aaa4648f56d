"""From the facts of a GGUF file to the rotation that config.json would give. Imports no torch."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from headrace.logs import shown
from headrace.models.gguf.families import Facts
from headrace.types import UnsupportedModel

ROPE_FACTORS = "rope_freqs.weight"
LONGROPE_FACTORS = {"long_factor": "rope_factors_long.weight", "short_factor": "rope_factors_short.weight"}
SCALING = {"type", "factor", "original_context_length", "finetuned"}
"""Of the keys under rope.scaling, those that are read."""
IMPLIED = {
    "attn_factor": 1.0,
    "yarn_attn_factor": 1.0,
    "yarn_ext_factor": 1.0,
    "yarn_beta_fast": 32.0,
    "yarn_beta_slow": 1.0,
}
"""Others, and the value that says nothing new."""

SAYS_NOTHING = (0, 1)
"""Of factors."""
UNSTRETCHED = ("none", "linear", "longrope")
"""Types that, without another factor, leave divisors as they are."""

NEVER = 1e20
"""A divisor by which nothing turns."""


def rope_of(facts: Facts, head_dim: int) -> dict[str, Any]:
    """rope_parameters but for rope_theta and the share of a head that is rotated. Raises UnsupportedModel for keys that
    are not read, and for a stretch beside divisors, which llama.cpp would divide by too."""
    longrope = any(name in facts.tensors for name in LONGROPE_FACTORS.values())
    _refuse_others(facts, {"attn_factor"} if longrope else set())
    kind, factor = _stretch(facts)
    divisors = ROPE_FACTORS in facts.tensors or longrope
    if divisors and (kind not in UNSTRETCHED or (kind != "none" and factor not in SAYS_NOTHING)):
        told = f"rope.scaling.type {shown(kind)} by {factor:g} beside divisors of the rotation"
        raise UnsupportedModel(f"{facts.file.path}: {facts.prefix}{told} is not supported")
    if ROPE_FACTORS in facts.tensors:
        return (_proportional if facts.prefix == "gemma4." else _llama3)(facts, head_dim)
    if longrope:
        return _longrope(facts)
    if kind == "none":
        return {"rope_type": "default"}
    if not factor:
        told = f"{facts.prefix}rope.scaling.type is {shown(kind)}, and there is no rope.scaling.factor"
        raise ValueError(f"{facts.file.path}: {told}; download it again")
    rope: dict[str, Any] = {"rope_type": kind, "factor": factor}
    if kind == "yarn":
        length = facts.count("rope.scaling.original_context_length", facts.count("context_length"))
        rope["original_max_position_embeddings"] = length
    return rope


def _refuse_others(facts: Facts, read: set[str]) -> None:
    prefix = facts.prefix + "rope.scaling."
    for key in facts.file.metadata:
        name = key.removeprefix(prefix)
        if not key.startswith(prefix) or name in SCALING | facts.scaling | read:
            continue
        if facts.number(f"rope.scaling.{name}") != IMPLIED.get(name):
            raise UnsupportedModel(f"{facts.file.path}: {shown(key)} is not supported")


def _stretch(facts: Facts) -> tuple[str, float]:
    """How the rotation is stretched, and by what, 0 if nothing says it. As in llama.cpp a factor without a type is
    linear, and older files call the factor rope.scale_linear."""
    factor = facts.number("rope.scaling.factor", facts.number("rope.scale_linear", 0.0))
    return facts.text("rope.scaling.type", "none" if factor in SAYS_NOTHING else "linear"), factor


def _longrope(facts: Facts) -> dict[str, Any]:
    """Both sets of divisors, and the factor that llama.cpp's converter has made of the two lengths."""
    length = facts.count("rope.scaling.original_context_length", facts.count("context_length"))
    width = facts.count("rope.dimension_count")
    factors = {field: facts.vector(name, width // 2).tolist() for field, name in LONGROPE_FACTORS.items()}
    rope = {"rope_type": "longrope", "original_max_position_embeddings": length, **factors}
    given = facts.value("rope.scaling.attn_factor")
    return rope if given is None else rope | {"attention_factor": facts.number("rope.scaling.attn_factor")}


def _proportional(facts: Facts, head_dim: int) -> dict[str, Any]:
    """Of a global layer of Gemma 4: pairs that are not rotated have a divisor beyond all positions."""
    given = facts.vector(ROPE_FACTORS, head_dim // 2)
    turned = int((given == 1).sum())
    if not turned or (given[:turned] != 1).any() or (given[turned:] < NEVER).any():
        raise UnsupportedModel(f"{facts.file.path}: {ROPE_FACTORS} is not as Gemma 4's rotation makes it")
    return {"rope_type": "proportional", "partial_rotary_factor": 2 * turned / head_dim}


def _llama3(facts: Facts, head_dim: int) -> dict[str, Any]:
    """The parameters of llama3's rotation that gave the divisors in the file: it has these alone."""
    given = facts.vector(ROPE_FACTORS, head_dim // 2)
    theta, factor = facts.number("rope.freq_base", 10_000.0), float(given.max())
    lengths = 2 * math.pi * theta ** (2 * np.arange(head_dim // 2) / head_dim)
    for exponent in range(5, 21):
        made = _divisors(lengths, factor, 2**exponent)
        if np.allclose(made, given, rtol=1e-4):
            return {
                "rope_type": "llama3", "factor": factor, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                "original_max_position_embeddings": 2**exponent,
            }  # fmt: skip
    raise UnsupportedModel(f"{facts.file.path}: {ROPE_FACTORS} is not as llama3's rotation makes it; use safetensors")


def _divisors(lengths: np.ndarray[Any, Any], factor: float, original: int) -> np.ndarray[Any, Any]:
    """Of each wave length: 1 for short ones, `factor` for those beyond the original length, between them a blend."""
    smooth = np.clip((original / lengths - 1.0) / (4.0 - 1.0), 0.0, 1.0)
    return 1.0 / ((1.0 - smooth) / factor + smooth)
