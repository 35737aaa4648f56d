"""Shapes of answers become grammars, or are refused with the part that cannot be taken."""

from __future__ import annotations

import pytest

from headrace.engine.structured.compile import check, grammar_of
from headrace.errors import InvalidRequest
from headrace.structured import Structured

pytestmark = pytest.mark.unit


@pytest.mark.parametrize(
    "structured",
    [
        Structured(json={"type": "object", "properties": {"a": {"type": "integer"}}}),
        Structured(json="true"),
        Structured(json_object=True),
        Structured(regex=r"\d{3}-[a-z]+"),
        Structured(choice=["yes", 'n"o', "\n"]),
        Structured(grammar='start: "a" | "b" start'),
    ],
    ids=lambda structured: structured.kind,
)
def test_what_can_be_taken(structured: Structured) -> None:
    check(structured, None)
    assert grammar_of(structured)


@pytest.mark.parametrize(
    ("structured", "told"),
    [
        (Structured(json={"type": "string", "format": "cron"}), "cron"),
        (Structured(json="{"), "JSON Schema"),
        (Structured(regex="(a)\\1"), "references to groups"),
        (Structured(grammar="start: nowhere"), "nowhere"),
    ],
)
def test_what_cannot_be_taken_is_refused(structured: Structured, told: str) -> None:
    with pytest.raises(InvalidRequest, match=told) as refused:
        check(structured, None)
    assert refused.value.param == "structured"


@pytest.mark.parametrize("expression", [r"\s$\n", "a$b", "(a$)*b", "a^b"])
def test_an_anchor_inside_an_expression_is_refused_in_our_own_words(expression: str) -> None:
    told = r"^{}: \^ and \$ inside an expression look around, which is not supported; leave them out, .*$"
    for structured, place in (
        (Structured(regex=expression), "regex"),
        (Structured(json={"type": "string", "pattern": expression}), "#"),
    ):
        with pytest.raises(InvalidRequest, match=told.format(place)):
            check(structured, None)


def test_equal_shapes_have_one_grammar() -> None:
    assert grammar_of(Structured(json='{"type":"string"}')) == grammar_of(Structured(json='{ "type" : "string" }'))
    assert grammar_of(Structured(choice=["b", "a", "a"])) == grammar_of(Structured(choice=["a", "b"]))
