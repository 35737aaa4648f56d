"""The doors that are attacked, a file each; tools.fuzz.run finds them by their file's name."""

from __future__ import annotations

from pathlib import Path
from random import Random
from typing import Protocol


class Door(Protocol):
    """One way in. A module here has `door() -> Door`.

    memory_mib: the process and its children may grow by so much after `open`. case_s: no case takes longer.
    """

    memory_mib: int
    case_s: float

    def open(self, folder: Path) -> None:
        """Makes what all cases need; `folder` is empty and goes away afterwards."""

    def case(self, rng: Random) -> str:
        """Attacks once, in a way that depends on `rng` alone, and returns what came of it in a word or two ('refused',
        'miss', 'same bits'), which is counted. Raises, AssertionError for instance, if a promise is broken."""

    def close(self) -> None:
        """Ends what `open` started."""
