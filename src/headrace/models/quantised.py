"""quantization_config of a config.json: which quantised checkpoints are read, how their tensors lie. Imports no torch.

Activations are rounded where a scheme asks for int8 of each token, under a scale found as it passes, and weights have a
scale for each output. Of others that round activations (FP8, scales found beforehand) the weights alone are used.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal

from headrace.logs import shown
from headrace.types import UnsupportedModel

Layout = Literal["gptq", "awq", "nvfp4", "nvfp4 scale_2", "packed", "packed mxfp4", "nf4", "int8 scb", "plain", "mxfp4"]
FIELDS = ("quantization_config", "compression_config")
BESIDE = "hf_quant_config.json"
"""Where ModelOpt says it, beside a config.json that says nothing of it."""
ENDS: dict[Layout, tuple[str, ...]] = {
    "gptq": ("qweight", "qzeros", "scales", "g_idx"),
    "awq": ("qweight", "qzeros", "scales"),
    "nvfp4": ("weight_packed", "weight_global_scale", "weight_scale"),
    "nvfp4 scale_2": ("weight", "weight_scale_2", "weight_scale"),
    "packed": ("weight_packed", "weight_shape", "weight_scale", "weight_zero_point", "weight_g_idx"),
    "packed mxfp4": ("weight_packed", "weight_scale"),
    "nf4": (
        "weight",
        "weight.quant_state.bitsandbytes__nf4",
        "weight.absmax",
        "weight.quant_map",
        "weight.nested_absmax",
        "weight.nested_quant_map",
    ),
    "int8 scb": ("weight", "SCB", "weight_format"),
    "plain": ("weight", "weight_scale", "weight_scale_inv", "weight_zero_point"),
    "mxfp4": ("blocks", "scales"),
}
"""Of the names of a module's tensors; its matrix is there where the first is, and the second or, of plain ones, any."""
FP8_BLOCK = [128, 128]
PACKED, NVFP4, MXFP4 = "pack-quantized", "nvfp4-pack-quantized", "mxfp4-pack-quantized"
PLAIN = ("int-quantized", "float-quantized", "naive-quantized", "mxfp8-quantized")
MODELOPT: dict[str, tuple[str, Layout, int]] = {
    "NVFP4": ("NVFP4", "nvfp4 scale_2", 4),
    "W4A16_NVFP4": ("NVFP4", "nvfp4 scale_2", 4),
    "FP8": ("FP8", "plain", 8),
    "FP8_PER_CHANNEL_PER_TOKEN": ("FP8", "plain", 8),
    "FP8_PB_WO": ("FP8 in blocks", "plain", 8),
    "MXFP8": ("MXFP8", "plain", 8),
}
"""Name, layout and bits of ModelOpt's algorithms that are read."""


@dataclass(frozen=True, slots=True)
class Scheme:
    """How matrices are stored. name: told to people; zeros_less_one: zero points of gptq's first format; rounds_rows:
    rows that meet them are rounded to int8 (kernels.formats, w8a8); group: inputs under one scale, 0 where that is not
    said; ordered: inputs lie by their groups, which tensors tell; zeros: there are zero points; others: how some of
    them are stored instead, which their tensors tell."""

    name: str
    layout: Layout
    bits: int
    zeros_less_one: bool = False
    rounds_rows: bool = False
    group: int = 0
    ordered: bool = False
    zeros: bool = False
    others: tuple[Scheme, ...] = ()

    @property
    def every(self) -> tuple[Scheme, ...]:
        """This one and the others, in the order in which a module's tensors are held against them."""
        return tuple(sorted((self, *self.others), key=lambda each: list(ENDS).index(each.layout)))


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
    if not isinstance(method, str) or method not in _METHODS:
        raise UnsupportedModel(
            f"{field}: quant_method {shown(repr(method))} is not supported; supported: {', '.join(_METHODS)}; "
            f"otherwise use the unquantised checkpoint"
        )
    return _METHODS[method](given)


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
    ordered = given.get("desc_act") is True
    return Scheme(f"GPTQ int{bits}", "gptq", bits, form == "gptq", group=_group(given), ordered=ordered)


