"""The pages of docs/api name exactly the fields that the bodies have: in a table after `<!-- fields: CLASS -->`, beside
those that all routes share (`<!-- fields: sampling -->` in docs/api/common.md)."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

import pytest

from headrace.server.openapi import ROUTES, Route
from tests.support.docs_pages import ALL_BLOCKS

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


CALLS = {
    "post_v1_completions": "client.completions.create(",
    "post_v1_chat_completions": "client.chat.completions.create(",
    "post_v1_embeddings": "client.embeddings.create(",
    "post_v1_responses": "client.responses.create(",
    "post_v1_responses_input_tokens": "client.responses.input_tokens.count(",
    "get_v1_responses_one": "client.responses.retrieve(",
    "delete_v1_responses_one": "client.responses.delete(",
    "get_v1_responses_one_input_items": "client.responses.input_items.list(",
    "get_v1_models": "client.models.list(",
    "get_v1_models_one": "client.models.retrieve(",
}
"""What asks a route by OpenAI's client."""


def asked(route: Route, language: str, text: str) -> bool:
    """Whether an example asks this route."""
    path = re.sub(r"\\{\w+\\}", '[^/\\\\s"]+', re.escape(route.path))
    if language == "bash":
        return any(
            re.search(rf":8000{path}(?=[\s\"]|$)", line) and ("-X DELETE" in line) == (route.method == "DELETE")
            for line in text.splitlines()
        )
    return CALLS.get(route.name, "\0") in text or re.search(rf"[\"0]{path}\"", text) is not None


@pytest.mark.parametrize("route", ROUTES, ids=lambda route: route.name)
@pytest.mark.parametrize("language", ["bash", "python"])
def test_an_example_asks_every_route(route: Route, language: str) -> None:
    """tests/processes/test_docs_served.py runs it."""
    examples = [block for block in ALL_BLOCKS if block.served and block.language == language and "/api/" in block.page]
    assert any(asked(route, language, block.text) for block in examples)
