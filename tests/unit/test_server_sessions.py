"""/v1/cache/sessions: what comes to the engine, whose it is, and what is refused."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from headrace.engine.calls import DeleteSession, ListSessions, LoadSession, ReadSession, SaveSession
from headrace.offload.sessions.names import NO_STORAGE, NOT_FOUND, missing
from headrace.server.tenants import salt_of
from headrace.types import InvalidRequest
from tests.support.fake_engine import FakeEngine
from tests.support.fake_server import TEXT, Running, check_refusal, serving, text

pytestmark = pytest.mark.unit

SESSIONS = "/v1/cache/sessions"
KEYS = """
[tenants.acme]
keys = ["key-of-acme"]
[tenants.other]
keys = ["key-of-other"]
"""
TOLD = {"tokens": 5, "saved_tokens": 0, "restored_tokens": 0, "bytes": 900, "seconds": 0.1, "why": ""}


class Saved:
    """What an engine knows of sessions: calls so far, and sessions by tenant and name."""

    def __init__(self) -> None:
        self.calls: list[Any] = []
        self.known: dict[tuple[str, str], SaveSession] = {}

    def prepare(self, number: int, engine: FakeEngine) -> None:
        for kind, answer in ((SaveSession, self._save), (ReadSession, self._read), (LoadSession, self._load),
                             (DeleteSession, self._delete), (ListSessions, self._list)):  # fmt: skip
            engine.answers[kind] = answer

    def _save(self, call: SaveSession) -> Any:
        if call.name == "full":
            raise InvalidRequest("no space left", None, NO_STORAGE)
        self.calls.append(call)
        self.known[call.tenant, call.name] = call
        return TOLD

    def _one(self, call: Any) -> SaveSession:
        self.calls.append(call)
        if (call.tenant, call.name) not in self.known:
            raise missing(call.name)
        return self.known[call.tenant, call.name]

    def _read(self, call: ReadSession) -> Any:
        return {"tokens": self._one(call).tokens, "to": "file", "adapter": self._one(call).adapter}

    def _load(self, call: LoadSession) -> Any:
        self._one(call)
        return TOLD

    def _delete(self, call: DeleteSession) -> None:
        self._one(call)
        del self.known[call.tenant, call.name]

    def _list(self, call: ListSessions) -> Any:
        return [{"name": name, "bytes": 900, "saved": 1} for tenant, name in self.known if tenant == call.tenant]


@pytest.fixture
def saved() -> Saved:
    return Saved()


@pytest.fixture
def server(saved: Saved, tmp_path: Path) -> Iterator[Running]:
    keys = tmp_path / "keys.toml"
    keys.write_text(KEYS)
    keys.chmod(0o600)
    own = dict(api_keys_file=str(keys), sessions_dir=str(tmp_path / "s"), kv_offload_path=str(tmp_path / "kv"))
    with serving(**own, prepare=saved.prepare) as running:
        yield running


def by(running: Running, tenant: str, method: str, path: str = SESSIONS, **body: Any) -> httpx.Response:
    headers = {"Authorization": f"Bearer key-of-{tenant}"}
    if method == "POST":
        return running.http.post(path, json=body, headers=headers)
    return running.http.request(method, path, headers=headers)


def test_saved_listed_loaded_and_deleted(server: Running, saved: Saved) -> None:
    reply = by(server, "acme", "POST", name="a", prompt="hello", to="tier")
    assert reply.json() == {"object": "session", "name": "a", "model": "fake", "to": "tier", "cached_tokens": 0,
                            "tokens": 5, "saved_tokens": 0, "bytes": 900, "seconds": 0.1}  # fmt: skip
    assert saved.calls == [SaveSession("a", "acme", list(b"hello"), salt_of("acme", None), 0, "tier")]
    assert server.engine.asked[-1][0] == "hello", "what is not cached is computed first, as any request"
    assert server.engine.salts[-1] == (salt_of("acme", None), 0)
    listed = by(server, "acme", "GET").json()
    assert listed == {"object": "list", "data": [{"object": "session", "name": "a", "bytes": 900, "saved": 1}]}
    loaded = by(server, "acme", "POST", f"{SESSIONS}/a/load").json()
    assert loaded == {"object": "session", "name": "a", "model": "fake", **TOLD}
    assert saved.calls[-1] == LoadSession("a", "acme", salt_of("acme", None), 0)
    deleted = by(server, "acme", "DELETE", f"{SESSIONS}/a").json()
    assert deleted == {"object": "session.deleted", "name": "a", "deleted": True} and not saved.known


def test_null_is_the_default_place(server: Running, saved: Saved) -> None:
    assert by(server, "acme", "POST", name="a", prompt="hello", to=None).json()["to"] == "file"
    assert saved.calls[-1] == SaveSession("a", "acme", list(b"hello"), salt_of("acme", None), 0, "file")


def test_an_empty_body_loads(server: Running) -> None:
    by(server, "acme", "POST", name="a", prompt="hello")
    headers = {"Authorization": "Bearer key-of-acme"}
    assert server.http.post(f"{SESSIONS}/a/load", headers=headers).status_code == 200


def test_foreign_ones_are_as_unknown_ones(server: Running) -> None:
    by(server, "acme", "POST", name="a", prompt="hello")
    for method, path in (("POST", f"{SESSIONS}/a/load"), ("DELETE", f"{SESSIONS}/a")):
        foreign = by(server, "other", method, path)
        unknown = by(server, "other", method, path.replace("/a", "/b"))
        check_refusal(foreign, 404, "name")
        assert foreign.json()["error"]["code"] == NOT_FOUND
        assert foreign.text.replace("'a'", "'b'") == unknown.text
    assert by(server, "other", "GET").json()["data"] == []


def test_by_token_ids_messages_and_a_recent_request(server: Running, saved: Saved) -> None:
    assert by(server, "acme", "POST", name="ids", prompt_token_ids=[1, 2, 3]).status_code == 200
    assert saved.calls[-1].tokens == [1, 2, 3]
    assert by(server, "acme", "POST", name="chat", messages=[{"role": "user", "content": "hi"}]).status_code == 200
    assert saved.calls[-1].tokens == list(b"hi\n")
    answered = by(server, "acme", "POST", TEXT, **text("hello", max_tokens=3)).json()
    assert by(server, "acme", "POST", name="r", request_id=answered["id"]).status_code == 200
    assert saved.calls[-1].tokens == list(b"hello" + b"hel")
    check_refusal(by(server, "other", "POST", name="r", request_id=answered["id"]), 404, "request_id")
    two = by(server, "acme", "POST", TEXT, **text("hello", max_tokens=3, n=2)).json()
    refused = by(server, "acme", "POST", name="r", request_id=two["id"])
    check_refusal(refused, 400, "request_id")
    assert "2 answers" in refused.text


def test_salts_of_clients(server: Running, saved: Saved) -> None:
    by(server, "acme", "POST", name="a", prompt="hello", cache_salt="s")
    by(server, "acme", "POST", f"{SESSIONS}/a/load", cache_salt="s")
    assert [saved.calls[0].salt, saved.calls[-1].salt] == [salt_of("acme", "s")] * 2


def test_of_adapters(saved: Saved, tmp_path: Path) -> None:
    """Whoever is named computes it, or whoever has answered the request; who loads it may name the same."""
    with serving(lora_modules="sql=a,late=b", sessions_dir=str(tmp_path / "s"), prepare=saved.prepare) as running:

        def post(path: str = SESSIONS, **body: Any) -> httpx.Response:
            return running.http.post(path, json=body)

        assert post(name="a", prompt="hello", model="sql").json()["model"] == "sql"
        assert saved.calls[-1].adapter == "sql" and running.engine.adapters == ["sql"]
        for named in ({}, {"model": "sql"}):
            assert post(f"{SESSIONS}/a/load", **named).json()["model"] == "sql"
        refused = post(f"{SESSIONS}/a/load", model="fake")
        check_refusal(refused, 400, "model")
        assert "this session is of 'sql'" in refused.text
        answered = post(TEXT, **text("hello", max_tokens=3, model="sql")).json()
        check_refusal(post(name="r", request_id=answered["id"], model="fake"), 404, "request_id")
        for named in ({}, {"model": "sql"}):
            assert post(name="r", request_id=answered["id"], **named).json()["model"] == "sql"
            assert (saved.calls[-1].adapter, saved.calls[-1].tokens) == ("sql", list(b"hello" + b"hel"))
        calls = len(saved.calls)
        check_refusal(post(name="b", prompt="hello", model="late"), 400, "model")
        assert len(saved.calls) == calls
        assert post(name="b", prompt="hello").json()["model"] == "fake" and saved.calls[-1].adapter == ""
        check_refusal(post(f"{SESSIONS}/b/load", model="sql"), 400, "model")


@pytest.mark.parametrize(
    ("body", "status", "param"),
    [
        ({"name": "a"}, 400, "prompt"),
        ({"prompt": "hi"}, 400, "name"),
        ({"name": "../a", "prompt": "hi"}, 400, "name"),
        ({"name": "a", "prompt": "hi", "messages": [{"role": "user", "content": "hi"}]}, 400, "messages"),
        ({"name": "a", "prompt": "hi", "tools": []}, 400, "tools"),
        ({"name": "a", "prompt": "hi", "to": "moon"}, 400, "to"),
        ({"name": "a", "prompt": ""}, 400, "prompt"),
        ({"name": "a", "prompt_token_ids": [1, 2_000_000]}, 400, "prompt_token_ids"),
        ({"name": "a", "prompt_token_ids": [65] * 4000}, 400, "prompt_token_ids"),
        ({"name": "a", "prompt": "hi", "cache_salt": ""}, 400, "cache_salt"),
        ({"name": "a", "prompt": "hi", "public_prefix_tokens": 64}, 400, "public_prefix_tokens"),
        ({"name": "a", "prompt": "hi", "request_id": "r", "model": "x"}, 404, "model"),
        ({"name": "a", "request_id": "cmpl-1"}, 404, "request_id"),
        ({"name": "a", "prompt": "hi", "colour": 1}, 400, "colour"),
        ({"name": "full", "prompt": "hi"}, 507, None),
    ],
    ids=str,
)
def test_refusals(body: dict[str, Any], status: int, param: str | None, server: Running, saved: Saved) -> None:
    check_refusal(by(server, "acme", "POST", **body), status, param)
    assert not saved.calls


@pytest.mark.parametrize(("method", "path"), [("DELETE", "/.a"), ("POST", "/.a/load")], ids=str)
def test_names_that_are_none(method: str, path: str, server: Running, saved: Saved) -> None:
    check_refusal(by(server, "acme", method, SESSIONS + path), 400, "name")
    check_refusal(by(server, "acme", "POST", f"{SESSIONS}/a/load", public_prefix_tokens=1), 400, "public_prefix_tokens")
    assert not saved.calls


@pytest.mark.parametrize(
    ("method", "path"), [("DELETE", "/a"), ("GET", ""), ("POST", ""), ("POST", "/a/load")], ids=str
)
def test_unknown_query_parameters(method: str, path: str, server: Running, saved: Saved) -> None:
    """An option that is misspelled does not delete what it should have kept."""
    by(server, "acme", "POST", name="a", prompt="hello")
    calls = len(saved.calls)
    refused = by(server, "acme", method, f"{SESSIONS}{path}?x=1")
    check_refusal(refused, 400, "x")
    assert refused.json()["error"]["code"] == "unknown_parameter" and len(saved.calls) == calls


@pytest.mark.parametrize(
    ("to", "settings"),
    [(None, {"context_parallel_size": 2}), ("file", {"tensor_parallel_size": 2}), ("tier", {}),
     ("file", {"offload_schedule": "row", "kv_offloading_size": 0.1})],
)  # fmt: skip
def test_a_place_that_there_is_not_is_refused_before_anything_is_computed(
    to: str | None, settings: dict[str, Any], tmp_path: Path
) -> None:
    with serving(sessions_dir=str(tmp_path), kv_offload_path="none", **settings) as running:
        check_refusal(running.http.post(SESSIONS, json={"name": "a", "prompt": "hello", "to": to}), 400, "to")
        assert not running.engine.asked


def test_a_server_that_saves_none_says_how() -> None:
    with serving() as running:
        for reply in (
            running.http.post(SESSIONS, json={"name": "a", "prompt": "hi"}),
            running.http.get(SESSIONS),
            running.http.post(f"{SESSIONS}/a/load", json={}),
        ):
            check_refusal(reply, 400, None)
            assert "--sessions-dir" in reply.text
        assert not running.engine.asked
