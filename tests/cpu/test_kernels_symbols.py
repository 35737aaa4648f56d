"""Nothing leaks from one instruction set to another, and none is taken by a processor that lacks a part of it.

The linker keeps one copy of each inline function and template. If a set's files make one outside the set's namespace,
processors without AVX-512 may run a body that needs it. Bodies for any processor have no VEX or EVEX instruction.
"""

from __future__ import annotations

import platform
import re
import shutil
import subprocess
from bisect import bisect_right
from pathlib import Path

import pytest

from headrace.kernels import cpu, extension

pytestmark = pytest.mark.cpu
ROOT = Path(__file__).resolve().parents[2]
SETS = ("portable", "avx2", "avx512", "avx512bf16", "amx")
OURS = re.compile(rf"headrace(?:::|\d+)(?:{'|'.join(SETS)})")
"""A name in a set's namespace; some lambdas stay mangled."""
Body = tuple[int, int, str]
"""Where a function begins and ends, and its name."""


def output(*command: str | Path) -> list[str]:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()


def shared_bodies(symbols: list[str]) -> list[Body]:
    """Functions outside the sets' namespaces, in the order of their addresses, from the lines of `nm -CS`."""
    found = set()
    for line in symbols:
        if (match := re.match(r"([0-9a-f]+) ([0-9a-f]+) [TtWVu] (.*)", line)) and not OURS.search(match[3]):
            found.add((int(match[1], 16), int(match[1], 16) + int(match[2], 16), match[3]))
    return sorted(found)


def leaks(bodies: list[Body], instructions: list[str]) -> set[str]:
    """Names of bodies with instructions of AVX or later, from the lines of `objdump -d`."""
    starts, found = [begin for begin, _, _ in bodies], set()
    for line in instructions:
        if match := re.match(r" +([0-9a-f]+):\t(?:v(?!er[rw])|k|tile|ldtile|sttile)", line):
            place = bisect_right(starts, int(match[1], 16)) - 1
            if place >= 0 and int(match[1], 16) < bodies[place][1]:
                found.add(bodies[place][2])
    return found


@pytest.mark.skipif(not cpu.available(), reason=str(cpu.unavailable_reason()))
@pytest.mark.skipif(not (shutil.which("nm") and shutil.which("objdump")), reason="there is no nm or no objdump")
@pytest.mark.skipif(platform.machine() != "x86_64", reason="one instruction set only")
@pytest.mark.parametrize("kernels", ["runnable", pytest.param("all", marks=pytest.mark.matrix)])
def test_no_set_lends_its_bodies(kernels: str) -> None:
    """The same twice: make test has kernels for the sets that run here, make test-matrix those for all sets."""
    library = extension.require().__file__
    symbols = output("nm", "-DCS", "--defined-only", library) + output("nm", "-CS", "--defined-only", library)
    bodies = shared_bodies(symbols)
    assert any("std::" in name for _, _, name in bodies)  # else it looks at nothing
    assert leaks(bodies, output("objdump", "-d", "--no-show-raw-insn", library)) == set()


def test_a_leak_is_found() -> None:
    symbols = [
        "0000000000001000 0000000000000010 W std::vector<float>::reserve(unsigned long)",
        "0000000000001010 0000000000000010 t headrace::amx::rms_norm(headrace::Norm const&)",
        "0000000000001020 0000000000000010 t headrace::tops(long)",
    ]
    bodies = shared_bodies(symbols)
    assert [name for _, _, name in bodies] == ["std::vector<float>::reserve(unsigned long)", "headrace::tops(long)"]
    plain = ["    1004:\tmovups %xmm0,(%rdi)", "    1008:\tverr   %ax"]
    assert leaks(bodies, plain) == set()
    assert leaks(bodies, [*plain, "    1014:\tvmovups %zmm0,(%rdi)", "    1030:\tvmovups %ymm0,(%rdi)"]) == set()
    assert leaks(bodies, [*plain, "    102c:\tvmovups %xmm0,(%rdi)"]) == {"headrace::tops(long)"}
    for instruction in ("vmovups %ymm0,(%rdi)", "kmovd  %eax,%k1", "tilezero %tmm0", "vzeroupper"):
        assert leaks(bodies, [f"    100a:\t{instruction}"]) == {"std::vector<float>::reserve(unsigned long)"}


def test_a_set_asks_for_all_that_it_is_compiled_with() -> None:
    options = dict(re.findall(r"set\(HEADRACE_(\w+) (?:\$\{HEADRACE_\w+\} )?(-m[^)]*)\)", _text("isa/isas.cmake")))
    asked = dict(re.findall(r"bool has_(\w+)\(\) \{(.*?)\n?\}\n", _text("isa/features.h"), re.DOTALL))
    assert set(options) == set(SETS) - {"portable"}
    for isa, words in options.items():
        wanted = {word[2:] for word in words.split() if word.startswith("-m") and "=" not in word}
        assert {name for name in wanted if f'"{name}"' not in asked[isa] and f"has_{name}()" not in asked[isa]} == set()


def _text(path: str) -> str:
    return (ROOT / "csrc" / path).read_text()
