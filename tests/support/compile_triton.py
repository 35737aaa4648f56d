"""Compiles the Triton kernels for GPUs that need not be there: machine code, but nothing runs.

    python -m tests.support.compile_triton [ARCHITECTURE ...]

Prints a table: kernel, architecture, registers, instructions that spill some, bytes of shared memory, and whether
products are the architecture's own tensor-core instructions; then the same as JSON. Run in a process of its own by
test_triton.py, whose kernels are interpreted.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.experimental.gluon._runtime import GluonASTSource
from triton.experimental.gluon.language import NVMMASharedLayout

from headrace.kernels.triton import attention_kernels, draw_kernels, hopper_kernels, sample_kernels, tile_schedule
from tests.support import compiled_rows
from tests.support.compiled_rows import Compiled

ARCHITECTURES = {80: ("mma.sync", 163 << 10), 90: ("wgmma", 227 << 10), 100: ("tcgen05", 227 << 10)}
"""Of an A100, an H100 and a B200: instruction of its tensor cores, and shared memory of a program."""
TYPES = dict.fromkeys(("items", "tasks", "positions", "slots", "offsets", "count", "bases", "merged"), "*i32")
TYPES |= dict.fromkeys(("acc_of", "m_of", "z_of", "bias", "sinks"), "*fp32") | {"factor": "fp32", "cap": "fp32"}
TYPES |= dict.fromkeys(("q_stride", "k_stride", "v_stride", "bias_len", "window"), "i32")
MERGE = {"HEADS": 32, "D": 128, "P": 128, "SPAN": tile_schedule.SPAN, "WINDOW": False, "SINKS": False}
WALK = MERGE | {"KV_HEADS": 8, "PART": 4, "PARTS": 1, "LANES": tile_schedule.LANES, "PRECISION": "ieee"}
WALK |= {"BIAS": False, "CAP": False, "SPLIT": False, "RESUME": False}
MODELS = {
    "": {},
    " 64": {"D": 64, "P": 64},
    " capped": {"CAP": True},
    " window, sinks": {"WINDOW": True, "SINKS": True},
}
HOPPER = {"HEADS": 32, "KV_HEADS": 8, "D": 128, "SPAN": tile_schedule.SPAN}

DRAWN = dict.fromkeys(("logits",), "*fp32") | dict.fromkeys(("masks", "tokens"), "*i32")
DRAWN |= dict.fromkeys(("counters", "leading", "leaders"), "*i64")
DRAWN |= dict.fromkeys(
    ("asked", "peaks", "found", "bins", "kept", "limits", "strays", "before", "states", "after"), "*fp64"
)
DRAWN |= dict.fromkeys(("stride", "rows", "width", "words", "blocks", "shift", "count"), "i32")
BLOCKED = {"BLOCK": 2048}
SAMPLING: dict[str, dict[str, Any]] = {
    "greatest_of_blocks": BLOCKED,
    "greatest": {"BLOCKS": 64},
    "weigh": BLOCKED | {"PIECE": 128},
    "limit": {"BLOCKS": 64},
    "descend": {"FIRST": False, "STAGE": 1, "BLOCKS": 64},
    "narrow": BLOCKED | {"STAGE": 1, "PIECE": 128},
    "cut": {"WIDE": False, "STAGE": 1},
    "strays_of_blocks": BLOCKED,
    "weigh_before_stray": BLOCKED | {"BLOCKS": 64},
    "judge_stray": {"BLOCKS": 64},
    "pick": BLOCKED | {"BLOCKS": 64},
    "rank": BLOCKED,
    "leaders_of_blocks": BLOCKED,
    "leaders_of_rows": {"SIZE": 2048},
}


@dataclass
class Used:
    """What a compiled kernel takes: registers of a thread, instructions that spill some, bytes of a program's shared
    memory and their limit; tensor: whether it multiplies with the architecture's own instruction."""

    registers: int
    spills: int
    shared: int
    limit: int
    tensor: bool


