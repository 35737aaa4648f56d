"""The HTTP server over a fake engine: answers, as the real OpenAI client sees them. Real sockets, no torch."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from headrace.types import Delta
from tests.support.fake_engine import FakeCapacity, FakeRun
from tests.support.fake_server import CHAT, TEXT, Running, ask, serving, text

pytestmark = pytest.mark.unit


@pytest.fixture(scope="module")
def fast() -> Iterator[Running]:
    with serving() as running:
        yield running


def test_chat_answers_with_usage_and_figures(fast: Running) -> None:
    answer = fast.client().chat.completions.create(
        model="fake", messages=[{"role": "user", "content": "abc" * 50}], max_tokens=9
    )
    assert answer.object == "chat.completion" and answer.id.startswith("chatcmpl-")
    assert answer.system_fingerprint == "fp_fake"
    assert answer.choices[0].message.content == "abcabcabc"
    assert answer.choices[0].message.role == "assistant"
    assert answer.choices[0].finish_reason == "length"
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens, answer.usage.total_tokens) == (151, 9, 160)
    assert answer.usage.prompt_tokens_details.cached_tokens == 64
    told = answer.headrace  # type: ignore[attr-defined]
    assert (told["cached_tokens"], told["new_tokens"]) == (64, 87)
    assert told["ttft_s"] > 0 and told["e2e_s"] >= told["ttft_s"] >= told["queue_s"] >= 0


def test_chat_stream_is_the_whole_answer(fast: Running) -> None:
    client = fast.client()
    ask_for: dict[str, Any] = {"model": "fake", "messages": [{"role": "user", "content": "naïve €"}], "max_tokens": 30}
    whole = client.chat.completions.create(**ask_for).choices[0].message.content
    chunks = list(client.chat.completions.create(**ask_for, stream=True))
    assert chunks[0].choices[0].delta.role == "assistant" and chunks[0].choices[0].delta.content == ""
    assert "".join(c.choices[0].delta.content or "" for c in chunks) == whole
    assert len(whole) > 20 and "�" not in whole
    assert [c.choices[0].finish_reason for c in chunks] == [None] * (len(chunks) - 1) + ["length"]
    assert all(c.usage is None and c.system_fingerprint == "fp_fake" for c in chunks)
    assert chunks[-1].headrace["new_tokens"] == 11  # type: ignore[attr-defined]


def test_stream_usage_comes_last_and_alone(fast: Running) -> None:
    chunks = list(
        fast.client().completions.create(
            model="fake", prompt="xy" * 64, max_tokens=4, stream=True, stream_options={"include_usage": True}
        )
    )
    assert all(c.usage is None for c in chunks[:-1])
    assert chunks[-1].choices == [] and chunks[-1].usage.completion_tokens == 4
    assert chunks[-1].usage.prompt_tokens_details.cached_tokens == 64


def test_stream_ends_with_done(fast: Running) -> None:
    reply = fast.http.post(TEXT, json=text(stream=True))
    assert reply.headers["content-type"].startswith("text/event-stream")
    assert reply.text.endswith("data: [DONE]\n\n")


@pytest.mark.parametrize("stream", [False, True])
def test_n_sequences_have_their_own_index(fast: Running, stream: bool) -> None:
    made = fast.client().completions.create(model="fake", prompt="abcd", max_tokens=3, n=3, stream=stream)
    texts = {0: "", 1: "", 2: ""}
    for part in made if stream else [made]:
        for choice in part.choices:
            texts[choice.index] += choice.text
    assert texts == {0: "abc", 1: "bcd", 2: "cda"}


@pytest.mark.parametrize("stream", [False, True])
def test_several_prompts(fast: Running, stream: bool) -> None:
    made = fast.client().completions.create(
        model="fake", prompt=["abcd", "wxyz"], max_tokens=2, n=2, stream=stream, extra_body={"return_token_ids": True}
    )
    texts = dict.fromkeys(range(4), "")
    for part in made if stream else [made]:
        for choice in part.choices:
            texts[choice.index] += choice.text
    assert texts == {0: "ab", 1: "bc", 2: "wx", 3: "xy"}
    if not stream:
        assert made.usage.prompt_tokens == 8 and made.usage.completion_tokens == 8
        assert made.choices[2].prompt_token_ids == list(b"wxyz") and made.choices[3].token_ids == list(b"xy")


@pytest.mark.parametrize("prompt", ["abc", [97, 98, 99], ["abc"], [[97, 98, 99]]])
def test_forms_of_a_prompt(fast: Running, prompt: Any) -> None:
    assert fast.http.post(TEXT, json=text(prompt, max_tokens=4)).json()["choices"][0]["text"] == "abca"


@pytest.mark.parametrize("prompt", ["abc", [97, 98, 99]])
@pytest.mark.parametrize("stream", [False, True])
def test_echo_with_logprobs_covers_the_prompt(fast: Running, prompt: Any, stream: bool) -> None:
    made = fast.client().completions.create(
        model="fake", prompt=prompt, max_tokens=2, echo=True, logprobs=2, stream=stream
    )
    parts = [part.choices[0] for part in (made if stream else [made])]
    assert "".join(part.text for part in parts) == "abcab"
    rows = [part.logprobs for part in parts if part.logprobs]
    assert [token for row in rows for token in row.tokens] == ["a", "b", "c", "a", "b"]
    assert [offset for row in rows for offset in row.text_offset] == [0, 1, 2, 3, 4]
    assert [value for row in rows for value in row.token_logprobs] == [None, -1.0, -1.0, -1.0, -1.0]
    assert rows[-1].top_logprobs[-1] == {"A": -0.5, "b": -1.0}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("backwards", [False, True])
def test_each_choice_echoes_the_prompts_logprobs(
    fast: Running, stream: bool, backwards: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In whichever order the engine tells of its sequences."""
    step = FakeRun.step

    async def turned(run: FakeRun) -> list[Delta]:
        return (await step(run))[::-1]

    if backwards:
        monkeypatch.setattr(FakeRun, "step", turned)
    made = fast.client().completions.create(
        model="fake", prompt=["abc", "xyz"], n=2, max_tokens=2, echo=True, logprobs=0, stream=stream
    )
    told: dict[int, tuple[str, list[str], list[int]]] = {index: ("", [], []) for index in range(4)}
    for part in made if stream else [made]:
        for choice in part.choices:
            text, tokens, offsets = told[choice.index]
            rows = choice.logprobs
            told[choice.index] = text + choice.text, tokens + rows.tokens, offsets + rows.text_offset
    assert [text for text, *_ in told.values()] == ["abcab", "abcbc", "xyzxy", "xyzyz"]
    assert all(list(text) == tokens and offsets == [0, 1, 2, 3, 4] for text, tokens, offsets in told.values())


