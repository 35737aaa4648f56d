"""`headrace keys`: keys for the file of a server (--api-keys-file)."""

from __future__ import annotations

from typing import Annotated

import typer

from headrace import console
from headrace.cli.help import HELP_ALL_OF_GROUP, USUAL_PANEL, PanelledCommand, PanelledGroup
from headrace.cli.options import guarded

app = typer.Typer(
    cls=PanelledGroup, help="API keys of a server with tenants.", no_args_is_help=True, rich_markup_mode=None
)


@app.callback()
def _group(help_all: Annotated[bool, HELP_ALL_OF_GROUP] = False) -> None:
    """The server reads them from the file that --api-keys-file names (docs/keys.md)."""


def new(
    tenant: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Print a whole table for this tenant.", rich_help_panel=USUAL_PANEL),
    ] = None,
) -> None:
    """Make a key, and print it with the line for the file.

    The line holds the key's SHA-256 alone: the key itself goes to the client, and is nowhere else.
    """
    from headrace.server.keyfile import hashed, lines_for, new_key

    key = new_key()
    lines = lines_for(tenant, key) if tenant is not None else f'"{hashed(key)}",'
    where = "into the file" if tenant is not None else "into the list of a tenant's keys in the file"
    console.out.print(f"# for the client\n{key}\n# {where}\n{lines}", markup=False, highlight=False, soft_wrap=True)


app.command(cls=PanelledCommand)(guarded(new))
