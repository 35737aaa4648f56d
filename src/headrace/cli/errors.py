"""An error as one line and an exit code, and what --debug shows instead."""

from __future__ import annotations

import logging
import os
import re
import select
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import typer
from typer.exceptions import TyperException

from headrace import logs
from headrace.cli.help import PanelledGroup
from headrace.config import EngineConfig
from headrace.console import err
from headrace.types import did_you_mean

BAD_INPUT, FAILURE, INTERRUPTED = 2, 1, 130
UNREAD = 141
"""As shells tell that a process ended by SIGPIPE: whoever read its output, `head` for one, had enough."""
STDOUT = 1

_debug = False


def set_debug(on: bool) -> None:
    global _debug
    _debug = on


def log_as(config: EngineConfig, *, serving: bool) -> EngineConfig:
    """Sets up the log of this process. The settings with a level for the engine's processes: where they leave it open,
    a server has info (debug under --debug), any other command warning."""
    if config.server.log_level == "auto" and (serving or _debug):
        config = config.replace(log_level="debug" if _debug else "info")
    logs.to_stderr(logs.level_of(config.server.log_level, logging.WARNING), config.server.log_format)
    return config


def tell(error: str) -> None:
    """An error on one line, whatever is in it."""
    told = logs.shown(" ".join(error.split()), logs.MOST_IN_LINE)
    err.print(f"headrace: {told}", style="red", markup=False)


PLAINER = (
    # Flags have no values on the command line: a wrong one stands in the environment.
    (r"^Invalid value .*env var: '([^']*)'\): Input should be a valid boolean.*", r"\1 must be true or false"),
    (r"^Invalid value for '([^']*)'(?: \(env var: '[^']*'\))?: ", r"\1: "),
    (r": Input should be a valid (integer|number|boolean).*", r" must be a \1"),
    (r" a integer$", r" an integer"),
    (r": Input should be greater than or equal to (\S+)", r" must be at least \1"),
    (r": Input should be less than or equal to (\S+)", r" must be at most \1"),
    (r"^No such option: (\S+).*", r"no such option \1"),
    (r"^No such command (.*?)\.( Did you mean (.*)\?)?$", r"no such command \1\2"),
    (r" Did you mean (.*?)\?$", r"; did you mean \1?"),
    (r"^Got unexpected extra arguments? ?\(?s?\)? ?\((.*)\)$", r"not expected: \1"),
    (r"^Option '(.*)' requires an argument\.?$", r"\1 needs a value"),
    (r"^Missing (argument|option) '(.*?)'.*$", r"missing \1 \2"),
)
"""What click and pydantic say, and how it is told here."""


def usage(error: Any) -> str:
    """What a ClickException says of the command line, with where help is."""
    told = " ".join(error.format_message().split())
    for pattern, plainer in PLAINER:
        told = re.sub(pattern, plainer, told)
    told += did_you_mean(getattr(error, "option_name", ""), getattr(error, "possibilities", None) or ())
    command = getattr(getattr(error, "ctx", None), "command_path", "headrace")
    return f"{told} See {command} --help" if told.endswith("?") else f"{told.rstrip('.')}; see {command} --help"


@contextmanager
def one_line_errors() -> Iterator[None]:
    """Turns an exception into one line and an exit code: 2 for bad input, 1 for a failure. --debug shows it whole."""
    try:
        yield
    except (typer.Exit, typer.Abort):
        raise
    except KeyboardInterrupt:
        raise typer.Exit(INTERRUPTED) from None
    except Exception as error:
        if _debug or (isinstance(error, BrokenPipeError) and _nobody_reads()):
            raise
        tell(str(error) or type(error).__name__)
        raise typer.Exit(BAD_INPUT if isinstance(error, ValueError) else FAILURE) from None


def _nobody_reads() -> bool:
    """Whether standard output is a pipe whose reader is gone: a broken pipe may also be a lost process's."""
    poll = select.poll()
    poll.register(STDOUT, 0)
    return any(happened & (select.POLLERR | select.POLLHUP) for _, happened in poll.poll(0))


@contextmanager
def _ends_unread() -> Iterator[None]:
    """Without anybody for its results a command ends, and says nothing."""
    try:
        yield
    except BrokenPipeError:
        if not _nobody_reads():
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), STDOUT)  # Python will write what it still holds
        raise typer.Exit(UNREAD) from None


class OneLineGroup(PanelledGroup):
    """The whole command line: what is wrong with it is told in one line, too. --debug may stand anywhere."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        ours = args[: args.index("--")] if "--" in args else args
        if "--debug" in ours[1:]:
            args = ["--debug", *(each for each in ours if each != "--debug"), *args[len(ours) :]]
        return super().parse_args(ctx, args)

    def make_context(self, *args: Any, **more: Any) -> Any:
        with _ends_unread():  # --version and --help are answered here
            return super().make_context(*args, **more)

    def invoke(self, ctx: Any) -> Any:
        with _ends_unread():
            made = super().invoke(ctx)
            sys.stdout.flush()
            return made

    def main(self, args: Any = None, standalone_mode: bool = True, **more: Any) -> Any:  # type: ignore[override]
        if not standalone_mode:
            return super().main(args, standalone_mode=False, **more)
        try:
            code = super().main(args, standalone_mode=False, **more)
        except typer.Abort:
            tell("given up")
            sys.exit(FAILURE)
        except TyperException as error:
            if type(error).__name__ == "NoArgsIsHelpError":  # a group without a command shows its help
                error.show()  # type: ignore[attr-defined]
            else:
                tell(usage(error))
            sys.exit(error.exit_code)
        sys.exit(code if isinstance(code, int) else 0)