@dataclass
class HopperCompiled(Compiled):
    """A kernel in Gluon, for one architecture."""

    options: dict[str, int] = field(default_factory=dict)

    def signature(self) -> dict[str, str]:
        block = repr(NVMMASharedLayout(128, 16, 2))
        dim = self.constants["D"]
        described = {"k_desc": f"tensordesc<bf16[{dim}, 64],{block}>", "v_desc": f"tensordesc<bf16[64, {dim}],{block}>"}
        return super().signature() | described


def attention_cases() -> Iterator[Compiled]:
    options = {"num_warps": 4, "num_stages": 3}
    for model, others in MODELS.items():
        for way, split in (("flash", False), ("split", True)):
            yield Compiled(f"{way}{model}", attention_kernels.walk, WALK | {"SPLIT": split} | others, options, TYPES)
    resumed = WALK | {"SPLIT": True, "RESUME": True}
    yield Compiled("resumed", attention_kernels.walk, resumed, options, TYPES)
    yield Compiled("merge_spans", attention_kernels.merge_spans, MERGE, {"num_warps": 1}, TYPES)
    yield Compiled("store", attention_kernels.store, {"KV_HEADS": 2, "D": 80, "P": 128}, {"num_warps": 1}, TYPES)


def hopper_cases() -> Iterator[Compiled]:
    for dim, stages in ((128, 4), (64, 8)):
        flash = HOPPER | {"D": dim, "STAGES": stages, "SINKS": False}
        yield HopperCompiled(f"hopper flash {dim}", hopper_kernels.flash, flash, types=TYPES)
        split = HOPPER | {"D": dim, "STAGES": stages * 3 // 4, "RESUME": True, "WINDOW": True}
        yield HopperCompiled(f"hopper split {dim}", hopper_kernels.split, split, {"maxnreg": 128}, TYPES)


def sampling_cases() -> Iterator[Compiled]:
    for name, constants in SAMPLING.items():
        kernel = getattr(sample_kernels, name, None) or getattr(draw_kernels, name)
        yield Compiled(name, kernel, constants, {}, DRAWN)


def compiled(case: Compiled, architecture: int) -> Used:
    names, signature = case.kernel.arg_names, case.signature()
    values = {(names.index(name),): value for name, value in case.constants.items()}
    aligned = {(names.index(n),): [["tt.divisibility", 16]] for n in names if signature[n][0] == "*" or "stride" in n}
    make = GluonASTSource if isinstance(case, HopperCompiled) else ASTSource
    source = make(case.kernel, signature, constexprs=values, attrs=aligned)
    done = triton.compile(source, target=GPUTarget("cuda", architecture, 32), options=case.options)
    registers, spills = resources(done.asm["cubin"])
    instruction, limit = ARCHITECTURES[architecture]
    return Used(registers, spills, done.metadata.shared, limit, instruction in done.asm["ptx"])


def resources(machine_code: bytes) -> tuple[int, int]:
    """Registers of a thread, and instructions that spill some of them to memory."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(machine_code)
        file.flush()
        found = re.search(r"REG:(\d+) STACK:(\d+)", _said("cuobjdump", "-res-usage", file.name))
        assert found
        return int(found[1]), len(re.findall(r"\bSTL\b", _said("nvdisasm", file.name))) if int(found[2]) else 0


def _said(tool: str, *arguments: str) -> str:
    path = Path(triton.__file__).parent / "backends/nvidia/bin" / tool
    return subprocess.run([path, *arguments], capture_output=True, text=True, check=True).stdout


def main() -> None:
    found: dict[str, dict[str, dict[str, Any]]] = {}
    for architecture in [int(each) for each in sys.argv[1:]] or ARCHITECTURES:
        cases = [*attention_cases()]
        if architecture == 90:
            cases += [*hopper_cases(), *compiled_rows.cases(90), *sampling_cases()]
        for case in cases:
            used = compiled(case, architecture)
            print(
                f"{case.name:24} sm_{architecture:<4} {used.registers:4} {used.spills:5} {used.shared:7} {used.tensor}",
                flush=True,
            )
            found.setdefault(str(architecture), {})[case.name] = vars(used)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
