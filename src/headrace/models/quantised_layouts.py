"""How quantised checkpoints in safetensors lay out a matrix: the tensors of a module taken apart (kernels.formats).

N: outputs, K: inputs, G: inputs of a group. Every layout has `parts`, the ends of the names of its tensors beside the
module's, and unpacks them to `Coded`:
  gptq   qweight int32 [K / c, N], c codes a word, lowest bits first; qzeros int32 [K / G, N / c] minus 1 (format gptq)
         or as they are (gptq_v2); scales [K / G, N]; g_idx int32 [K], the group of each input.
  awq    qweight int32 [K, N / 8] with outputs in the order 0 2 4 6 1 3 5 7 of each eight; qzeros [K / G, N / 8] so too;
         scales [K / G, N].
  packed compressed-tensors' weight_packed int32 [N, K / c]; weight_scale [N, K / G] or [N, 1]; weight_zero_point int32
         [N / c, K / G]; weight_g_idx.
  nvfp4  weight_packed uint8 [N, K / 2], of two inputs next to each other the first in the lower four bits; weight_scale
         float8_e4m3fn [N, K / 16], over weight_global_scale of all. ModelOpt's (nvfp4 scale_2): weight, weight_scale,
         times weight_scale_2.
  packed mxfp4  weight_packed so; weight_scale uint8 [N, K / 32], powers of 2.
  mxfp4  blocks uint8 [N, K / 32, 16], of two inputs next to each other the first in the lower four bits; scales uint8
         [N, K / 32], powers of 2.
  nf4    weight [N K / 2, 1] of bitsandbytes, of two inputs next to each other the first in the upper four bits;
         weight.absmax fp32 of `blocksize` inputs each, or uint8 under weight.nested_quant_map [256] and
         weight.nested_absmax; weight.quant_state.bitsandbytes__nf4: JSON that says the sizes.
  int8 scb  weight int8 [N, K], SCB fp32 [N], 127 times the scales.
  plain  weight int8 or float8_e4m3fn [N, K] with weight_scale [N, K / G], [N, 1], [1] or blocks, or weight_scale_inv;
         of MXFP8 uint8 [N, K / 32], powers of 2.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from headrace.kernels.formats import FORMATS, NF4, NUMBERS, Coded, Format
from headrace.logs import shown
from headrace.models.quantised import Scheme
from headrace.types import UnsupportedModel

Tensors = Mapping[str, Tensor]
FLOATS = (torch.float16, torch.bfloat16, torch.float32)
AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)
"""Where each of eight outputs lies in a word."""


def coded(scheme: Scheme, tensors: Tensors, rows: Tensor | None) -> Coded:
    """The matrix of a module, or its rows of these numbers. Raises ValueError for tensors that do not fit together."""
    try:
        return _LAYOUTS[scheme.layout](scheme, tensors, rows)
    except (
        RuntimeError,
        IndexError,
        KeyError,
        TypeError,
        ZeroDivisionError,
    ) as error:  # torch's, over shapes and types; of JSON
        raise ValueError(f"its tensors do not fit together ({shown(error)})") from None


def unpacked(words: Tensor, bits: int) -> Tensor:
    """uint8 [..., n * 32 / bits] of words int32 [..., n], the lowest bits first."""
    each = torch.arange(0, 32, bits, dtype=torch.int32)
    return (words[..., None] >> each & (1 << bits) - 1).to(torch.uint8).flatten(-2)


def _some(x: Tensor, rows: Tensor | None) -> Tensor:
    return x if rows is None else x[rows]


def _of_type(tensors: Tensors, name: str, *types: torch.dtype) -> Tensor:
    """One of them. Raises ValueError where it is of another type."""
    if tensors[name].dtype not in types:
        told = " or ".join(str(each).removeprefix("torch.") for each in types)
        raise ValueError(f"{name} must be {told}, it is {str(tensors[name].dtype).removeprefix('torch.')}")
    return tensors[name]


def _gptq(scheme: Scheme, tensors: Tensors, rows: Tensor | None) -> Coded:
    codes = unpacked(_of_type(tensors, "qweight", torch.int32).T.contiguous(), scheme.bits)
    scales = _of_type(tensors, "scales", *FLOATS).T
    zeros = unpacked(_of_type(tensors, "qzeros", torch.int32), scheme.bits).T.int()
    order = _order(scheme, tensors.get("g_idx"), codes.shape[1], scales.shape[1])
    return _whole_numbers(scheme, codes, scales, zeros + (1 if scheme.zeros_less_one else 0), rows, order)


def _awq(scheme: Scheme, tensors: Tensors, rows: Tensor | None) -> Coded:
    def columns(words: Tensor) -> Tensor:
        """uint8 [N, K or groups] of words [.., N / 8]."""
        each = unpacked(words, 4).unflatten(-1, (-1, 8))[..., list(AWQ_ORDER)]
        return each.flatten(-2).T

    codes, zeros = (columns(_of_type(tensors, name, torch.int32)) for name in ("qweight", "qzeros"))
    return _whole_numbers(scheme, codes, _of_type(tensors, "scales", *FLOATS).T, zeros.int(), rows, None)


def _packed(scheme: Scheme, tensors: Tensors, rows: Tensor | None) -> Coded:
    shape = [int(size) for size in tensors["weight_shape"]]
    codes = unpacked(_of_type(tensors, "weight_packed", torch.int32), scheme.bits)[:, : shape[1]]
    scales, zeros = _of_type(tensors, "weight_scale", *FLOATS), None
    if "weight_zero_point" in tensors:
        points = unpacked(_of_type(tensors, "weight_zero_point", torch.int32).T.contiguous(), scheme.bits).T
        zeros = points[: shape[0]].int()
    elif scheme.zeros:
        raise ValueError("there are no zero points (weight_zero_point), which config.json says there are")
    order = _order(scheme, tensors.get("weight_g_idx"), codes.shape[1], scales.shape[1])
    return _whole_numbers(scheme, codes, scales, zeros, rows, order)


def _order(scheme: Scheme, groups: Tensor | None, inputs: int, count: int) -> Tensor | None:
    """int32 [K]: inputs by their groups; None where they lie so already."""
    if groups is None or groups.numel() == 0 or int(groups.max()) < 0:
        if scheme.ordered:
            raise ValueError("there is no g_idx, which config.json says there is")
        return None
    size = inputs // count
    fits = groups.shape == (inputs,) and int(groups.min()) >= 0 and int(groups.max()) < count
    if not fits or bool((torch.bincount(groups, minlength=count) != size).any()):
        raise ValueError(f"g_idx does not put {size} inputs into each of {count} groups")
    if torch.equal(groups.long(), torch.arange(inputs) // size):
        return None
    return groups.argsort(stable=True).int()


def _whole_numbers(
    scheme: Scheme, codes: Tensor, scales: Tensor, zeros: Tensor | None, rows: Tensor | None, order: Tensor | None
) -> Coded:
    """Codes uint8 [N, K] from 0 on, scales [N, K / G], zero points (None: the middle) of the whole matrix, of which
    the rows of these numbers are taken: the format is the same for each tensor rank's share."""
    middle = 1 << scheme.bits - 1
    if len(scales) != len(codes) or (zeros is not None and zeros.shape != scales.shape):
        told = "" if zeros is None else f", zero points {list(zeros.shape)}"
        raise ValueError(f"codes are {list(codes.shape)}, scales {list(scales.shape)}{told}")
    codes, scales = _some(codes, rows), _some(scales, rows)
    codes = (codes ^ middle if scheme.bits == 8 else codes - middle).view(torch.int8)
    codes = codes if order is None else codes[:, order.long()]
    smalls = None if zeros is None or bool((zeros == middle).all()) else _some(zeros, rows) - middle
    if smalls is not None and bool(((smalls < -128) | (smalls > 127)).any()):
        raise ValueError("a zero point is beyond 8 bits")
    name = f"W{scheme.bits}{' zeros' if smalls is not None else ''}"
    form = _grouped(scheme, FORMATS[name], codes, scales)
    return Coded(
        form,
        codes.contiguous(),
        scales.contiguous(),
        smalls=smalls if smalls is None else smalls.to(torch.int8),
        order=order,
    )


