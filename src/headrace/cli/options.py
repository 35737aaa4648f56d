"""Options made from the fields of EngineConfig and SamplingParams, so that no flag is written down twice."""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable, Iterable
from dataclasses import MISSING, Field, fields
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

import typer

from headrace.cli.errors import one_line_errors
from headrace.config import EngineConfig, config_from_env, env_name
from headrace.engine import torchrun
from headrace.types import SamplingParams

SERVER_ONLY = {
    "host",
    "port",
    "api_key",
    "served_model_name",
    "max_queued_requests",
    "max_queued_tokens",
    "log_interval_s",
    "restart",
}
"""Settings that mean nothing without a server."""

SAMPLING_HELP = {  # --seed is a setting of the engine already
    "max_tokens": "Most tokens of an answer. Default: as many as the context allows.",
    "min_tokens": "Fewest tokens of an answer.",
    "temperature": "0 takes the most likely token; higher is more varied.",
    "top_k": "Draw from so many most likely tokens; 0: all.",
    "top_p": "Draw from the most likely tokens that have this probability together.",
    "min_p": "Leave out tokens less likely than this share of the most likely one.",
    "stop": "Text that ends the answer; may be given several times.",
    "presence_penalty": "Against tokens that were used already.",
    "frequency_penalty": "Against tokens by how often they were used.",
    "repetition_penalty": "Against tokens of prompt and answer; 1: none.",
    "ignore_eos": "Go on past the end-of-text token.",
}

Option = inspect.Parameter


def engine_fields(server: bool) -> list[Field[Any]]:
    return [item for item in fields(EngineConfig) if item.name != "model" and (server or item.name not in SERVER_ONLY)]


def with_config(command: Callable[..., None], *, server: bool, model_argument: bool) -> Callable[..., None]:
    """`command(config=..., ...)` as a command with an option for every setting.

    What is given on the command line wins over the environment, that over the default. Under torchrun the command
    runs on rank 0; the other ranks are its workers.
    """
    options = [_model(model_argument), *(_engine_option(item) for item in engine_fields(server))]
    names = [option.name for option in options]

    def run(**given: Any) -> None:
        settings = {name: given.pop(name) for name in names}
        # Left out where it was not given: config_from_env then fills it in by its own rules.
        config = config_from_env(**{k: v for k, v in settings.items() if v is not None})
        torchrun.serve_if_worker(config)
        command(config=config, **given)

    return _dressed(run, command, "config", options)


def with_sampling(command: Callable[..., None], **defaults: Any) -> Callable[..., None]:
    """`command(params=..., ...)` with options for the sampling parameters in SAMPLING_HELP."""
    hints = get_type_hints(SamplingParams)
    own = {item.name: item.default for item in fields(SamplingParams)}
    options = []
    for name, told in SAMPLING_HELP.items():
        kind, default = hints[name], defaults.get(name, own[name])
        if name == "stop":
            kind, default = list[str], []
        options.append(_option(name, kind, default, typer.Option(*_flags(name, kind), help=told)))

    def run(**given: Any) -> None:
        sampling = {name: given.pop(name) for name in SAMPLING_HELP}
        command(params=SamplingParams(**{**sampling, "stop": tuple(sampling["stop"] or ())}), **given)

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
    told, default = _help_of("model"), "tiny"
    made: Any = typer.Argument if argument else typer.Option
    info = made(help=told, envvar=env_name("model"), show_default=default)
    return _option("model", str | None, None, info)


def _engine_option(item: Field[Any]) -> Option:
    kind = get_type_hints(EngineConfig)[item.name]
    assert item.default is not MISSING
    shown = None if item.default is None else str(item.default)
    info = typer.Option(
        *_flags(item.name, kind),
        *item.metadata["aliases"],
        help=_help_of(item.name),
        envvar=env_name(item.name),
        show_default=shown or False,
        show_envvar=True,
    )
    return _option(item.name, kind if _is_optional(kind) else kind | None, None, info)


def _help_of(name: str) -> str:
    told: str = next(item.metadata["help"] for item in fields(EngineConfig) if item.name == name)
    return told


def _flags(name: str, kind: Any) -> tuple[str, ...]:
    flag = "--" + name.replace("_", "-")
    return (f"{flag}/--no-{flag[2:]}",) if kind is bool else (flag,)


def _is_optional(kind: Any) -> bool:
    return get_origin(kind) in (Union, types.UnionType) and type(None) in get_args(kind)


def _option(name: str, kind: Any, default: Any, info: Any) -> Option:
    if get_origin(kind) is Literal:
        kind = kind | None
    return Option(name, Option.KEYWORD_ONLY, default=default, annotation=Annotated[kind, info])
