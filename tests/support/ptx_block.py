"""PTX of a compiled Triton kernel, executed on the CPU: one block of threads, an instruction for all that stand at it.

n: threads of the block. Whoever is behind goes first, so that threads that part meet again. What ptxas makes of it, and
what depends on which warp is faster, is not seen (but see SharedMemory.races).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from tests.support import ptx_numbers as pn
from tests.support.ptx_async import Barriers, Box, Tiles
from tests.support.ptx_matrix import MatrixInstructions, names_of
from tests.support.ptx_memory import WARP, Fault, GlobalMemory, SharedMemory, Words

U = np.uint64
UNDEFINED = 0x7FC5A5A57FC5A5A5
"""What a register holds that no instruction writes, where a compiler needs one without caring which: NaN."""
IGNORED = ("griddepcontrol", "prefetch", "membar")


class Instruction(NamedTuple):
    """predicate: its register, and whether it must be false."""

    predicate: tuple[str, bool] | None
    op: list[str]
    arguments: list[str]
    text: str


class Program:
    """The one kernel of a text in PTX."""

    def __init__(self, ptx: str) -> None:
        text = ptx.split(".section")[0]
        self.parameters = re.findall(r"\.param [^\n]*?(\w+_param_\d+)", text)
        self.threads = int(re.findall(r"\.reqntid (\d+)", text)[0])
        self.shared = re.findall(r"\.extern \.shared [^\n]*?(\w+)\[", text)
        self.code: list[Instruction] = []
        self.labels: dict[str, int] = {}
        self._local: dict[str, str] = {}
        body = text[text.index("{", text.index(".reqntid")) :]
        for line in body.splitlines():
            self._line(line.split("//")[0].strip())
        first = (each.arguments[0] for each in self.code if each.arguments)
        self.written = {name for each in first for name in re.findall(r"%\w+", each)}

    def _line(self, line: str) -> None:
        if label := re.match(r"^(\$?\w+):$", line):
            name = label[1] if line[0] == "$" else self._own(label[1])
            self.labels[name] = len(self.code)
            return
        for part in line.split(";"):
            text = part.strip()
            if not re.search(r"\{.*\}", text):
                text = text.lstrip("{").rstrip("}").strip()
            if text and not text.startswith("."):
                made = _instruction(text)
                if made.op[0] == "bra":
                    made = made._replace(arguments=[self._local.get(each, each) for each in made.arguments])
                self.code.append(made)

    def _own(self, label: str) -> str:
        """A name for a label within a block of its own, whose branches back to it follow."""
        self._local[label] = f"{label}@{len(self.code)}"
        return self._local[label]


def _instruction(text: str) -> Instruction:
    found = re.match(r"^@(!?)(%?\w+)\s+(.*)$", text)
    op, _, rest = (found[3] if found else text).replace("\t", " ").partition(" ")
    arguments = [each.strip() for each in re.findall(r"\s*(\{[^}]*\}|\[[^\]]*\]|[^,]+)\s*(?:,|$)", rest.strip())]
    return Instruction((found[2], found[1] == "!") if found else None, op.split("."), arguments, text)


class Block(MatrixInstructions):
    """One block: at (x, y, z) of a grid. values: of the parameters, as raw numbers, tensor maps as Tiles."""

    def __init__(
        self, program: Program, values: Sequence[int | Tiles], memory: GlobalMemory, shared: int,
        at: tuple[int, int, int], grid: tuple[int, int, int],
    ) -> None:  # fmt: skip
        self.program, self.memory, self.shared = program, memory, SharedMemory(shared)
        self.barriers = Barriers(self.shared)
        self.values = dict(zip(program.parameters, values, strict=False))
        self.maps = [each for each in values if isinstance(each, Tiles)]
        self.n, self.registers = program.threads, {name: U(0) + np.zeros(program.threads, U) for name in program.shared}
        for number, name in enumerate(name for name, value in self.values.items() if isinstance(value, Tiles)):
            self.registers[name] = np.full(self.n, number, U)  # a map is addressed by its number
        thread = np.arange(self.n)
        self.lane, self.warp = thread % WARP, thread // WARP
        special: dict[str, Any] = {"%tid.x": thread, "%tid.y": 0, "%tid.z": 0, "%laneid": self.lane}
        for axis, mine, all_ in zip("xyz", at, grid, strict=True):
            special |= {f"%ctaid.{axis}": mine, f"%nctaid.{axis}": all_}
        self.registers |= {name: np.broadcast_to(value, self.n).astype(U) for name, value in special.items()}
        self.active = np.ones(self.n, bool)
        self.text = ""

    def run(self) -> None:
        """To the end of all threads. Raises Fault."""
        code, labels = self.program.code, self.program.labels
        place, live = np.zeros(self.n, np.int64), np.ones(self.n, bool)
        with np.errstate(all="ignore"):
            while live.any() and (at := int(place[live].min())) < len(code):
                predicate, op, arguments, self.text = code[at]
                here = live & (place == at)
                place[here] = at + 1
                self.active = here
                if predicate is not None:
                    self.active = here & ((self.get(predicate[0]) == 0) == predicate[1])
                if op[0] == "bra":
                    place[self.active] = labels[arguments[0]]
                elif op[0] in ("ret", "exit"):
                    live &= ~self.active
                elif self.active.any() and op[0] not in IGNORED:
                    try:
                        self._step(op, arguments)
                    except Fault as fault:
                        raise Fault(f"{fault}: {self.text}") from None

    def get(self, name: str) -> Words:
        if name in self.registers:
            return self.registers[name]
        if name[:2] in ("0f", "0d"):
            return np.full(self.n, int(name[2:], 16), U)
        if re.match(r"^-?(0x[0-9a-fA-F]+|\d+)U?$", name):
            return np.full(self.n, int(name.rstrip("U"), 0) & (2**64 - 1), U)
        if name[0] == "%" and name not in self.program.written:
            return np.full(self.n, UNDEFINED, U)
        raise Fault(f"{name} is read before it is written")

    def put(self, name: str, value: Words) -> None:
        if name != "_":
            self.registers[name] = np.where(self.active, value, self.registers.get(name, U(0)))

    def _step(self, op: list[str], arguments: list[str]) -> None:
        own: Callable[[list[str], list[str]], None] | None = getattr(self, f"_{op[0]}", None)
        if own is not None:
            own(op, arguments)
            return
        target, *given = arguments
        raws = [self.get(each) for each in given]
        if op[0] == "selp":
            made = np.where(raws[2] != 0, raws[0], raws[1])
        elif op[0] == "setp":
            made = pn.compare(op[1], op[-1], *raws)
        elif op[0] == "not" and op[-1] == "pred":
            made = (raws[0] == 0).astype(U)
        elif op[0] in NAMED:
            made = NAMED[op[0]](op, raws)
        else:
            made = pn.compute(op, raws)
        self.put(target, made)

    def _address(self, argument: str) -> Words:
        base, _, more = argument.strip("[] ").partition("+")
        return self.get(base.strip()) + U(int(more, 0) & (2**64 - 1) if more.strip() else 0)

    def _ld(self, op: list[str], arguments: list[str]) -> None:
        kind, size = op[-1], int(op[-1][1:]) // 8
        if op[1] == "param":
            found = np.full(self.n, self.values[arguments[1].strip("[] ")], U)
            self.put(arguments[0], pn.raw_of(pn.numbers(found, kind).astype(np.int64)) if kind[0] == "s" else found)
            return
        at, names = self._address(arguments[1]), names_of(arguments[0])
        self._check_aligned(at, size * len(names))
        for number, name in enumerate(names):
            found = self._loaded(op[1], at + U(number * size), size)
            self.put(name, pn.raw_of(pn.numbers(found, kind).astype(np.int64)) if kind[0] == "s" else found)

    def _loaded(self, where: str, at: Words, size: int) -> Words:
        found, mine = np.zeros(self.n, U), self.active
        if where == "shared":
            found[mine] = self.shared.load(at[mine], size, self.warp[mine], self.text)
        else:
            found[mine] = self.memory.load(at[mine], size)
        return found

    def _st(self, op: list[str], arguments: list[str]) -> None:
        size, names = int(op[-1][1:]) // 8, names_of(arguments[1])
        at = self._address(arguments[0])
        self._check_aligned(at, size * len(names))
        for number, name in enumerate(names):
            if op[1] == "shared":
                self._share(at + U(number * size), self.get(name), size)
            else:
                self.memory.store((at + U(number * size))[self.active], self.get(name)[self.active], size)

    def _share(self, at: Words, values: Words, size: int, later: bool = False) -> None:
        mine = self.active
        self.shared.store(at[mine], values[mine], size, self.warp[mine], self.text, later)

    def _check_aligned(self, at: Words, size: int) -> None:
        if (at[self.active] % U(size)).any():
            raise Fault(f"an address is no multiple of {size}")

    def _cp(self, op: list[str], arguments: list[str]) -> None:
        if "tensor" in op:
            self._copy_box(op, arguments)
        elif "bulk" in op:
            return  # boxes on their way out have left when they are issued
        elif "commit_group" in op:
            self.shared.commit()
        elif "wait_group" in op:
            self.shared.wait(int(arguments[0]))
        else:
            into, source = self._address(arguments[0]), self._address(arguments[1])
            size = int(arguments[2], 0)
            self._check_aligned(into | source, size)
            copied = self.get(arguments[3]) if len(arguments) > 3 else np.full(self.n, size, U)
            every = self.active
            for first in range(0, size, 4):
                self.active = every & (copied > first)
                found = self._loaded("global", source + U(first), 4)
                self.active = every
                self._share(into + U(first), found, 4, later=True)

    def _copy_box(self, op: list[str], arguments: list[str]) -> None:
        """Of a tensor of two dimensions, by each thread that takes part: into shared memory, or out of it."""
        if "2d" not in op:
            raise Fault("a copy of another number of dimensions than 2")
        outward = op[5] == "global"
        there, shared = arguments[:2] if outward else arguments[1::-1]
        chosen, places = re.findall(r"^\[\s*([^,]+?)\s*,\s*\{(.*)\}\s*\]$", there)[0]
        maps, column, row = (self.get(each.strip()) for each in (chosen, *places.split(",")))
        at, barrier = self._address(shared), None if outward else self._address(arguments[2])
        for thread in np.flatnonzero(self.active):
            box = Box(self.maps[int(maps[thread])], *(int(each[thread].astype(np.int32)) for each in (row, column)))
            where, by = int(at[thread]), int(self.warp[thread])
            if barrier is None:
                box.write(self.memory, self.shared, where, by, self.text)
            else:
                self.barriers.copied(int(barrier[thread]), where, *box.read(self.memory), by, self.text)

    def _mbarrier(self, op: list[str], arguments: list[str]) -> None:
        if op[1] == "try_wait":
            at, parity = self._address(arguments[1]), self.get(arguments[2])
            passed = np.zeros(self.n, U)
            for each in np.unique(at[self.active]):
                mine = self.active & (at == each)
                passed[mine] = self.barriers.passed(int(each), int(parity[mine][0]))
            self.put(arguments[0], passed)
            return
        at = self._address(arguments[1 if op[1] == "arrive" else 0])
        for thread in np.flatnonzero(self.active):
            if op[1] == "init":
                self.barriers.make(int(at[thread]), int(self.get(arguments[1])[thread]))
            elif op[1] == "inval":
                self.barriers.end(int(at[thread]))
            else:
                self.barriers.arrive(int(at[thread]), int(arguments[2]) if "expect_tx" in op else 0)

    def _fence(self, op: list[str], arguments: list[str]) -> None:
        if op[1:3] == ["proxy", "async"]:
            self.shared.fence(np.unique(self.warp[self.active]))

    def _elect(self, op: list[str], arguments: list[str]) -> None:
        """One thread of each warp: the first."""
        target, _, predicate = arguments[0].partition("|")
        self.put(target, np.zeros(self.n, U))
        self.put(predicate, (self.lane == 0).astype(U))

    def _cvta(self, op: list[str], arguments: list[str]) -> None:
        self.put(arguments[0], self.get(arguments[1]))

    def _bar(self, op: list[str], arguments: list[str]) -> None:
        if op[1] == "sync":
            self.shared.barrier()

    def _mov(self, op: list[str], arguments: list[str]) -> None:
        kind, (target, source) = op[-1], arguments
        parts = names_of(target if target.startswith("{") else source)
        width = U(0 if kind == "pred" else int(kind[1:]) // len(parts))
        if target.startswith("{"):
            for number, name in enumerate(parts):
                self.put(name, self.get(source) >> (width * U(number)) & ((U(1) << width) - U(1)))
        elif source.startswith("{"):
            raws = [self.get(name) & ((U(1) << width) - U(1)) for name in parts]
            self.put(target, sum((raw << (width * U(i)) for i, raw in enumerate(raws)), np.zeros(self.n, U)))
        else:
            raw = self.get(source)
            self.put(target, (raw != 0).astype(U) if kind == "pred" else pn.masked(raw, kind))

    def _shfl(self, op: list[str], arguments: list[str]) -> None:
        value, by, limits = (self.get(each) for each in arguments[1:4])
        segment, clamp = limits.astype(np.int64) >> 8 & 31, limits.astype(np.int64) & 31
        last, by = (self.lane & segment) | (clamp & ~segment), by.astype(np.int64)
        other = {
            "bfly": self.lane ^ by, "up": self.lane - by, "down": self.lane + by,
            "idx": (self.lane & segment) | (by & ~segment),
        }[op[2]]  # fmt: skip
        there = other >= last if op[2] == "up" else other <= last
        target, _, predicate = arguments[0].partition("|")
        self.put(target, value[self.warp * WARP + np.where(there, other, self.lane)])
        if predicate:
            self.put(predicate, there.astype(U))

    def _redux(self, op: list[str], arguments: list[str]) -> None:
        x = pn.numbers(self.get(arguments[1]), op[-1]).reshape(-1, WARP)
        made = {"max": np.max, "min": np.min, "add": np.sum}[op[2]](x, axis=1).astype(x.dtype)
        self.put(arguments[0], pn.raw_of(np.repeat(made, WARP)))


NAMED: dict[str, Callable[[list[str], list[Words]], Words]] = {
    "cvt": pn.convert,
    "prmt": lambda op, raws: pn.permuted(*raws),
    "bfi": lambda op, raws: pn.inserted(*raws),
    "shf": lambda op, raws: pn.funnelled(op, *raws),
    "lop3": lambda op, raws: pn.chosen_bits(int(raws[3][0]), *raws[:3]),
    "popc": lambda op, raws: np.array([int(raw).bit_count() for raw in raws[0].tolist()], U),
    "bfe": lambda op, raws: pn.field(op[-1], *raws),
}
