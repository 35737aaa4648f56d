"""Compiles the Triton kernels for GPUs that need not be there: machine code, but nothing runs.

    python -m tests.support.compile_triton [ARCHITECTURE:NUMBER ...]

Compiles these cases of each architecture (by default all) and prints what each takes as JSON. Run in a process of its
own by test_triton_compiled.py, since other tests' kernels are interpreted; `python -m tools.gpu.spills` makes a table.
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

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.experimental.gluon._runtime import GluonASTSource, GluonJITFunction
from triton.experimental.gluon.language import NVMMASharedLayout

from headrace.kernels.triton import (
    attention_kernels,
    change_kernels,
    changing,
    draw_kernels,
    hopper_kernels,
    int8_kv_kernels,
    latent_kernels,
    pinned_kernels,
    sample_kernels,
    tile_schedule,
    token_kernels,
    walk_options,
)
from headrace.kernels.triton.launch_entries import CONTRACTED
from headrace.types import MAX_LISTED
from tests.support import (
    compiled_latents,
    compiled_pieces,
    compiled_recurrent,
    compiled_rounded,
    compiled_rows,
    compiled_weights,
)
from tests.support.compiled_rows import Compiled

ARCHITECTURES = {80: ("mma.sync", 163 << 10), 90: ("wgmma", 227 << 10), 100: ("tcgen05", 227 << 10)}
"""Of an A100, an H100 and a B200: instruction of its tensor cores, and shared memory of a program."""
ONE_WARP = re.compile(r"#ttg\.nvidia_mma<\{versionMajor = 3, .*warpsPerCTA = \[\d+, 1\], instrShape.*")
SMALLEST = 99 << 10
"""Shared memory of the smallest GPUs that take the choices for sm_80: sm_86, sm_89 and sm_120."""
TYPES = dict.fromkeys(("items", "tasks", "positions", "slots", "offsets", "count", "bases", "merged"), "*i32")
TYPES |= dict.fromkeys(("acc_of", "m_of", "z_of", "bias", "sinks", "k_scale", "v_scale"), "*fp32")
TYPES |= dict.fromkeys(("q_stride", "k_stride", "v_stride", "bias_len", "window"), "i32")
TYPES |= {"factor": "fp32", "cap": "fp32"}
STORED = {"*fp32": torch.float32, "*i8": torch.int8}
GATHER = {"addresses": "*i64", "into": "*i64", "tasks": "i32", "words": "i32"}
MERGE = {"HEADS": 32, "D": 128, "P": 128, "SPAN": tile_schedule.SPAN, "WINDOW": 0, "SINKS": False}
WALK = MERGE | {"KV_HEADS": 8, "PART": 4, "PARTS": 1, "PRECISION": "ieee"}
WALK |= {"BIAS": False, "CAP": False, "SPLIT": False, "RESUME": False}
HEADS = (64, 128, 256, 512)
MODELS: dict[str, dict[str, int | bool]] = {
    "": {}, " window": {"WINDOW": 1}, " blocks": {"WINDOW": 2}, " bias": {"BIAS": True}, " cap": {"CAP": True},
    " window, cap": {"WINDOW": 1, "CAP": True}, " window, sinks": {"WINDOW": 1, "SINKS": True},
}  # fmt: skip
"""Of Llama, Mistral, Llama 4, BLOOM and MPT, Grok, Gemma 2, gpt-oss. Heads of 256 have no bias in any model, those of
512 (Gemma 4's) none of all this."""
HOPPER = {"HEADS": 32, "KV_HEADS": 8, "D": 128, "SPAN": tile_schedule.SPAN}

DRAWN = dict.fromkeys(("logits",), "*fp32") | dict.fromkeys(("masks", "tokens"), "*i32")
DRAWN |= dict.fromkeys(("counters", "leading", "leaders", "request"), "*i64") | {"listed": "*i32", "ranked": "*fp64"}
DRAWN |= dict.fromkeys(
    ("asked", "peaks", "found", "bins", "kept", "limits", "strays", "before", "states", "after"), "*fp64"
)
DRAWN |= dict.fromkeys(("stride", "rows", "width", "words", "blocks", "shift", "count"), "i32")
BLOCKED = {"BLOCK": 2048}
OF_LOGITS: dict[str, dict[str, Any]] = {
    "greatest_of_blocks": BLOCKED,
    "weigh": BLOCKED | {"PIECE": 128},
    "narrow": BLOCKED | {"STAGE": 1, "PIECE": 128},
    "cut": {"STAGE": 1},
    "strays_of_blocks": BLOCKED,
    "weigh_before_stray": BLOCKED | {"BLOCKS": 64},
    "pick": BLOCKED | {"BLOCKS": 64},
}
"""Of logits as they are, and as they are changed."""
SAMPLING: dict[str, dict[str, Any]] = {
    **{name: constants | {"CHANGED": False} for name, constants in OF_LOGITS.items()},
    **{f"{name} changed": constants | {"CHANGED": True} for name, constants in OF_LOGITS.items()},
    "greatest": {"BLOCKS": 64},
    "limit": {"BLOCKS": 64},
    "descend": {"FIRST": False, "STAGE": 1, "BLOCKS": 64},
    "judge_stray": {"BLOCKS": 64},
    "rank": BLOCKED,
    "leaders_of_blocks": BLOCKED,
    "leaders_of_rows": {"SIZE": 2048},
    "listed_logits": {"SIZE": MAX_LISTED},
    "rank_listed": BLOCKED,
    "change": BLOCKED,
    "count": {},
}


@dataclass
class Used:
    """What a compiled kernel takes: registers of a thread; instructions that spill some of them in all, and in its
    innermost loops of products (stores and loads); bytes of a program's shared memory and their limit. tensor: whether
    it multiplies with the architecture's own instruction. sums: how a tile of probabilities, whose rows are summed up,
    is spread over threads. fused: whether products and sums are fused."""

    registers: int
    spills: int
    in_loops: int
    shared: int
    limit: int
    tensor: bool
    sums: list[str]
    fused: bool = False


@dataclass
class HopperCompiled(Compiled):
    """A kernel in Gluon, for one architecture."""

    options: dict[str, int] = field(default_factory=dict)

    def signature(self) -> dict[str, str]:
        block = repr(NVMMASharedLayout(128, 16, 2))
        dim = self.constants["D"]
        described = {"k_desc": f"tensordesc<bf16[{dim}, 64],{block}>", "v_desc": f"tensordesc<bf16[64, {dim}],{block}>"}
        return super().signature() | described


def attention_cases(architecture: int) -> Iterator[Compiled]:
    for dim in HEADS:
        for model, others in MODELS.items():
            if dim <= 128 or (dim == 256 and "BIAS" not in others) or model in ("", " window"):
                yield from _walks(architecture, dim, model, others, TYPES)
        int8 = TYPES | {"k": "*i8", "v": "*i8"}
        for model in ("", " window") if dim <= 256 else ():
            yield from _walks(architecture, dim, f"{model} int8", MODELS[model], int8)
        if dim < 128:
            yield from _walks(architecture, dim, " fp32", {}, TYPES | dict.fromkeys(("q", "k", "v", "out"), "*fp32"))
        merge = MERGE | {"D": dim, "P": dim, "WINDOW": 1, "SINKS": True}
        yield Compiled(f"merge_spans {dim}", attention_kernels.merge_spans, merge, {"num_warps": 1}, TYPES)
    store = {"KV_HEADS": 2, "D": 80, "P": 128}
    yield Compiled("store", attention_kernels.store, store, {"num_warps": 1}, TYPES)
    int8 = TYPES | {"k": "*i8", "v": "*i8"}
    yield Compiled("store int8", int8_kv_kernels.store, store, {"num_warps": 1}, int8)
    yield Compiled("gather", pinned_kernels.gather, {"BLOCK": 1024}, {"num_warps": 8}, GATHER)


def _walks(
    architecture: int, dim: int, model: str, others: dict[str, bool], types: dict[str, str]
) -> Iterator[Compiled]:
    stored = STORED.get(types.get("k", ""), torch.bfloat16)
    place = architecture // 10, dim, WALK["PART"]
    flash = walk_options.flash_chosen(*place, stored)
    other = walk_options.chosen(*place, stored == torch.float32)
    for way, split, resumed in (("flash", False, False), ("split", True, False), ("resumed", True, True)):
        lanes, warps, stages, columns, keys = other if split else flash
        options = {"num_warps": warps, "num_stages": stages}
        sizes = WALK | {"D": dim, "P": dim, "V": columns or dim, "K": keys, "LANES": lanes} | others
        constants = sizes | {"SPLIT": split, "RESUME": resumed}
        yield Compiled(f"{way} {dim}{model}", attention_kernels.walk, constants, options, types)


def hopper_cases() -> Iterator[Compiled]:
    for dim, stages in ((128, 4), (64, 8)):
        flash = HOPPER | {"D": dim, "STAGES": stages, "SINKS": False}
        yield HopperCompiled(f"hopper flash {dim}", hopper_kernels.flash, flash, types=TYPES)
        split = HOPPER | {"D": dim, "STAGES": stages * 3 // 4, "RESUME": True, "WINDOW": 1}
        yield HopperCompiled(f"hopper split {dim}", hopper_kernels.split, split, {"maxnreg": 128}, TYPES)


def sampling_cases() -> Iterator[Compiled]:
    for name, constants in SAMPLING.items():
        modules, kernel = (sample_kernels, draw_kernels, change_kernels), name.split()[0]
        found = next(getattr(module, kernel) for module in modules if hasattr(module, kernel))
        yield Compiled(name, found, constants, changing.EXACT if kernel == "change" else {}, DRAWN)
    yield Compiled(
        "look_up", token_kernels.look_up, {"BLOCK": 128}, {}, DRAWN | dict.fromkeys(("chosen", "known"), "*i32")
    )


def cases(architecture: int) -> list[Compiled]:
    """All that an engine can launch on such a GPU."""
    hopper = hopper_cases() if architecture == 90 else ()
    rows, codes = compiled_rows.cases(architecture), compiled_weights.cases()
    rounded, pieces = compiled_rounded.cases(architecture), compiled_pieces.cases()
    others = (*compiled_latents.cases(architecture), *compiled_recurrent.cases(), *sampling_cases())
    return [*attention_cases(architecture), *hopper, *pieces, *rows, *codes, *rounded, *others]


def compiled(case: Compiled, architecture: int) -> Used:
    names, signature = case.kernel.arg_names, case.signature()
    values = {(names.index(name),): value for name, value in case.constants.items()}
    aligned = {(names.index(n),): [["tt.divisibility", 16]] for n in names if signature[n][0] == "*" or "stride" in n}
    make = GluonASTSource if isinstance(case.kernel, GluonJITFunction) else ASTSource
    source = make(case.kernel, signature, constexprs=values, attrs=aligned)
    done = triton.compile(source, target=GPUTarget("cuda", architecture, 32), options=CONTRACTED | case.options)
    registers, spills, in_loops = resources(done.asm["cubin"])
    instruction, limit = ARCHITECTURES[architecture]
    sums = sums_of(done.asm["ttgir"]) if case.kernel in (attention_kernels.walk, latent_kernels.walk) else []
    ptx, shared = done.asm["ptx"], done.metadata.shared
    return Used(registers, spills, in_loops, shared, limit, instruction in ptx, sums, "fma." in ptx)


def sums_of(ttgir: str) -> list[str]:
    """Layouts of the tiles [lanes, 64] of which rows are summed up or have their maximum taken. Of Hopper's those with
    a row in one warp are one: its threads hold the same columns whatever the lanes and the width of an instruction."""
    layouts = dict(re.findall(r"^(#\w+) = (#.*)$", ttgir, re.MULTILINE))
    names = re.findall(r"\(tensor<\d+x(?:32|64)xf32, (#\w+)>\) -> tensor<\d+xf32", ttgir)
    return sorted({ONE_WARP.sub("wgmma, a row in one warp", layouts[name]) for name in names})


def resources(machine_code: bytes) -> tuple[int, int, int]:
    """Registers of a thread, and instructions that spill some of them to memory: in all, and in loops (in_loops)."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(machine_code)
        file.flush()
        found = re.search(r"REG:(\d+) STACK:(\d+)", _said("cuobjdump", "-res-usage", file.name))
        assert found
        if not int(found[2]):
            return int(found[1]), 0, 0
        code = _said("nvdisasm", file.name)
        return int(found[1]), len(re.findall(r"\bSTL\b", code)), in_loops(code)


def in_loops(code: str) -> int:
    """Stores to and loads from the stack in the innermost loops that have a product: between a label and a branch back
    to it. What lies behind an exit is no loop: a place to wait, from where a branch goes back. Products of a warp are
    HMMA (bf16), IMMA (int8) and QMMA (FP8), of a warp group those with a G, on sm_100 UTC*MMA."""
    labels: dict[str, int] = {}
    lines: list[str] = []
    loops: list[tuple[int, int]] = []
    for line in code.splitlines():
        if label := re.match(r"(\.L_x_\d+):", line.strip()):
            labels[label[1]] = len(lines)
        elif re.match(r"\s*/\*[0-9a-f]{4,}\*/", line):
            back = re.search(r"\bBRA\b.*`\((\.L_x_\d+)\)", line)
            lines.append(line)
            if back and back[1] in labels:
                loops.append((labels[back[1]], len(lines)))
    product = [bool(re.search(r"\b([HIQ]G?MMA|UTC\w*MMA)\b", line)) for line in lines]
    spill = [bool(re.search(r"\b(STL|LDL)\b", line)) for line in lines]
    exits = [" EXIT" in line for line in lines]
    with_product = [(a, b) for a, b in loops if any(product[a:b]) and not any(exits[a:b])]
    inner = [a for a in with_product if not any(a != b and a[0] <= b[0] and b[1] <= a[1] for b in with_product)]
    return sum(sum(spill[begin:end]) for begin, end in inner)


def _said(tool: str, *arguments: str) -> str:
    path = Path(triton.__file__).parent / "backends/nvidia/bin" / tool
    return subprocess.run([path, *arguments], capture_output=True, text=True, check=True).stdout


def main() -> None:
    found: dict[str, dict[str, dict[str, Any]]] = {}
    wanted = [tuple(map(int, each.split(":"))) for each in sys.argv[1:]]
    wanted = wanted or [(a, n) for a in ARCHITECTURES for n in range(len(cases(a)))]
    for architecture, number in wanted:
        case = cases(architecture)[number]
        found.setdefault(str(architecture), {})[case.name] = vars(compiled(case, architecture))
    print(json.dumps(found))


if __name__ == "__main__":
    main()
