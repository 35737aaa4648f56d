"""The server as a user runs it: a process of its own, the real engine on the shipped model, the real OpenAI client."""

from __future__ import annotations

import json
import os
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import openai
import psutil
import pytest
from typer.testing import CliRunner

from headrace.cli.main import app
from tests.support.fake_server import BAD_REQUESTS, check_refusal, open_request, send_bad, until
from tests.support.server_process import CHAT, PROMPT, TEXT, ServerProcess, process, text

MESSAGES = [
    {"role": "system", "content": "The code of Lisbon is 4821. The code of Paris is 1093. " + PROMPT * 4},
    {"role": "user", "content": "What is the code of Lisbon?"},
]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    with process(tmp_path_factory.mktemp("server"), "--log-interval-s", "0.5") as started:
        started.wait_ready()
        yield started
        assert started.stop() == 0, started.log.read_text()


def joined(stream: Any) -> dict[int, str]:
    """Index -> text, of a stream or of a whole completion."""
    texts: dict[int, str] = {}
    for part in stream:
        for choice in part.choices:
            texts[choice.index] = texts.get(choice.index, "") + choice.text
    return texts


# ---- answers ---------------------------------------------------------------------------------------------------------


def test_the_next_turn_finds_the_whole_answer_cached(server: ServerProcess) -> None:
    """A hot answer has tokens that its text does not become again."""
    ask = server.client().chat.completions.create
    shared: dict[str, Any] = {"model": "tiny", "temperature": 2.0, "seed": 5, "extra_body": {"return_token_ids": True}}
    first = ask(messages=MESSAGES, max_tokens=200, **shared)
    own, prompt = first.choices[0].token_ids, first.choices[0].prompt_token_ids  # type: ignore[attr-defined]
    message = first.choices[0].message
    turns = [*MESSAGES, message.model_dump(exclude_none=True), {"role": "user", "content": "And of Paris?"}]
    carried = message.token_ids  # type: ignore[attr-defined]
    told = json.dumps({"messages": [{"role": "assistant", "content": message.content}]})
    assert carried == own and httpx.post(server.url + "/tokenize", content=told).json()["tokens"] != own
    second = ask(messages=turns, max_tokens=8, **shared)
    assert second.usage is not None and second.usage.prompt_tokens_details is not None
    assert second.usage.prompt_tokens_details.cached_tokens >= (len(prompt) + len(own) - 1) // 64 * 64
    read = second.choices[0].prompt_token_ids  # type: ignore[attr-defined]
    assert read[: len(prompt) + len(own)] == prompt + own
    plain = server.client().completions.create(prompt=read, max_tokens=8, **shared)
    assert plain.choices[0].token_ids == second.choices[0].token_ids  # type: ignore[attr-defined,union-attr]


@pytest.mark.parametrize("sampling", [{"temperature": 0}, {"temperature": 1.0, "seed": 11}])
def test_stream_equals_whole(server: ServerProcess, sampling: dict[str, Any]) -> None:
    client = server.client()
    whole = client.completions.create(model="tiny", prompt=PROMPT, max_tokens=40, **sampling)
    stream = client.completions.create(model="tiny", prompt=PROMPT, max_tokens=40, stream=True, **sampling)
    assert joined(stream)[0] == whole.choices[0].text != ""


def test_chat_stream_equals_whole_and_finds_the_cache(server: ServerProcess) -> None:
    client = server.client()
    ask: dict[str, Any] = {"model": "tiny", "messages": MESSAGES, "max_tokens": 20, "temperature": 0}
    whole = client.chat.completions.create(**ask)
    chunks = list(client.chat.completions.create(**ask, stream=True, stream_options={"include_usage": True}))
    assert chunks[0].choices[0].delta.role == "assistant"
    told = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert told == whole.choices[0].message.content != ""
    usage = chunks[-1].usage
    assert usage.prompt_tokens == whole.usage.prompt_tokens and usage.completion_tokens == whole.usage.completion_tokens
    cached = usage.prompt_tokens_details.cached_tokens
    assert cached == usage.prompt_tokens - 1 > 0, "all but the last token"
    figures = chunks[-1].headrace  # type: ignore[attr-defined]
    assert figures["cached_tokens"] == cached and figures["new_tokens"] == usage.prompt_tokens - cached
    assert figures["decode_tokens_per_s"] > 0 and figures["ttft_s"] > 0


