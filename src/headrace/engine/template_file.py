"""Chat templates that are files of their own: beside a model, or given in place of its own."""

from __future__ import annotations

from pathlib import Path

from jinja2 import Environment, TemplateError, nodes
from jinja2.ext import Extension
from jinja2.parser import Parser

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


def given_template(path: Path) -> str:
    """The chat template that the setting names. Raises ValueError where it cannot be read, and for wrong syntax, of
    which else every conversation would be told."""
    try:
        text = template_of(path)
        Environment(extensions=("jinja2.ext.loopcontrols", _Generation)).parse(text)
    except ValueError as error:
        raise ValueError(f"chat_template: {error}") from None
    except TemplateError as error:
        raise ValueError(f"chat_template: {path} is no template: {error}; put it right") from None
    return text


class _Generation(Extension):
    """The block that transformers adds, for what the model is to write."""

    tags = {"generation"}  # noqa: RUF012 (as jinja2 has it)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)
