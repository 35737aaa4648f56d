"""POST /v1/embeddings over a fake engine: a vector has the text's length and its first byte."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.fake_server import Running, check_refusal, serving

EMBEDDINGS = "/v1/embeddings"


@pytest.fixture(scope="module")
def fast() -> Iterator[Running]:
    with serving() as running:
        yield running


@pytest.mark.parametrize("form", ["float", "base64"])
def test_openais_client_reads_them(fast: Running, form: Any) -> None:
    made = fast.client().embeddings.create(model="fake", input=["abc", "d"], encoding_format=form, user="u")
    if form == "float":
        assert [each.embedding for each in made.data] == [pytest.approx(each, abs=1e-6) for each in VECTORS]
    assert [each.index for each in made.data] == [0, 1] and made.usage.prompt_tokens == made.usage.total_tokens == 4
    plain = fast.client().embeddings.create(model="fake", input=["abc", "d"])  # base64, which the client decodes
    assert [each.embedding for each in plain.data] == [pytest.approx(each, abs=1e-6) for each in VECTORS]


def unit(*numbers: float) -> list[float]:
    length = sum(each * each for each in numbers) ** 0.5
    return [each / length for each in numbers]


VECTORS = [unit(3, 97, 0, 0), unit(1, 100, 0, 0)]


@pytest.mark.parametrize(("given", "count"), [("abc", 1), ([97, 98], 1), ([[97], [98, 99]], 2), (["a", "b", "c"], 3)])
def test_every_form_of_input(fast: Running, given: Any, count: int) -> None:
    reply = fast.http.post(EMBEDDINGS, json={"input": given}).json()
    assert reply["object"] == "list" and len(reply["data"]) == count and reply["model"] == "fake"


def test_many_inputs_do_not_fill_the_queue() -> None:
    with serving(max_queued_requests=4, token_s=0.001) as running:
        reply = running.http.post(EMBEDDINGS, json={"input": ["ab"] * 50})
        assert reply.status_code == 200 and len(reply.json()["data"]) == 50


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "input"),
        ({"input": ""}, "input"),
        ({"input": []}, "input"),
        ({"input": ["a", ""]}, "input"),
        ({"input": [1, "a"]}, "input"),
        ({"input": [400]}, "input"),
        ({"input": "a" * 5000}, "input"),
        ({"input": ["a"] * 2049}, "input"),
        ({"input": "a", "dimensions": 2}, "dimensions"),
        ({"input": "a", "dimensions": 0}, "dimensions"),
        ({"input": "a", "dimensions": "4"}, "dimensions"),
        ({"input": "a", "encoding_format": "int8"}, "encoding_format"),
        ({"input": "a", "stream": True}, "stream"),
        ({"input": "a", "cache_salt": ""}, "cache_salt"),
        ({"input": "a", "task": "query"}, "task"),
    ],
)
def test_refusals_name_the_field(fast: Running, body: dict[str, Any], param: str) -> None:
    check_refusal(fast.http.post(EMBEDDINGS, json=body), 400, param)
    assert fast.engine.stats.kv.chunks_used == 0


@pytest.mark.parametrize("route", [EMBEDDINGS, "/v1/classify", "/v1/completions"])
def test_an_empty_text_of_several_is_told_by_its_place(route: str) -> None:
    field = "prompt" if route == "/v1/completions" else "input"
    with serving(labels=("no", "yes") if route == "/v1/classify" else ()) as running:
        for given, place in ((["a", ""], "[1]"), ([[], [97]], "[0]"), ("", ""), ([], "")):
            refused = running.http.post(route, json={field: given})
            check_refusal(refused, 400, field)
            assert refused.json()["error"]["message"] == f"{field}{place} must not be empty"


def test_dimensions_that_are_all_are_taken(fast: Running) -> None:
    assert len(fast.http.post(EMBEDDINGS, json={"input": "a", "dimensions": 4}).json()["data"][0]["embedding"]) == 4