def _grouped(scheme: Scheme, form: Format, codes: Tensor, scales: Tensor) -> Format:
    group, rest = divmod(codes.shape[1], max(1, scales.shape[1]))
    if scales.dim() != 2 or rest or group % 16 or scheme.group not in (0, group):
        said = f", {scheme.group} each by config.json," if scheme.group else ""
        raise UnsupportedModel(f"{codes.shape[1]} inputs under {scales.shape[-1]} scales{said} are not read")
    return form.grouped(group, NUMBERS[scales.dtype])


def _plain(scheme: Scheme, tensors: Tensors, rows: Tensor | None) -> Coded:
    whole = scheme.name in ("int8", "W8A8")
    weight = _of_type(tensors, "weight", torch.int8 if whole else torch.float8_e4m3fn)
    if "weight_zero_point" in tensors and bool(tensors["weight_zero_point"].any()):
        raise UnsupportedModel(f"{scheme.name} with zero points is not read")
    named = "weight_scale" if "weight_scale" in tensors else "weight_scale_inv"
    scales = _of_type(tensors, named, *FLOATS, *(() if whole else (torch.uint8, torch.float8_e8m0fnu)))
    if scales.dtype == torch.float8_e8m0fnu:
        scales = scales.view(torch.uint8)
    scales = _spread(scales, *weight.shape)
    codes, scales = _some(weight, rows).contiguous(), _some(scales, rows)
    if whole:
        if scales.shape[1] == 1:
            return Coded(FORMATS["w8a8" if scheme.rounds_rows else "int8"], codes, scales.float())
        return Coded(_grouped(scheme, FORMATS["W8"], codes, scales), codes, scales.contiguous())
    raw = codes.view(torch.int8)
    if bool(((raw & 127) == 127).any()):
        raise ValueError("a weight is NaN")
    return Coded(_grouped(scheme, FORMATS["FP8"], codes, scales), raw, scales.contiguous())


