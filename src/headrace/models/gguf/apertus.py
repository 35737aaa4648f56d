"""GGUF files of Apertus: names, and the numbers of each layer's xIELU, which are arrays in the metadata. Imports no
torch.

Facts: llama.cpp's conversion/apertus.py, which writes the numbers as the checkpoint has them, and
src/models/apertus.cpp and ggml_xielu, which take the softplus of both alphas.
"""

from __future__ import annotations

from typing import Any, NoReturn

import numpy as np

from headrace.models.gguf.families import LAYER, MOST_LAYERS, Facts, with_biases
from headrace.types import UnsupportedModel

NAMES = {
    "blk.{}.attn_norm": LAYER + "attention_layernorm",
    "blk.{}.ffn_norm": LAYER + "feedforward_layernorm",
}
ALPHAS = ("alpha_p", "alpha_n")
"""Under xielu., a key without the architecture's name."""
SAME_IN_ALL = {"beta": 0.5, "eps": -1e-6}
"""What the others are in all models."""
ROUNDED = 1e-2
"""Relative; eps is bf16 in checkpoints."""


def fields(facts: Facts, rope: dict[str, Any]) -> dict[str, Any]:
    """Raises ValueError for numbers of xIELU that are not there for each layer, and UnsupportedModel for a beta or an
    eps of another value than is computed with."""
    for name in ALPHAS:
        _of_layers(facts, name)
    for name, expected in SAME_IN_ALL.items():
        found = _of_layers(facts, name)
        others = found[~np.isclose(found, expected, rtol=ROUNDED, atol=0.0)]
        if others.size:
            told = f"xielu.{name} {float(others[0]):g} is not supported; {expected:g} is"
            raise UnsupportedModel(f"{facts.file.path}: {told}")
    return with_biases(facts, rope)


def vectors(facts: Facts) -> dict[str, np.ndarray[Any, Any]]:
    """The alphas, fp32 [1], by the names of the checkpoint's tensors. Raises as fields."""
    return {
        f"{LAYER.format(layer)}mlp.act_fn.{name}": value
        for name in ALPHAS
        for layer, value in enumerate(_of_layers(facts, name).reshape(-1, 1))
    }


def _of_layers(facts: Facts, name: str) -> np.ndarray[Any, Any]:
    """A number of each layer, fp32; one alone is that of all layers, as llama.cpp reads it."""
    key, layers = f"xielu.{name}", facts.layers
    value = facts.file.metadata.get(key)
    if isinstance(value, float):
        value = np.full(max(0, min(layers, MOST_LAYERS)), value)
    if value is None:
        _refuse(facts, f"there is no {key}")
    if not isinstance(value, np.ndarray) or value.dtype.kind != "f":
        _refuse(facts, f"{key} holds no fractions")
    if len(value) != min(layers, MOST_LAYERS):
        _refuse(facts, f"{key} has {len(value)} numbers for {layers} layers")
    if not np.isfinite(value).all():
        _refuse(facts, f"{key} holds NaN or infinity")
    return value.astype(np.float32)


def _refuse(facts: Facts, what: str) -> NoReturn:
    raise ValueError(f"{facts.file.path}: {what}; download it again")
