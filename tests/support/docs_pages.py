"""The pages of the documentation, their blocks, spans of code and links."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md")]
PAGES += [*sorted((ROOT / "docs").glob("*.md")), *sorted((ROOT / "docs/api").glob("*.md"))]
"""What speaks of the present: its commands, names and files must be there."""

NOTES = [ROOT / "CHANGELOG.md", *sorted((ROOT / "bench/notes").glob("*.md"))]
"""What speaks of its day: only links and results must be there."""

MARK = re.compile(r"<!-- (run|run on|served(?: by a classifier)?|tested by (?P<tests>.+)|not run: (?P<reason>.+)) -->")
PRINTED = "<!-- printed -->"
"""Precedes the block that shows, to the letter, what the block before it prints (one that is run)."""

FENCE = re.compile(r"^( *)```(.*)$")
LINK = re.compile(r"\]\(([^)\s]+)\)|<img[^>]* src=\"([^\"]+)\"")


@dataclass(frozen=True)
class Block:
    """A fenced block: its language, its text, the line before it, and where it begins."""

    page: str
    line: int
    language: str
    text: str
    before: str

    @property
    def mark(self) -> re.Match[str] | None:
        return MARK.fullmatch(self.before.strip())

    @property
    def runs(self) -> bool:
        return self.mark is not None and self.mark[1] in ("run", "run on")

    @property
    def goes_on(self) -> bool:
        """Whether it knows the names of the block that ran before it."""
        return self.mark is not None and self.mark[1] == "run on"

    @property
    def served(self) -> bool:
        """Whether it asks a server on port 8000 (tests/processes/test_docs_served.py)."""
        return self.mark is not None and self.mark[1] in ("served", "served by a classifier")

    @property
    def classified(self) -> bool:
        """Whether that server has a classifier with one label, under the name reranker."""
        return self.mark is not None and self.mark[1] == "served by a classifier"

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"

    def commands(self) -> list[str]:
        """The commands of a block of shell, continued lines joined."""
        joined = self.text.replace("\\\n", " ")
        return [line.strip() for line in joined.splitlines() if line.strip() and not line.strip().startswith("#")]


def name(page: Path) -> str:
    return str(page.relative_to(ROOT))


def blocks(page: Path) -> Iterator[Block]:
    lines = page.read_text().splitlines()
    inside: tuple[int, str] | None = None
    for number, line in enumerate(lines):
        fence = FENCE.match(line)
        if fence and inside is None:
            inside = number, fence[2].strip()
        elif fence and inside is not None:
            first, language = inside
            before = lines[first - 1] if first else ""
            yield Block(name(page), first + 1, language, "\n".join(lines[first + 1 : number]) + "\n", before)
            inside = None
    assert inside is None, f"{name(page)} has a block without an end"


def prose(page: Path) -> str:
    """The page without its blocks."""
    kept, inside = [], False
    for line in page.read_text().splitlines():
        if FENCE.match(line):
            inside = not inside
        kept.append("" if inside or FENCE.match(line) else line)
    return "\n".join(kept)


def spans(page: Path) -> list[str]:
    """Inline code."""
    return [" ".join(span.split()) for span in re.findall(r"`([^`]+)`", prose(page))]


def links(page: Path) -> list[str]:
    found = [first or second for first, second in LINK.findall(prose(page))]
    return [link for link in found if not re.match(r"[a-z]+:", link)]


def anchors(page: Path) -> set[str]:
    """Of its headings, as the site makes them."""
    found = set()
    for title in re.findall(r"^#+ (.*)$", prose(page), re.MULTILINE):
        plain = re.sub(r"[^\w\s-]", "", title).strip().lower()
        found.add(re.sub(r"[-\s]+", "-", plain))
    return found


ALL_BLOCKS = [block for page in PAGES for block in blocks(page)]
SHOWN = {before: block.text for before, block in pairwise(ALL_BLOCKS) if block.before == PRINTED}
"""What blocks print, by the block, as their page shows it."""
