"""The GPU kernels compiled for three generations of GPUs, none of which need be there.

`python -m tools.gpu.spills` compiles all of some 370 kernels and variants; here some of them are, other ones for each
HEADRACE_TEST_SEED.
"""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import pytest

pytest.importorskip("triton", reason="Triton is built for Linux only")

from headrace.kernels import triton as kernels
from tests.support import compile_triton, sampling
from tests.support.compile_triton import ARCHITECTURES, Used
from tests.support.compiled_rows import Compiled
from tools.gpu import spills

WITHOUT_PRODUCTS = ("merge_spans", "store", "gather", "norm", "activate", "rotate_heads", *compile_triton.SAMPLING,
                    "add_segments", "route", "arrange", "combine", "add_changes", "keep", "look_up", "piece", "echo",
                    "rounded rows", "delta", "mamba2", "short conv", "turn_queries", "make_keys")  # fmt: skip
OLDER = {100: "rounded int8"}
"""Products for which Triton uses instructions of an older generation."""


def test_every_kernel_is_among_those_that_are_compiled() -> None:
    """All but those that others call, which are parts of these."""
    compiled = {case.kernel.fn.__name__ for number in ARCHITECTURES for case in compile_triton.cases(number)}
    trees = [ast.parse(file.read_text()) for file in Path(kernels.__path__[0]).glob("*_kernels.py")]
    nodes = [node for tree in trees for node in ast.walk(tree)]
    called = {node.func.id for node in nodes if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)}
    own = {node.name for tree in trees for node in tree.body if isinstance(node, ast.FunctionDef)}
    assert {name for name in own - called if name[0] != "_"} == compiled


@pytest.mark.parametrize("count", [1, pytest.param(12, marks=pytest.mark.matrix)], ids=["one", "a dozen"])
def test_kernels_compile_for_gpus(count: int, tmp_path: Path) -> None:
    """Loops of products keep everything in registers, shared memory suffices, products are the tensor cores' own
    instructions, and all variants of a layer sum up a row in one order. One: of attention."""
    every = {f"{number}:{at}": case.name for number in ARCHITECTURES for at, case in cases(number)}
    some = [at for at, name in every.items() if count > 1 or (name.startswith(("flash", "split")) and not plain(name))]
    found = used(Random(f"{sampling.seed()}/{count}").sample(some, count), tmp_path)
    assert sum(map(len, found.values())) == count
    for number, each in found.items():
        assert [line for line in spills.problems(number, each) if not line.endswith(" (known)")] == []
        older = OLDER.get(number, " ")
        odd = (name for name, used in each.items() if not used.tensor and not plain(name))
        assert [name for name in odd if not name.startswith(older)] == []


def test_penalties_have_the_roundings_of_the_hosts(tmp_path: Path) -> None:
    """No product is fused with a sum, as they are in all other kernels."""
    [at] = [at for at, case in cases(90) if case.name == "change"]
    assert not used([f"90:{at}"], tmp_path)[90]["change"].fused


def cases(architecture: int) -> Iterator[tuple[int, Compiled]]:
    yield from enumerate(compile_triton.cases(architecture))


def plain(name: str) -> bool:
    """Whether a kernel has no product of an architecture's own kind: none, or one of too few rows for that."""
    return name.startswith(WITHOUT_PRODUCTS) or name.endswith("fp32") or " x 16" in name


def used(drawn: list[str], cache: Path) -> dict[int, dict[str, Used]]:
    """What these take, by architecture, compiled in a process that does not interpret kernels."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(cache)
    command = [sys.executable, "-m", "tests.support.compile_triton", *drawn]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    found: dict[str, dict[str, dict[str, Any]]] = json.loads(done.stdout.splitlines()[-1])
    return {int(number): {name: Used(**taken) for name, taken in each.items()} for number, each in found.items()}


@pytest.mark.parametrize(
    "product", ["HMMA.16816", "HGMMA", "IMMA.16832", "IGMMA", "QMMA", "QGMMA", "UTCHMMA", "UTCQMMA"]
)
def test_what_lies_behind_an_exit_is_no_loop(product: str) -> None:
    """Of machine code: a loop with a product that spills, one without, and a place to wait that goes back."""
    code = f"""
.L_x_0:
 /*0000*/ {product} R0 ;
 /*0010*/ STL [R1], R0 ;
 /*0020*/ @P0 BRA `(.L_x_0) ;
.L_x_1:
 /*0030*/ LDL R0, [R1] ;
 /*0040*/ @P0 BRA `(.L_x_1) ;
.L_x_2:
 /*0050*/ {product} R0 ;
 /*0060*/ EXIT ;
 /*0070*/ LDL R0, [R1] ;
 /*0080*/ BRA `(.L_x_2) ;
"""
    assert compile_triton.in_loops(code) == 1


def test_what_spills_or_does_not_fit_is_told() -> None:
    one, other = "#mma<a>", "#mma<b>"
    fits = Used(255, 3, 0, 99 << 10, 163 << 10, True, [one])
    spilling = Used(255, 3, 2, 100 << 10, 163 << 10, True, [other])
    found = {"flash 64 cap": fits, "split 64": spilling, "products": fits}
    told = list(spills.problems(80, found))
    assert told[:2] == ["sm_80 split 64: 2 spills in loops", "sm_80 split 64: 102400 bytes of shared memory"]
    assert "rows are summed up in several orders" in told[-1] and len(told) == 3
    assert list(spills.problems(90, {"flash 128 bias": spilling})) == [
        "sm_90 flash 128 bias: 2 spills in loops (known)"
    ]


def test_rows_are_summed_up_alike() -> None:
    """On a Hopper GPU wherever one warp holds a row; not where two do."""

    def of(warps: str, width: int) -> list[str]:
        mma = f"versionMajor = 3, versionMinor = 0, warpsPerCTA = {warps}, instrShape = [16, {width}, 16]"
        layout = f"#mma = #ttg.nvidia_mma<{{{mma}}}>\n"
        return compile_triton.sums_of(layout + "(tensor<64x64xf32, #mma>) -> tensor<64xf32, #ttg.slice")

    assert of("[8, 1]", 32) == of("[4, 1]", 64) == ["wgmma, a row in one warp"]
    assert of("[4, 2]", 32) != of("[8, 1]", 32)
