"""What the GPU kernels take when they are compiled, without a GPU: registers, spills and shared memory by ptxas.

    python -m tools.gpu.spills [--only WORD] [--architectures 80,90,100]

Compiles each kernel and variant that an engine can launch (tests/support/compile_triton.py) and prints a Markdown
table, variants of one kernel as one row that has the most of them; then those that spill inside a loop of products, by
name. Exit status: 1 where a loop spills that KNOWN does not name, or shared memory does not suffice. Takes minutes.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from fnmatch import fnmatch

import triton

from tests.support.compile_triton import ARCHITECTURES, SMALLEST, Used, cases, compiled

KNOWN: dict[int, tuple[str, ...]] = {
    80: ("flash 64*int8", "codes int8, 2000 rows", "codes FP8, 2000 rows", "rounded int8 128 x 256*"),
    90: ("flash 128 bias", "flash 128*int8", "split 576, latents"),
    100: ("flash 256*int8", "flash 576, latents"),
}
"""Patterns of kernels whose loops spill some registers, by Triton 3.9 alone."""


def main(arguments: Sequence[str] | None = None) -> int:
    """The exit status."""
    parser = argparse.ArgumentParser(prog="python -m tools.gpu.spills", description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="kernels whose names have this word")
    parser.add_argument("--architectures", default=",".join(map(str, ARCHITECTURES)), help="default: %(default)s")
    given = parser.parse_args(arguments)
    architectures = [int(each) for each in given.architectures.split(",")]
    found = {number: dict(measured(number, given.only)) for number in architectures}
    print(f"Triton {triton.__version__}: registers / spills in loops (in all) / KiB of shared memory\n")
    print("\n".join(table(found)))
    wrong = [line for number, kernels in found.items() for line in problems(number, kernels)]
    print("\n".join(["", *wrong]))
    return 1 if any(not line.endswith(" (known)") for line in wrong) else 0


def measured(architecture: int, word: str = "") -> Iterator[tuple[str, Used]]:
    """Each kernel with what it takes."""
    for case in cases(architecture):
        if word in case.name:
            yield case.name, compiled(case, architecture)


def table(found: dict[int, dict[str, Used]]) -> Iterator[str]:
    """A row for each kernel and head size, a column for each architecture."""
    groups: dict[str, dict[int, list[Used]]] = {}
    for architecture, kernels in found.items():
        for name, used in kernels.items():
            groups.setdefault(group_of(name), {}).setdefault(architecture, []).append(used)
    yield "| kernel | variants |" + "".join(f" sm_{architecture} |" for architecture in found)
    yield "|---|---:|" + "---:|" * len(found)
    for group, by in groups.items():
        cells = [told(by.get(architecture, [])) for architecture in found]
        yield f"| {group} | {max(map(len, by.values()))} | {' | '.join(cells)} |"


def group_of(name: str) -> str:
    """The row of a kernel: variants of attention are one, and so are tiles of a product and steps of sampling."""
    words = name.split()
    if words[0] in ("flash", "split", "resumed"):
        return f"{words[0]} {words[1]}" + (f" {words[-1]}" if words[-1] in ("int8", "fp32", "latents") else "")
    if words[0] in ("few", "many", "plain"):
        return f"products, {words[0]}" + (", gated" if words[-1] == "silu" else "")
    if words[0] == "rounded":
        return f"products of rounded rows, {words[1]}" if words[1] in ("int8", "e4m3") else "without products"
    if words[0] == "codes":
        return "products of codes and experts"
    alone = (
        "hopper",
        "merge_spans",
        "store",
        "norm",
        "rotate_heads",
        "multiply_heads",
        "delta",
        "kda",
        "mamba2",
        "short",
    )
    return name if words[0] in alone else "without products"


def told(each: list[Used]) -> str:
    """The most that one of these takes."""
    if not each:
        return ""
    registers, shared = max(used.registers for used in each), max(used.shared for used in each)
    spilt = f"{max(used.in_loops for used in each)} ({max(used.spills for used in each)})"
    return f"{registers} / {spilt} / {shared / 1024:.0f}"


def problems(architecture: int, kernels: dict[str, Used]) -> Iterator[str]:
    """Loops that spill, memory that does not suffice, and layers whose variants sum up rows in different orders."""
    sums: dict[str, set[str]] = {}
    for name, used in kernels.items():
        if used.in_loops:
            known = " (known)" if any(fnmatch(name, pattern) for pattern in KNOWN[architecture]) else ""
            yield f"sm_{architecture} {name}: {used.in_loops} spills in loops{known}"
        small = architecture == 80 and used.sums
        if used.shared > (SMALLEST if small else used.limit):
            yield f"sm_{architecture} {name}: {used.shared} bytes of shared memory"
        if used.sums:
            sums.setdefault(" ".join(group_of(name).split()[1:]), set()).update(used.sums)
    for heads, layouts in sums.items():
        if len(layouts) > 1:
            yield f"sm_{architecture} heads of {heads}: rows are summed up in several orders: {sorted(layouts)}"


if __name__ == "__main__":
    sys.exit(main())
