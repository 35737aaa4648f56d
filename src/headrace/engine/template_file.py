"""Chat templates that are files of their own."""

from __future__ import annotations

from pathlib import Path

from headrace.files import read_given

TEMPLATE, MOST_TEMPLATE = "chat_template.jinja", 1 << 20


def template_beside(folder: Path) -> str | None:
    """The chat template that lies in a folder as a file of its own. Raises ValueError where it cannot be read."""
    found = folder / TEMPLATE
    return template_of(found) if found.is_file() else None


def template_of(path: Path) -> str:
    """The chat template that is a file. Raises ValueError where it cannot be read."""
    try:
        return read_given(path, MOST_TEMPLATE).decode()
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} cannot be read: {error}") from None
