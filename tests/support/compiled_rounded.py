"""Compiles the kernels of rounded rows, as models of Llama's size launch them, for GPUs that need not be there.

    python -m tests.support.compiled_rounded [ARCHITECTURE ...]

Prints compile_triton's table and JSON. Run in a process of its own by test_gpu_rounded.py, whose kernels are
interpreted.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator

from headrace.kernels import rounded_rows
from headrace.kernels.triton import rounded, rounded_kernels
from tests.support.compile_triton import ARCHITECTURES, compiled
from tests.support.compiled_rows import Compiled

TYPES = {"codes": "*i8", "weight": "*i8", "x_scales": "*fp32", "scales": "*fp32", "table": "*i64", "begin": "*i32"}
TYPES |= {"order": "*i32"} | dict.fromkeys(("k_stride", "out_stride", "experts", "chosen"), "i32")
ROUND = {"LARGEST": rounded_rows.LARGEST, "LEAST": rounded_rows.LEAST, "BLOCK": rounded.BLOCK}


def cases() -> Iterator[Compiled]:
    yield Compiled("round rows", rounded_kernels.round_rows, ROUND, {"num_warps": 8}, TYPES)
    for tile in rounded.TILES:
        options = {"num_warps": tile.warps, "num_stages": tile.stages}
        sizes = {"ROWS": tile.rows, "COLUMNS": tile.columns, "STEP": rounded.STEP, "BIAS": True}
        for name, experts in (("", 0), (", experts", 32)):
            constants = sizes | {"EXPERTS": experts, "SENT": experts > 0}
            types = TYPES | {"x": "*i8"}
            yield Compiled(
                f"w8a8 {tile.columns} x {tile.rows}{name}", rounded_kernels.product, constants, options, types
            )


def main() -> None:
    found = {}
    for architecture in [int(each) for each in sys.argv[1:]] or ARCHITECTURES:
        for case in cases():
            used = compiled(case, architecture)
            name = f"{case.name}, sm_{architecture}"
            print(f"{name:32} {used.registers:4} {used.spills:5} {used.shared:7} {used.tensor}", flush=True)
            found[name] = vars(used)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
