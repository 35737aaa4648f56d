"""Lines of a batch: which are requests, in which order they are asked, and how many at once."""

from __future__ import annotations

import asyncio
import json
from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Any

import pytest

from headrace.config.served import ServedNames
from headrace.server.batch import CHAT, MOST_LOSSES, TEXT, Answer, BatchRequest, answers, read_requests
from headrace.types import EngineDead

pytestmark = pytest.mark.unit


def line(custom_id: Any = "a", url: Any = TEXT, **body: Any) -> dict[str, Any]:
    return {"custom_id": custom_id, "method": "POST", "url": url, "body": body or {"prompt": "x"}}


def encoded(lines: Iterable[Any]) -> list[bytes]:
    return [one if isinstance(one, bytes) else json.dumps(one).encode() + b"\n" for one in lines]


def chat(custom_id: str, *texts: str, **more: Any) -> dict[str, Any]:
    messages = [{"role": "user" if i % 2 else "system", "content": text} for i, text in enumerate(texts)]
    return line(custom_id, CHAT, messages=messages, **more)


BAD = [
    (b"{", "invalid_json_line", "not valid JSON", None),
    (b"\xff\n", "invalid_json_line", "not valid JSON", None),
    (b'{"custom_id": "a", "body": ' + b"[" * 100_000, "invalid_json_line", "nested too deeply", None),
    (b"[1]\n", "invalid_json_line", "no object", None),
    (line(custom_id=None), "missing_required_parameter", "custom_id", None),
    (line(custom_id=7), "missing_required_parameter", "custom_id", None),
    (line(custom_id=""), "missing_required_parameter", "custom_id", None),
    (line(custom_id="good"), "duplicate_custom_id", "'good' is that of line 1 too", None),
    ({**line(), "method": "GET"}, "invalid_method", "'GET'", "a"),
    (line(url="/v1/embeddings"), "invalid_url", "'/v1/embeddings'", "a"),
    ({"custom_id": "a", "url": TEXT}, "missing_required_parameter", "body", "a"),
    ({**line(), "body": "x"}, "missing_required_parameter", "body", "a"),
    ({"prompt": "x"}, "missing_required_parameter", "prompt where url and body should be", None),
    (line(prompt="x", stream=True), "unsupported_parameter", "stream", "a"),
    (line(prompt="\ud800"), "invalid_value", "half a surrogate pair is not text", "a"),
    (line("good", prompt="\ud800"), "invalid_value", "half a surrogate pair is not text", None),
    (line("\ud800"), "invalid_json_line", "not valid JSON", None),
]


@pytest.mark.parametrize(("bad", "code", "words", "custom_id"), BAD)
def test_bad_line_is_told_and_the_others_remain(bad: Any, code: str, words: str, custom_id: str | None) -> None:
    found = read_requests(encoded([line("good"), b" \n", bad, line("b")]))
    assert [request.custom_id for request in found.requests] == ["good", "b"]
    told = found.bad[0]
    assert (told.line, told.code, told.custom_id, len(found.bad)) == (3, code, custom_id, 1)
    assert words in told.message
    found.check_form("in.jsonl")


def test_method_and_byte_order_mark_may_be_there_or_not() -> None:
    found = read_requests([b'\xef\xbb\xbf{"custom_id": "a", "url": "/v1/completions", "body": {"prompt": "x"}}\n'])
    assert [(request.custom_id, request.body) for request in found.requests] == [("a", b'{"prompt": "x"}')]


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        ([], "holds no requests"),
        ([b"\n"], "holds no requests"),
        ([{"prompt": "x"}, {"prompt": "y"}], 'Line 1 .* no other of the 2 lines .*"url": "/v1/completions".*"prompt"'),
        ([{"messages": []}], 'Line 1 .*messages where.*"url": "/v1/chat/completions".*"messages"'),
        ([b"Once upon a time\n"], "Line 1 .*not valid JSON.*must look like this"),
        ([line(url="/v1/embeddings")], "Line 1 .*/v1/chat/completions and /v1/completions"),
    ],
)
def test_file_of_another_form_is_refused_with_the_remedy(lines: list[Any], words: str) -> None:
    with pytest.raises(ValueError, match=words) as told:
        read_requests(encoded(lines)).check_form("in.jsonl")
    assert str(told.value).startswith("in.jsonl ")


@pytest.mark.parametrize("depth", [100, 500, 900])
@pytest.mark.parametrize(("begin", "end"), [(b"[", b"]"), (b'{"content": ', b"}")])
def test_a_body_that_is_nested_deeply_is_for_the_server_to_refuse(depth: int, begin: bytes, end: bytes) -> None:
    """It does not end the batch."""
    body = b'{"prompt": ' + begin * depth + b"1" + end * depth + b"}"
    deep = b'{"custom_id": "deep", "url": "/v1/completions", "body": ' + body + b"}\n"
    found = read_requests(encoded([line("a"), deep, line("b")]))
    assert {request.custom_id for request in found.requests} == {"a", "b", "deep"} and not found.bad


