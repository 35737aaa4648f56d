"""PTX's instructions of tensor cores, and those that load and store matrices for them: a part of ptx_block.Block.

n: threads of the block.
"""

from __future__ import annotations

import re
from typing import Any

import numpy as np

from tests.support import ptx_numbers as pn
from tests.support.ptx_memory import WARP, Fault, SharedMemory, Words

U = np.uint64
GROUP = 4
"""Warps that a wgmma instruction is of."""
SWIZZLED = {0: (16, 0), 1: (128, 7), 2: (64, 3), 3: (32, 1)}
"""Bytes of a row of a wgmma operand by its descriptor's last bits, and of how many rows the number moves its parts."""


class MatrixInstructions:
    """What they need of a block: see ptx_block.Block."""

    n: int
    lane: Any
    warp: Any
    text: str
    shared: SharedMemory

    def get(self, name: str) -> Words:
        raise NotImplementedError

    def put(self, name: str, value: Words) -> None:
        raise NotImplementedError

    def _address(self, argument: str) -> Words:
        raise NotImplementedError

    def _loaded(self, where: str, at: Words, size: int) -> Words:
        raise NotImplementedError

    def _share(self, at: Words, values: Words, size: int, later: bool = False) -> None:
        raise NotImplementedError

    def _rows(self, at: Words, number: int, turned: bool) -> list[tuple[Words, int]]:
        """Where a thread's part of the number-th matrix of 8 x 8 lies: its addresses, with their bytes."""
        first = self.warp * WARP + 8 * number
        if not turned:
            return [(at[first + self.lane // 4] + (4 * (self.lane % 4)).astype(U), 4)]
        pair = first + self.lane % 4 * 2
        return [(at[pair + half] + (2 * (self.lane // 4)).astype(U), 2) for half in range(2)]

    def _ldmatrix(self, op: list[str], arguments: list[str]) -> None:
        at = self._address(arguments[1])
        for number, name in enumerate(names_of(arguments[0])):
            parts = [self._loaded("shared", *each) for each in self._rows(at, number, "trans" in op)]
            self.put(name, parts[0] if len(parts) == 1 else parts[0] | parts[1] << U(16))

    def _stmatrix(self, op: list[str], arguments: list[str]) -> None:
        at = self._address(arguments[0])
        for number, name in enumerate(names_of(arguments[1])):
            for half, (address, size) in enumerate(self._rows(at, number, "trans" in op)):
                self._share(address, self.get(name) >> U(16 * half), size)

    def _pairs(self, name: str, kind: str) -> list[Any]:
        return [pn.numbers(self.get(name) >> U(shift) & U(0xFFFF), kind).astype(np.float64) for shift in (0, 16)]

    def _left(self, names: list[str], kind: str) -> Any:
        """[n / 32, 16, 16] of four registers a thread, the first factor of mma and wgmma."""
        made = np.zeros((self.n // WARP, 16, 16))
        for number, name in enumerate(names):
            for half, value in enumerate(self._pairs(name, kind)):
                row, column = self.lane // 4 + 8 * (number % 2), self.lane % 4 * 2 + half + 8 * (number // 2)
                made[self.warp, row, column] = value
        return made

    def _summed(self, names: list[str], into: list[str], products: Any, keep: bool) -> None:
        """Adds products [n / 32, 16, N] to what registers hold."""
        for number, (name, target) in enumerate(zip(names, into, strict=True)):
            row = self.lane // 4 + 8 * (number % 4 // 2)
            made = products[self.warp, row, 8 * (number // 4) + self.lane % 4 * 2 + number % 2]
            before = pn.numbers(self.get(name), "f32") if keep else 0.0
            self.put(target, pn.raw_of((made + before).astype(np.float32)))

    def _mma(self, op: list[str], arguments: list[str]) -> None:
        if "m16n8k16" not in op:
            raise Fault("a product of another size than m16n8k16")
        into, left, right, before = (names_of(each) for each in arguments)
        made = np.zeros((self.n // WARP, 16, 8))
        for number, name in enumerate(right):
            for half, value in enumerate(self._pairs(name, op[-2])):
                made[self.warp, self.lane % 4 * 2 + half + 8 * number, self.lane // 4] = value
        self._summed(before, into, self._left(left, op[-2]) @ made, keep=True)

    def _wgmma(self, op: list[str], arguments: list[str]) -> None:
        if op[1] != "mma_async":
            return
        columns = int(re.findall(r"m64n(\d+)k16", self.text)[0])
        into, (left, right, scale, *_), kind = names_of(arguments[0]), arguments[1:], op[-1]
        if left.startswith("{"):
            first = self._left(names_of(left), kind)
        else:
            first = self._operands(left, 64, arguments[6] == "1", kind).reshape(-1, 16, 16)
        second = np.repeat(self._operands(right, columns, arguments[-1] == "1", kind), GROUP, axis=0)
        self._summed(into, into, first @ second.swapaxes(1, 2), keep=bool(self.get(scale)[0]))

    def _operands(self, name: str, rows: int, turned: bool, kind: str) -> Any:
        """[n / 128, rows, 16]: each group of four warps has a descriptor of its own."""
        groups = range(0, self.n // WARP, GROUP)
        return np.stack([self._operand(name, warp, rows, turned, kind) for warp in groups])

    def _operand(self, name: str, warp: int, rows: int, turned: bool, kind: str) -> Any:
        """[rows, 16] of shared memory, as the wgmma descriptor of this warp says. turned: rows lie side by side."""
        descriptor = int(self.get(name)[warp * WARP])
        start, leading, stride = ((descriptor >> shift & 0x3FFF) << 4 for shift in (0, 16, 32))
        width, moves = SWIZZLED[descriptor >> 62]
        row, k = np.indices((rows, 16))
        if turned:
            each = width // 2
            at = start + row // each * leading + k // 8 * stride + k % 8 * width + row % each * 2
        elif moves:
            at = start + row // 8 * stride + row % 8 * width + k * 2
        else:
            at = start + row // 8 * stride + row % 8 * 16 + k // 8 * leading + k % 8 * 2
        at = at ^ ((at >> 7 & moves) << 4)
        found = self.shared.load_fenced(at.ravel().astype(U), 2, np.repeat(warp, at.size), self.text)
        return pn.numbers(found, kind).astype(np.float64).reshape(rows, 16)


def names_of(argument: str) -> list[str]:
    return [each.strip() for each in argument.strip("{} ").split(",")]
