"""Every field of a request that holds a number or a text has bounds: nothing is a fault of ours, whatever it holds."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields
from typing import Any

import httpx
import pytest

from headrace.server.chat_body import ChatBody
from headrace.server.protocol import CompletionBody
from headrace.types import InvalidRequest, Request, SamplingParams
from tests.support.fake_server import CHAT, TEXT, Running, ask, serving, text

pytestmark = pytest.mark.unit

NUMBERS = ["-1", "0", "1", "2", "2147483648", "4294967296", "9223372036854775808", "18446744073709551616", "-1e308",
           "-9223372036854775809", "1" + "0" * 400, "-1" + "0" * 400, "1e308", "1e999", "1e-320",
           "NaN", "1.5"]  # fmt: skip
OTHERS = ['""', '"x"', '"' + "x" * 100_000 + '"', "[]", "{}", "true", "null", "[18446744073709551616]", '{"7": 1e999}',
          '{"18446744073709551616": 1}', "[" + ",".join(["7"] * 5000) + "]", '["' + "x" * 5000 + '"]',
          "[" * 200 + "]" * 200]  # fmt: skip
FIELDS = [(TEXT, name) for name in CompletionBody.model_fields] + [(CHAT, name) for name in ChatBody.model_fields]


@pytest.fixture(scope="module")
def running() -> Iterator[Running]:
    with serving() as running:
        yield running


def send(running: Running, route: str, field: str, value: str) -> httpx.Response:
    """A request with one field as given, in JSON that no encoder of ours would write."""
    fixed: dict[str, Any] = text() if route == TEXT else ask()
    fixed.pop(field, None)
    body = httpx.Request("POST", "http://x", json=fixed).content.decode()
    raw = body[:-1] + ("," if fixed else "") + f'"{field}": {value}}}'
    return running.http.post(route, content=raw.encode(), headers={"Content-Type": "application/json"})


@pytest.mark.parametrize(("route", "field"), FIELDS)
def test_any_value_is_served_or_refused_by_name(running: Running, route: str, field: str) -> None:
    for value in NUMBERS + OTHERS:
        reply = send(running, route, field, value)
        told = (field, value[:40], reply.text[:300])
        assert reply.status_code in (200, 400, 404), told
        if reply.status_code != 200:
            error = reply.json()["error"]
            param = error["param"]
            known = {"invalid_json"} if error["code"] == "invalid_json" else set()
            assert known or str(param).split("[")[0].split(".")[0] in set(field_names_of(field)), told
    assert running.engine.stats.kv.chunks_used == 0


def field_names_of(field: str) -> list[str]:
    """Names by which a refusal of this field may go: limits of two fields together are told of either."""
    together = {
        "stream": ["stream_options"], "max_tokens": ["min_tokens", "max_completion_tokens"],
        "logprobs": ["top_logprobs"], "min_tokens": ["max_tokens"],
        "max_completion_tokens": ["max_tokens"], "n": ["best_of"],
        "echo": ["prompt_logprobs"],
    }  # fmt: skip
    return [field, *together.get(field, [])]


@pytest.mark.parametrize("field", [f.name for f in fields(SamplingParams)])
def test_the_python_interface_has_the_same_bounds(field: str) -> None:
    for value in (10**400, -(10**400), 2**64, 1e308, float("nan"), float("inf"), -1e308, [2**64], [10**400], {7: 1e308},
                  {2**64: 1.0}, ["x" * 5000], list(range(5000))):  # fmt: skip
        try:
            SamplingParams(**{field: value})
        except InvalidRequest as error:
            assert error.param == field
        else:
            assert field in {"include_stop_str_in_output", "ignore_eos", "skip_special_tokens", "logit_bias", "stop"}


@pytest.mark.parametrize("value", [2**64, -1, 1.5, True, 10**400])
def test_public_prefix_tokens_beyond_all_contexts(value: Any) -> None:
    with pytest.raises(InvalidRequest) as caught:
        Request("r", [1], SamplingParams(), None, value)
    assert caught.value.param == "public_prefix_tokens"


@pytest.mark.parametrize("scheme", ["Basic ", "Digest ", "Bearef ", "Bearer-", "Bearer\t", "bearer", "XXXXXX "])
def test_only_the_bearer_scheme_is_taken(scheme: str) -> None:
    with serving(api_key="s3cret") as running:
        for name in ("Authorization", "authorization"):
            assert running.http.get("/v1/models", headers={name: scheme + "s3cret"}).status_code == 401
        for right in ("Bearer s3cret", "bearer s3cret", "BEARER  s3cret"):
            assert running.http.get("/v1/models", headers={"Authorization": right}).status_code == 200
