"""Products of rounded rows (w8a8, fp8_rowwise) beside bf16 and weights of int8, on the matrices of Llama-3-8B.

    python -m tools.gpu.rounded_products

Microseconds of a product with all its launches, rounding among them, by rows: medians, caches empty. Prints a table,
then JSON.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import partial
from typing import get_args

import torch

from headrace.config import Quantization
from headrace.kernels import ops
from headrace.kernels.triton.rounded import FP8_SINCE
from tools.gpu import timing

MATRICES = {"out": (4096, 4096), "qkv": (4096, 6144), "gate_up": (4096, 28_672), "down": (14_336, 4096)}
"""(inputs, outputs)."""
ROWS = (1, 16, 64, 512, 2048)


def schemes() -> list[Quantization]:
    has_fp8 = torch.cuda.get_device_capability() >= FP8_SINCE
    left_out = {"int4"} if has_fp8 else {"int4", "fp8_rowwise"}
    return [scheme for scheme in get_args(Quantization) if scheme not in left_out]


@torch.inference_mode()
def table(inputs: int, outputs: int, forms: Sequence[Quantization]) -> dict[int, dict[str, float]]:
    """Microseconds by rows and by how the weight is kept."""
    weight = (torch.randn(outputs, inputs, device=timing.CUDA) * inputs**-0.5).bfloat16()
    packed = {form: ops.pack(weight, form) for form in forms}
    found = {}
    for rows in ROWS:
        x = torch.randn(rows, inputs, device=timing.CUDA).bfloat16()
        ms = timing.in_turns({form: partial(ops.linear, x, each) for form, each in packed.items()}, 7)
        found[rows] = {form: 1e3 * each for form, each in ms.items()}
    return found


def main() -> None:
    found, forms = {}, schemes()
    print(f"{'matrix':10} {'rows':>5}", *(f"{form:>12}" for form in forms))
    for name, (inputs, outputs) in MATRICES.items():
        found[name] = table(inputs, outputs, forms)
        for rows, us in found[name].items():
            print(f"{name:10} {rows:5}", *(f"{us[form]:12.1f}" for form in forms), flush=True)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
