"""Compiled kernels whose PTX is executed on the CPU (tests.support.ptx_launch)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("triton", reason="Triton is built for Linux only")

from tests.support import ptx_numbers
from tests.support.ptx_async import PATIENCE, Barriers, Box, Tiles
from tests.support.ptx_block import NAMED, Block, Program
from tests.support.ptx_memory import Fault, GlobalMemory, SharedMemory

KERNEL = """
.visible .entry k(.param .u64 .ptr .global .align 1 k_param_0, .param .u32 k_param_1)
.reqntid 64
{
	ld.param.b64 %rd1, [k_param_0];
	ld.param.b32 %r1, [k_param_1];
	mov.u32 %r2, %tid.x;
	setp.ge.s32 %p1, %r2, %r1;
	@%p1 bra $L__end;
	mul.wide.u32 %rd2, %r2, 4;
	add.s64 %rd3, %rd1, %rd2;
	ld.global.b32 %r3, [%rd3 + 0];
	fma.rn.f32 %r4, %r3, 0f40000000, 0f3F800000;
	st.global.b32 [%rd3 + 0], %r4;
$L__end:
	ret;
}
"""


def executed(count: int, room: int) -> torch.Tensor:
    """2 x + 1 of the first `count` of `room` numbers."""
    x = torch.arange(64.0)[:room]
    Block(Program(KERNEL), [x.data_ptr(), count], GlobalMemory([("x", x)]), 0, (0, 0, 0), (1, 1, 1)).run()
    return x


def test_one_kernel() -> None:
    assert executed(3, 64).tolist() == [1.0, 3.0, 5.0, *range(3, 64)]
    with pytest.raises(Fault, match=r"4 bytes at byte 160 of x, which has 160: ld\.global\.b32"):
        executed(41, 40)


def test_products_and_pairs() -> None:
    """The high half of a product, shifts of two registers, bits put in, and two numbers of 32 bits in a register."""

    def of(op: str, *raws: int) -> int:
        words, given = op.split("."), [np.array([raw], np.uint64) for raw in raws]
        return int((NAMED[words[0]](words, given) if words[0] in NAMED else ptx_numbers.compute(words, given))[0])

    assert of("mul.hi.u16", 383, 43691) == 383 * 43691 >> 16
    assert of("mul.hi.s32", 0xFFFFFFFF, 7) == 0xFFFFFFFF and of("mul.hi.u64", 1 << 63, 6) == 3
    assert of("shf.l.wrap.b32", 0x80000000, 0x1, 33) == 3 and of("shf.r.wrap.b32", 0x10, 0xF, 4) == 0xF0000001
    assert of("bfi.b32", 0x1FF, 0x12345678, 8, 8) == 0x1234FF78
    one, two = 0x3F800000, 0x40000000
    assert of("fma.rn.f32x2", two << 32 | one, one << 32 | two, one << 32 | one) == 0x40400000 << 32 | 0x40400000


def test_a_register_that_nothing_writes() -> None:
    """A compiler may take one where it does not care; one that is read too early is a fault."""
    code = KERNEL.replace("0f40000000", "%r9")
    x = torch.zeros(64)
    Block(Program(code), [x.data_ptr(), 64], GlobalMemory([("x", x)]), 0, (0, 0, 0), (1, 1, 1)).run()
    assert x.isnan().all()
    late = code.replace("$L__end:", "$L__end:\n\tmov.u32 %r9, 1;")
    with pytest.raises(Fault, match="%r9 is read before it is written"):
        Block(Program(late), [x.data_ptr(), 64], GlobalMemory([("x", x)]), 0, (0, 0, 0), (1, 1, 1)).run()


def test_races_of_shared_memory() -> None:
    """A read of what another warp wrote needs a barrier between them; copies land when they are waited for."""
    memory, at = SharedMemory(64), np.zeros(1, np.uint64)
    one, other = np.zeros(1, np.int64), np.ones(1, np.int64)
    memory.store(at, at + np.uint64(7), 4, one, "stored", later=True)
    memory.commit()
    memory.barrier()
    assert memory.load(at, 4, other, "early").tolist() == [0]
    memory.wait(0)
    assert memory.load(at, 4, other, "late").tolist() == [7] and not memory.races
    memory.store(at, at, 4, one, "too soon", later=False)
    assert memory.races == {"writes what another warp touches: too soon"}
    with pytest.raises(Fault, match="4 bytes at byte 64 of 64 in shared memory"):
        memory.load(at + np.uint64(64), 4, one, "outside")


def test_what_no_fence_is_behind() -> None:
    """wgmma reads what a thread wrote behind a fence alone: the writer's, or the reader's behind a barrier."""
    memory, at = SharedMemory(64), np.zeros(1, np.uint64)
    one, other = np.zeros(1, np.int64), np.ones(1, np.int64)

    def seen(by: np.ndarray) -> int:
        memory.load_fenced(at, 4, by, "read")
        return len(memory.races)

    memory.store(at, at, 4, one, "stored", later=False)
    memory.fence(other)
    assert seen(one) == 1
    memory.races.clear()
    memory.fence(one)
    assert seen(one) == 0
    memory.store(at, at, 4, one, "stored", later=False)
    memory.barrier()
    memory.fence(other)
    assert seen(other) == 0


BOX = 64 * 128
"""Bytes of a box of 64 rows by 64 columns."""


def copied(barriers: Barriers, tiles: Tiles, memory: GlobalMemory, row: int) -> None:
    barriers.copied(BOX, 0, *Box(tiles, row, 0).read(memory), 0, "copied")


@pytest.fixture
def on_their_way() -> Iterator[tuple[SharedMemory, Barriers, Tiles, GlobalMemory]]:
    """70 rows of two bytes' numbers, and a barrier behind room for a box of them."""
    x = torch.arange(70 * 64, dtype=torch.int16).view(70, 64)
    shared, tiles = SharedMemory(BOX + 8), Tiles(x.data_ptr(), (70, 64), 128, 2, (64, 64))
    barriers, memory = Barriers(shared), GlobalMemory([("x", x)])
    barriers.make(BOX, 1)
    yield shared, barriers, tiles, memory  # and the numbers live as long