def _awq(given: dict[str, Any]) -> Scheme:
    version = str(given.get("version") or "gemm").lower()
    if version != "gemm":
        raise UnsupportedModel(f"quantization_config: awq of version {shown(repr(version))} is not supported, gemm is")
    bits = _bits(given.get("bits", given.get("w_bit")), (4,), "awq")
    return Scheme("AWQ int4", "awq", bits, group=_group(given, "q_group_size"))


def _group(given: dict[str, Any], other: str = "group_size") -> int:
    """Inputs under one scale; 0: all of them, or not said."""
    size = given.get("group_size", given.get(other))
    if size is None or size == -1:
        return 0
    if not isinstance(size, int) or isinstance(size, bool) or size < 1:
        raise UnsupportedModel(f"quantization_config: group_size {shown(repr(size))} is not supported")
    return size


def _fp8(given: dict[str, Any]) -> Scheme:
    block = given.get("weight_block_size")
    if block is not None and block != FP8_BLOCK:
        raise UnsupportedModel(f"quantization_config: weight_block_size {shown(repr(block))}: {FP8_BLOCK} is supported")
    return Scheme("FP8" if block is None else "FP8 in blocks", "plain", 8)


def _fbgemm(given: dict[str, Any]) -> Scheme:
    return Scheme("FP8", "plain", 8)


def _bitsandbytes(given: dict[str, Any]) -> Scheme:
    """llm_int8_skip_modules need no look: a module without scales has numbers."""
    if given.get("load_in_8bit"):
        return Scheme("bitsandbytes int8", "int8 scb", 8)
    kind = given.get("bnb_4bit_quant_type", "fp4")
    if not given.get("load_in_4bit") or kind != "nf4":
        raise UnsupportedModel(
            f"quantization_config: bitsandbytes of {shown(repr(kind))} is not supported, nf4 and int8 are"
        )
    return Scheme("NF4", "nf4", 4)


def _auto_round(given: dict[str, Any]) -> Scheme:
    """Packed as GPTQ or AWQ has it; zero points less one where that is named."""
    form = str(given.get("packing_format") or "auto_round:auto_gptq").removeprefix("auto_round:")
    other = given.get("extra_config")
    every = [given, *(other.values() if isinstance(other, dict) else ())]
    kinds = [(each.get("bits", given.get("bits")), _group(given | each)) for each in every if isinstance(each, dict)]
    kinds = [kind for kind in kinds if kind[0] not in (16, 32)]  # modules of numbers
    if form not in ("auto_gptq", "gptqmodel", "auto_round", "auto_awq") or any(kind != kinds[0] for kind in kinds):
        told = ", ".join(f"{bits} bits by {group}" for bits, group in kinds[:4])
        raise UnsupportedModel(
            f"quantization_config: auto-round's {shown(repr(form))} of {shown(told)} is not supported; auto_gptq, "
            f"gptqmodel and auto_awq of one number of bits and one group_size are"
        )
    bits, group = kinds[0] if kinds else (None, 0)
    if form == "auto_awq":
        return Scheme("AWQ int4", "awq", _bits(bits, (4,), "auto-round"), group=group)
    bits = _bits(bits, (4, 8), "auto-round")
    return Scheme(f"AutoRound int{bits}", "gptq", bits, zeros_less_one=form == "auto_gptq", group=group)


def _mxfp4(given: dict[str, Any]) -> Scheme:
    """modules_to_not_convert need no look: a module without blocks has numbers."""
    return Scheme("MXFP4", "mxfp4", 4)


