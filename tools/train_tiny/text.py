"""The text: the King James Bible from Debian, split by book into training and held-out parts."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

PACKAGES = ("bible-kjv-text", "bible-kjv")  # the compressed text, and the program that unpacks it
WHOLE = "gen1:1-rev22:21"
HELD_OUT = ("Ruth", "Eccl", "Jonah", "Jas")
FILLER = ("Ruth", "Jonah")  # shipped as filler.txt, so that a demo's text is text the model has not seen
VERSE = re.compile(r"^(\d?[A-Za-z]+)(\d+):\d+ (.+)$")

HELP = """The King James text could not be fetched. Either
  - install it:  apt-get install bible-kjv bible-kjv-text   (then `bible` must be on the PATH), or
  - put both .deb files into {folder} by hand (packages.debian.org), or
  - write the output of `bible -f {whole}` to {text}."""


@dataclass(frozen=True)
class Corpus:
    train: list[str]  # verses; one that ends a chapter ends with a newline
    held_out: list[str]
    filler: str


def load_corpus(folder: Path) -> Corpus:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "kjv.txt"
    if not path.exists():
        path.write_text(_fetch(folder), encoding="utf-8")
    return split_books(path.read_text(encoding="utf-8"))


def split_books(labelled: str) -> Corpus:
    """Lines such as 'Ge1:1 In the beginning ...' to verses; books named in HELD_OUT are kept apart."""
    matches = [VERSE.match(line) for line in labelled.splitlines()]
    rows = [m.groups() for m in matches if m]
    if len(rows) < 31_000:
        raise SystemExit(f"the King James text has 31,102 verses, but only {len(rows)} were read; delete it and retry")
    chapters = [row[:2] for row in rows] + [("", "")]
    verses = [(book, text + "\n" * (chapters[i] != chapters[i + 1])) for i, (book, _, text) in enumerate(rows)]
    return Corpus(
        train=[t for b, t in verses if b not in HELD_OUT],
        held_out=[t for b, t in verses if b in HELD_OUT],
        filler=join(t for b, t in verses if b in FILLER),
    )


def join(verses: Iterable[str]) -> str:
    """Verses in running text: a space between two, none after a chapter's newline."""
    return " ".join(verses).replace("\n ", "\n")


def _fetch(folder: Path) -> str:
    command = _installed() or _unpacked(folder)
    if command:
        done = subprocess.run([*command, "-f", WHOLE], capture_output=True, text=True)
        if done.returncode == 0 and len(done.stdout) > 4_000_000:
            return done.stdout
    raise SystemExit(HELP.format(folder=folder, whole=WHOLE, text=folder / "kjv.txt"))


def _installed() -> list[str] | None:
    found = shutil.which("bible")
    return [found] if found else None


def _unpacked(folder: Path) -> list[str] | None:
    """Download the Debian packages where missing and unpack them into the folder; needs no root."""
    if not shutil.which("dpkg"):
        return None
    for package in PACKAGES:
        if not list(folder.glob(f"{package}_*.deb")) and not _download(package, folder):
            return None
        subprocess.run(["dpkg", "-x", str(next(folder.glob(f"{package}_*.deb"))), str(folder / "root")], check=True)
    usr = folder / "root" / "usr"
    return [str(usr / "bin" / "bible"), "-p", str(usr / "lib")]


def _download(package: str, folder: Path) -> bool:
    if not shutil.which("apt-get"):
        return False
    return subprocess.run(["apt-get", "download", package], cwd=folder, capture_output=True).returncode == 0
