"""quantization_config of a config.json: which quantised checkpoints are read, how their tensors lie. Imports no torch.

Activations are rounded where a scheme asks for int8 of each token, under a scale found as it passes, and weights have a
scale for each output. Of others that round activations (FP8, scales found beforehand) the weights alone are used.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from headrace.logs import shown
from headrace.types import UnsupportedModel

Layout = Literal["gptq", "awq", "packed", "plain", "mxfp4"]
FIELDS = ("quantization_config", "compression_config")
METHODS = ("gptq", "awq", "compressed-tensors", "fp8", "mxfp4")
ENDS: dict[Layout, tuple[str, ...]] = {
    "gptq": ("qweight", "qzeros", "scales", "g_idx"),
    "awq": ("qweight", "qzeros", "scales"),
    "packed": ("weight_packed", "weight_scale", "weight_shape", "weight_zero_point", "weight_g_idx"),
    "plain": ("weight", "weight_scale", "weight_scale_inv"),
    "mxfp4": ("blocks", "scales"),
}
"""Of the names of a module's tensors; its matrix is there where the first is, and any of the plain ones beside it."""
FP8_BLOCK = [128, 128]
PACKED, PLAIN = "pack-quantized", ("int-quantized", "float-quantized", "naive-quantized")


@dataclass(frozen=True, slots=True)
class Scheme:
    """How matrices are stored. name: told to people; zeros_less_one: zero points of gptq's first format; rounds_rows:
    rows that meet them are rounded to int8 (kernels.formats, w8a8)."""

    name: str
    layout: Layout
    bits: int
    zeros_less_one: bool = False
    rounds_rows: bool = False


def scheme_of(raw: dict[str, Any]) -> Scheme | None:
    """What config.json says of quantisation; None where weights are numbers. Raises UnsupportedModel naming a method,
    or what it asks for, that is not read."""
    field = next((name for name in FIELDS if raw.get(name)), None)
    if field is None:
        return None
    given = raw[field]
    if not isinstance(given, dict):
        raise UnsupportedModel(f"{field} must be an object")
    method = given.get("quant_method")
    readers = {"gptq": _gptq, "awq": _awq, "compressed-tensors": _compressed, "fp8": _fp8, "mxfp4": _mxfp4}
    if method not in METHODS:
        raise UnsupportedModel(
            f"{field}: quant_method {shown(repr(method))} is not supported; supported: {', '.join(METHODS)}; "
            f"otherwise use the unquantised checkpoint"
        )
    return readers[str(method)](given)


def _bits(value: Any, allowed: tuple[int, ...], method: str) -> int:
    if value not in allowed or isinstance(value, bool):
        told = " or ".join(map(str, allowed))
        raise UnsupportedModel(
            f"quantization_config: {method} of {shown(repr(value))} bits is not supported, of {told} is"
        )
    return int(value)


def _gptq(given: dict[str, Any]) -> Scheme:
    form = given.get("checkpoint_format") or "gptq"
    if form not in ("gptq", "gptq_v2"):
        raise UnsupportedModel(f"quantization_config: checkpoint_format {shown(repr(form))} is not supported")
    bits = _bits(given.get("bits"), (4, 8), "gptq")
    return Scheme(f"GPTQ int{bits}", "gptq", bits, form == "gptq")


def _awq(given: dict[str, Any]) -> Scheme:
    version = str(given.get("version") or "gemm").lower()
    if version != "gemm":
        raise UnsupportedModel(f"quantization_config: awq of version {shown(repr(version))} is not supported, gemm is")
    return Scheme("AWQ int4", "awq", _bits(given.get("bits", given.get("w_bit")), (4,), "awq"))


def _fp8(given: dict[str, Any]) -> Scheme:
    block = given.get("weight_block_size")
    if block is not None and block != FP8_BLOCK:
        raise UnsupportedModel(f"quantization_config: weight_block_size {shown(repr(block))}: {FP8_BLOCK} is supported")
    return Scheme("FP8" if block is None else "FP8 in blocks", "plain", 8)


def _mxfp4(given: dict[str, Any]) -> Scheme:
    """modules_to_not_convert need no look: a module without blocks has numbers."""
    return Scheme("MXFP4", "mxfp4", 4)


def _compressed(given: dict[str, Any]) -> Scheme:
    groups = given.get("config_groups")
    found = [
        each
        for each in (groups.values() if isinstance(groups, dict) else ())
        if isinstance(each, dict) and isinstance(each.get("weights"), dict)
    ]
    kinds = {(str(each["weights"].get("type", "int")), each["weights"].get("num_bits")) for each in found}
    if len(kinds) != 1:
        raise UnsupportedModel("quantization_config: config_groups must hold one kind of weights")
    [(kind, bits)] = kinds
    form = given.get("format")
    if form == PACKED and kind == "int":
        return Scheme(f"W{bits}A16", "packed", _bits(bits, (4, 8), PACKED))
    if form in PLAIN and kind in ("int", "float"):
        bits = _bits(bits, (8,), str(form))
        if kind == "int" and all(_rounds_rows(each) for each in found):
            return Scheme("W8A8", "plain", bits, rounds_rows=True)
        return Scheme("int8" if kind == "int" else "FP8", "plain", bits)
    raise UnsupportedModel(
        f"quantization_config: format {shown(repr(form))} of {shown(kind)} weights is not supported; "
        f"supported: {PACKED} of int, {', '.join(PLAIN)}"
    )


def _rounds_rows(group: dict[str, Any]) -> bool:
    """Whether a group of compressed-tensors asks for int8 of each row, around 0, where outputs have a scale each."""
    rows = group.get("input_activations")
    return (
        isinstance(rows, dict)
        and (rows.get("type", "int"), rows.get("num_bits"), rows.get("strategy")) == ("int", 8, "token")
        and (rows.get("dynamic"), rows.get("symmetric", True)) == (True, True)
        and group["weights"].get("strategy") == "channel"
    )
