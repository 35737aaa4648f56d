"""/v1/cache/prefixes over HTTP: what is computed and pinned for a body, and that owners alone meet their pins."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from jsonschema import Draft202012Validator

from headrace.engine.calls import ListPrefixes, PinPrefix, ReleasePrefix
from headrace.server.openapi import document
from headrace.server.tenants import salt_of
from headrace.types import InvalidRequest
from tests.support.fake_engine import pinned
from tests.support.fake_server import Running, check_refusal, open_request, serving, until

pytestmark = pytest.mark.unit

URL = "/v1/cache/prefixes"
LONG = "x" * 199
ACME, OTHER = "key-of-acme", "key-of-other"
FILE = f"""
[tenants.acme]
keys = ["{ACME}"]
max_prompt_tokens = 300
[tenants.other]
keys = ["{OTHER}"]
tokens_per_minute = 300
"""


class Kept:
    """Pins by owner and id."""

    def __init__(self) -> None:
        self.pins: dict[tuple[str, str], dict[str, Any]] = {}
        self.calls: list[PinPrefix] = []
        self.refusal: InvalidRequest | None = None

    def pin(self, call: PinPrefix) -> dict[str, Any]:
        self.calls.append(call)
        if self.refusal is not None:
            raise self.refusal
        self.pins[call.tenant, call.id] = pinned(call)
        return pinned(call)

    def release(self, call: ReleasePrefix) -> dict[str, Any]:
        if (call.tenant, call.id) not in self.pins:
            raise InvalidRequest("no", "id", "not_found")
        return self.pins.pop((call.tenant, call.id))

    def listed(self, call: ListPrefixes) -> list[dict[str, Any]]:
        return [pin for (owner, _), pin in self.pins.items() if owner == call.tenant]

    def at(self, running: Running) -> Running:
        running.engine.answers = {PinPrefix: self.pin, ReleasePrefix: self.release, ListPrefixes: self.listed}
        return running


@pytest.fixture
def kept() -> Kept:
    return Kept()


@pytest.fixture
def server(kept: Kept) -> Iterator[Running]:
    with serving() as running:
        yield kept.at(running)


def post(running: Running, key: str = "", **body: Any) -> httpx.Response:
    return running.http.post(URL, json=body, headers={"x-api-key": key} if key else {})


def test_a_text(server: Running, kept: Kept) -> None:
    reply = post(server, prompt=LONG, id="doc", ttl="1h")
    assert reply.status_code == 200
    told = reply.json()
    assert (told["id"], told["kind"], told["tokens"], told["chunks"]) == ("doc", "prefix", 192, 3)
    assert abs(told["expires_at"] - time.time() - 3600) < 60 and told["ttl_seconds"] == 3600
    assert told["usage"]["prompt_tokens"] == 193 and told["cached_tokens"] == 96, "as the fake counts"
    prompt, params = server.engine.asked[0]
    assert prompt == "x" * 193 and params.max_tokens == 1
    (call,) = kept.calls
    assert bytes(call.tokens).decode() == "x" * 192 and call.after.startswith("prefix-")
    schema = document(False)
    wanted = schema["paths"][URL]["post"]["responses"]["200"]["content"]["application/json"]["schema"]
    Draft202012Validator({**wanted, "components": schema["components"]}).validate(told)


def test_messages_up_to_where_conversations_go_on(server: Running, kept: Kept) -> None:
    """The fake's template writes each message and a newline."""
    system = {"role": "system", "content": LONG}
    assert post(server, messages=[system]).json()["tokens"] == 192
    talk = [{"role": "user", "content": "y" * 63}, {"role": "assistant", "content": "z" * 191}]
    assert post(server, messages=talk).json()["tokens"] == 192
    assert bytes(kept.calls[-1].tokens).decode() == "y" * 63 + "\n" + "z" * 128
    tools = [{"type": "function", "function": {"name": "f", "description": "d" * 200}}]
    assert post(server, messages=[system], tools=tools).json()["tokens"] >= 512
    assert server.engine.asked[-1][0].count("d" * 200) == 1


