"""What is refused because something else was surely meant: a model as a prompt or a command, requests as one prompt."""

from __future__ import annotations

import json
from pathlib import Path

from headrace.engine.capacity import SHIPPED
from headrace.models.gguf.header import SUFFIX
from headrace.models.published import PUBLISHED

LINES_OF_JSON = (".jsonl", ".ndjson")


def check_prompts(prompts: list[str]) -> None:
    """Raises ValueError if the first of them names a model. For commands that were given none by -m."""
    if prompts and names_a_model(prompts[0]):
        told = f"give the model as -m {prompts[0]}" + ("" if prompts[1:] else " and a text to continue")
        raise ValueError(f"generate takes prompts: {told}")


def names_a_model(text: str) -> bool:
    """Whether this is the name of a model, the folder of one or a GGUF file."""
    try:
        path = Path(text).expanduser()
        gguf = path.suffix == SUFFIX and path.is_file()
        return text in SHIPPED or text in PUBLISHED or gguf or (path / "config.json").is_file()
    except (OSError, ValueError):  # too long for a path, or with a null byte
        return False


def check_file(path: Path, text: str) -> None:
    """Raises ValueError if the file holds requests, one a line."""
    if path.suffix in LINES_OF_JSON or _holds_objects(text.splitlines()):
        told = f"{path} holds one request a line: headrace batch {path} OUT.jsonl answers each"
        raise ValueError(f"{told} (or is it one prompt? Give it on standard input)")


def _holds_objects(lines: list[str]) -> bool:
    """One alone may be a prompt in JSON."""
    return len(lines) > 1 and all(map(_is_object, filter(str.strip, lines)))


def _is_object(line: str) -> bool:
    try:
        return line.lstrip().startswith("{") and isinstance(json.loads(line), dict)
    except (ValueError, RecursionError):
        return False
