"""The kernels of recurrent layers, as those of Qwen3-Next and Qwen3.5, of Granite 4 H and of LFM2 launch them: for
compile_triton."""

from __future__ import annotations

from collections.abc import Iterator

from headrace.kernels.triton import delta_kernels, mamba2_kernels, short_conv_kernels
from tests.support.compiled_rows import Compiled

WIDE = ("decays", "conv", "bias", "gates", "rate", "dt_bias", "skip", "made", "scalars", "matrices", "weight")
TYPES = dict.fromkeys(WIDE, "*fp32")
TYPES |= dict.fromkeys(("taps", "segments", "groups"), "*i32") | {"mixed_stride": "i32", "scale": "fp32"}
HEADS = {"KEY_HEADS": 16, "VALUE_HEADS": 32, "D": 128, "V": 128, "K": 4}
MAMBA = {"VALUE_HEADS": 48, "VALUES": 3072, "CHANNELS": 3328}
WHOLE = {"P": 128, "TOGETHER": 8}


def cases() -> Iterator[Compiled]:
    for name, heads, channels in (("delta", HEADS, False), ("kda", HEADS | {"KEY_HEADS": 32}, True)):
        own = {"BY_CHANNEL": channels}
        yield Compiled(f"{name} convolve", delta_kernels.convolve, heads | WHOLE | own, {"num_warps": 4}, TYPES)
        parts = {"P": 128, "COLUMNS": 8, "CHANNELS": 16}
        yield Compiled(f"{name} recur", delta_kernels.recur, heads | parts | own, {"num_warps": 1}, TYPES)
        gate = {
            "VALUE_HEADS": 32,
            "KEYS": 128 * heads["KEY_HEADS"],
            "V": 128,
            "KIND": "sigmoid" if channels else "silu",
        }
        yield Compiled(f"{name} gate", delta_kernels.gate, gate | WHOLE, {"num_warps": 4}, TYPES)
    made = MAMBA | {"K": 4, "BIASED": True, "BLOCK": 1024, "HEADS": 64}
    yield Compiled("mamba2 convolve", mamba2_kernels.convolve, made, {"num_warps": 4}, TYPES)
    sizes = MAMBA | {"KEY_HEADS": 1, "D": 128, "V": 64, "K": 4, "P": 128, "COLUMNS": 8, "PART": 16}
    yield Compiled("mamba2 recur", mamba2_kernels.recur, sizes, {"num_warps": 1}, TYPES)
    longer = sizes | {"VALUE_HEADS": 24, "VALUES": 3072, "CHANNELS": 3584, "D": 256, "V": 128, "P": 256}
    yield Compiled("mamba2 recur of long keys", mamba2_kernels.recur, longer, {"num_warps": 1}, TYPES)
    gate = {"VALUES": 3072, "CHANNELS": 3328, "TOGETHER": 3072, "P": 4096}
    for normed in (True, False):
        name = "mamba2 gate" if normed else "mamba2 gate without a norm"
        yield Compiled(name, mamba2_kernels.gate, gate | {"NORMED": normed}, {"num_warps": 8}, TYPES)
    for kernel in (short_conv_kernels.convolve, short_conv_kernels.keep):
        name = f"short conv {kernel.fn.__name__}"
        yield Compiled(name, kernel, {"CHANNELS": 2048, "K": 3, "BLOCK": 1024}, {"num_warps": 4}, TYPES)
