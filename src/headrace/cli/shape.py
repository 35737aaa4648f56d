"""The shape of an answer on the command line."""

from __future__ import annotations

from pathlib import Path

from headrace.types import InvalidRequest, Structured


def shape_of(json_schema: str | None, regex: str | None, choice: list[str] | None) -> Structured | None:
    """What --json-schema (a file or its text), --regex and --choice ask for. Raises InvalidRequest naming the option,
    ValueError for two of them or a file that cannot be read."""
    given = {"--json-schema": json_schema, "--regex": regex, "--choice": choice or None}
    names = [name for name, value in given.items() if value is not None]
    if not names:
        return None
    if names[1:]:
        raise ValueError(f"give {names[0]} or {names[1]}, not both")
    from headrace.engine.structured.compile import check

    try:
        shape = Structured(json=None if json_schema is None else _schema(json_schema), regex=regex, choice=choice or ())
        check(shape, None)  # before a model is loaded, whose own check comes later
        return shape
    except InvalidRequest as error:
        raise ValueError(f"{names[0]}: {error}") from None


def _schema(given: str) -> str:
    """A text that begins as JSON does is the schema, any other one is the name of its file."""
    if given.lstrip()[:1] in ("{", ""):
        return given
    from headrace.cli.generate import read_text

    return read_text(Path(given))
