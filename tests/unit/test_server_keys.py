"""Keys of tenants over HTTP: who comes in, whose chunks requests meet, limits, the log, the metrics, a new file."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from headrace.config import EngineConfig
from headrace.engine.tenant_keywords import TenantKeywords
from headrace.server.app import create_app
from headrace.server.serve import make_server
from headrace.server.tenants import salt_of, spoken
from tests.support.fake_engine import FakeEngine
from tests.support.fake_server import (
    CHAT,
    TEXT,
    Running,
    ask,
    check_refusal,
    metric,
    open_request,
    serving,
    text,
    until,
)

pytestmark = pytest.mark.unit

ACME, OTHER, FREE = "key-of-acme", "key-of-other", "key-of-free"
FILE = f"""
[tenants.acme]
keys = ["{ACME}"]
metrics = true
[tenants.other]
keys = ["{OTHER}"]
salt = "s"
"""
Write = Callable[[str], str]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    def to_file(told: str) -> str:
        path = tmp_path / "keys.toml"
        path.write_text(told)
        path.chmod(0o600)
        return str(path)

    return to_file


def limited(rules: str) -> str:
    return f'[tenants.acme]\nkeys = ["{ACME}"]\nmetrics = true\n{rules}\n[tenants.free]\nkeys = ["{FREE}"]\n'


def post(running: Running, body: dict[str, Any], key: str = ACME, path: str = TEXT) -> httpx.Response:
    return running.http.post(path, json=body, headers={"Authorization": f"Bearer {key}"})


def limits_of(reply: httpx.Response) -> dict[str, str]:
    found = reply.headers.items()
    return {name.removeprefix("x-ratelimit-"): value for name, value in found if name.startswith("x-ratelimit-")}


def seconds_of(told: str) -> float:
    minutes, _, rest = told.rpartition("m")
    return 60 * float(minutes or 0) + float(rest.removesuffix("s"))


def check_limited(reply: httpx.Response, limit: str, wait: str) -> None:
    check_refusal(reply, 429, None)
    error = reply.json()["error"]
    assert error["code"] == "rate_limit_exceeded" and error["type"] == "rate_limit_error"
    assert limit in error["message"] and reply.headers["retry-after"] == wait, (error, reply.headers)


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


def test_requests_per_minute(write: Write) -> None:
    with serving(api_keys_file=write(limited("requests_per_minute = 2"))) as running:
        assert [post(running, text()).status_code for _ in range(2)] == [200, 200]
        check_limited(post(running, text()), "requests_per_minute", "30")
        with pytest.raises(openai.RateLimitError):
            running.client(ACME).completions.create(model="fake", prompt="hi")
        assert running.client(ACME).models.list().data, "only what is posted counts"
        assert post(running, text(), FREE).status_code == 200


def test_requests_at_once(write: Write) -> None:
    with serving(api_keys_file=write(limited("max_concurrent_requests = 1")), token_s=0.01) as running:
        with running.client(ACME).completions.create(model="fake", prompt="hi", stream=True, max_tokens=3000):
            check_limited(post(running, text()), "max_concurrent_requests", "1")
            assert post(running, text(), FREE).status_code == 200
        until(lambda: post(running, text()).status_code == 200)


def test_tokens_per_minute(write: Write) -> None:
    """The fake finds half of the chunks of a prompt in its cache: 200 of these tokens count, and 8 of the answer."""
    with serving(api_keys_file=write(limited("tokens_per_minute = 600"))) as running:
        tenant = running.app.state.headrace.keys.tenants["acme"]
        assert post(running, text("x" * 384)).status_code == 200
        assert tenant._tokens.level == pytest.approx(600 - 192 - 8, abs=5)
        check_refusal(post(running, text("x" * 384, max_tokens=10_000_000)), 400, "max_tokens")
        running.engine.stats.scheduler.waiting = 1000
        assert post(running, text("x" * 384)).json()["error"]["code"] == "overloaded"
        running.engine.stats.scheduler.waiting = 0
        assert tenant._tokens.level == pytest.approx(600 - 192 - 8, abs=5), "what the engine never had costs nothing"
        check_limited(post(running, text("x" * 599, stream=True)), "tokens_per_minute", "20")
        assert post(running, text("x" * 700), FREE).status_code == 200


def test_replies_tell_where_the_limits_stand(write: Write) -> None:
    """As OpenAI's do: whole, streamed, refused; and nothing where there is no limit."""
    with serving(api_keys_file=write(limited("requests_per_minute = 3\ntokens_per_minute = 6000"))) as running:
        told = []
        for body in (text("x" * 384), text(stream=True), text(n=0), text()):
            reply = post(running, body)
            told.append((reply.status_code, limits_of(reply)))
        assert [status for status, _ in told] == [200, 200, 400, 429]
        assert [each["remaining-requests"] for _, each in told] == ["2", "1", "0", "0"]
        assert {each["limit-requests"] for _, each in told} == {"3"}
        assert {each["limit-tokens"] for _, each in told} == {"6000"}
        assert 5790 <= int(told[0][1]["remaining-tokens"]) <= 5830, "192 of the prompt and 8 of the answer"
        assert [seconds_of(each["reset-requests"]) for _, each in told[:3]] == pytest.approx([20, 40, 60], abs=5)
        assert not limits_of(post(running, text(), FREE))
        get = running.http.get("/v1/models", headers={"Authorization": f"Bearer {ACME}"})
        assert not limits_of(get) and not limits_of(running.http.post(TEXT, json=text())), "nor without a key"


