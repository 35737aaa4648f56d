"""Compiles the kernels of codes and experts for GPUs that need not be there: A100 (sm_80), H100 (sm_90), B200 (sm_100).

Prints for each whether its products are tensor-core instructions. Run in a process of its own by test_gpu_weights.py,
whose kernels are interpreted.
"""

from __future__ import annotations

import json
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from headrace.kernels.triton import adapted_kernels, int8_kv_kernels, weight_kernels, weights
from headrace.kernels.triton.launch_entries import CONTRACTED
from tests.support.compiled_rows import Compiled

PRODUCTS = {80: "mma.sync", 90: "wgmma.mma_async", 100: "tcgen05.mma"}
TYPES = {
    "scales": "*fp32", "offsets": "*fp32", "table": "*i64", "begin": "*i32", "order": "*i32", "logits": "*fp32",
    "expert": "*i32", "share": "*fp32", "place": "*i32", "parts": "*fp32", "x": "*bf16", "bias": "*bf16",
    "out": "*bf16", "y": "*bf16", "k": "*i8", "v": "*i8", "k_new": "*bf16", "v_new": "*bf16", "k_scale": "*fp32",
    "v_scale": "*fp32", "slots": "*i32", "correction": "*fp32", "scale": "fp32", "made": "*bf16", "change": "*bf16",
    "numbers": "*i32", "has": "*i32",
}  # fmt: skip
"""Of arguments that are no 32-bit numbers."""
FORMS = {
    "int8": ("int8", 8, 0, False, 64), "int4": ("int4", 4, 64, False, 64), "Q4_K": ("uint4", 4, 32, True, 32),
    "Q6_K": ("int8", 8, 16, False, 16), "Q2_K": ("uint4", 8, 16, True, 16),
    "MXFP4": ("e2m1", 4, 32, False, 32), "FP8": ("e4m3", 8, 128, False, 64),
    "NVFP4": ("e2m1", 8, 16, False, 16),
    "numbers": ("plain", 16, 0, False, 64),
}  # fmt: skip
"""CODES, BITS, GROUP, OFFSETS and STEP of weight_kernels.product."""

ROUTE = {"CHOSEN": 4, "P": 32, "C": 4, "SHARED": True}
SOFTMAX = {"G": 1, "SIGMOID": False, "CORRECTED": False, "GROUPS": 1, "MET": 1, "SUMMED": 1}
GROUPS = {"G": 8, "SIGMOID": True, "CORRECTED": True, "GROUPS": 8, "MET": 4, "SUMMED": 2}
SMALL: list[tuple[str, Any, dict[str, Any], dict[str, int]]] = [
    ("add_segments", weight_kernels.add_segments, {"WIDTH": 1024, "SEGMENTS": 8, "SCALED": True, "BIAS": True}, {}),
    ("route", weight_kernels.route, ROUTE | SOFTMAX, {"num_warps": 1}),
    ("route by groups", weight_kernels.route, ROUTE | GROUPS, {"num_warps": 1}),
    ("arrange", weight_kernels.arrange, {"BLOCK": 64, "EXPERTS": 64}, {}),
    ("combine", weight_kernels.combine, {"CHOSEN": 4, "COLUMNS": 1024}, {}),
    ("add_changes", adapted_kernels.add_changes, {"COLUMNS": 1024}, {"num_warps": 4}),
]
"""Kernels without products: name, kernel, constants, options."""


def products() -> list[tuple[str, dict[str, Any], weights.Tile]]:
    found = []
    for name, (codes, bits, group, offsets, step) in FORMS.items():
        few = [(16, 8)] if name == "numbers" else []  # adapters of rows that decode
        for rows, experts in ((16, 0), (2000, 32 if name in ("int4", "numbers") else 0), *few):
            tile = weights.tile_for(rows, torch.bfloat16, torch.device("cpu"), plain=False)
            constants = dict(
                ROWS=tile.rows, COLUMNS=tile.columns, STEP=step, STEPS=tile.steps, CODES=codes, BITS=bits,
                GROUP=group, OFFSETS=offsets, WHOLE=True, BIAS=True, SEGMENTS=1, APART=False, EXPERTS=experts,
                SENT=experts > 0, PRECISION="ieee",
            )  # fmt: skip
            found.append((f"{name}, {rows} rows{' of experts' * (rows == 16 and experts > 0)}", constants, tile))
    return found


def cases() -> list[Compiled]:
    """The same kernels and the smaller ones of experts, for compile_triton."""
    found = []
    for name, constants, tile in products():
        words = {"weight": "*bf16" if constants["BITS"] == 16 else "*i32"}
        options = dict(num_warps=tile.warps, num_stages=tile.stages)
        found.append((f"codes {name}", weight_kernels.product, constants, options, words))
    found += [(name, kernel, constants, options, {}) for name, kernel, constants, options in SMALL]
    return [
        Compiled(name, kernel, constants, options, dict.fromkeys(kernel.arg_names, "i32") | TYPES | types)
        for name, kernel, constants, options, types in found
    ]


def compiled(kernel: Any, constants: dict[str, Any], target: int, types: dict[str, str], **options: int) -> str:
    """The kernel's PTX."""
    names = kernel.arg_names
    given = TYPES | types
    signature = {name: "constexpr" if name in constants else given.get(name, "i32") for name in names}
    values = {(names.index(name),): value for name, value in constants.items()}
    source = ASTSource(kernel, signature, constexprs=values)
    return str(triton.compile(source, target=GPUTarget("cuda", target, 32), options=options | CONTRACTED).asm["ptx"])


def main() -> None:
    found: dict[str, bool] = {}
    for target, instruction in PRODUCTS.items():
        for name, constants, tile in products() if target == 90 else products()[:4]:
            words = {"weight": "*bf16" if constants["BITS"] == 16 else "*i32"}
            options = dict(num_warps=tile.warps, num_stages=tile.stages)
            ptx = compiled(weight_kernels.product, constants, target, words, **options)
            found[f"{name}, sm_{target}"] = instruction in ptx
    for _, kernel, constants, options in SMALL:
        compiled(kernel, constants, 90, {}, **options)
    compiled(int8_kv_kernels.store, {"KV_HEADS": 2, "D": 80, "P": 128}, 90, {"offsets": "*i32"}, num_warps=1)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
