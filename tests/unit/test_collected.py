"""No test file lies where pytest does not look, as once in a folder called dist, which it leaves out by default; and
none takes anything from another."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.unit

ROOT = Path(__file__).parents[2]
VISIT = """
import sys, pytest

class Empty(pytest.File):
    def collect(self):
        print("visited", self.path)
        return []

class Visits:
    @pytest.hookimpl(tryfirst=True)
    def pytest_pycollect_makemodule(self, module_path, parent):
        return Empty.from_parent(parent, path=module_path)

pytest.main(["--collect-only", "--noconftest", "-qqs", "-c", sys.argv[1], sys.argv[2]], [Visits()])
"""

FROM_TESTS = re.compile(r"^ *(?:from|import) tests\b.*\b(?:test_\w+|conftest)\b.*$", re.MULTILINE)
"""An import of a test module or a conftest, in a script that a test starts too."""


def visited(tests: Path) -> set[Path]:
    """Files that pytest takes for tests, by this project's settings. None is imported."""
    command = [sys.executable, "-c", VISIT, str(ROOT / "pyproject.toml"), str(tests)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    return {Path(line.removeprefix("visited ")) for line in done.stdout.splitlines() if line.startswith("visited ")}


def test_every_test_file_is_collected() -> None:
    there = set((ROOT / "tests").glob("**/test_*.py"))
    assert len(there) > 90
    assert visited(ROOT / "tests") == there
    names = [path.name for path in there]
    assert sorted(set(names)) == sorted(names), "of two files of one name pytest takes the first it meets"


def test_a_folder_that_is_left_out_would_be_noticed(tmp_path: Path) -> None:
    for name in ("cpu", "dist"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "test_x.py").touch()
    assert visited(tmp_path) == {tmp_path / "cpu" / "test_x.py"}


def test_shared_helpers_lie_in_support() -> None:
    """Not in a test module or a conftest: what these define belongs to them and to pytest."""
    files = [path for folder in ("tests", "tools") for path in (ROOT / folder).rglob("*.py")]
    found = {str(path.relative_to(ROOT)): FROM_TESTS.findall(path.read_text()) for path in files}
    assert not {name: lines for name, lines in found.items() if lines}


@pytest.mark.parametrize(
    "module", ["tests.cpu.test_x import y", "tests.cpu import a, test_x", "tests.unit.conftest import y"]
)
def test_an_import_from_a_test_module_would_be_noticed(module: str) -> None:
    assert FROM_TESTS.search(f"import os\n    from {module}\n")
