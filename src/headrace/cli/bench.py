"""`headrace bench`: a command for each benchmark of bench/registry.py, made of its options."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import MISSING
from functools import cache
from pathlib import Path
from typing import Annotated, Any, TypeVar, get_type_hints

import typer

from headrace.bench.benchmark import BenchOption, options_of
from headrace.cli.errors import one_line_errors
from headrace.cli.help import HELP_ALL, HELP_ALL_OF_GROUP, USUAL_PANEL, PanelledCommand, PanelledGroup, panel
from headrace.cli.options import metavar, model_either_way, one_model, shown_default

JSON = inspect.Parameter(
    "json_file",
    inspect.Parameter.KEYWORD_ONLY,
    default=None,
    annotation=Annotated[Path | None, typer.Option("--json", metavar="FILE", help="File that takes the result.")],
)
JSON_LAST = ("cache", "serve")
"""Their help names --json last, that of the others names it first."""

Options = TypeVar("Options")


def command_of(
    kind: type[Options], name: str, run: Callable[..., object], *more: inspect.Parameter
) -> Callable[..., None]:
    """A command that calls run(made, **more), its options being the fields of `kind` (bench.benchmark.option) and
    `more`."""
    options, types = options_of(kind), get_type_hints(kind)

    def command(help_all: bool, **given: Any) -> None:
        with one_line_errors():
            if "model" in options:
                given["model"] = _model(given, options["model"])
            made = kind(**{field: _value(field, option, given.pop(field)) for field, option in options.items()})
            run(made, **given)

    parameters = [each for field, option in options.items() for each in _parameters(field, types[field], option)]
    parameters = [*more, *parameters, HELP_ALL] if name not in JSON_LAST else [*parameters, *more, HELP_ALL]
    command.__name__, command.__doc__ = name, kind.__doc__
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {each.name: each.annotation for each in parameters}
    return command


def _model(given: dict[str, Any], option: BenchOption) -> str:
    model = one_model(given)
    if model is None and option.default is MISSING:
        raise ValueError("no model: give it first or as -m")
    return option.default if model is None else model


def _value(field: str, option: BenchOption, given: Any) -> Any:
    if option.parse is None:
        return given
    value = option.parse(field, given)
    if option.min is not None and value < option.min:
        raise ValueError(f"{field} must be at least {option.min}, got {value}")
    return value


def _parameters(field: str, kind: Any, option: BenchOption) -> list[inspect.Parameter]:
    required = option.default is MISSING
    if field == "model":
        return model_either_way(option.help + ("" if required else f"  [default: {option.default}]"))
    shown = str if option.parse is not None else kind
    least = option.min if option.parse is None else None
    about: dict[str, Any] = {"help": option.help, "min": least, "envvar": option.envvar}
    about["rich_help_panel"] = panel(USUAL_PANEL, option.rare) if not option.argument else None
    about["metavar"] = None if option.argument else metavar(shown)
    if not required and option.default is not None:
        about["show_default"] = shown_default(option.default)
    info = typer.Argument(**about) if option.argument else typer.Option(*option.flags, **about)
    default = inspect.Parameter.empty if required else option.default
    return [
        inspect.Parameter(field, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[shown, info])
    ]


@cache
def commands() -> dict[str, Any]:
    """Those of `headrace bench` by name. Only now the benchmarks are imported: other commands do not pay for them."""
    from headrace.bench.registry import BENCHMARKS
    from headrace.bench.result import measure

    app = typer.Typer(rich_markup_mode=None)
    for benchmark in BENCHMARKS:
        app.command(cls=PanelledCommand)(command_of(benchmark, benchmark.name, measure, JSON))
    made: dict[str, Any] = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    return made


class BenchGroup(PanelledGroup):
    """`headrace bench`, with the commands that it then has."""

    @property  # type: ignore[override]
    def commands(self) -> dict[str, Any]:
        return commands()

    @commands.setter
    def commands(self, _: dict[str, Any]) -> None:
        """What typer knows of: none."""


app = typer.Typer(
    cls=BenchGroup, help="Measure; --json FILE writes the result.", no_args_is_help=True, rich_markup_mode=None
)


@app.callback()
def _group(help_all: Annotated[bool, HELP_ALL_OF_GROUP] = False) -> None:
    """Each benchmark prints its figures; those of a run under other load are worth little."""