@pytest.mark.parametrize(
    ("seconds", "told"), [(0, "0ms"), (0.0171, "18ms"), (1, "1s"), (7.46, "7.5s"), (60, "1m0s"), (359.99, "6m0s")]
)
def test_times_are_told_as_openai_tells_them(seconds: float, told: str) -> None:
    assert spoken(seconds) == told


def test_sizes_of_a_request(write: Write) -> None:
    with serving(api_keys_file=write(limited("max_prompt_tokens = 100\nmax_output_tokens = 40"))) as running:
        too_long = post(running, text("x" * 101))
        check_refusal(too_long, 400, "prompt")
        assert too_long.json()["error"]["code"] == "context_length_exceeded"
        check_refusal(post(running, ask("x" * 101), path=CHAT), 400, "messages")
        check_refusal(post(running, text(["x" * 60] * 2)), 400, "prompt")
        check_refusal(post(running, text(max_tokens=41)), 400, "max_tokens")
        check_refusal(post(running, text(max_tokens=21, n=2)), 400, "max_tokens")
        body = ask(max_tokens=None, max_completion_tokens=41)
        check_refusal(post(running, body, path=CHAT), 400, "max_completion_tokens")
        assert post(running, text("x" * 100, max_tokens=20, n=2)).status_code == 200
        assert post(running, text("x" * 101, max_tokens=41), FREE).status_code == 200
        whole = post(running, ask(max_tokens=None, n=2), path=CHAT).json()
        assert whole["usage"]["completion_tokens"] == 40, "left open: as much as is allowed"
        check_refusal(post(running, ask(max_tokens=None, min_tokens=30, n=2), path=CHAT), 400, "max_tokens")


def test_a_tenant_leaves_half_of_the_queue_to_the_others(write: Write) -> None:
    """acme weighs twice as much as free: of 4 requests under way it may have 2."""
    file = write(limited("weight = 2"))
    with serving(api_keys_file=file, max_queued_requests=4, running_limit=1, token_s=0.01) as running:
        waiting = running.engine.stats.scheduler
        keys = running.app.state.headrace.keys
        with httpx.Client(base_url=running.url) as http:
            socks = [open_request(running.port, text(max_tokens=3000), key=ACME) for _ in range(3)]
            until(lambda: waiting.waiting == 2 and keys.tenants["acme"].under_way == 3)
            assert not keys.beyond_share(keys.tenants["acme"]), "alone it may have all"
            socks.append(open_request(running.port, text(max_tokens=3000), key=FREE))
            until(lambda: waiting.waiting == 3)
            refused = http.post(TEXT, json=text(), headers={"x-api-key": ACME})
            check_refusal(refused, 429, None)
            assert "weight" in refused.json()["error"]["message"] and refused.headers["retry-after"] == "7"
            socks.append(open_request(running.port, text(max_tokens=3000), key=FREE))
            until(lambda: waiting.waiting == 4)
        for sock in socks:
            sock.close()
        until(lambda: waiting.running == waiting.waiting == 0)
        assert all(tenant.under_way == 0 for tenant in keys.tenants.values())


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


def test_limits_name_the_field_of_each_route(write: Write) -> None:
    with serving(api_keys_file=write(limited("max_output_tokens = 4"))) as running:
        too_many = post(running, {"model": "fake", "input": "hi", "max_output_tokens": 5}, path="/v1/responses")
        check_refusal(too_many, 400, "max_output_tokens")
        message = {"model": "fake", "max_tokens": 5, "messages": [{"role": "user", "content": "hi"}]}
        told = post(running, message, path="/v1/messages")
        assert told.status_code == 400 and told.json()["error"]["type"] == "invalid_request_error"
        assert "this key allows 4" in told.json()["error"]["message"]
        assert post(running, {**message, "max_tokens": 4}, path="/v1/messages").status_code == 200
        assert {salt for salt, _ in running.engine.salts} == {salt_of("acme", None)}


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


def test_scores_and_embeddings_are_no_output(write: Write) -> None:
    """What is not answered does not share the tokens that answers may have; the text of a score counts once."""
    with serving(api_keys_file=write(limited("max_output_tokens = 1\nmax_prompt_tokens = 40"))) as running:
        options = ["ab"] * 10
        assert post(running, {"text": "x" * 20, "options": options}, path="/v1/score").status_code == 200
        assert post(running, {"input": ["a"] * 40}, path="/v1/embeddings").status_code == 200
        check_refusal(post(running, {"text": "x" * 21, "options": options}, path="/v1/score"), 400, "options")
        check_refusal(post(running, {"input": ["a"] * 41}, path="/v1/embeddings"), 400, "input")
        check_refusal(post(running, text("a", max_tokens=2)), 400, "max_tokens")


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


def test_a_full_queue_says_when_what_waits_of_the_tenant_is_done(write: Write) -> None:
    """Also while bodies are being read, which nobody's tenant has caused."""
    with serving(api_keys_file=write(limited("weight = 1"))) as running:
        running.app.state.headrace.admitting = 1000
        refused = post(running, text())
        check_refusal(refused, 429, None)
        assert refused.headers["retry-after"] == "3"
