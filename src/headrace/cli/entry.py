"""The `headrace` script: a ctrl-c while the commands are being imported ends it without a traceback."""

from __future__ import annotations

import signal


def main() -> None:
    """Runs the command line. An ignored SIGINT, as of jobs behind nohup, stays ignored."""
    own = signal.getsignal(signal.SIGINT)
    if own is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from headrace.cli import main as commands

    signal.signal(signal.SIGINT, own)
    commands.main()