def _compressed(given: dict[str, Any]) -> Scheme:
    for name in ("transform_config", "sparsity_config"):
        said = given.get(name)
        if said and not (isinstance(said, dict) and said.get("format") == "dense"):
            raise UnsupportedModel(f"quantization_config: {name} is not supported")
    groups = given.get("config_groups")
    found = [
        each
        for each in (groups.values() if isinstance(groups, dict) else ())
        if isinstance(each, dict) and isinstance(each.get("weights"), dict)
    ]
    if not found:
        raise UnsupportedModel("quantization_config: config_groups must say of what kind weights are")
    kinds = list(dict.fromkeys(_of_group(each, each.get("format") or given.get("format")) for each in found))
    if len(kinds) > 1 and all(kind.name in ("W8A8", "int8") for kind in kinds):  # all groups round rows, or none
        kinds = [Scheme("int8", "plain", 8)]
    return _together(kinds, "config_groups")


def _together(kinds: list[Scheme], field: str) -> Scheme:
    """One scheme of several, which no two may have in one layout: tensors would not tell which it is."""
    if len({kind.layout for kind in kinds}) < len(kinds):
        told = ", ".join(kind.name for kind in kinds)
        raise UnsupportedModel(f"quantization_config: {field} of {told} in one checkpoint is not supported")
    first, *others = kinds
    return replace(first, others=tuple(others))


def _of_group(group: dict[str, Any], form: Any) -> Scheme:
    """Of a group of compressed-tensors, in this format."""
    weights = group["weights"]
    kind, bits = str(weights.get("type", "int")), weights.get("num_bits")
    size = _group(weights) if weights.get("strategy", "group") == "group" else 0
    if weights.get("dynamic"):
        raise UnsupportedModel("quantization_config: dynamic weights are not supported")
    if form == PACKED and kind == "int":
        bits = _bits(bits, (4, 8), PACKED)
        ordered, zeros = weights.get("actorder") in (True, "group"), weights.get("symmetric", True) is False
        return Scheme(f"W{bits}A16", "packed", bits, group=size, ordered=ordered, zeros=zeros)
    if form in (NVFP4, MXFP4) and kind == "float" and weights.get("symmetric", True) is not False:
        bits = _bits(bits, (4,), str(form))
        return Scheme("NVFP4", "nvfp4", bits) if form == NVFP4 else Scheme("MXFP4", "packed mxfp4", bits)
    if form in PLAIN and kind in ("int", "float"):
        bits = _bits(bits, (8,), str(form))
        if kind == "int":
            rounds = _rounds_rows(group)
            return Scheme("W8A8" if rounds else "int8", "plain", bits, rounds_rows=rounds, group=size)
        return Scheme("MXFP8" if form == "mxfp8-quantized" else "FP8", "plain", bits)
    raise UnsupportedModel(
        f"quantization_config: format {shown(repr(form))} of {shown(kind)} weights is not supported; "
        f"supported: {PACKED} of int, {NVFP4}, {MXFP4}, {', '.join(PLAIN)}"
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


def _modelopt(given: dict[str, Any]) -> Scheme:
    """ModelOpt's, each module's own algorithm where they differ. Its scales of activations are not used."""
    algorithm, layers = given.get("quant_algo"), given.get("quantized_layers")
    found = [str(algorithm)]
    if algorithm == "MIXED_PRECISION" and isinstance(layers, dict) and layers:
        found = [str(each.get("quant_algo") if isinstance(each, dict) else None) for each in layers.values()]
    for each in found:
        if each not in MODELOPT:
            raise UnsupportedModel(
                f"quantization_config: quant_algo {shown(repr(each))} is not supported; supported: "
                f"{', '.join(MODELOPT)}, and MIXED_PRECISION of these"
            )
    return _together([Scheme(*kind) for kind in dict.fromkeys(MODELOPT[each] for each in found)], "quantized_layers")


_METHODS: dict[str, Callable[[dict[str, Any]], Scheme]] = {
    "gptq": _gptq, "awq": _awq, "compressed-tensors": _compressed, "fp8": _fp8, "mxfp4": _mxfp4, "modelopt": _modelopt,
    "fbgemm_fp8": _fbgemm, "bitsandbytes": _bitsandbytes, "auto-round": _auto_round, "intel/auto-round": _auto_round,
}  # fmt: skip