def _mxfp4(scheme: Scheme, tensors: Tensors, rows: Tensor | None) -> Coded:
    blocks, scales = _some(tensors["blocks"], rows), _some(tensors["scales"], rows)
    if blocks.dtype != torch.uint8 or scales.dtype != torch.uint8:
        raise ValueError(f"blocks and scales must be uint8, they are {blocks.dtype} and {scales.dtype}")
    codes = torch.stack((blocks & 15, blocks >> 4), -1).flatten(1)
    return Coded(FORMATS["MXFP4"], codes.view(torch.int8), scales.contiguous())


def _packed_mxfp4(scheme: Scheme, tensors: Tensors, rows: Tensor | None) -> Coded:
    return _of_halves("MXFP4", tensors["weight_packed"], tensors["weight_scale"], torch.uint8, rows)


def _nvfp4(scheme: Scheme, tensors: Tensors, rows: Tensor | None) -> Coded:
    if scheme.layout == "nvfp4":
        packed, scale = tensors["weight_packed"], 1 / tensors["weight_global_scale"].float()
    else:
        packed, scale = tensors["weight"], tensors["weight_scale_2"].float()
    return _of_halves("NVFP4", packed, tensors["weight_scale"], torch.float8_e4m3fn, rows, scale)


def state_of(stored: Tensor) -> tuple[int, int, int, int, float]:
    """Outputs, inputs, inputs of a block, blocks of a block of blocks, and what is added to their scales, of a matrix
    of bitsandbytes. Raises ValueError for JSON that does not say so."""
    try:
        said = json.loads(bytes(stored.tolist()))
        outputs, inputs = said["shape"]
        sizes = outputs, inputs, said["blocksize"], said.get("nested_blocksize", 1)
        offset = float(said.get("nested_offset", 0.0))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"its quant_state does not say its sizes ({shown(error)})") from None
    if not all(isinstance(size, int) and 0 < size < 1 << 31 for size in sizes) or not math.isfinite(offset):
        raise ValueError(f"its quant_state has sizes {shown(repr(said))}")
    return (*sizes, offset)