def test_other_models_in_all_lines_are_refused() -> None:
    same = read_requests(encoded(line(i, prompt="x", model="gpt-9") for i in "ab"))
    with pytest.raises(ValueError, match=r"'gpt-9'.*--served-model-name gpt-9"):
        same.check_model("in.jsonl", ServedNames(("tiny",)))
    same.check_model("in.jsonl", ServedNames(("tiny", "gpt-9")))
    several = [line("a", prompt="x", model="gpt-9"), line("b", prompt="x", model="gpt-8")]
    with pytest.raises(ValueError, match=r"leave model out of their bodies$"):
        read_requests(encoded(several)).check_model("in.jsonl", ServedNames(("tiny",)))
    read_requests(encoded([*several, line("c")])).check_model("in.jsonl", ServedNames(("tiny",)))


def test_common_beginnings_are_neighbours() -> None:
    given = [
        chat("1", "long document", "first question"),
        chat("2", "another document", "first question"),
        line("3", prompt=[300, 2, 3]),
        chat("4", "long document", "second question", temperature=0),
        chat("5", "long document", "first question", cache_salt="tenant"),
        line("6", prompt=[2, 2, 3]),
        line("7", prompt=[300, 2, 4]),
        chat("8", "another document", "first question", "answer", "more"),
        line("9", CHAT, messages=[{"role": "system", "content": [{"type": "text", "text": "long document"}]}]),
    ]
    order = "".join(request.custom_id for request in read_requests(encoded(given)).requests)
    assert order == "289146375", "tenants, routes and documents each together, shorter before longer"


class Server:
    """Answers after two turns of the loop; notes what was under way at once. `fails`: whether the engine fails then."""

    def __init__(self, fails: Callable[[list[bytes]], bool] = lambda under_way: False) -> None:
        self.fails = fails
        self.under_way: list[bytes] = []
        self.seen: list[list[bytes]] = []
        self.company: dict[bytes, list[int]] = defaultdict(list)

    async def post(self, path: str, body: bytes) -> tuple[int, bytes]:
        self.under_way.append(body)
        try:
            await asyncio.sleep(0)
            self.seen.append(list(self.under_way))
            self.company[body].append(len(self.under_way))
            failed = self.fails(self.under_way)
            await asyncio.sleep(0)
        finally:
            self.under_way.remove(body)
        return 503 if failed else 200, body

    async def ready(self) -> None:
        pass


class LostServer(Server):
    """The engine fails for good with the third request while the others wait."""

    async def post(self, path: str, body: bytes) -> tuple[int, bytes]:
        if body == b"2":
            return 503, body
        self.under_way.append(body)
        try:
            await asyncio.Event().wait()
        finally:
            self.under_way.remove(body)
        return 200, body

    async def ready(self) -> None:
        assert len(self.under_way) == 3
        raise EngineDead("lost for good")


def ask(server: Server, requests: list[BatchRequest], most: int = 4) -> list[Answer]:
    async def run() -> list[Answer]:
        return [answer async for answer in answers(server, requests, most)]

    return asyncio.run(run())


def asked(count: int, **more: Any) -> list[BatchRequest]:
    return [BatchRequest(i, str(i), TEXT, str(i).encode(), **more) for i in range(count)]


def test_so_many_sequences_at_once_and_no_more() -> None:
    for sequences, most in ((1, 4), (2, 2), (5, 1)):
        server = Server()
        assert len(ask(server, asked(12, sequences=sequences))) == 12
        assert max(map(len, server.seen)) == most


def test_choices_and_prompts_count_as_sequences() -> None:
    bodies = [{"prompt": "a"}, {"prompt": "a", "n": 3}, {"prompt": ["a", "b"], "n": 2}, {"prompt": [1, 2]}, {"n": "x"}]
    given = read_requests(encoded(line(str(i), **body) for i, body in enumerate(bodies))).requests
    assert {request.custom_id: request.sequences for request in given} == {"0": 1, "1": 3, "2": 4, "3": 1, "4": 1}


def test_large_bodies_wait_for_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headrace.server.batch.MOST_BYTES", 100)
    large = [BatchRequest(i, str(i), TEXT, bytes(51)) for i in range(3)]
    server = Server()
    assert len(ask(server, large)) == 3 and max(map(len, server.seen)) == 1


def test_lost_requests_are_asked_again_and_the_one_at_fault_is_found() -> None:
    server = Server(fails=lambda under_way: b"2" in under_way)
    found = {answer.request.custom_id: answer.status for answer in ask(server, asked(5))}
    assert found == {**{str(i): 200 for i in range(5)}, "2": 0}
    assert len(server.company[b"2"]) == MOST_LOSSES and server.company[b"2"][0] > 1
    assert {told[-1] for told in server.company.values() if len(told) == MOST_LOSSES} == {1}, "the last time alone"


def test_no_other_engine_is_the_end() -> None:
    server = LostServer()
    with pytest.raises(EngineDead, match="lost for good"):
        ask(server, asked(8))
    assert server.under_way == [], "the others are cancelled"
