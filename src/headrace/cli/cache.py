"""`headrace cache`: the KV that servers keep on disk (--kv-offload-path): what there is, removing it, checking it."""

from __future__ import annotations

import json
import os
import re
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from headrace import console
from headrace.cli.help import HELP_ALL_OF_GROUP, USUAL_PANEL, PanelledCommand, PanelledGroup
from headrace.cli.options import guarded, with_model

PATH_ENV = "HEADRACE_KV_OFFLOAD_PATH"
AGE = re.compile(r"(\d+(?:\.\d+)?) ?([smhdw])")
UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 7 * 86400}

app = typer.Typer(
    cls=PanelledGroup,
    help="KV that servers keep on disk: list it, remove it, check it.",
    no_args_is_help=True,
    rich_markup_mode=None,
)

Path_ = Annotated[
    str | None,
    typer.Option(
        "--path",
        metavar="DIR",
        help="The directory. Default: HEADRACE_KV_OFFLOAD_PATH, else the user's cache directory.",
        rich_help_panel=USUAL_PANEL,
    ),
]


@app.callback()
def _group(help_all: Annotated[bool, HELP_ALL_OF_GROUP] = False) -> None:
    """`headrace serve` keeps them in the user's cache directory unless told otherwise (docs/offload.md)."""


def ls(
    path: Path_ = None, as_json: Annotated[bool, typer.Option("--json", help="As one JSON object.")] = False
) -> None:
    """What is stored: models, chunks, tokens, bytes, last use, by tenant.

    headrace cache ls; headrace cache ls --path /var/cache/headrace --json
    """
    from headrace.cli.cache_listing import listing, show

    root = _root(path)
    with _progress("reading") as tell:
        found = listing(root, tell)
    if as_json:
        print(json.dumps(found.told(), indent=1))
    else:
        show(console.out, found)


def rm(
    model: str | None,
    everything: Annotated[bool, typer.Option("--all", help="Of all models.")] = False,
    older_than: Annotated[
        str | None, typer.Option(metavar="AGE", help="Only what was not used for so long, as 12h, 7d or 4w.")
    ] = None,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    path: Path_ = None,
) -> None:
    """Remove stored KV. Servers may go on: what is gone they compute again.

    headrace cache rm tiny; headrace cache rm --older-than 7d; headrace cache rm --all --yes
    """
    from headrace.cli.cache_listing import listing
    from headrace.offload.tiers import upkeep
    from headrace.offload.tiers.notes import drop_notes
    from headrace.progress import sized

    if everything == (model is not None) and not (older_than and not everything):
        if everything:
            raise ValueError("give MODEL or --all, not both")
        raise ValueError("say what to remove: MODEL, --all, or --older-than AGE")
    before = None if older_than is None else time.time_ns() - int(age_s(older_than) * 1e9)
    root = _root(path)
    with _progress("reading") as tell:
        found = listing(root, tell)
    chosen = found.chosen(model, before)
    size = sum(each.entry.size for each in chosen)
    told = f"{len(chosen):,} blobs, {sized(size)}, of {found.place}"
    if not chosen:
        console.out.print(f"nothing to remove in {found.place}", markup=False)
        return
    if not (yes or _agreed(f"Remove {told}?")):
        raise typer.Exit(1)
    with _progress("removing") as tell:
        upkeep.remove(root, [each.entry for each in chosen], tell)
    if everything and older_than is None:
        drop_notes(root)
    console.out.print(f"removed {told}", markup=False)


def verify(
    repair: Annotated[bool, typer.Option("--repair", help="Remove what is bad; make a bad index anew.")] = False,
    path: Path_ = None,
) -> None:
    """Read every blob and compare checksums, names and index. Ends with 1 if something is bad and not repaired.

    headrace cache verify; headrace cache verify --repair
    """
    from headrace.config.environment import from_home
    from headrace.offload.tiers import upkeep

    root = _root(path)
    count = 0

    def counted(done: int, total: int) -> None:
        nonlocal count
        count = total
        tell(done, total)

    flaws = []
    with _progress("checking") as tell:
        for flaw in upkeep.verify(root, counted) if upkeep.holds_kv(root) else ():
            flaws.append(flaw)
    for flaw in flaws:
        console.out.print(f"bad  {flaw.what}", markup=False, soft_wrap=True)
    if flaws and repair:
        upkeep.repair(root, flaws)
    bad = f"{len(flaws):,} bad{', removed' if repair else '; --repair removes them'}" if flaws else "all sound"
    console.out.print(f"{from_home(root)}: {count:,} blobs, {bad}", markup=False)
    if flaws and not repair:
        raise typer.Exit(1)


def age_s(text: str) -> float:
    """Seconds of '7d'. Raises ValueError."""
    found = AGE.fullmatch(text.strip().lower())
    if found is None:
        raise ValueError(f"--older-than must be a number with s, m, h, d or w, as 7d, got {text!r}")
    return float(found[1]) * UNITS[found[2]]


def _root(path: str | None) -> Path:
    """Raises ValueError where there is no directory, or it is none of KV."""
    from headrace.config.tiers import NO_DISK, OWN_DISK
    from headrace.offload.tiers import own_disk, upkeep

    named = path if path is not None else os.environ.get(PATH_ENV) or OWN_DISK
    if named in (NO_DISK, OWN_DISK):
        try:
            return own_disk.kv_folder()
        except own_disk.Unusable as error:
            raise ValueError(f"no directory: {error}; --path names one") from None
    root = Path(named).expanduser()
    if not root.is_dir():
        raise ValueError(f"{root} is no directory")
    if any(root.iterdir()) and not upkeep.holds_kv(root):
        raise ValueError(f"{root} holds no KV of Headrace; give the directory of --kv-offload-path")
    return root


def _agreed(question: str) -> bool:
    """Asks on a terminal. Raises ValueError elsewhere."""
    if not _terminal():
        raise ValueError(f"{question} There is no terminal to ask on: --yes removes without asking")
    return typer.confirm(question, err=True)


def _terminal() -> bool:
    return sys.stdin.isatty()


@contextmanager
def _progress(doing: str) -> Iterator[Callable[[int, int], None]]:
    """A line that tells how many blobs are done."""
    state = (0, 0)

    def tell(done: int, total: int) -> None:
        nonlocal state
        state = done, total

    def text() -> str:
        return f"{doing} {state[0]:,} of {state[1]:,} blobs" if state[1] else ""

    with console.ProgressLine(text, lambda: state[0] / state[1] if state[1] else None):
        yield tell


for command in (ls, with_model(rm, "Whose KV: a name, folder or id, as `headrace cache ls` tells it."), verify):
    app.command(cls=PanelledCommand)(guarded(command))
