"""How a query and a document become one text, and a logit a score."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace import InvalidRequest
from headrace.engine.reranking import PLAIN, QWEN3, answers_of, asks_for, joined, sigmoid

pytestmark = pytest.mark.unit

ANY = st.text(st.sampled_from("a{}query document"), max_size=30)


@given(head=ANY, middle=ANY, tail=ANY, turned=st.booleans(), query=ANY, documents=st.lists(ANY, min_size=1, max_size=3))
def test_each_place_is_filled_once(
    head: str, middle: str, tail: str, turned: bool, query: str, documents: list[str]
) -> None:
    """What a query or a document says is no place, nor are other braces."""
    places = ("{document}", "{query}") if turned else ("{query}", "{document}")
    template = f"{head}{places[0]}{middle}{places[1]}{tail}"
    if template.count("{query}") + template.count("{document}") > 2:
        with pytest.raises(InvalidRequest, match="once each"):
            joined(template, query, documents)
        return
    for text, document in zip(joined(template, query, documents), documents, strict=True):
        first, second = (document, query) if turned else (query, document)
        assert text == f"{head}{first}{middle}{second}{tail}"


@pytest.mark.parametrize(
    "template", ["", "{query}", "{document}", "{query}{query}{document}", "{0}{query}", "{ query }"]
)
def test_a_template_has_both_places(template: str) -> None:
    with pytest.raises(InvalidRequest, match="once each") as refused:
        joined(template, "a", ["b"])
    assert refused.value.param == "template"


def test_a_query_is_not_read_too_often() -> None:
    assert len(joined(PLAIN, "q" * 4000, ["d"] * 1000)) == 1000
    with pytest.raises(InvalidRequest, match=r"1,000 documents .* of 5,018 characters") as refused:
        joined(PLAIN, "q" * 5000, ["d"] * 1000)
    assert refused.value.param == "query"
    assert len(joined(PLAIN, "q", ["d" * (1 << 22)])) == 1, "documents are read once each"


def test_the_published_prompt() -> None:
    [text] = joined(QWEN3, "why?", ["because"])
    assert text.endswith("<Query>: why?\n<Document>: because<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n")


class Words:
    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        assert not add_special_tokens
        return {"yes": [9], "no": [4]}[text]


def test_yes_and_no_in_this_order() -> None:
    params = asks_for(answers_of(Words()))
    assert params.logprob_token_ids == (9, 4) and (params.max_tokens, params.temperature) == (1, 0)


@given(st.floats(-1e300, 1e300))
def test_sigmoid(logit: float) -> None:
    assert 0 <= sigmoid(logit) <= 1 and math.isclose(sigmoid(logit) + sigmoid(-logit), 1)
    if abs(logit) < 30:
        assert math.isclose(sigmoid(logit), 1 / (1 + math.exp(-logit)))
