"""The tensor types of ggml, by their numbers in a file. Imports no torch."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TensorType:
    """A type of which `block` numbers in a row take `size` bytes."""

    name: str
    block: int
    size: int

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
    0: TensorType("F32", 1, 4),
    1: TensorType("F16", 1, 2),
    30: TensorType("BF16", 1, 2),
    2: TensorType("Q4_0", 32, 18),
    3: TensorType("Q4_1", 32, 20),
    6: TensorType("Q5_0", 32, 22),
    7: TensorType("Q5_1", 32, 24),
    8: TensorType("Q8_0", 32, 34),
    12: TensorType("Q4_K", 256, 144),
    13: TensorType("Q5_K", 256, 176),
    14: TensorType("Q6_K", 256, 210),
    39: TensorType("MXFP4", 32, 17),
}
"""Those that are read."""

OTHERS = {
    9: "Q8_1", 10: "Q2_K", 11: "Q3_K", 15: "Q8_K", 16: "IQ2_XXS", 17: "IQ2_XS",
    18: "IQ3_XXS", 19: "IQ1_S", 20: "IQ4_NL", 21: "IQ3_S", 22: "IQ2_S", 23: "IQ4_XS", 24: "I8", 25: "I16", 26: "I32",
    27: "I64", 28: "F64", 29: "IQ1_M", 34: "TQ1_0", 35: "TQ2_0",
}  # fmt: skip
"""Names of the others, to refuse them by."""


def name_of(kind: int) -> str:
    """The name of a type that is not read."""
    return OTHERS.get(kind, f"type {kind}")