def test_the_same_prefix_is_extended(server: Running, kept: Kept) -> None:
    first, again = (post(server, prompt_token_ids=[7] * 130, ttl_seconds=s).json() for s in (5, 50))
    assert first["id"] == again["id"] and first["id"].startswith("prefix_")
    assert post(server, prompt_token_ids=[8] * 130).json()["id"] != first["id"]
    assert post(server, prompt_token_ids=[7] * 130, cache_salt="s").json()["id"] != first["id"]
    assert len(server.http.get(URL).json()["data"]) == 2


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "messages"), ({"prompt": "a", "messages": [{"role": "user", "content": "a"}]}, "messages"),
        ({"prompt": "short"}, "prompt"), ({"prompt_token_ids": [1] * 63}, "prompt_token_ids"),
        ({"prompt_token_ids": [99_999] * 64}, "prompt_token_ids"), ({"prompt": LONG, "ttl": "2h"}, "ttl"),
        ({"prompt": LONG, "ttl_seconds": 0}, "ttl_seconds"), ({"prompt": LONG, "ttl_seconds": 1e9}, "ttl_seconds"),
        ({"prompt": LONG, "ttl_seconds": 1, "ttl": "1h"}, "ttl"), ({"prompt": LONG, "id": "a/b"}, "id"),
        ({"prompt": LONG, "id": ""}, "id"), ({"prompt": LONG, "id": "breakpoint_1"}, "id"),
        ({"prompt": LONG, "tools": []}, "tools"), ({"messages": []}, "messages"), ({"prompt": "x" * 9000}, "prompt"),
        ({"messages": [{"role": "tool", "content": LONG}]}, "messages[0].tool_call_id"),
        ({"prompt": LONG, "cache_salt": ""}, "cache_salt"), ({"prompt": LONG, "max_tokens": 3}, "max_tokens"),
    ],
)  # fmt: skip
def test_wrong_bodies(server: Running, kept: Kept, body: dict[str, Any], param: str) -> None:
    check_refusal(post(server, **body), 400, param)
    assert not kept.calls


def test_no_room(server: Running, kept: Kept) -> None:
    """Told at once, without the prefix being computed to its end."""
    kept.refusal = InvalidRequest("99 chunks of others", None, "pins_full")
    reply = post(server, prompt=LONG)
    check_refusal(reply, 400, None)
    assert reply.json()["error"]["code"] == "pins_full" and "others" not in reply.text
    until(lambda: server.engine.stats.scheduler.running == 0)


def test_without_the_client_nothing_is_computed(kept: Kept) -> None:
    with serving(chunk_s=0.05) as running:
        kept.at(running)
        sock = open_request(running.port, {"prompt": "x" * 3000}, path=URL)
        until(lambda: bool(running.engine.read))
        sock.close()
        until(lambda: bool(running.engine.aborted) and running.engine.stats.kv.chunks_used == 0)


def test_owners_alone(kept: Kept, tmp_path: Path) -> None:
    path = tmp_path / "keys.toml"
    path.write_text(FILE)
    path.chmod(0o600)
    with serving(api_keys_file=str(path)) as running:
        kept.at(running)
        assert post(running, ACME, prompt=LONG, id="a", cache_salt="x").status_code == 200
        assert (kept.calls[0].tenant, kept.calls[0].salt) == ("acme", salt_of("acme", "x"))
        mine, theirs = {"x-api-key": ACME}, {"x-api-key": OTHER}
        assert [each["id"] for each in running.http.get(URL, headers=mine).json()["data"]] == ["a"]
        assert running.http.get(f"{URL}/a", headers=mine).json()["tokens"] == 192
        assert running.http.get(URL, headers=theirs).json()["data"] == []
        for method in ("GET", "DELETE"):
            foreign, unknown = (running.http.request(method, f"{URL}/{name}", headers=theirs) for name in ("a", "b"))
            check_refusal(foreign, 404, "id")
            assert foreign.text.replace("'a'", "'b'") == unknown.text
        told = running.http.delete(f"{URL}/a", headers=mine)
        assert told.json() == {"id": "a", "object": "cache.prefix", "deleted": True}
        check_refusal(running.http.delete(f"{URL}/a", headers=mine), 404, "id")
        check_refusal(post(running, ACME, prompt="x" * 400), 400, "prompt")
        assert post(running, OTHER, prompt="x" * 280).status_code == 200
        check_refusal(post(running, OTHER, prompt="y" * 280), 429, None)


def test_clients_without_keys_by_their_salt(server: Running) -> None:
    post(server, prompt=LONG, id="a", cache_salt="x")
    assert server.http.get(URL).json()["data"] == []
    assert len(server.http.get(URL, params={"cache_salt": "x"}).json()["data"]) == 1
    check_refusal(server.http.delete(f"{URL}/a"), 404, "id")
    check_refusal(server.http.get(URL, params={"salt": "x"}), 400, "salt")
    check_refusal(server.http.post(URL, params={"cache_salt": "x"}, json={"prompt": LONG}), 400, "cache_salt")
    assert server.http.delete(f"{URL}/a", params={"cache_salt": "x"}).status_code == 200
