"""The kernels of attention in pieces, and of what is asked of a GPU before kernels are launched directly: for
compile_triton."""

from __future__ import annotations

from collections.abc import Iterator

from headrace.kernels.triton import launch_kernels, piece_kernels
from tests.support.compiled_rows import Compiled

STATES = ("acc_of", "m_of", "z_of", "total_acc", "total_m", "total_z", "block_acc", "block_m", "block_z", "sinks")
TYPES = dict.fromkeys((*STATES, *(f"new_{name}" for name in STATES)), "*fp32")
TYPES |= dict.fromkeys(("bases", "first", "last", "block_of", "new_block_of"), "*i32")
TYPES |= dict.fromkeys(("begins", "addresses"), "*i64")
SIZES = {"HEADS": 32, "D": 128, "P": 128}
ECHO = {"words": "*i32", "factor": "fp32", "out": "*fp32"} | dict.fromkeys(("one", "even", "odd"), "i32")


def cases() -> Iterator[Compiled]:
    for kernel, constants in (
        (piece_kernels.begin, SIZES), (piece_kernels.fold, SIZES | {"BEGUN": True}), (piece_kernels.merge, SIZES),
        (piece_kernels.finish, SIZES | {"SINKS": True}),
    ):  # fmt: skip
        yield Compiled(f"piece {kernel.fn.__name__}", kernel, constants, {"num_warps": 1}, TYPES)
    yield Compiled("echo", launch_kernels.echo, {"ROWS": 8, "COLUMNS": 64, "COPIED": False}, {"num_warps": 4}, ECHO)