def test_a_box_leaves_for_the_tensor_alone(on_their_way: Any) -> None:
    """By the asynchronous proxy: what threads wrote needs a fence before it."""
    shared, _, tiles, memory = on_their_way
    at = np.arange(0, BOX, 2).astype(np.uint64)
    shared.store(at, at, 2, np.zeros(len(at), np.int64), "stored", later=False)
    shared.barrier()
    Box(tiles, 67, 0).write(memory, shared, 0, 0, "left")
    assert shared.races == {"reads what no fence is behind: left"}
    read = Box(tiles, 66, 0).read(memory)[1].view(np.int16).reshape(64, 64)
    assert read[0, 1] == 66 * 64 + 1 and read[1, :8].tolist() == [*range(0, 16, 2)] and read[3, 0] == 2 * 128 + 32
    assert not read[4:].any()


def test_a_box_lands_when_its_barrier_has_been_waited_for(on_their_way: Any) -> None:
    """Parts of rows change places by the row; rows outside of the tensor are 0; a phase has a parity of its own."""
    shared, barriers, tiles, memory = on_their_way
    barriers.arrive(BOX, BOX)
    assert not barriers.passed(BOX, 0)
    copied(barriers, tiles, memory, 3)
    assert not shared.bytes.any()
    assert barriers.passed(BOX, 0) and not barriers.passed(BOX, 1)
    rows = shared.bytes[:BOX].view(np.int16).reshape(64, 8, 8)
    assert rows[0, 0, 0] == 3 * 64 and rows[1, 1, 0] == 4 * 64 and rows[1, 0, 0] == 4 * 64 + 8
    barriers.arrive(BOX, BOX)
    copied(barriers, tiles, memory, 64)
    assert barriers.passed(BOX, 1)
    rows = shared.bytes[:BOX].view(np.int16).reshape(64, 64)
    assert rows[5].any() and not rows[6:].any()


def test_barriers_that_are_used_wrongly(on_their_way: Any) -> None:
    shared, barriers, tiles, memory = on_their_way
    with pytest.raises(Fault, match="no barrier at 8 of shared memory"):
        barriers.arrive(8)
    barriers.arrive(BOX, BOX // 2)
    with pytest.raises(Fault, match="has been arrived at often enough"):
        barriers.arrive(BOX)
    with pytest.raises(Fault, match="is waited for in vain"):
        [barriers.passed(BOX, 0) for _ in range(PATIENCE + 1)]
    barriers.make(BOX, 1)
    barriers.arrive(BOX)
    copied(barriers, tiles, memory, 0)
    with pytest.raises(Fault, match=f"{BOX} bytes more than the barrier at {BOX} was told of"):
        barriers.passed(BOX, 0)
    shared.barrier()
    shared.load(np.zeros(1, np.uint64), 4, np.ones(1, np.int64), "read")
    copied(barriers, tiles, memory, 0)
    assert shared.races == {"writes what another warp touches: copied"}


def found_by(module: str) -> dict[str, Any]:
    """What it prints, in a process that interprets no kernel."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, "-m", module], env=environment, capture_output=True, check=True)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.matrix
def test_compiled_kernels_for_hopper() -> None:
    """Latents: both ways give the same bits, near plain torch's, and copies are waited for. Products of blocks that the
    GPU copies: those of tiles that threads load."""
    every = found_by("tests.support.ptx_hopper")
    assert len(every["products"]) == 4 and all(every["products"].values()), every
    found = every["latents of 320"]
    assert found["used"] and found["races"] == [] and found["launches"] == 6
    assert all(0 < difference < 2e-2 for difference in found["differences"].values())
    assert len(found["differences"]) == 2


@pytest.mark.matrix
def test_compiled_layers_are_those_of_plain_torch() -> None:
    """For an H100: int8 pools and sinks; of heads of 256 and of latents both ways give the same bits, and of recurrent
    layers all cuts."""
    found = found_by("tests.support.ptx_launch")
    assert found.pop("recurrent layers") == {"convolve": 20, "recur": 15, "gate": 15, "keep": 5, "races": 0}
    assert found.pop("both ways") == [True, True] and found.pop("races") == 0 and len(found) == 4
    assert all(0 < difference < 2e-2 for difference in found.values())
