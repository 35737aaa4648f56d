"""Options made from SETTINGS and SamplingParams, so that no flag is written down twice."""

from __future__ import annotations

import inspect
import logging
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

import typer

from headrace import logs
from headrace.cli.errors import log_as, one_line_errors
from headrace.cli.help import COMMON_PANEL, HELP_ALL, SAMPLING_PANEL, panel
from headrace.config import SETTINGS, Setting, config_from_env
from headrace.config.server import ServerSettings
from headrace.config.sizes import parse_size
from headrace.config.tiers import OWN_DISK
from headrace.engine import preflight, torchrun
from headrace.types import SamplingParams

SERVER_ONLY = {item.name for item in SETTINGS.values() if item.record is ServerSettings and not item.everywhere}
"""Settings that mean nothing without a server."""

WITHOUT_EFFECT = {"max_connections"}
"""Settings of the server that other commands take, do nothing with, and do not show."""

DISK = "kv_offload_path"

TOKEN_COUNTS = {"max_tokens", "min_tokens"}
"""Sampling parameters that may be given as 2k, too."""

Option = inspect.Parameter


def engine_settings(server: bool) -> list[Setting]:
    """All but the model, those that most people need first."""
    found = [item for item in SETTINGS.values() if item.name != "model" and (server or item.name not in SERVER_ONLY)]
    return sorted(found, key=lambda item: (not item.common, item.common and item.record is not ServerSettings))


def with_config(command: Callable[..., None], *, server: bool, model_argument: bool) -> Callable[..., None]:
    """`command(config=..., ...)` as a command with an option for every setting.

    What is given on the command line wins over the environment, that over the default. Under torchrun the command
    runs on rank 0; the other ranks are its workers.
    """
    engine_options = [_engine_option(item, server) for item in engine_settings(server)]
    options = [*_model(model_argument), *engine_options]
    names = [option.name for option in engine_options]

    def run(**given: Any) -> None:
        from headrace.offload.tiers import own_disk

        settings = {name: given.pop(name) for name in names} | {"model": one_model(given)}
        # Left out where it was not given: config_from_env then fills it in by its own rules.
        told = {k: v for k, v in settings.items() if v is not None}
        logs.to_stderr(logging.WARNING)
        if server and SETTINGS[DISK].env not in os.environ:
            told.setdefault(DISK, OWN_DISK)
        config = config_from_env(**{name: _value(SETTINGS[name], value) for name, value in told.items()})
        config = own_disk.resolved(log_as(config, serving=server))
        torchrun.serve_if_worker(config)
        preflight.check(config)
        command(config=config, **given)

    return _dressed(run, command, "config", options)


def _value(item: Setting, given: Any) -> Any:
    """A setting's value of its text, which click has from a flag or from the environment."""
    if not isinstance(given, str):
        return given
    return item.parse(given, item.env if os.environ.get(item.env) == given else item.flag)


def with_model(command: Callable[..., None], help: str) -> Callable[..., None]:
    """`command(model=..., ...)` with the model first or by -m."""

    def run(**given: Any) -> None:
        command(model=one_model(given), **given)

    return _dressed(run, command, "model", model_either_way(help))


def with_sampling(command: Callable[..., None], **defaults: Any) -> Callable[..., None]:
    """`command(params=..., ...)` with options for the sampling parameters that have a help text for it.

    Those of `defaults` are among the options that most people need."""
    hints = get_type_hints(SamplingParams)
    options = []
    for item in fields(SamplingParams):
        name, told = item.name, item.metadata["cli"]
        if told:
            kind, default = hints[name], defaults.get(name, item.default)
            if get_origin(kind) is Sequence:
                kind, default = list[get_args(kind)[0]], []  # type: ignore[misc]
            flags = _flags("--" + name.replace("_", "-"), kind)
            place = COMMON_PANEL if name in defaults else SAMPLING_PANEL
            shown = False if default in (None, []) else shown_default(default)
            told = told if not shown else told.partition(" Default:")[0]
            info = typer.Option(*flags, help=told, metavar=metavar(kind), show_default=shown, rich_help_panel=place)
            options.append(_option(name, str | None if name in TOKEN_COUNTS else kind, default, info))
    names = [option.name for option in options]

    def run(**given: Any) -> None:
        sampling = {name: given.pop(name) for name in names}
        for name in TOKEN_COUNTS & {name for name, value in sampling.items() if value is not None}:
            sampling[name] = parse_size("--" + name.replace("_", "-"), str(sampling[name]), "tokens")
        lists = {name: tuple(value) for name, value in sampling.items() if isinstance(value, list)}
        command(params=SamplingParams(**sampling | lists), **given)

    return _dressed(run, command, "params", options)


