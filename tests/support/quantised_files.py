"""Folders of quantised checkpoints in safetensors, and in transformers' models what they stand for."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedModel

from headrace.kernels.formats import FORMATS as CODED

Tensors = dict[str, Tensor]
Written = tuple[Tensors, Tensor]
"""A module's tensors by the ends of their names, and the matrix [N, K] that they stand for by the format's formula."""


def words(codes: Tensor, bits: int) -> Tensor:
    """int32 [..., n * bits / 32] of codes [..., n], the first in the lowest bits."""
    whole = (codes.long().unflatten(-1, (-1, 32 // bits)) << torch.arange(0, 32, bits)).sum(-1)
    return (whole - (whole >> 31 << 32)).int()


def drawn(weight: Tensor, bits: int, group: int, seed: int, sym: bool) -> tuple[Tensor, Tensor, Tensor]:
    """codes [N, K], zero points [N, K / G] and fp16 scales [N, K / G] of a matrix about as wide as `weight`."""
    made = torch.Generator().manual_seed(seed)
    outputs, inputs = weight.shape
    codes = torch.randint(0, 1 << bits, (outputs, inputs), generator=made)
    half = 1 << bits - 1
    zeros = torch.full((outputs, inputs // group), half)
    if not sym:
        zeros += torch.randint(-3, 4, zeros.shape, generator=made)
    scales = weight.std() / half * 1.7 * (0.5 + torch.rand(zeros.shape, generator=made))
    return codes, zeros, scales.half()


def gptq(
    weight: Tensor, seed: int, bits: int = 4, group: int = 32, sym: bool = False, act_order: bool = False
) -> Written:
    codes, zeros, scales = drawn(weight, bits, group, seed, sym)
    inputs = weight.shape[1]
    g_idx = torch.arange(inputs) // group
    if act_order:
        g_idx = g_idx[torch.randperm(inputs, generator=torch.Generator().manual_seed(seed % 2))]
    tensors = {
        "qweight": words(codes, bits).T.contiguous(),
        "qzeros": words((zeros - 1).T.contiguous(), bits),
        "scales": scales.T.contiguous(),
        "g_idx": g_idx.int(),
    }
    return tensors, scales.float()[:, g_idx] * (codes - zeros[:, g_idx])


def awq(weight: Tensor, seed: int) -> Written:
    codes, zeros, scales = drawn(weight, 4, 64, seed, False)
    each = torch.arange(weight.shape[1]) // 64

    def by_outputs(values: Tensor) -> Tensor:
        """int32 [.., N / 8]: of eight outputs the nibbles hold 0 2 4 6 1 3 5 7."""
        return words(values.T.unflatten(-1, (-1, 8))[..., [0, 2, 4, 6, 1, 3, 5, 7]].flatten(-2), 4)

    tensors = {"qweight": by_outputs(codes), "qzeros": by_outputs(zeros), "scales": scales.T.contiguous()}
    return tensors, scales.float()[:, each] * (codes - zeros[:, each])


def packed(weight: Tensor, seed: int, bits: int = 4, sym: bool = True) -> Written:
    codes, zeros, scales = drawn(weight, bits, 128, seed, sym)
    each = torch.arange(weight.shape[1]) // 128
    tensors = {
        "weight_packed": words(codes, bits),
        "weight_scale": scales.bfloat16(),
        "weight_shape": torch.tensor(weight.shape),
    }
    if not sym:
        tensors["weight_zero_point"] = words(zeros.T.contiguous(), bits).T.contiguous()
    return tensors, scales.bfloat16().float()[:, each] * (codes - zeros[:, each])


def int8(weight: Tensor, seed: int) -> Written:
    scales = (weight.abs().amax(1, keepdim=True) / 127).bfloat16()
    codes = (weight / scales.float()).round().clamp(-127, 127).to(torch.int8)
    return {"weight": codes, "weight_scale": scales}, codes.float() * scales.float()


def fp8(weight: Tensor, seed: int) -> Written:
    scale = weight.abs().max() / 400
    codes = (weight / scale).to(torch.float8_e4m3fn)
    return {"weight": codes, "weight_scale": scale.reshape(1), "input_scale": torch.ones(1)}, codes.float() * scale


def fp8_blocks(weight: Tensor, seed: int) -> Written:
    blocks = -(-weight.shape[0] // 128), weight.shape[1] // 128
    scales = (0.5 + torch.rand(blocks, generator=torch.Generator().manual_seed(seed))) / 2000
    spread = scales.repeat_interleave(128, 0)[: len(weight)].repeat_interleave(128, 1)
    codes = (weight / spread).clamp(-440, 440).to(torch.float8_e4m3fn)
    return {"weight": codes, "weight_scale_inv": scales}, codes.float() * spread


def halves(weight: Tensor, seed: int, group: int) -> tuple[Tensor, Tensor, Tensor]:
    """Of codes e2m1 [N, K]: two in a byte [N, K / 2], what they stand for, and of groups what makes them as wide as
    `weight`."""
    made = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 16, weight.shape, generator=made)
    table = torch.tensor(CODED["MXFP4"].codes.table)
    groups = 0.5 + torch.rand(len(weight), weight.shape[1] // group, generator=made)
    return (codes[:, ::2] | codes[:, 1::2] << 4).to(torch.uint8), table[codes], groups * weight.std() / table.std()


def nvfp4(weight: Tensor, seed: int, divided: bool = True) -> Written:
    packed, values, groups = halves(weight, seed, 16)
    scale = groups.max() / 400
    scales = (groups / scale).to(torch.float8_e4m3fn)
    meant = values * (scales.float() * scale).repeat_interleave(16, 1)
    if divided:
        return {"weight_packed": packed, "weight_scale": scales, "weight_global_scale": 1 / scale.reshape(1)}, meant
    beside = {"weight_scale": scales, "weight_scale_2": scale, "input_scale": torch.tensor(0.5)}
    return {"weight": packed} | beside, meant


def mxfp4(weight: Tensor, seed: int) -> Written:
    packed, values, groups = halves(weight, seed, 32)
    exponents = groups.log2().round()
    meant = values * exponents.exp2().repeat_interleave(32, 1)
    return {"weight_packed": packed, "weight_scale": (exponents + 127).to(torch.uint8)}, meant


def mxfp8(weight: Tensor, seed: int) -> Written:
    exponents = (weight.abs().unflatten(1, (-1, 32)).amax(-1) / 400).log2().ceil()
    spread = exponents.exp2().repeat_interleave(32, 1)
    codes = (weight / spread).to(torch.float8_e4m3fn)
    return {"weight": codes, "weight_scale": (exponents + 127).to(torch.uint8)}, codes.float() * spread


def nf4(weight: Tensor, seed: int, nested: bool = True) -> Written:
    made = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 16, weight.shape, generator=made)
    blocks = codes.numel() // 64
    said: dict[str, Any] = {"quant_type": "nf4", "blocksize": 64, "dtype": "bfloat16", "shape": list(weight.shape)}
    tensors = {"weight.quant_map": torch.tensor(NF4)}
    if nested:
        said |= {"nested_blocksize": 256, "nested_dtype": "float32", "nested_offset": float(weight.std() * 2)}
        each, table = torch.randint(0, 256, (blocks,), generator=made), torch.linspace(-1, 1, 256)
        tops = (0.5 + torch.rand(-(-blocks // 256), generator=made)) * weight.std()
        scales = table[each] * tops.repeat_interleave(256)[:blocks] + said["nested_offset"]
        tensors |= {"weight.absmax": each.to(torch.uint8), "weight.nested_absmax": tops}
        tensors["weight.nested_quant_map"] = table
    else:
        scales = (1 + torch.rand(blocks, generator=made)) * weight.std()
        tensors["weight.absmax"] = scales
    state = torch.tensor(list(json.dumps(said).encode()), dtype=torch.uint8)
    packed = (codes.flatten()[::2] << 4 | codes.flatten()[1::2]).to(torch.uint8)[:, None]
    values = torch.tensor(NF4).bfloat16().float()[codes].view(blocks, 64) * scales[:, None]
    return tensors | {"weight": packed, "weight.quant_state.bitsandbytes__nf4": state}, values.view(weight.shape)


def int8_scb(weight: Tensor, seed: int) -> Written:
    top = weight.abs().amax(1)
    codes = (weight / top[:, None] * 127).round().to(torch.int8)
    tensors = {"weight": codes, "SCB": top, "weight_format": torch.tensor(0, dtype=torch.uint8)}
    return tensors, codes.float() * (top / 127)[:, None]


def fp8_rows(weight: Tensor, seed: int) -> Written:
    scales = weight.abs().amax(1, keepdim=True) / 400
    codes = (weight / scales).to(torch.float8_e4m3fn)
    return {"weight": codes, "weight_scale": scales}, codes.float() * scales


def fp8_powers(weight: Tensor, seed: int) -> Written:
    """FP8 in blocks whose scales are powers of 2."""
    blocks = -(-weight.shape[0] // 128), weight.shape[1] // 128
    exponents = torch.randint(114, 118, blocks, generator=torch.Generator().manual_seed(seed), dtype=torch.uint8)
    spread = exponents.repeat_interleave(128, 0)[: len(weight)].repeat_interleave(128, 1)
    steps = torch.exp2(spread.float() - 127)
    codes = (weight / steps).clamp(-440, 440).to(torch.float8_e4m3fn)
    return {"weight": codes, "weight_scale_inv": exponents.view(torch.float8_e8m0fnu)}, codes.float() * steps


def in_turn(*writers: Callable[[Tensor, int], Written]) -> Callable[[Tensor, int], Written]:
    """Matrices stored by one of these each."""
    return lambda weight, seed: writers[seed % len(writers)](weight, seed)


def weights_of(kind: str, bits: int, **more: Any) -> dict[str, Any]:
    return {"config_groups": {"group_0": {"targets": ["Linear"], "weights": {"type": kind, "num_bits": bits, **more}}}}


def w8a8(**more: Any) -> dict[str, Any]:
    """int8 of each output, and of each row as it passes, unless `more` of the activations says something else."""
    rows = {"type": "int", "num_bits": 8, "strategy": "token", "dynamic": True, "symmetric": True}
    groups = weights_of("int", 8, strategy="channel")
    groups["config_groups"]["group_0"]["input_activations"] = rows | more
    return COMPRESSED | {"format": "int-quantized"} | groups


NF4 = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip
BNB = {"quant_method": "bitsandbytes"}
ROUND: dict[str, Any] = {"quant_method": "auto-round", "bits": 4, "group_size": 32}
COMPRESSED = {"quant_method": "compressed-tensors"}
FOURTHS = weights_of("float", 4)
MIXED: dict[str, Any] = {
    "config_groups": {
        name: weights_of(kind, bits)["config_groups"]["group_0"] | {"format": form}
        for name, kind, bits, form in (
            ("a", "float", 8, "float-quantized"), ("b", "float", 4, "nvfp4-pack-quantized"),
            ("c", "int", 4, "pack-quantized"), ("d", "float", 4, "mxfp4-pack-quantized"),
        )
    }
}  # fmt: skip
LAYERS = {"quantized_layers": {"a": {"quant_algo": "NVFP4", "group_size": 16}, "b": {"quant_algo": "FP8"}}}
FORMATS: dict[str, tuple[dict[str, Any], Callable[[Tensor, int], Written]]] = {
    "gptq": ({"quant_method": "gptq", "bits": 4, "group_size": 32}, gptq),
    "gptq symmetric": (
        {"quant_method": "gptq", "bits": 4, "group_size": 128}, lambda w, s: gptq(w, s, group=128, sym=True)
    ),
    "gptq act-order": (
        {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": True},
        lambda w, s: gptq(w, s, act_order=True),
    ),
    "gptq of 8 bits": ({"quant_method": "gptq", "bits": 8, "group_size": 64}, lambda w, s: gptq(w, s, 8, 64)),
    "awq": ({"quant_method": "awq", "bits": 4, "group_size": 64, "version": "gemm"}, awq),
    "W4A16": (COMPRESSED | {"format": "pack-quantized"} | weights_of("int", 4), packed),
    "W4A16 with zeros": (
        COMPRESSED | {"format": "pack-quantized"} | weights_of("int", 4, symmetric=False),
        lambda w, s: packed(w, s, sym=False),
    ),
    "W8A16": (COMPRESSED | {"format": "pack-quantized"} | weights_of("int", 8), lambda w, s: packed(w, s, 8)),
    "W8": (COMPRESSED | {"format": "int-quantized"} | weights_of("int", 8), int8),
    "W8A8, activations of one scale": (w8a8(strategy="tensor", dynamic=False), int8),
    "FP8": (COMPRESSED | {"format": "float-quantized"} | weights_of("float", 8), fp8),
    "FP8 blocks": ({"quant_method": "fp8", "weight_block_size": [128, 128]}, fp8_blocks),
    "NVFP4": (COMPRESSED | {"format": "nvfp4-pack-quantized"} | FOURTHS, nvfp4),
    "MXFP4": (COMPRESSED | {"format": "mxfp4-pack-quantized"} | FOURTHS, mxfp4),
    "MXFP8": (COMPRESSED | {"format": "mxfp8-quantized"} | weights_of("float", 8), mxfp8),
    "mixed": (COMPRESSED | {"format": "mixed-precision"} | MIXED, in_turn(nvfp4, fp8, mxfp4, packed)),
    "ModelOpt NVFP4": ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, lambda w, s: nvfp4(w, s, False)),
    "bitsandbytes NF4": (BNB | {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}, nf4),
    "bitsandbytes NF4, one scale": (
        BNB | {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}, lambda w, s: nf4(w, s, False)
    ),
    "bitsandbytes int8": (BNB | {"load_in_8bit": True}, int8_scb),
    "FP8 by rows": ({"quant_method": "fbgemm_fp8"}, fp8_rows),
    "FP8 blocks, powers of 2": (
        {"quant_method": "fp8", "weight_block_size": [128, 128], "scale_fmt": "ue8m0"}, fp8_powers
    ),
    "AutoRound": (ROUND | {"packing_format": "auto_round:auto_gptq", "extra_config": {"a": {"bits": 16}}}, gptq),
    "AutoRound, AWQ": (ROUND | {"group_size": 64, "packing_format": "auto_round:auto_awq"}, awq),
    "ModelOpt FP8": ({"quant_method": "modelopt", "quant_algo": "FP8"}, fp8),
    "ModelOpt mixed": (
        {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION"} | LAYERS,
        in_turn(fp8, lambda w, s: nvfp4(w, s, False)),
    ),
}  # fmt: skip


ROUNDED: tuple[dict[str, Any], Callable[[Tensor, int], Written]] = (w8a8(), int8)
"""The one whose activations are rounded."""
MODULE = "model.layers.1.mlp.up_proj"
PROJECTION = re.compile(r"_proj|\.w[123]\.")
MIXTRALS = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}


def published(model: PreTrainedModel, name: str, parameter: Tensor) -> Iterator[tuple[str, Tensor]]:
    """A parameter by the name that checkpoints have for it; of experts, which transformers fuses, each matrix."""
    mixtral = model.config.model_type in ("mixtral", "minimax_m2")
    name = name.replace(".mlp.", ".block_sparse_moe.") if mixtral else name
    if parameter.dim() != 3 or ".experts." not in name:
        yield name, parameter
        return
    layer, _, fused = name.rpartition(".")
    parts = ("gate_proj", "up_proj") if fused == "gate_up_proj" else ("down_proj",)
    for expert, matrices in enumerate(parameter):
        for part, matrix in zip(parts, matrices.chunk(len(parts)), strict=True):
            yield f"{layer}.{expert}.{MIXTRALS[part] if mixtral else part}.weight", matrix


def write(model: PreTrainedModel, folder: Path, name: str) -> Path:
    """The model's folder with all projections of its layers quantised, and in `model` what they stand for."""
    config, quantise = FORMATS.get(name, ROUNDED)
    folder.mkdir()
    fields = json.loads(model.config.to_json_string()) | {"quantization_config": config, "dtype": "bfloat16"}
    (folder / "config.json").write_text(json.dumps(fields | {"architectures": [type(model).__name__]}))
    tensors: Tensors = {}
    with torch.no_grad():
        corrections = [named for named in model.named_buffers() if named[0].endswith("e_score_correction_bias")]
        every = [*model.named_parameters(), *corrections]
        matrices = [each for named in every for each in published(model, *named)]
        for seed, (each, matrix) in enumerate(matrices):
            if not PROJECTION.search(each) or matrix.dim() == 1:
                tensors[each] = matrix.contiguous()
                continue
            stored, meant = quantise(matrix.detach(), seed)
            matrix.copy_(meant)
            tensors |= {f"{each.removesuffix('.weight')}.{end}": tensor for end, tensor in stored.items()}
    save_file(tensors, folder / "model.safetensors")
    return folder