def test_salt_hides_the_cache(server: ServerProcess) -> None:
    def cached(salt: str) -> int:
        body = {"messages": MESSAGES, "max_tokens": 1, "cache_salt": salt}
        return server.http.post(CHAT, json=body).json()["usage"]["prompt_tokens_details"]["cached_tokens"]

    assert [cached("one"), cached("one") > 0, cached("two")] == [0, True, 0]


@pytest.mark.parametrize("stream", [False, True])
def test_n_sequences_by_seed(server: ServerProcess, stream: bool) -> None:
    def draw(seed: int) -> dict[int, str]:
        made = server.client().completions.create(
            model="tiny", prompt=PROMPT, max_tokens=16, n=2, temperature=1.0, seed=seed, stream=stream
        )
        return joined(made if stream else [made])

    first = draw(5)
    assert set(first) == {0, 1} and first[0] != first[1]
    assert draw(5) == first != draw(6)


@pytest.mark.parametrize("stream", [False, True])
def test_stop_ends_the_text_before_it(server: ServerProcess, stream: bool) -> None:
    whole = server.http.post(TEXT, json=text(max_tokens=40)).json()["choices"][0]["text"]
    stop = whole[len(whole) // 2 :][:3]
    made = server.client().completions.create(
        model="tiny", prompt=PROMPT, max_tokens=40, temperature=0, stop=stop, stream=stream
    )
    parts = list(made) if stream else [made]
    assert joined(parts)[0] == whole[: whole.index(stop)]
    assert parts[-1].choices[0].finish_reason == "stop" and parts[-1].choices[0].stop_reason == stop
    until(server.idle)


def test_logprobs(server: ServerProcess) -> None:
    ask: dict[str, Any] = {"model": "tiny", "messages": MESSAGES, "max_tokens": 8, "temperature": 0}
    client = server.client()
    whole = client.chat.completions.create(**ask, logprobs=True, top_logprobs=3).choices[0]
    for entry in whole.logprobs.content:
        values = [top.logprob for top in entry.top_logprobs]
        assert len(values) == 3 and values == sorted(values, reverse=True)
        assert entry.token == entry.top_logprobs[0].token and entry.logprob == values[0] <= 0
    chunks = client.chat.completions.create(**ask, logprobs=True, top_logprobs=3, stream=True)
    streamed = [e for c in chunks if c.choices[0].logprobs for e in c.choices[0].logprobs.content]
    assert streamed == whole.logprobs.content
    told = b"".join(bytes(entry.bytes) for entry in whole.logprobs.content).decode()
    assert told.startswith(whole.message.content)


def test_echo_gives_the_prompts_logprobs(server: ServerProcess) -> None:
    made = server.client().completions.create(model="tiny", prompt=PROMPT, max_tokens=3, echo=True, logprobs=1)
    row = made.choices[0].logprobs
    assert made.choices[0].text.startswith(PROMPT)
    assert len(row.tokens) == made.usage.total_tokens and row.token_logprobs[0] is None
    for token, at in list(zip(row.tokens, row.text_offset, strict=True))[1:-3]:
        assert made.choices[0].text[at:].startswith(token)


def test_logit_bias_forces_a_token(server: ServerProcess) -> None:
    body = text(logit_bias={"1000": 100}, max_tokens=3, return_token_ids=True, ignore_eos=True)
    assert server.http.post(TEXT, json=body).json()["choices"][0]["token_ids"] == [1000] * 3


def test_several_prompts_answer_as_alone(server: ServerProcess) -> None:
    prompts = ["And God said,", "The code of Paris is", PROMPT]
    together = joined([server.client().completions.create(model="tiny", prompt=prompts, max_tokens=8, temperature=0)])
    alone = [server.http.post(TEXT, json=text(p, max_tokens=8)).json()["choices"][0]["text"] for p in prompts]
    assert together == dict(enumerate(alone))


# ---- refusals, leaving clients, load ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.matrix] * (i % 8 > 0)) for i, name in enumerate(BAD_REQUESTS)]
)
def test_bad_request_is_refused_and_the_next_is_served(server: ServerProcess, name: str) -> None:
    """All of them on a fake engine: tests/unit/test_server_refusals.py."""
    check_refusal(*send_bad(server.http, name, "tiny"))
    assert server.http.post(TEXT, json=text(max_tokens=1)).json()["choices"][0]["finish_reason"] == "length"


def test_openai_client_names_the_parameter(server: ServerProcess) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        server.client().chat.completions.create(model="tiny", messages=MESSAGES, n=1000)
    assert caught.value.param == "n"