@pytest.mark.parametrize("stream", [False, True])
def test_offsets_count_characters_where_tokens_are_parts_of_them(fast: Running, stream: bool) -> None:
    made = fast.client().completions.create(
        model="fake", prompt="😀é", max_tokens=2, echo=True, logprobs=0, stream=stream
    )
    rows = [part.choices[0].logprobs for part in (made if stream else [made]) if part.choices[0].logprobs]
    assert [offset for row in rows for offset in row.text_offset] == [0, 0, 0, 0, 1, 1, 2, 2]


def test_an_echo_leaves_a_character_to_the_answer_that_only_begins_in_the_prompt(fast: Running) -> None:
    asked = text([97, *"😀".encode()[:2]], max_tokens=0, echo=True, logprobs=0)
    assert fast.http.post(TEXT, json=asked).json()["choices"][0]["text"] == "a"


@pytest.mark.parametrize("stream", [False, True])
def test_chat_logprobs(fast: Running, stream: bool) -> None:
    made = fast.client().chat.completions.create(
        model="fake",
        messages=[{"role": "user", "content": "xyz"}],
        max_tokens=3,
        logprobs=True,
        top_logprobs=1,
        stream=stream,
    )
    parts = [part.choices[0].logprobs for part in (made if stream else [made])]
    entries = [entry for part in parts if part for entry in part.content]
    assert [e.token for e in entries] == ["x", "y", "z"]
    assert [e.logprob for e in entries] == [-1.0] * 3
    assert [[t.token for t in e.top_logprobs] for e in entries] == [["A"]] * 3
    assert entries[0].bytes == [120]


