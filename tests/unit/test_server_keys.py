"""Keys of tenants over HTTP: who comes in, whose chunks requests meet, the log, the metrics, a new file."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
from pathlib import Path
from typing import Any

import openai
import pytest

from headrace.config import EngineConfig
from headrace.engine.tenant_keywords import TenantKeywords
from headrace.server.app import create_app
from headrace.server.serve import make_server
from headrace.server.tenants import salt_of
from tests.support.fake_engine import FakeEngine
from tests.support.fake_server import (
    CHAT,
    TEXT,
    ask,
    check_refusal,
    metric,
    serving,
    text,
    until,
)
from tests.support.tenant_keys import ACME, FILE, FREE, OTHER, Write, check_limited, key_file, limited, post

pytestmark = pytest.mark.unit


@pytest.fixture
def write(tmp_path: Path) -> Write:
    return key_file(tmp_path)


def test_who_comes_in(write: Write) -> None:
    with serving(api_keys_file=write(FILE), api_key="the-one-key") as running:
        assert running.http.get("/health").status_code == 200
        models = "/v1/models"
        for headers in ({}, {"Authorization": "Bearer no"}, {"x-api-key": "no"}, {"x-api-key": f"Bearer {ACME}"}):
            check_refusal(running.http.get(models, headers=headers), 401, None)
        for key in (ACME, OTHER, "the-one-key"):
            assert running.http.get(models, headers={"x-api-key": key}).status_code == 200
            assert running.http.get(models, headers={"authorization": "Bearer no", "X-Api-Key": key}).status_code == 200
            assert running.client(key).models.list().data[0].id == "fake"
        status = {key: running.http.get("/metrics", headers={"x-api-key": key}).status_code for key in (ACME, OTHER)}
        assert status == {ACME: 200, OTHER: 403}
        assert running.http.get("/metrics", headers={"x-api-key": "the-one-key"}).status_code == 200


def test_the_server_chooses_the_salt(write: Write, tmp_path: Path) -> None:
    system = "You are the help desk of Lisbon. " * 10
    (tmp_path / "system.txt").write_text(system)
    public = str(tmp_path / "system.txt")
    with serving(api_keys_file=write(FILE), api_key="the-one-key", public_prefix_file=public) as running:
        for key, salt in ((ACME, None), (ACME, "x"), (OTHER, None), (OTHER, salt_of("acme", None)),
                          ("the-one-key", None), ("the-one-key", "acme")):  # fmt: skip
            body = text(system + "hi") if salt is None else text(system + "hi", cache_salt=salt)
            assert post(running, body, key).status_code == 200
        assert running.engine.salts == [
            (salt_of("acme", None), 320), (salt_of("acme", "x"), 320), (salt_of("s", None), 320),
            (salt_of("s", salt_of("acme", None)), 320), (None, 0), (salt_of("", "acme"), 320),
        ]  # fmt: skip


def test_making_tokens_public_needs_a_right(write: Write) -> None:
    body = text("x" * 200, public_prefix_tokens=128)
    with serving(api_keys_file=write(FILE + "public_prefix_tokens = true")) as running:
        check_refusal(post(running, body, ACME), 400, "public_prefix_tokens")
        assert post(running, body, OTHER).status_code == 200
        assert running.engine.salts == [(salt_of("s", None), 128)]


def test_a_tenants_shares_go_with_its_requests(write: Write) -> None:
    with serving(api_keys_file=write(limited("kv_share = 0.25\nkv_limit = 0.5\ntier_quota = 0.75"))) as running:
        assert post(running, text("hi"), ACME).status_code == 200
        shares = {"kv_share": 0.25, "kv_limit": 0.5, "tier_quota": 0.75}
        assert running.engine.own == [{"tenant": "acme", "weight": 1.0, "priority": 0, **shares}]


def test_log_and_metrics_tell_the_tenant_and_never_the_key(write: Write, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, "headrace.server")
    file = write(limited("requests_per_minute = 2"))
    with serving(api_keys_file=file, log_requests="params") as running:
        for _ in range(3):
            post(running, text("x" * 200))
        page = running.http.get("/metrics", headers={"x-api-key": ACME}).text
        until(lambda: "length    acme" in caplog.text)
    assert "arrived   acme" in caplog.text and "tenant acme: its 2 requests per minute" in caplog.text
    assert {r.fields["tenant"] for r in caplog.records if "event" in getattr(r, "fields", {})} == {"acme"}
    assert ACME not in caplog.text and ACME not in page
    told = [line for line in page.splitlines() if 'tenant="acme"' in line]
    assert set(told) == {
        'headrace:tenant_requests_running{tenant="acme"} 0.0',
        'headrace:tenant_requests_total{tenant="acme"} 2.0',
        'headrace:tenant_tokens_total{kind="prompt",tenant="acme"} 400.0',
        'headrace:tenant_tokens_total{kind="cached",tenant="acme"} 192.0',
        'headrace:tenant_tokens_total{kind="output",tenant="acme"} 16.0',
        'headrace:tenant_limited_total{limit="requests_per_minute",tenant="acme"} 1.0',
    }


def test_without_a_file_nothing_tells_of_tenants() -> None:
    with serving() as running:
        assert post(running, text(cache_salt="acme")).status_code == 200
        assert running.engine.salts == [("acme", 0)] and 'tenant="' not in running.http.get("/metrics").text


def test_a_new_file_takes_effect_and_a_bad_one_none(write: Write, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "headrace.server")
    with serving(api_keys_file=write(limited("requests_per_minute = 2"))) as running:
        keys = running.app.state.headrace.keys
        assert post(running, text()).status_code == 200
        write("[tenants.acme]\nkeys = 3")
        keys.reload()
        assert "the keys stay as they were" in caplog.text and "tenants.acme.keys must be a list" in caplog.text
        assert post(running, text()).status_code == 200
        write(f"[tenants.acme]\nkeys = ['{OTHER}']\nrequests_per_minute = 3\n")
        keys.reload()
        assert "keys read again: 1 key added (acme); 2 keys removed (acme, free); rules changed (acme)" in caplog.text
        check_refusal(post(running, text()), 401, None)
        check_refusal(post(running, text(), FREE), 401, None)
        check_limited(post(running, text(), OTHER), "requests_per_minute", "20")  # what was spent stays spent


def test_a_bad_file_ends_the_start_and_an_open_one_is_warned_of(
    write: Write, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = EngineConfig(model="fake", api_keys_file=write("[tenants.a]\nkeys = 1"))
    with pytest.raises(ValueError, match=r"tenants\.a\.keys must be a list"):
        create_app(FakeEngine(config), config)
    Path(write(FILE)).chmod(0o644)
    create_app(FakeEngine(config), config)
    assert "can be read by all users of this machine" in caplog.text
    with pytest.raises(ValueError, match="api_keys_file must name a file"):
        EngineConfig(model="fake", api_keys_file=" ")


def test_health_keeps_the_reason_from_strangers_here_too(write: Write) -> None:
    with serving(api_keys_file=write(FILE)) as running:
        running.engine.die("secret path")
        running.wait(503)
        assert "secret" not in json.dumps(running.http.get("/health").json())


def test_responses_are_kept_for_their_tenant(write: Write) -> None:
    with serving(api_keys_file=write(FILE)) as running:
        acme, other = running.client(ACME).responses, running.client(OTHER).responses
        kept = acme.create(model="fake", input="hi", max_output_tokens=4)
        assert acme.retrieve(kept.id).id == kept.id
        for call in (other.retrieve, other.delete):
            with pytest.raises(openai.NotFoundError):
                call(kept.id)
        with pytest.raises(openai.BadRequestError, match="not found"):
            other.create(model="fake", input="and?", previous_response_id=kept.id)


SCORED = {"text": "x" * 200, "options": ["ab", "c"]}
EMBEDDED = {"input": ["x" * 100, "y" * 101]}


@pytest.mark.parametrize(("path", "body"), [("/v1/score", SCORED), ("/v1/embeddings", EMBEDDED)])
def test_scores_and_embeddings_come_by_the_same_door(path: str, body: dict[str, Any], write: Write) -> None:
    file = write(limited("tokens_per_minute = 230") + f'[tenants.other]\nkeys = ["{OTHER}"]\nrequests_per_minute = 1\n')
    with serving(api_keys_file=file) as running:
        check_refusal(running.http.post(path, json=body), 401, None)
        check_refusal(post(running, {**body, "public_prefix_tokens": 64}, path=path), 400, "public_prefix_tokens")
        assert not running.engine.salts
        assert post(running, body, path=path).status_code == 200
        assert post(running, {**body, "cache_salt": "x"}, FREE, path).status_code == 200
        assert set(running.engine.salts) == {(salt_of("acme", None), 0), (salt_of("free", "x"), 0)}
        refused = post(running, body, path=path)
        check_refusal(refused, 429, None)
        assert "tokens_per_minute" in refused.json()["error"]["message"]
        assert post(running, body, OTHER, path).status_code == 200
        check_limited(post(running, body, OTHER, path), "requests_per_minute", "60")
        page = running.http.get("/metrics", headers={"x-api-key": ACME}).text
        tokens = 202 if path == "/v1/score" else 201  # an option of one token is not computed
        assert metric(page, "tenant_tokens_total", tenant="acme", kind="prompt") == tokens
        assert metric(page, "tenant_requests_running", tenant="acme") == 0


def test_reranking_comes_by_that_door_too(write: Write) -> None:
    body = {"query": "x" * 30, "documents": ["y" * 69, "z" * 70]}
    with serving(api_keys_file=write(limited("tokens_per_minute = 230")), labels=("a",)) as running:
        check_refusal(running.http.post("/v1/rerank", json=body), 401, None)
        public = post(running, {**body, "public_prefix_tokens": 64}, path="/v1/rerank")
        check_refusal(public, 400, "public_prefix_tokens")
        assert post(running, body, path="/v1/rerank").status_code == 200
        assert post(running, {**body, "cache_salt": "x"}, FREE, "/rerank").status_code == 200
        assert set(running.engine.salts) == {(salt_of("acme", None), 0), (salt_of("free", "x"), 0)}
        check_refusal(post(running, body, path="/v1/rerank"), 429, None)
        page = running.http.get("/metrics", headers={"x-api-key": ACME}).text
        assert metric(page, "tenant_tokens_total", tenant="acme", kind="prompt") == 201


def test_a_hangup_without_a_file_is_ignored(caplog: pytest.LogCaptureFixture) -> None:
    """The signal itself, which ends a process by default."""
    server = make_server(create_app(FakeEngine(EngineConfig()), EngineConfig()))

    async def hang_up() -> None:
        with server.capture_signals():
            os.kill(os.getpid(), signal.SIGHUP)
            await asyncio.sleep(0)
            while not caplog.messages:
                await asyncio.sleep(0.001)

    before = signal.getsignal(signal.SIGHUP)
    with caplog.at_level(logging.INFO, "headrace.server"):
        asyncio.run(hang_up())
    assert caplog.messages == ["SIGHUP: there is nothing to read again without --api-keys-file"]
    assert signal.getsignal(signal.SIGHUP) == before and not server.should_exit


def test_tenant_and_weight_are_the_keys_and_priority_is_the_requests(write: Write) -> None:
    """On every route that asks the engine; the operator's key has no tenant, and the usual weight."""
    with serving(api_keys_file=write(limited("weight = 2.5")), api_key="operator") as running:
        asked: list[tuple[str, dict[str, object]]] = [
            (TEXT, text(priority=3)),
            (CHAT, ask(priority=3)),
            ("/v1/embeddings", {"input": "x", "priority": 3}),
            ("/v1/score", {"text": "a", "options": ["b"], "priority": 3}),
            ("/v1/messages", {"max_tokens": 1, "messages": [{"role": "user", "content": "x"}], "priority": 3}),
            ("/v1/responses", {"input": "x", "max_output_tokens": 1, "priority": 3}),
        ]
        for path, body in asked:
            running.engine.own.clear()
            assert post(running, body, path=path).status_code == 200, path
            assert {turn_of(own) for own in running.engine.own} == {("acme", 2.5, 3)}, path
        post(running, text(), "operator")
        assert turn_of(running.engine.own[-1]) == ("", 1.0, 0)


def turn_of(own: TenantKeywords) -> tuple[str, float, int]:
    return own["tenant"], own["weight"], own["priority"]