def guarded(command: Callable[..., None]) -> Callable[..., None]:
    """`command` with its errors told in one line."""

    def run(help_all: bool, **given: Any) -> None:
        with one_line_errors():
            command(**given)

    return _dressed(run, command, options=[HELP_ALL])


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


def _model(first: bool) -> list[Option]:
    item = SETTINGS["model"]
    # Read from the environment by config_from_env alone: click could not tell it from a second model.
    twin, default = f"env var: {item.env}", f"default: {item.default}"
    if first:
        return model_either_way(f"{item.help}  [{default}]", twin, item.record.title)
    return [model_by_name(f"{item.help}  [{twin}; {default}]", COMMON_PANEL)]


def model_by_name(help: str, place: str | None = None) -> Option:
    """The option -m, --model."""
    info = typer.Option("-m", "--model", metavar="MODEL", help=help, rich_help_panel=place)
    return _option("model", str | None, None, info)


def model_either_way(help: str, told: str = "", place: str | None = None) -> list[Option]:
    """An argument and the option, of which one_model makes one. told: whence it comes besides."""
    first = _option("model_first", str | None, None, typer.Argument(metavar="MODEL", help=help))
    return [first, model_by_name("The model, in place of the argument." + (f"  [{told}]" if told else ""), place)]


def one_model(given: dict[str, Any]) -> str | None:
    """The model of a command's values, from which both forms are taken out. Raises ValueError for two models."""
    first, named = given.pop("model_first", None), given.pop("model")
    if first is not None and named is not None and first != named:
        raise ValueError(f"two models are given, {first} and -m {named}: leave one out")
    return first if named is None else named


def _engine_option(item: Setting, server: bool) -> Option:
    title = item.record.title if server or item.record is not ServerSettings else "Log and engine process"
    info = typer.Option(
        *_flags(item.flag, item.kind),
        *item.aliases,
        help=item.help,
        envvar=item.env,
        metavar=metavar(item.kind, item.name),
        show_default=False if item.default is None else shown_default(item.default),
        show_envvar=True,
        hidden=not server and item.name in WITHOUT_EFFECT,
        rich_help_panel=COMMON_PANEL if item.common else panel(title, item.rare),
    )
    # All but flags are text here: EngineConfig reads them as it reads the environment.
    return _option(item.name, bool | None if item.kind is bool else str | None, None, info)


def shown_default(value: Any) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    return f"{value:g}" if isinstance(value, float) else str(value)


METAVARS = {
    "_s": "SECONDS", "_ms": "MS", "_gbps": "GB/S", "_mb": "SIZE", "ing_size": "SIZE", "disk_size": "SIZE",
    "remote_size": "SIZE", "_path": "DIR", "_url": "URL", "_table": "FILE", "host": "ADDRESS", "_interface": "ADDRESS",
    "_key": "KEY", "_name": "NAME", "_file": "FILE", "_template": "FILE",
}  # fmt: skip
"""End of a setting's name -> what stands for its value in help texts; others say its kind."""

KINDS = {int: "N", float: "X", Path: "FILE"}


def metavar(kind: Any, name: str = "") -> str | None:
    """None for a flag, which takes no value."""
    kinds = get_args(kind) or (kind,)
    if get_origin(kind) is Literal:
        return "|".join(kinds)
    if bool in kinds:
        return None
    named = next((told for end, told in METAVARS.items() if name.endswith(end)), None)
    return named or next((told for kind, told in KINDS.items() if kind in kinds), "TEXT")


def _flags(flag: str, kind: Any) -> tuple[str, ...]:
    return (f"{flag}/--no-{flag[2:]}",) if kind is bool else (flag,)


def _option(name: str, kind: Any, default: Any, info: Any) -> Option:
    if get_origin(kind) is Literal:
        kind = kind | None
    return Option(name, Option.KEYWORD_ONLY, default=default, annotation=Annotated[kind, info])
