"""Options made from SETTINGS and SamplingParams, so that no flag is written down twice; help texts in panels."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from dataclasses import fields
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

import typer
from typer.core import TyperCommand

from headrace.cli.errors import one_line_errors
from headrace.config import SETTINGS, Setting, config_from_env
from headrace.config.server import ServerSettings
from headrace.engine import preflight, torchrun
from headrace.types import SamplingParams

SERVER_ONLY = {item.name for item in SETTINGS.values() if item.record is ServerSettings and not item.everywhere}
"""Settings that mean nothing without a server."""

COMMON_PANEL = "Options that most people need"
SAMPLING_PANEL = "Sampling"

Option = inspect.Parameter


def engine_settings(server: bool) -> list[Setting]:
    """All but the model, those that most people need first."""
    found = [item for item in SETTINGS.values() if item.name != "model" and (server or item.name not in SERVER_ONLY)]
    return sorted(found, key=lambda item: not item.common)


def with_config(command: Callable[..., None], *, server: bool, model_argument: bool) -> Callable[..., None]:
    """`command(config=..., ...)` as a command with an option for every setting.

    What is given on the command line wins over the environment, that over the default. Under torchrun the command
    runs on rank 0; the other ranks are its workers.
    """
    options = [_model(model_argument), *(_engine_option(item) for item in engine_settings(server))]
    names = [option.name for option in options]

    def run(**given: Any) -> None:
        settings = {name: given.pop(name) for name in names}
        # Left out where it was not given: config_from_env then fills it in by its own rules.
        config = config_from_env(**{k: v for k, v in settings.items() if v is not None})
        torchrun.serve_if_worker(config)
        preflight.check(config)
        command(config=config, **given)

    return _dressed(run, command, "config", options)


def with_sampling(command: Callable[..., None], **defaults: Any) -> Callable[..., None]:
    """`command(params=..., ...)` with options for the sampling parameters that have a help text for it."""
    hints = get_type_hints(SamplingParams)
    options = []
    for item in fields(SamplingParams):
        name, told = item.name, item.metadata["cli"]
        if told:
            kind, default = hints[name], defaults.get(name, item.default)
            if get_origin(kind) is tuple:
                kind, default = list[get_args(kind)[0]], []  # type: ignore[misc]
            info = typer.Option(*_flags("--" + name.replace("_", "-"), kind), help=told, rich_help_panel=SAMPLING_PANEL)
            options.append(_option(name, kind, default, info))
    names = [option.name for option in options]

    def run(**given: Any) -> None:
        sampling = {name: given.pop(name) for name in names}
        lists = {name: tuple(value) for name, value in sampling.items() if isinstance(value, list)}
        command(params=SamplingParams(**sampling | lists), **given)

    return _dressed(run, command, "params", options)


def guarded(command: Callable[..., None]) -> Callable[..., None]:
    """`command` with its errors told in one line."""

    def run(**given: Any) -> None:
        with one_line_errors():
            command(**given)

    return _dressed(run, command)


def _dressed(
    run: Callable[..., None], command: Callable[..., None], replaced: str = "", options: Iterable[Option] = ()
) -> Callable[..., None]:
    """`run` with the name, the text and the parameters of `command`, the one called `replaced` becoming `options`."""
    kept = [p for p in inspect.signature(command, eval_str=True).parameters.values() if p.name != replaced]
    parameters = [p.replace(kind=Option.KEYWORD_ONLY) for p in (*kept, *options)]
    run.__name__, run.__doc__ = command.__name__, command.__doc__
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {p.name: p.annotation for p in parameters}
    return run


def _model(argument: bool) -> Option:
    item = SETTINGS["model"]
    made: Any = typer.Argument if argument else typer.Option
    panel = {} if argument else {"rich_help_panel": COMMON_PANEL}
    info = made(help=item.help, envvar=item.env, show_default=item.default, **panel)
    return _option("model", str | None, None, info)


def _engine_option(item: Setting) -> Option:
    info = typer.Option(
        *_flags(item.flag, item.kind),
        *item.aliases,
        help=item.help,
        envvar=item.env,
        show_default=False if item.default is None else str(item.default),
        show_envvar=True,
        rich_help_panel=COMMON_PANEL if item.common else item.record.title,
    )
    return _option(item.name, item.kind if item.optional else item.kind | None, None, info)


def _flags(flag: str, kind: Any) -> tuple[str, ...]:
    return (f"{flag}/--no-{flag[2:]}",) if kind is bool else (flag,)


def _option(name: str, kind: Any, default: Any, info: Any) -> Option:
    if get_origin(kind) is Literal:
        kind = kind | None
    return Option(name, Option.KEYWORD_ONLY, default=default, annotation=Annotated[kind, info])


class PanelledCommand(TyperCommand):
    """A command whose plain help lists options under the headings that `rich_help_panel` names, in order of appearance.

    typer's own panels are tables, which cut the names of flags off on narrow terminals.
    """

    def format_options(self, ctx: Any, formatter: Any) -> None:
        sections: dict[str, list[tuple[str, str]]] = {}
        for param in self.get_params(ctx):
            told = param.get_help_record(ctx)
            if told is not None:
                usual = "Arguments" if param.param_type_name == "argument" else "Options"
                sections.setdefault(getattr(param, "rich_help_panel", None) or usual, []).append(told)
        for heading, rows in sections.items():
            with formatter.section(heading):
                formatter.write_dl(rows)
