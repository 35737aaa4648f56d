"""The help texts as people see them, kept in tests/unit/golden: `python tools/golden.py` writes them anew.

Read the difference (git diff) before it is committed: tests/unit/test_help.py compares them letter by letter.
"""

from __future__ import annotations

import io
import os
from contextlib import redirect_stdout
from pathlib import Path
from unittest.mock import patch

from headrace.cli.main import app

FOLDER = Path(__file__).parents[1] / "tests" / "unit" / "golden"
COMMANDS = ("", "serve", "generate")
WIDTHS = (80, 120)
SCREENS = {f"{command or 'headrace'}-{width}.txt": (command, width) for command in COMMANDS for width in WIDTHS}
"""File -> (command, columns of the terminal)."""


def screen(command: str, width: int, flag: str = "--help") -> str:
    """What `headrace COMMAND --help` prints at this width."""
    text = io.StringIO()
    with redirect_stdout(text), patch.dict(os.environ, COLUMNS=str(width)):
        app([*command.split(), flag], prog_name="headrace", standalone_mode=False)
    return text.getvalue()


def main() -> None:
    FOLDER.mkdir(exist_ok=True)
    for stale in set(FOLDER.glob("*.txt")) - {FOLDER / name for name in SCREENS}:
        stale.unlink()
    for name, (command, width) in SCREENS.items():
        (FOLDER / name).write_text(screen(command, width))
        print(FOLDER / name)


if __name__ == "__main__":
    main()
