"""What is made of the settings and kept: help texts as people see them, and the keywords of LLM for editors.

`python tools/golden.py` writes tests/unit/golden and config/keywords.py anew. Read the difference (git diff) before it
is committed: tests/unit/test_help.py and test_python.py compare them letter by letter.
"""

from __future__ import annotations

import io
import json
import os
import textwrap
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any, Literal, get_args, get_origin
from unittest.mock import patch

from headrace.cli.main import app
from headrace.config import SETTINGS

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


KEYWORDS = Path(__file__).parents[1] / "src" / "headrace" / "config" / "keywords.py"
HEAD = '''\
"""Keywords of LLM and AsyncLLM, for editors and type checkers.

Written by tools/golden.py from SETTINGS: change them there.
"""

from __future__ import annotations

from typing import Literal, TypedDict


class SettingKeywords(TypedDict, total=False):
    """Every setting but the model, with its type."""
'''


def keywords() -> str:
    """The text of config/keywords.py."""
    lines = [HEAD.rstrip()]
    for item in SETTINGS.values():
        if item.name != "model":
            lines += ["", *_declared(item.name, kind_text(item.given_kind))]
            lines += textwrap.wrap(f'"""{item.help}"""', 120, initial_indent=4 * " ", subsequent_indent=4 * " ")
    return "\n".join(lines) + "\n"


def _declared(name: str, kind: str) -> list[str]:
    """A keyword's line; what its type lists stands on a line of its own where it is too long, as ruff would have it."""
    line = f"    {name}: {kind}"
    if len(line) <= 120 or "[" not in kind:
        return [line]
    head, listed = line.removesuffix("]").split("[", 1)
    return [f"{head}[", f"        {listed}", "    ]"]


def kind_text(kind: Any) -> str:
    """A type as source: `int | None`, `Literal["auto", "int8"]`."""
    if get_origin(kind) is Literal:
        return f"Literal[{', '.join(json.dumps(each) for each in get_args(kind))}]"
    parts = get_args(kind) or (kind,)
    return " | ".join("None" if part is type(None) else part.__name__ for part in parts)


def main() -> None:
    KEYWORDS.write_text(keywords())
    print(KEYWORDS)
    FOLDER.mkdir(exist_ok=True)
    for stale in set(FOLDER.glob("*.txt")) - {FOLDER / name for name in SCREENS}:
        stale.unlink()
    for name, (command, width) in SCREENS.items():
        (FOLDER / name).write_text(screen(command, width))
        print(FOLDER / name)


if __name__ == "__main__":
    main()
