"""Which instruction sets kernels are compiled for: those that run here by `make test`, all by `make test-matrix`."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from headrace.kernels import cpu, extension

pytestmark = pytest.mark.cpu
ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.skipif(not cpu.available(), reason=str(cpu.unavailable_reason()))
@pytest.mark.skipif(not shutil.which("c++"), reason="no compiler")
def test_configuration_tells_the_sets_that_run_here(tmp_path: Path) -> None:
    """csrc/isa/native.cpp, from plain to fast: of those that were built, the ones that kernels can be forced to."""
    program = tmp_path / "runnable"
    options = ["-std=c++20", f"-I{ROOT / 'csrc'}", "-DHEADRACE_KNOWS_AMX=1"]
    subprocess.run(["c++", *options, ROOT / "csrc/isa/native.cpp", "-o", program], check=True)
    told = subprocess.run([program], check=True, capture_output=True, text=True).stdout.split()
    built = extension.require().built_isas().split(", ")
    assert told[0] == "portable"
    assert [isa for isa in told if isa in built] == list(cpu.available_isas())


@pytest.mark.skipif(not shutil.which("make"), reason="no make")
@pytest.mark.parametrize(("target", "sets"), [("test", "runnable"), ("test-matrix", "all")])
def test_what_a_change_must_pass_compiles_all_sets(target: str, sets: str) -> None:
    assert f"make {target}\n" in (ROOT / ".ci/run").read_text()
    assert [step.rpartition(" ")[2] for step in installs(target)] == [sets]


@pytest.mark.skipif(not shutil.which("make"), reason="no make")
@pytest.mark.parametrize("targets", [("lint", "docs"), ("test-matrix", "test"), ("fuzz", "lint", "docs")])
def test_what_is_made_together_is_installed_once(targets: tuple[str, ...]) -> None:
    """With make -j two would write into .venv at the same time, and the last one's kernels stay."""
    assert [step.rpartition(" ")[2] for step in installs(*targets)] == ["all"]


def installs(*targets: str) -> list[str]:
    """The commands that install, in a clone without .venv."""
    dry = ["make", "--dry-run", "--always-make", *targets]
    steps = subprocess.run(dry, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    return [step for step in steps.splitlines() if "tools/install.py" in step]
