"""Hooks of mkdocs.

Pages that lie outside docs/ (README, CONTRIBUTING, laboratory notes) join the site. Links that are right on GitHub,
relative to the file, are right there too. A finished page that loads anything from elsewhere is an error.
"""

from __future__ import annotations

import logging
import posixpath
import re
import sys
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

log = logging.getLogger("mkdocs.hooks.headrace")

ROOT = Path(__file__).parents[2]
OUTSIDE = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "reporting.md",
    "CHANGELOG.md": "changelog.md",
    **{f"bench/notes/{path.name}": f"notes/{path.name}" for path in sorted((ROOT / "bench/notes").glob("*.md"))},
}
"""File of the repository -> page of the site."""

LINK = re.compile(r"(\]\()([^)\s#]+)(#[^)\s]*)?(\))")
LOADED = re.compile(
    r"""<(?:script|img|iframe|source|video|audio|embed|object)\b[^>]*?\b(?:src|srcset|data)\s*=\s*["']?\s*((?:https?:)?//[^\s"'>]+)"""
    r"""|<link\b(?=[^>]*\brel=["']?(?:stylesheet|preconnect|preload|icon|dns-prefetch))[^>]*?\bhref\s*=\s*["']?\s*((?:https?:)?//[^\s"'>]+)"""
    r"""|@import\s+["'(]*((?:https?:)?//[^\s"')]+)|url\(\s*["']?((?:https?:)?//[^\s"')]+)""",
    re.IGNORECASE,
)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    for source, page in OUTSIDE.items():
        files.append(File.generated(config, page, content=(ROOT / source).read_text()))
    files.append(File.generated(config, "settings.md", content=settings()))
    return files


def settings() -> str:
    """A page with every setting by room: flag, environment twin, default and help."""
    sys.path.insert(0, str(ROOT / "src"))
    from headrace.config import SETTINGS

    lines = ["# Every setting", "", "What `headrace serve --help-all` says. A flag wins over its environment twin.", ""]
    lines += ["| flag | environment | default | |", "|---|---|---|---|"]
    for item in SETTINGS.values():
        names = [*(["MODEL"] if item.name == "model" else []), item.flag, *item.aliases]
        names += [f"--no-{item.flag[2:]}"] if item.kind is bool else []
        flags = [f"`{name}`" for name in names]
        default = "" if item.default is None else f"`{item.default}`"
        text = item.help.replace("|", "\\|")
        lines.append(f"| {', '.join(flags)} | `{item.env}` | {default} | {text} |")
    return "\n".join(lines) + "\n"


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Links relative to the file in the repository become links relative to the page."""
    uri = page.file.src_uri
    source = next((source for source, made in OUTSIDE.items() if made == uri), f"docs/{uri}")

    def moved(match: re.Match[str]) -> str:
        target = match[2]
        if re.match(r"[a-z]+:|/", target):
            return match[0]
        path = posixpath.normpath(posixpath.join(posixpath.dirname(source), target))
        goal = OUTSIDE.get(path, path.removeprefix("docs/") if path.startswith("docs/") else None)
        if goal is None:
            log.warning("%s links to %s, which is not on the site", source, target)
            return match[0]
        return f"{match[1]}{posixpath.relpath(goal, posixpath.dirname(uri) or '.')}{match[3] or ''}{match[4]}"

    return LINK.sub(moved, markdown)


def on_post_build(config: MkDocsConfig, **_: Any) -> None:
    """No page asks the network for anything when it is looked at."""
    for path in sorted(Path(config.site_dir).rglob("*")):
        if path.suffix in {".html", ".css"}:
            for found in LOADED.finditer(path.read_text(errors="replace")):
                log.warning("%s loads %s", path.relative_to(config.site_dir), next(filter(None, found.groups())))
