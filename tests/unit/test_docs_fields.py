"""The pages of docs/api name exactly the fields that the bodies have: in a table after `<!-- fields: CLASS -->`, beside
those that all routes share (`<!-- fields: sampling -->` in docs/api/common.md)."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

import pytest

from headrace.server.openapi import ROUTES

pytestmark = pytest.mark.unit

API = Path(__file__).parents[2] / "docs/api"
MARK = re.compile(r"<!-- fields: ([\w.]+) -->\n\n((?:\|.*\n)+)")
TABLES = [
    pytest.param(path, *found.groups(), id=f"{path.stem}-{found[1].rpartition('.')[2]}")
    for path in sorted(API.glob("*.md"))
    for found in MARK.finditer(path.read_text())
]


def named(table: str) -> set[str]:
    """What the first column names."""
    rows = [row.split("|")[1] for row in table.splitlines()[2:]]
    return {name for row in rows for name in re.findall(r"`([a-z_]+)`", row)}


def body(name: str) -> set[str]:
    module, _, kind = name.rpartition(".")
    return set(getattr(importlib.import_module(module), kind).model_fields)


SAMPLED = body("headrace.server.protocol.SampledBody")


@pytest.mark.parametrize(("page", "of", "table"), TABLES)
def test_a_page_names_every_field(page: Path, of: str, table: str) -> None:
    wanted = SAMPLED if of == "sampling" else body(of)
    if of != "sampling" and wanted >= SAMPLED:
        wanted = wanted - SAMPLED
    assert named(table) == wanted, f"{page.name}: the table of {of} and its fields differ"


def test_there_are_tables() -> None:
    assert len(TABLES) >= 3


def test_every_route_is_in_the_table() -> None:
    """By itself, or below one that is: /v1/responses/{id}."""
    text = (API.parent / "api.md").read_text()
    listed = set(re.findall(r"`[A-Z]+ (/\S+)`", text)) | set(re.findall(r"`[A-Z]+ (/[^`]+)`", text))
    there = {route.path for route in ROUTES}
    assert {path for path in there if not any(path == one or path.startswith(f"{one}/") for one in listed)} == set()
    assert {path for path in listed if path not in there} == set()
