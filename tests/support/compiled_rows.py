"""The kernels of products, norms, activations and heads, as models of Llama's size launch them: for compile_triton."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from headrace.kernels.triton import kept_row_kernels, product_kernels, products, rotary_kernels, row_kernels
from headrace.kernels.triton.tiles import AHEAD, TOGETHER, Tile

INTEGERS = ("rows", "inputs", "outputs", "x_stride", "width", "stride", "heads", "row_heads")
INTEGERS += ("turn_stride",)
NUMBERS = ("eps", "offset")
OTHERS = {"slots": "*i32", "offsets": "*i32", "cos_sin": "*fp32"}


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


def cases(architecture: int = 80) -> list[Compiled]:
    """For GPUs of that architecture: from sm_90 on they copy blocks by themselves, and kernels overlap."""
    overlaps = architecture >= 90
    ahead = AHEAD if overlaps else 0

    def usual(tiles: tuple[Tile, ...]) -> list[Tile]:
        return [tile for tile in tiles if overlaps or tile.way == "plain"]

    few, gated = (products.FEW[:3], products.GATED[:3]) if overlaps else (products.PLAIN, products.GATED_PLAIN)
    narrow = products.NARROW if overlaps else ()
    found = [_product(tile, ahead) for tile in (*narrow, *few, *usual(products.MANY))]
    found += [_product(tile, ahead, "silu") for tile in (*narrow, *gated)]
    norms = {"P": 4096, "ADD": True, "WEIGHT": True, "OVERLAPS": overlaps}
    for name, rms in (("rms", True), ("layer", False)):
        constants = norms | {"RMS": rms, "BIAS": not rms}
        found.append(Compiled(f"norm {name}", row_kernels.norm, constants, dict(num_warps=8), {"heads": "i32"}))
    constants = {"WIDTH": 1024, "KIND": "silu", "GATED": True, "OVERLAPS": overlaps}
    found.append(Compiled("activate", row_kernels.activate, constants, dict(num_warps=4)))
    found.append(Compiled("keep", kept_row_kernels.keep, {"COLUMNS": 1024}, dict(num_warps=4), {"row_stride": "i32"}))
    heads = {"Q": 32, "KV": 8, "D": 128, "P": 128, "TURNED": 128, "NORM": True, "STORE": True, "TOGETHER": 8}
    types = {"heads": "*bf16"}
    found.append(Compiled("rotate_heads", rotary_kernels.rotate_heads, heads, dict(num_warps=4), types))
    return found


def _product(tile: Tile, ahead: int, kind: str = "") -> Compiled:
    sizes: dict[str, Any] = {"ROWS": tile.rows, "COLUMNS": tile.columns, "STEP": tile.step, "BIAS": True}
    options = dict(num_warps=tile.warps, num_stages=tile.stages)
    name = f"{tile.way} {tile.rows} x {tile.columns} {kind}".rstrip()
    few = {"KIND": kind, "GATED": kind != "", "AHEAD": ahead}
    if tile.way == "plain":
        plain = few | {"TOGETHER": TOGETHER, "EVEN": True, "PRECISION": "ieee"}
        return Compiled(name, product_kernels.product, sizes | plain, options)
    shapes = {"x": (tile.rows, tile.step), "w": (tile.columns, tile.step)}
    if tile.way == "few":
        return Compiled(name, product_kernels.product_of_few, sizes | few, options, _described(shapes))
    shapes["out"] = (tile.rows, tile.columns // 2)
    constants = sizes | {"TOGETHER": TOGETHER}
    return Compiled(name, product_kernels.product_by_blocks, constants, options, _described(shapes))


def _described(shapes: dict[str, tuple[int, int]]) -> dict[str, str]:
    """Tensor descriptors of blocks of these shapes."""
    return {name: f"tensordesc<bf16{list(shape)}>" for name, shape in shapes.items()}
