"""How Python shows LLM and AsyncLLM: every setting as a keyword with its type and default, and told in help()."""

from __future__ import annotations

import inspect
import textwrap
from collections.abc import Iterator
from typing import TypeVar

from headrace.config.fields import Setting
from headrace.config.server import ServerSettings
from headrace.config.together import SETTINGS

WIDTH = 100
C = TypeVar("C", bound=type)


class PublicNames(type):
    """A class whose dir() lists its public names, and so do its instances' if they say `__dir__ = public_names`."""

    def __dir__(cls) -> list[str]:
        return [name for name in super().__dir__() if not name.startswith("_")]


def public_names(self: object) -> list[str]:
    return [name for name in object.__dir__(self) if not name.startswith("_")]


class LongSignature(inspect.Signature):
    """One whose text has a line for each parameter, as help() shows it."""

    def __str__(self) -> str:
        lines: list[str] = []
        marked = False
        for each in self.parameters.values():
            if each.kind is inspect.Parameter.KEYWORD_ONLY and not marked:
                lines, marked = [*lines, "*"], True
            lines.append(str(each))
        return "(\n    " + ",\n    ".join(lines) + ",\n)"


def shows_settings(cls: C) -> C:
    """A class whose __init__ takes `**settings`: its signature names them all, its docstring says what they are."""
    init = vars(cls)["__init__"]
    own = inspect.signature(init, eval_str=True)
    kept = [each for each in own.parameters.values() if each.kind is not inspect.Parameter.VAR_KEYWORD]
    init.__signature__ = LongSignature([*kept, *map(_keyword, _settings())])
    if cls.__doc__:  # none with python -OO
        cls.__doc__ = f"{inspect.cleandoc(cls.__doc__)}\n\n{settings_text()}\n"
    return cls


def _settings() -> Iterator[Setting]:
    return (item for item in SETTINGS.values() if item.name != "model")


def _keyword(item: Setting) -> inspect.Parameter:
    kind = inspect.Parameter.KEYWORD_ONLY
    return inspect.Parameter(item.name, kind, default=item.default, annotation=item.given_kind)


def settings_text() -> str:
    """The settings of the engine by panels, without rare ones."""
    lines: list[str] = ["Settings, with their defaults (the others: headrace serve --help-all):"]
    title = ""
    for item in _settings():
        if item.record is ServerSettings or item.rare:
            continue
        if item.record.title != title:
            title = item.record.title
            lines += ["", title]
        told = f"{item.name}={item.default!r}: {item.help}"
        lines += textwrap.wrap(told, WIDTH, initial_indent=4 * " ", subsequent_indent=8 * " ", break_on_hyphens=False)
    return "\n".join(lines)