def test_chat_logprobs_without_alternatives(fast: Running) -> None:
    choice = fast.http.post(CHAT, json=ask("xy", logprobs=True, max_tokens=1)).json()["choices"][0]
    assert choice["logprobs"]["content"] == [{"token": "x", "logprob": -1.0, "bytes": [120], "top_logprobs": []}]
    assert fast.http.post(CHAT, json=ask("xy")).json()["choices"][0]["logprobs"] is None


def test_prompt_logprobs(fast: Running) -> None:
    rows = fast.http.post(TEXT, json=text("abc", prompt_logprobs=1)).json()["choices"][0]["prompt_logprobs"]
    assert rows[0] is None and len(rows) == 3
    assert rows[1]["98"] == {"logprob": -1.0, "rank": 2, "decoded_token": "b"}
    assert len(fast.http.post(CHAT, json=ask("abc", prompt_logprobs=0)).json()["prompt_logprobs"]) == 4


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("stop", ["cd", ["zz", "cd"]])
def test_stop(fast: Running, stop: Any, stream: bool) -> None:
    made = fast.client().completions.create(model="fake", prompt="abcdef", max_tokens=20, stop=stop, stream=stream)
    parts = [part.choices[0] for part in (made if stream else [made])]
    assert "".join(part.text for part in parts) == "ab"
    assert parts[-1].finish_reason == "stop" and parts[-1].stop_reason == "cd"


@pytest.mark.parametrize("stop", [None, "cd"])
def test_a_chats_stream_tells_what_stopped_it(fast: Running, stop: Any) -> None:
    """As the whole reply does."""
    body = ask("abcdef") | {"stop": stop, "max_tokens": 20}
    whole = fast.http.post(CHAT, json=body).json()["choices"][0]
    lines = fast.http.post(CHAT, json=body | {"stream": True}).text.splitlines()
    last = [json.loads(line[6:])["choices"][0] for line in lines if line.startswith("data: {")][-1]
    assert (last["finish_reason"], last["stop_reason"]) == (whole["finish_reason"], whole["stop_reason"])
    assert last["stop_reason"] == stop


def test_chat_fills_the_context_by_default(fast: Running) -> None:
    body = ask("abc")
    del body["max_tokens"]
    usage = fast.http.post(CHAT, json=body).json()["usage"]
    assert usage["total_tokens"] == FakeCapacity.max_model_len
    assert fast.http.post(CHAT, json={**body, "max_completion_tokens": 5}).json()["usage"]["completion_tokens"] == 5


def test_messages_in_parts_roles_and_template_variables(fast: Running) -> None:
    parts = [{"type": "text", "text": "ab"}, {"type": "text", "text": "cd"}]
    messages = [{"role": "developer", "content": "x"}, {"role": "user", "content": parts}]
    body = {"messages": messages, "max_tokens": 9, "chat_template_kwargs": {"sign": "!"}}
    assert fast.http.post(CHAT, json=body).json()["choices"][0]["message"]["content"] == "x\nab\ncd\n!"


def test_reply_message_may_be_sent_back(fast: Running) -> None:
    reply = fast.client().chat.completions.create(
        model="fake", messages=[{"role": "user", "content": "hi"}], max_tokens=2
    )
    body = ask()
    body["messages"] += [reply.choices[0].message.model_dump(), {"role": "user", "content": "more"}]
    assert fast.http.post(CHAT, json=body).status_code == 200


def test_fields_without_effect_are_accepted(fast: Running) -> None:
    body = ask(user="me", metadata={"a": "b"}, store=False, service_tier="auto", temperature=None, tool_choice="none")
    assert fast.http.post(CHAT, json=body).status_code == 200


def test_salt_reaches_the_engine(fast: Running) -> None:
    assert fast.http.post(CHAT, json=ask(cache_salt="tenant", public_prefix_tokens=64)).status_code == 200
    assert fast.engine.salts[-1] == ("tenant", 64)


def test_models(fast: Running) -> None:
    card = fast.client().models.list().data[0]
    assert card.id == "fake" and card.max_model_len == 4000  # type: ignore[attr-defined]
    assert fast.client().models.retrieve("fake").id == "fake"
    with pytest.raises(openai.NotFoundError):
        fast.client().models.retrieve("gpt-9")
