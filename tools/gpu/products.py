"""Products with weights beside cuBLAS, on the matrices of Llama-2-7B and Llama-3-8B, by rows of a step."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
from torch.nn import functional as F

from headrace.kernels import ops
from tools.gpu import timing
from tools.gpu.runner import Case, Goal, Row
from tools.gpu.timing import CUDA

MATRICES = {
    "7B qkv": (4096, 12_288), "7B out": (4096, 4096), "7B gate_up": (4096, 22_016), "7B down": (11_008, 4096),
    "7B head": (4096, 32_000), "8B qkv": (4096, 6144), "8B gate_up": (4096, 28_672), "8B down": (14_336, 4096),
    "8B head": (4096, 128_256), "S1 out": (1024, 1024), "S1 down": (2816, 1024),
}  # fmt: skip
"""(inputs, outputs)."""
FEW, MANY = (1, 8, 16, 32), (512, 2048, 8192)
GOAL = 0.85
"""Of the read rate with few rows, of cuBLAS with many."""


def cases() -> Iterator[Case]:
    for name, (inputs, outputs) in MATRICES.items():
        yield Case(f"{name}, many rows", partial(case, name, inputs, outputs, MANY))
        yield Case(f"{name}, few rows", partial(case, name, inputs, outputs, FEW))


@torch.inference_mode()
def case(name: str, inputs: int, outputs: int, rows: tuple[int, ...]) -> Row:
    """One matrix at some numbers of rows. least: the smallest share of all."""
    weight = (torch.randn(outputs, inputs, device=CUDA) * inputs**-0.5).bfloat16()
    packed = ops.pack(weight)
    figures: dict[str, float] = {}
    for count in rows:
        if count == 8192 and outputs > 100_000:
            continue  # no step wants the logits of so many rows
        x = torch.randn(count, inputs, device=CUDA).bfloat16()
        ms = timing.in_turns({"ours": partial(ops.linear, x, packed), "cublas": partial(F.linear, x, weight)}, 7)
        read = weight.nbytes / 1e6 / timing.read_gbps()
        figures |= {f"{count}_of_cublas": ms["cublas"] / ms["ours"]}
        figures |= {f"{count}_of_read": read / ms["ours"]} if rows is FEW else {}
        figures |= {f"{count}_tflops": 2 * count * inputs * outputs / ms["ours"] / 1e9} if rows is MANY else {}
    kind = "_of_read" if rows is FEW else "_of_cublas"
    figures["least"] = min(value for key, value in figures.items() if key.endswith(kind))
    return Row(f"{name} {inputs:,} x {outputs:,}, {'few' if rows is FEW else 'many'} rows", figures,
               (Goal("least", GOAL),))  # fmt: skip
