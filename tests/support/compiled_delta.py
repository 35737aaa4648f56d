"""The kernels of gated delta nets, as Qwen3-Next's and Qwen3.5's layers launch them: for compile_triton."""

from __future__ import annotations

from collections.abc import Iterator

from headrace.kernels.triton import delta_kernels
from tests.support.compiled_rows import Compiled

TYPES = dict.fromkeys(("conv", "gates", "rate", "dt_bias", "made", "scalars", "matrices", "weight"), "*fp32")
TYPES |= dict.fromkeys(("taps", "segments", "groups"), "*i32") | {"mixed_stride": "i32", "scale": "fp32"}
HEADS = {"KEY_HEADS": 16, "VALUE_HEADS": 32, "D": 128, "V": 128, "K": 4}
WHOLE = {"P": 128, "TOGETHER": 8}


def cases() -> Iterator[Compiled]:
    yield Compiled("delta convolve", delta_kernels.convolve, HEADS | WHOLE, {"num_warps": 4}, TYPES)
    parts = {"P": 128, "COLUMNS": 8, "CHANNELS": 16}
    yield Compiled("delta recur", delta_kernels.recur, HEADS | parts, {"num_warps": 1}, TYPES)
    gate = {"VALUE_HEADS": 32, "KEYS": 2048, "V": 128}
    yield Compiled("delta gate", delta_kernels.gate, gate | WHOLE, {"num_warps": 4}, TYPES)
