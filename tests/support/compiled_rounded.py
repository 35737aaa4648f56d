"""The kernels of rounded rows, as models of Llama's size launch them: for compile_triton."""

from __future__ import annotations

from collections.abc import Iterator

from headrace.kernels import rounded_rows
from headrace.kernels.triton import rounded, rounded_kernels
from tests.support.compiled_rows import Compiled

TYPES = {"codes": "*i8", "x_scales": "*fp32", "scales": "*fp32", "table": "*i64", "begin": "*i32"}
TYPES |= {"order": "*i32"} | dict.fromkeys(("k_stride", "out_stride", "experts", "chosen"), "i32")
ROUND = {"LEAST": rounded_rows.LEAST, "BLOCK": rounded.BLOCK}
POINTERS = {"int8": "*i8", "e4m3": "*fp8e4nv"}


def cases(architecture: int) -> Iterator[Compiled]:
    for kind, tiles in rounded.TILES.items():
        e4m3 = {"E4M3": kind == "e4m3"}
        constants = ROUND | e4m3 | {"LARGEST": rounded_rows.LARGEST[kind]}
        yield Compiled(f"rounded rows to {kind}", rounded_kernels.round_rows, constants, {"num_warps": 16}, TYPES)
        if e4m3["E4M3"] and architecture < 89:
            continue
        types = TYPES | dict.fromkeys(("x", "weight"), POINTERS[kind])
        for tile in tiles:
            options = {"num_warps": tile.warps, "num_stages": tile.stages}
            sizes = e4m3 | {"ROWS": tile.rows, "COLUMNS": tile.columns, "STEP": rounded.STEP, "BIAS": True}
            for told, experts in (("", 0), (", experts", 32)) if tile == tiles[0] else (("", 0),):
                name, those = (
                    f"rounded {kind} {tile.columns} x {tile.rows}{told}",
                    {"EXPERTS": experts, "SENT": experts > 0},
                )
                yield Compiled(name, rounded_kernels.product, sizes | those, options, types)