@pytest.mark.matrix
def test_200_clients_leave_at_random_moments(server: ServerProcess) -> None:
    rng = random.Random(3)
    gone, done = server.metric("clients_gone_total"), server.metric("e2e_request_latency_seconds_count")
    start, socks = time.monotonic(), []
    for i in range(200):
        prompt = PROMPT * rng.randrange(1, 30) if i % 3 else [PROMPT * 2, "Amen"]
        # Answers long enough that most clients leave before theirs ends.
        body = text(prompt, max_tokens=rng.randrange(1, 1000), stream=i % 2 == 0, ignore_eos=True, n=1 + i % 2)
        socks.append((start + rng.random() * 4, open_request(server.port, body)))
    for moment, sock in sorted(socks, key=lambda item: item[0]):
        time.sleep(max(0.0, moment - time.monotonic()))
        sock.close()
    until(server.idle, 20)
    left = server.metric("clients_gone_total") - gone
    answered = server.metric("e2e_request_latency_seconds_count") - done
    assert left > 50 and left + answered <= 200
    assert server.metric("kv_chunks_cached") <= server.metric("kv_chunks_total")
    assert server.http.post(TEXT, json=text()).json()["choices"][0]["finish_reason"] == "length"


def test_lines_of_the_log(server: ServerProcess) -> None:
    """The status line is due at an interval: requests follow each other until one has met it, however fast they are."""
    for _ in range(200):
        server.http.post(TEXT, json=text(max_tokens=2000, ignore_eos=True))
        log = server.log.read_text()
        if "running   1  waiting   0  read" in log:
            break
    assert "KV cache  131,072 tokens" in log and "8 sequences of 16,384 tokens" in log
    assert "running   1  waiting   0  read" in log
    assert "length    prompt" in log


def test_bench_serve(server: ServerProcess, tmp_path: Path) -> None:
    file = tmp_path / "result.json"
    command = ["bench", "serve", "--url", server.url, "--requests", "6", "--at-once", "3", "--max-tokens", "4"]
    ran = CliRunner().invoke(app, [*command, "--shared-words", "200", "--json", str(file)])
    assert ran.exit_code == 0, ran.output
    written = json.loads(file.read_text())
    assert set(written) == {"date", "machine", "command", "cases"}
    assert written["cases"][0]["requests"] == 6 and written["cases"][0]["cached_share"] > 0.3


# ---- key, queue, ends ------------------------------------------------------------------------------------------------


SMALL = ("--api-key", "k3y", "--max-num-seqs", "1", "--max-queued-requests", "2", "--engine-timeout-s", "2")


@pytest.fixture(scope="module")
def key_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("keys") / "keys.toml"
    path.write_text('[tenants.acme]\nkeys = ["key-of-acme"]\n')
    return path


@pytest.fixture(scope="module")
def small_ones(tmp_path_factory: pytest.TempPathFactory, key_file: Path) -> Iterator[Callable[[], ServerProcess]]:
    """The small server; another one once a test has ended it."""
    started: list[ServerProcess] = []
    options = (*SMALL, "--api-keys-file", str(key_file), "--on-disconnect", "finish")
    with ExitStack() as stack:

        def alive() -> ServerProcess:
            if not started or started[-1].process.poll() is not None:
                started.append(stack.enter_context(process(tmp_path_factory.mktemp("small"), *options)))
                until(lambda: started[-1].health() == 503, 60)  # it listens before the model is loaded
                started[-1].wait_ready()
            return started[-1]

        yield alive


@pytest.fixture
def small(small_ones: Callable[[], ServerProcess]) -> ServerProcess:
    return small_ones()


def test_key(small: ServerProcess) -> None:
    check_refusal(httpx.get(small.url + "/metrics"), 401, None)
    check_refusal(httpx.post(small.url + TEXT, json=text()), 401, None)
    with pytest.raises(openai.AuthenticationError):
        small.client("other").models.list()
    assert small.client("k3y").models.list().data[0].id == "tiny"


def test_keys_are_read_again_on_sighup(small: ServerProcess, key_file: Path) -> None:
    def status(key: str) -> int:
        return httpx.get(small.url + "/v1/models", headers={"x-api-key": key}).status_code

    assert [status(key) for key in ("k3y", "key-of-acme", "key-of-beta")] == [200, 200, 401]
    key_file.write_text('[tenants.beta]\nkeys = ["key-of-beta"]\n')
    small.process.send_signal(signal.SIGHUP)
    until(lambda: status("key-of-beta") == 200)
    assert [status(key) for key in ("k3y", "key-of-acme")] == [200, 401]
    assert "1 key added (beta); 1 key removed (acme); tenants removed (acme)" in small.log.read_text()


