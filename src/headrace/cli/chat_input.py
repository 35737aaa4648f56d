"""The user's turns: lines of a terminal, with history, or of a pipe."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator

from headrace.cli.chat_commands import COMMANDS
from headrace.console import err, out

HELP = "/help lists the commands, ctrl-c stops an answer, ctrl-d or /exit leaves"

Read = Callable[[bool], str]
"""Gives the next line; raises EOFError at the end. True: it continues the line before."""


def turns() -> Iterator[str]:
    """Empty ones are left out."""
    if sys.stdin.isatty():
        err.print(HELP, style="dim")
        yield from _turns(_on_terminal(), patient=True)
    else:
        yield from _turns(_piped, patient=False)


def _turns(read: Read, *, patient: bool) -> Iterator[str]:
    """patient: the first ctrl-c clears the line, only a second one leaves."""
    cleared = False
    while True:
        try:
            turn = joined(read)
        except EOFError:
            if patient:
                err.print()  # the shell's line shall be its own
            return
        except KeyboardInterrupt:
            if not patient:
                raise
            if cleared:
                err.print()
                return
            cleared = True
            err.print("\nctrl-c again, ctrl-d or /exit leaves", style="dim")
            continue
        cleared = False
        if turn:
            yield turn


def joined(read: Read) -> str:
    """A turn: a line, and those after it as long as one ends in a backslash. Raises EOFError if there is none."""
    lines = [read(False)]
    while lines[-1].endswith("\\"):
        lines[-1] = lines[-1].removesuffix("\\")
        try:
            lines.append(read(True))
        except EOFError:
            break
    return "\n".join(lines).strip()


def _piped(continued: bool) -> str:
    line = sys.stdin.readline()
    if not line:
        raise EOFError
    return line.rstrip()


def _on_terminal() -> Read:
    """input(), which edits and recalls lines once readline is imported; Tab completes commands."""
    coloured = out.color_system is not None and not out.no_color
    try:
        import readline
    except ImportError:  # a Python without it
        coloured = False
    else:
        readline.set_completer_delims(" ")
        readline.set_completer(_completions)
        readline.parse_and_bind("tab: complete")

    def read(continued: bool) -> str:
        sign = "... " if continued else "> "
        if not sys.stdout.isatty():  # the answers go elsewhere, and the sign must not
            err.print(sign, end="", style="bold cyan")
            return input().rstrip()
        # The bytes 1 and 2 tell readline what takes no room on the line.
        return input(f"\001\033[1;36m\002{sign}\001\033[0m\002" if coloured else sign).rstrip()

    return read


def _completions(text: str, number: int) -> str | None:
    found = [name for name in COMMANDS if text.startswith("/") and name.startswith(text)]
    return found[number] if number < len(found) else None