def _nf4(scheme: Scheme, tensors: Tensors, rows: Tensor | None) -> Coded:
    outputs, inputs, block, nested, offset = state_of(tensors["weight.quant_state.bitsandbytes__nf4"])
    if inputs % block or block % 16:
        raise UnsupportedModel(f"NF4 of {inputs} inputs in blocks of {block} is not read")
    if (tensors["weight.quant_map"].bfloat16() != torch.tensor(NF4, dtype=torch.bfloat16)).any():
        raise ValueError("its numbers are not those of NF4")
    scales = tensors["weight.absmax"]
    if scales.dtype == torch.uint8:
        each = tensors["weight.nested_absmax"].float().repeat_interleave(nested)[: len(scales)]
        scales = tensors["weight.nested_quant_map"].float()[scales.long()] * each + offset
    scales = _some(scales.float().view(outputs, inputs // block), rows).contiguous()
    packed = _some(tensors["weight"].contiguous().view(torch.uint8).view(outputs, inputs // 2), rows)
    codes = torch.stack((packed >> 4, packed & 15), -1).flatten(1)
    return Coded(FORMATS["NF4"].grouped(block, "fp32"), codes.view(torch.int8), scales)


def _int8_scb(scheme: Scheme, tensors: Tensors, rows: Tensor | None) -> Coded:
    weight, scales = _of_type(tensors, "weight", torch.int8), tensors["SCB"].float().view(-1, 1) / 127
    return Coded(FORMATS["int8"], _some(weight, rows).contiguous(), _some(scales, rows).contiguous())


def _of_halves(
    name: str, packed: Tensor, scales: Tensor, dtype: torch.dtype, rows: Tensor | None, scale: Tensor | None = None
) -> Coded:
    """A matrix of codes e2m1 under scales of that type; scale: one number that those of groups are multiplied by."""
    if scales.dtype == torch.float8_e8m0fnu:
        scales = scales.view(torch.uint8)
    if packed.dtype != torch.uint8 or scales.dtype != dtype:
        raise ValueError(f"codes and scales must be uint8 and {dtype}, they are {packed.dtype} and {scales.dtype}")
    packed, scales = _some(packed, rows), _some(scales, rows)
    codes = torch.stack((packed & 15, packed >> 4), -1).flatten(1).view(torch.int8)
    if scale is None:
        return Coded(FORMATS[name], codes, scales.contiguous())
    form, group = FORMATS[name].of_rows(codes.shape[1]), FORMATS[name].group
    if codes.shape[1] % group or scale.numel() != 1:
        raise ValueError(f"{name} takes inputs in multiples of {group} under one scale, got {list(codes.shape)}")
    every = scale.reshape(1, 1).expand(len(codes), 1)
    return Coded(form, codes, every.contiguous(), scales.contiguous().view(torch.int8))


def _spread(scales: Tensor, outputs: int, inputs: int) -> Tensor:
    """[N, scales of a row], from one for all, some for each row, or one for each block of 128 x 128."""
    if scales.numel() == 1:
        return scales.reshape(1, 1).expand(outputs, 1)
    scales = scales.view(len(scales), -1)
    if len(scales) == outputs:
        return scales
    if scales.shape != (-(-outputs // BLOCK), -(-inputs // BLOCK)):
        raise ValueError(f"scales {list(scales.shape)} do not fit a matrix {[outputs, inputs]}")
    each = math.gcd(inputs, BLOCK)  # inputs of a group, of which a last block that is narrower has fewer
    return scales.repeat_interleave(BLOCK, 0)[:outputs].repeat_interleave(BLOCK // each, 1)[:, : inputs // each]


BLOCK = 128
_LAYOUTS: dict[str, Callable[[Scheme, Tensors, Tensor | None], Coded]] = {
    "gptq": _gptq, "awq": _awq, "packed": _packed, "plain": _plain, "mxfp4": _mxfp4, "nvfp4": _nvfp4,
    "nvfp4 scale_2": _nvfp4, "packed mxfp4": _packed_mxfp4, "nf4": _nf4, "int8 scb": _int8_scb,
}  # fmt: skip
