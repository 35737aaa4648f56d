"""Small breakages of the code, each with the tests that must fail on it: one TOML file a room, read here.

[[mutant]]
name = "reused-chunk-not-held"                # unique
breaks = "A chunk that a second request ..."  # what goes wrong, in one line
file = "src/headrace/kv/cache.py"
before = "..."                                # occurs exactly once in the file
after = "..."
tests = ["tests/unit/test_cache.py"]          # the smallest part of `make test` that must fail
"""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

ROOT = Path(__file__).resolve().parents[2]
HERE = Path(__file__).parent
NATIVE = "csrc"
"""The room of the C++ kernels, which a mutant has to be compiled with."""


@dataclass(frozen=True, slots=True)
class Mutant:
    """See above. tests: pytest's arguments."""

    name: str
    breaks: str
    file: str
    before: str
    after: str
    tests: tuple[str, ...]

    @property
    def room(self) -> str:
        """The folder of the file: offload/tiers; csrc with all of its folders; headrace for files beside the rooms."""
        folder = PurePosixPath(self.file).parent
        if folder.parts[0] == NATIVE:
            return NATIVE
        return str(folder.relative_to("src")).removeprefix("headrace/") if folder.parts[0] == "src" else str(folder)

    @property
    def native(self) -> bool:
        return self.room == NATIVE

    def applied(self, text: str) -> str:
        """The file's text with the breakage. Raises ValueError unless `before` occurs exactly once."""
        if (count := text.count(self.before)) != 1:
            raise ValueError(f"{self.name}: `before` occurs {count} times in {self.file}, not once")
        return text.replace(self.before, self.after)


def mutants() -> list[Mutant]:
    """All of them, room by room."""
    found = []
    for path in sorted(HERE.glob("*.toml")):
        for each in tomllib.loads(path.read_text())["mutant"]:
            found.append(Mutant(**{**each, "tests": tuple(each["tests"])}))
    return found


def rooms(root: Path = ROOT) -> set[str]:
    """Folders whose code must have mutants: those of the package, assets aside, and the kernels'."""
    package = root / "src" / "headrace"
    files = [path for path in package.rglob("*.py") if path.name != "__init__.py" and "assets" not in path.parts]
    return {Mutant("", "", str(path.relative_to(root)), "", "", ()).room for path in files} | {NATIVE}
