"""The tensor types of ggml, by their numbers in a file. Imports no torch."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TensorType:
    """A type of which `block` numbers in a row take `size` bytes, and `held` bits each in memory."""

    name: str
    block: int
    size: int
    held: float

    def row_bytes(self, columns: int) -> int:
        """Of a row of so many numbers, whole blocks."""
        return columns // self.block * self.size

    def bytes_of(self, shape: tuple[int, ...]) -> int | None:
        """Of a tensor; None where a row is not whole blocks, or there is nothing in it."""
        if math.prod(shape) < 1 or shape[-1] % self.block:
            return None
        return math.prod(shape) // self.block * self.size

    @property
    def plain(self) -> bool:
        """Whether it holds numbers as they are."""
        return self.block == 1


TYPES = {
    0: TensorType("F32", 1, 4, 32),
    1: TensorType("F16", 1, 2, 16),
    30: TensorType("BF16", 1, 2, 16),
    2: TensorType("Q4_0", 32, 18, 4.5),
    3: TensorType("Q4_1", 32, 20, 5.25),
    6: TensorType("Q5_0", 32, 22, 6.25),
    7: TensorType("Q5_1", 32, 24, 6.25),
    8: TensorType("Q8_0", 32, 34, 8.5),
    10: TensorType("Q2_K", 256, 84, 3.125),
    11: TensorType("Q3_K", 256, 110, 3.5625),
    12: TensorType("Q4_K", 256, 144, 4.625),
    13: TensorType("Q5_K", 256, 176, 5.625),
    14: TensorType("Q6_K", 256, 210, 6.5625),
    16: TensorType("IQ2_XXS", 256, 66, 3.3125),
    17: TensorType("IQ2_XS", 256, 74, 3.5625),
    18: TensorType("IQ3_XXS", 256, 98, 4.3125),
    19: TensorType("IQ1_S", 256, 50, 3.3125),
    20: TensorType("IQ4_NL", 32, 18, 4.5),
    21: TensorType("IQ3_S", 256, 110, 4.3125),
    22: TensorType("IQ2_S", 256, 82, 3.5625),
    23: TensorType("IQ4_XS", 256, 136, 4.3125),
    29: TensorType("IQ1_M", 256, 56, 3.5625),
    34: TensorType("TQ1_0", 256, 54, 2.09375),
    35: TensorType("TQ2_0", 256, 66, 2.09375),
    39: TensorType("MXFP4", 32, 17, 4.25),
    40: TensorType("NVFP4", 64, 36, 4.5078125),
    41: TensorType("Q1_0", 128, 18, 2.1875),
}
"""Those that are read."""

OTHERS = {9: "Q8_1", 15: "Q8_K", 24: "I8", 25: "I16", 26: "I32", 27: "I64", 28: "F64"}
"""Names of the others, to refuse them by."""


def name_of(kind: int) -> str:
    """The name of a type that is not read."""
    return OTHERS.get(kind, f"type {kind}")
