"""Compiles the Triton kernels for an H100 (sm_90), without one: PTX and machine code, but nothing runs.

Prints each kernel's name and whether its products are tensor-core instructions. Run in a process of its own by
test_triton.py, whose kernels are interpreted.
"""

from __future__ import annotations

import json
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from headrace.kernels.triton import attention_kernels, draw_kernels, sample_kernels, tile_schedule
from tests.support import compiled_rows

POINTERS = {"items": "*i32", "tasks": "*i32", "positions": "*i32", "slots": "*i32", "offsets": "*i32", "bases": "*i32"}
POINTERS |= {"masks": "*i32", "tokens": "*i32", "counters": "*i64", "leading": "*i64", "leaders": "*i64"}
FP64 = ("asked", "peaks", "found", "bins", "kept", "limits", "strays", "before", "states", "after")
FP32 = ("logits", "acc_of", "m_of", "z_of", "sinks")
NUMBERS = {"factor": "fp32", "cap": "fp32"}
SIZES = ("q_stride", "k_stride", "v_stride", "stride", "bias_len", "window", "rows", "width")
SIZES += ("words", "blocks", "shift", "count")
HEADS = {"HEADS": 8, "D": 128, "P": 128, "SPAN": tile_schedule.SPAN, "WINDOW": False}
WALK = HEADS | {"KV_HEADS": 2, "PART": 4, "PARTS": 1, "LANES": tile_schedule.LANES, "PRECISION": "ieee"}


BLOCKED = {"BLOCK": 2048}
SAMPLING: dict[str, dict[str, Any]] = {
    "greatest_of_blocks": BLOCKED,
    "greatest": {"BLOCKS": 64},
    "weigh": BLOCKED | {"PIECE": 128},
    "limit": {"BLOCKS": 64},
    "descend": {"FIRST": False, "STAGE": 1, "BLOCKS": 64},
    "narrow": BLOCKED | {"STAGE": 1, "PIECE": 128},
    "cut": {"WIDE": False, "STAGE": 1},
    "strays_of_blocks": BLOCKED,
    "weigh_before_stray": BLOCKED | {"BLOCKS": 64},
    "judge_stray": {"BLOCKS": 64},
    "pick": BLOCKED | {"BLOCKS": 64},
    "rank": BLOCKED,
    "leaders_of_blocks": BLOCKED,
    "leaders_of_rows": {"SIZE": 2048},
}


def kind_of(name: str) -> str:
    if name in SIZES:
        return "i32"
    if name in FP64:
        return "*fp64"
    return NUMBERS.get(name) or POINTERS.get(name) or ("*fp32" if name in FP32 else "*bf16")


def compiled(kernel: Any, constants: dict[str, Any], **options: int) -> str:
    """The kernel's PTX."""
    names = kernel.arg_names
    signature = {name: "constexpr" if name in constants else kind_of(name) for name in names}
    if kernel is attention_kernels.walk:
        signature |= {"bias": "*fp32", "count": "*i32"}
    return ptx_of(kernel, signature, constants, options)


def ptx_of(kernel: Any, signature: dict[str, str], constants: dict[str, Any], options: dict[str, int]) -> str:
    values = {(kernel.arg_names.index(name),): value for name, value in constants.items()}
    source = ASTSource(kernel, signature, constexprs=values)
    return str(triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options).asm["ptx"])


def main() -> None:
    found: dict[str, bool] = {}

    def note(name: str, ptx: str) -> None:
        found[name] = "wgmma.mma_async" in ptx

    for split, resume in ((True, False), (True, True), (False, False)):
        for bias in (False, True):
            constants = WALK | {"SPLIT": split, "RESUME": resume, "WINDOW": bias, "BIAS": bias, "CAP": bias}
            note(
                f"walk {split} {resume} {bias}", compiled(attention_kernels.walk, constants, num_warps=4, num_stages=3)
            )
    note("merge_spans", compiled(attention_kernels.merge_spans, HEADS | {"AHEAD": 8}))
    note("store", compiled(attention_kernels.store, {"KV_HEADS": 2, "D": 80, "P": 128}, num_warps=1))
    for case in compiled_rows.cases(90):
        note(case.name, ptx_of(case.kernel, case.signature(), case.constants, case.options))
    for name, constants in SAMPLING.items():
        note(name, compiled(getattr(sample_kernels, name, None) or getattr(draw_kernels, name), constants))
    print(json.dumps(found))


if __name__ == "__main__":
    main()
