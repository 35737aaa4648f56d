"""The kernels of products, norms, activations and heads, as models of Llama's size launch them: for compile_triton."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from headrace.kernels.triton import product_kernels, rotary_kernels, row_kernels
from headrace.kernels.triton.rows import SEGMENT

INTEGERS = ("rows", "inputs", "outputs", "x_stride", "elements", "segments", "width", "stride", "heads", "row_heads")
INTEGERS += ("turn_stride",)
NUMBERS = ("eps", "offset")
OTHERS = {"slots": "*i32", "offsets": "*i32", "cos_sin": "*fp32", "parts": "*fp32"}


@dataclass
class Compiled:
    """A kernel with its constants, options, and the types of arguments that are not told by their names."""

    name: str
    kernel: Any
    constants: dict[str, Any]
    options: dict[str, int]
    types: dict[str, str] = field(default_factory=dict)

    def signature(self) -> dict[str, str]:
        return {name: self._kind(name) for name in self.kernel.arg_names}

    def _kind(self, name: str) -> str:
        if name in self.constants:
            return "constexpr"
        if name in self.types:
            return self.types[name]
        if name in INTEGERS:
            return "i32"
        return "fp32" if name in NUMBERS else OTHERS.get(name, "*bf16")


def cases() -> list[Compiled]:
    sizes = {"ROWS": 64, "STEP": 64, "SEGMENT": SEGMENT, "PRECISION": "ieee", "BIAS": True}
    found = [
        Compiled(
            f"product {split}",
            product_kernels.product,
            sizes | {"COLUMNS": columns, "SPLIT": split},
            dict(num_warps=4, num_stages=4),
        )
        for split, columns in ((True, 64), (False, 128))
    ]
    found.append(Compiled("add_segments", product_kernels.add_segments, {"WIDTH": 1024, "BIAS": True}, {}))
    norms = {"P": 4096, "ADD": True, "WEIGHT": True}
    for name, rms in (("rms", True), ("layer", False)):
        constants = norms | {"RMS": rms, "BIAS": not rms}
        found.append(Compiled(f"norm {name}", row_kernels.norm, constants, dict(num_warps=8), {"heads": "i32"}))
    constants = {"WIDTH": 1024, "KIND": "silu", "GATED": True}
    found.append(Compiled("activate", row_kernels.activate, constants, dict(num_warps=4)))
    heads = {"Q": 32, "KV": 8, "D": 128, "P": 128, "TURNED": 128, "NORM": True, "STORE": True, "TOGETHER": 8}
    types = {"heads": "*bf16"}
    found.append(Compiled("rotate_heads", rotary_kernels.rotate_heads, heads, dict(num_warps=4), types))
    return found