def test_a_retry_finds_the_prefill_that_its_client_gave_up(small: ServerProcess) -> None:
    body = text([100 + i * i % 89 for i in range(8000)], max_tokens=1)
    given_up = open_request(small.port, body, key="k3y")
    until(lambda: small.metric("num_requests_running") == 1 or small.metric("prefilled_tokens_total") > 8000)
    given_up.close()
    until(small.idle, 60)
    retry = small.http.post(TEXT, json=body).json()
    assert retry["usage"]["prompt_tokens_details"]["cached_tokens"] == 7999, "all but the last token"


def test_full_queue(small: ServerProcess) -> None:
    replies: list[httpx.Response] = []
    headers = {"Authorization": "Bearer k3y"}

    def send() -> None:
        replies.append(httpx.post(small.url + TEXT, json=text(max_tokens=300), headers=headers, timeout=120))

    threads = [threading.Thread(target=send) for _ in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    refused = [reply for reply in replies if reply.status_code == 429]
    served = [reply for reply in replies if reply.status_code == 200]
    assert len(served) >= 2 and len(refused) >= 1 and len(served) + len(refused) == 12
    for reply in refused:
        check_refusal(reply, 429, None)
        assert int(reply.headers["retry-after"]) >= 1


def replace_engine(server: ServerProcess, number: signal.Signals) -> None:
    """The engine is lost in the midst of a stream; another one gives the same answer."""
    right = server.http.post(TEXT, json=text()).json()["choices"][0]["text"]
    restarts, lost = server.metric("engine_restarts_total"), server.engine()
    stream = server.client().completions.create(
        model="tiny", prompt=PROMPT, max_tokens=8000, stream=True, extra_body={"ignore_eos": True}
    )
    next(iter(stream))
    os.kill(lost.pid, number)
    with pytest.raises(openai.APIError, match="ended" if number == signal.SIGKILL else "hung"):
        for _ in stream:
            pass
    until(lambda: server.health() == 503)
    refused = server.http.post(TEXT, json=text())
    check_refusal(refused, 503, None)
    assert refused.json()["error"]["code"] == "restarting" and int(refused.headers["retry-after"]) >= 1
    server.wait_ready()
    assert server.http.post(TEXT, json=text()).json()["choices"][0]["text"] == right
    assert server.metric("engine_restarts_total") == restarts + 1
    assert server.engine().pid != lost.pid and not lost.is_running()


def test_killed_engine_is_replaced(server: ServerProcess) -> None:
    """The server then ends as any other does: see its fixture."""
    replace_engine(server, signal.SIGKILL)


@pytest.mark.matrix
def test_hung_engine_is_replaced(small: ServerProcess) -> None:
    replace_engine(small, signal.SIGSTOP)


def test_killed_server_takes_its_engine_along(small: ServerProcess) -> None:
    engine = small.engine()
    small.process.kill()
    small.process.wait()
    until(lambda: not engine.is_running() or engine.status() == psutil.STATUS_ZOMBIE, 15)


@pytest.mark.matrix
def test_killed_engine_ends_the_server(tmp_path: Path) -> None:
    with process(tmp_path, "--no-restart", "--log-format", "json", "--log-level", "debug") as doomed:
        doomed.wait_ready()
        errors: list[BaseException] = []

        def stream() -> None:
            try:
                made = doomed.client().completions.create(
                    model="tiny", prompt=PROMPT, max_tokens=8000, stream=True, extra_body={"ignore_eos": True}
                )
                for _ in made:
                    pass
            except Exception as error:
                errors.append(error)

        reader = threading.Thread(target=stream)
        reader.start()
        until(lambda: doomed.metric("num_requests_running") == 1)
        killed = time.monotonic()
        os.kill(doomed.engine().pid, signal.SIGKILL)
        until(lambda: doomed.health() == 503, 3)
        check_refusal(doomed.http.post(TEXT, json=text()), 503, None)
        assert doomed.process.wait(10) == 1
        assert time.monotonic() - killed < 10
        reader.join(5)
        assert len(errors) == 1 and isinstance(errors[0], openai.APIError), errors
        lines = [json.loads(line) for line in doomed.log.read_text().splitlines()]
        logger = {line["pid"]: line["logger"] for line in lines}
        assert len(logger) == 2 and logger[doomed.process.pid] == "headrace.server", "the engine follows the settings"
        assert any(line["level"] == "error" and "the engine process ended" in line["message"] for line in lines)
