"""The routes of the cache over HTTP: whose chunks are told to whom, pages and their cursors, who may reset."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from jsonschema import Draft202012Validator

from headrace.engine.call_handlers import CallHandlers
from headrace.engine.calls import ResetPrefixCache, TreePage
from headrace.kv.cache import KVCache
from headrace.kv.pins import Pins
from headrace.server.openapi import document
from headrace.server.tenants import salt_of
from headrace.types import CHUNK
from tests.support.fake_server import Running, check_refusal, serving

pytestmark = pytest.mark.unit

TREE, RESET = "/v1/cache/tree", "/v1/cache/reset"
ACME, OTHER, OPERATOR = "key-of-acme", "key-of-other", "key-of-operator"
FILE = f"""
[tenants.acme]
keys = ["{ACME}"]
[tenants.other]
keys = ["{OTHER}"]
metrics = true
"""


@contextmanager
def server_of(cache: KVCache, **options: Any) -> Iterator[Running]:
    """A server whose engine answers calls about this cache."""
    pins, capacity = Pins(cache, cache.pool.total // 2), SimpleNamespace(kv_bytes_per_token=8)
    core: Any = SimpleNamespace(cache=cache, pins=pins, loaded=SimpleNamespace(capacity=capacity))
    calls = CallHandlers(core)
    with serving(**options) as running:
        running.engine.answers.update(dict.fromkeys((TreePage, ResetPrefixCache), calls.ask))
        yield running


def cached(cache: KVCache, text: str, salt: str | None = None, public: int = 0) -> None:
    """A prompt with a chunk for each letter has been read."""
    tokens = [ord(letter) for letter in text for _ in range(CHUNK)] + [0]
    table = cache.open(tokens, salt=salt, public_tokens=public * CHUNK)
    cache.reuse(table)
    cache.extend(table, len(tokens) - table.length)
    cache.commit()
    cache.close(table)


def page(running: Running, key: str = "", **query: Any) -> httpx.Response:
    return running.http.get(TREE, params=query, headers={"x-api-key": key} if key else {})


def segments(running: Running, key: str = "", **query: Any) -> list[dict[str, Any]]:
    """All pages."""
    told: list[dict[str, Any]] = []
    while True:
        reply = page(running, key, **query)
        assert reply.status_code == 200, reply.text
        told += reply.json()["data"]
        if not reply.json()["has_more"]:
            assert reply.json()["next"] is None
            return told
        query["after"] = reply.json()["next"]


def sizes(told: list[dict[str, Any]]) -> list[tuple[int, int]]:
    return [(each["start"] // CHUNK, each["chunks"]) for each in told]


@pytest.fixture
def keys(tmp_path: Path) -> str:
    path = tmp_path / "keys.toml"
    path.write_text(FILE)
    path.chmod(0o600)
    return str(path)


def test_what_is_told_of_a_segment() -> None:
    cache = KVCache(100)
    for text in ("abcd", "abce", "abce"):
        cached(cache, text)
    with server_of(cache) as running:
        trunk, first, second = segments(running, limit=2)
        schema = document(False)
        told = schema["paths"][TREE]["get"]["responses"]["200"]["content"]["application/json"]["schema"]
        Draft202012Validator({**told, "components": schema["components"]}).validate(page(running).json())
    assert trunk["parent"] is None and first["parent"] == second["parent"] == trunk["id"]
    assert (trunk["start"], trunk["tokens"], trunk["chunks"], trunk["bytes"]) == (0, 192, 3, 192 * 8)
    assert (trunk["children"], trunk["hits"], trunk["reused_tokens"], trunk["holders"]) == (2, 2, 6 * 64, 0)
    assert (first["start"], first["hits"], second["hits"], second["children"]) == (192, 0, 1, 0)
    assert not trunk["private"] and trunk["owner"] is None


def test_clients_without_keys_see_what_has_their_salt() -> None:
    cache = KVCache(100)
    cached(cache, "ab")
    cached(cache, "abcd", salt="mine", public=2)
    with server_of(cache) as running:
        assert sizes(segments(running)) == [(0, 2)]
        (mine,) = segments(running, cache_salt="mine")
        assert sizes([mine]) == [(2, 2)] and mine["private"] and mine["parent"] is None
        assert segments(running, cache_salt="yours") == []
        told = segments(running, all="true")
    assert sizes(told) == [(0, 2), (2, 2)]
    assert told[1]["parent"] == told[0]["id"] and told[1]["owner"] and told[1]["id"] != mine["id"]


def test_tenants_see_their_own(keys: str) -> None:
    cache = KVCache(100)
    cached(cache, "abc", salt=salt_of("acme", None), public=1)
    cached(cache, "xyzw", salt=salt_of("acme", "x"))
    cached(cache, "abd", salt=salt_of("other", None), public=1)
    cached(cache, "pq", salt=salt_of("", "x"))
    with server_of(cache, api_keys_file=keys, api_key=OPERATOR) as running:
        assert sizes(segments(running, ACME)) == [(1, 2)]
        assert sizes(segments(running, ACME, cache_salt="x")) == [(0, 4)]
        assert segments(running, ACME)[0]["id"] != segments(running, OTHER)[0]["id"]
        assert segments(running, OTHER, cache_salt="x") == []
        assert sizes(segments(running, OPERATOR)) == [(0, 1)]
        assert sizes(segments(running, OPERATOR, cache_salt="x")) == [(0, 2)]
        check_refusal(page(running, ACME, all="true"), 403, None)
        for key in (OTHER, OPERATOR):
            assert sum(each["chunks"] for each in segments(running, key, all="1", limit=1)) == 1 + 2 + 4 + 2 + 2
        assert page(running).status_code == 401


def test_cursors(keys: str) -> None:
    """They hold for the listing that they are from, and nobody can make one up."""
    cache = KVCache(100)
    for letter in "bcdef":
        cached(cache, "a" + letter, salt=salt_of("other", None))
        cached(cache, "a" + letter)
    with server_of(cache, api_keys_file=keys, api_key=OPERATOR) as running:
        cursor = page(running, OTHER, limit=2).json()["next"]
        assert len(page(running, OTHER, after=cursor).json()["data"]) == 4
        for key, query in ((OPERATOR, {}), (OTHER, {"cache_salt": "x"}), (OTHER, {"all": "true"})):
            check_refusal(page(running, key, after=cursor, **query), 400, "after")
        for wrong in ("", "x", cursor[:-2], "A" * 40, "é", "A" * 5000):
            check_refusal(page(running, OTHER, after=wrong), 400, "after")


@pytest.mark.parametrize(
    ("query", "param"),
    [
        ({"limit": "0"}, "limit"), ({"limit": "501"}, "limit"), ({"limit": "1.5"}, "limit"), ({"limit": "-1"}, "limit"),
        ({"limit": "٣"}, "limit"), ({"limit": ["1", "2"]}, "limit"), ({"all": "yes"}, "all"),
        ({"cache_salt": ""}, "cache_salt"), ({"cache_salt": "a", "all": "true"}, "cache_salt"),
        ({"depth": "3"}, "depth"),
    ],
)  # fmt: skip
def test_wrong_parameters(server: Running, query: dict[str, Any], param: str) -> None:
    check_refusal(page(server, **query), 400, param)


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    with server_of(KVCache(10)) as running:
        yield running


def test_reset(server: Running) -> None:
    cache = KVCache(10)
    cached(cache, "abc")
    with server_of(cache) as running:
        check_refusal(running.http.post(RESET, params={"cache_salt": "x"}), 400, "cache_salt")
        told = running.http.post(RESET)
        assert (told.status_code, told.json()) == (200, {"object": "cache.reset", "chunks": 3})
        assert segments(running) == []


def test_who_may_reset(keys: str) -> None:
    with server_of(KVCache(10), api_keys_file=keys, api_key=OPERATOR) as running:
        for key, status in ((ACME, 403), (OTHER, 200), (OPERATOR, 200)):
            assert running.http.post(RESET, headers={"x-api-key": key}).status_code == status
