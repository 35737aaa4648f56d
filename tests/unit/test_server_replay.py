"""Over HTTP: answers that are sent back with their tokens, kept with a response, or remembered by the server."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, ClassVar

import pytest

from tests.support.fake_engine import FakeEngine, FakeTokenizer
from tests.support.fake_server import CHAT, Running, ask, check_refusal, serving

pytestmark = pytest.mark.unit

PAIR, CONTROL = 257, 256
"""Tokens: "ab" in one, and the one that ends a turn, a control token."""


class Merging(FakeTokenizer):
    """Of a text it makes one token of each "ab"; a model may write two. FakeEngine.asked shows the one as <257>."""

    named_tokens: ClassVar[dict[str, str | None]] = {"bos_token": None, "eos_token": "<256>", "pad_token": None}
    added_tokens: ClassVar[dict[str, int]] = {"<256>": CONTROL}
    special_tokens: ClassVar[frozenset[str]] = frozenset({"<256>"})
    write: Callable[[str], str] = staticmethod(lambda content: content)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        out: list[int] = []
        for number, part in enumerate(text.split("<256>")):
            out += [CONTROL] * (number > 0)
            for inner, piece in enumerate(part.split("ab")):
                out += [PAIR] * (inner > 0) + list(piece.encode())
        return out

    def token_bytes(self, token: int) -> bytes:
        return b"ab" if token == PAIR else super().token_bytes(token)

    def render_chat(self, messages: Any, add_generation_prompt: bool = True, **kwargs: Any) -> str:
        told = ((each["role"], each.get("content") or "", each.get("tool_calls")) for each in messages)
        return "".join(
            f"[{role}]{self.write(text)}{json.dumps(calls) if calls else ''}" for role, text, calls in told
        ) + ("[assistant]" if add_generation_prompt else "")


def merging(number: int, engine: FakeEngine) -> None:
    engine.tokenizer = Merging()


def shouting(number: int, engine: FakeEngine) -> None:
    engine.tokenizer = Merging()
    engine.tokenizer.write = str.upper


def chat(running: Running, *messages: Any, said: str = "xaby", **more: Any) -> dict[str, Any]:
    """The reply of a model that writes letter by letter."""
    running.engine.scripts.append(said)
    roles = ("user", "assistant")
    told = [
        {"role": roles[n % 2], "content": each} if isinstance(each, str) else each for n, each in enumerate(messages)
    ]
    reply = running.http.post(CHAT, json=ask(messages=told, return_token_ids=True, **more))
    assert reply.status_code == 200, reply.text
    return dict(reply.json())


def read(running: Running) -> str:
    """What the engine was given last, merged tokens as <257>."""
    return running.engine.asked[-1][0]


def message(reply: dict[str, Any]) -> dict[str, Any]:
    return dict(reply["choices"][0]["message"])


def replayed(reply: dict[str, Any]) -> int:
    return int(reply["headrace"]["reuse"]["replayed"])


def test_a_message_that_is_sent_back_as_it_came() -> None:
    with serving(prepare=merging) as running:
        first = chat(running, "ab?")
        assert message(first)["token_ids"] == list(b"xaby")
        second = chat(running, "ab?", message(first), "cab")
        assert read(running) == "[user]<257>?[assistant]xaby[user]c<257>[assistant]" and replayed(second) == 1
        before, own = first["choices"][0], second["choices"][0]["prompt_token_ids"]
        head = before["prompt_token_ids"]
        assert own[: len(head)] == head
        asked = {"messages": [{"role": "user", "content": "ab?"}, message(first)], "add_generation_prompt": False}
        assert own[: len(head) + 4] == running.http.post("/tokenize", json=asked).json()["tokens"]
        plain = chat(running, "ab?", "xaby", "cab")
        assert read(running) == "[user]<257>?[assistant]x<257>y[user]c<257>[assistant]" and replayed(plain) == 0


def test_the_answer_is_that_of_the_same_tokens() -> None:
    with serving(prepare=merging) as running:
        told = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "ab", "token_ids": [97, 98]}]
        body = ask(messages=told, return_token_ids=True, add_generation_prompt=True)
        own = running.http.post(CHAT, json=body).json()["choices"][0]
        ids = {"model": "fake", "prompt": own["prompt_token_ids"], "max_tokens": 8, "return_token_ids": True}
        assert 97 in ids["prompt"] and PAIR not in ids["prompt"]
        assert running.http.post("/v1/completions", json=ids).json()["choices"][0]["token_ids"] == own["token_ids"]


@pytest.mark.parametrize(
    ("content", "tokens"),
    [
        ("ab", list(b"ac")),
        ("ab", list(b"a")),
        ("ab", list(b"abc")),
        ("ab", [97, CONTROL, 98]),
        ("ab", [CONTROL]),
        ("ab", [97, 98, 300]),
        ("ab", [97, 98, 2**30]),
        ("", [97]),
        ("ab", [97] * 30_000),
    ],
)
def test_tokens_that_say_something_else_are_refused(content: str, tokens: list[int]) -> None:
    with serving(prepare=merging) as running:
        told = [{"role": "user", "content": "q"}, {"role": "assistant", "content": content, "token_ids": tokens}]
        for route in (CHAT, "/tokenize"):
            body = ask(messages=told) if route == CHAT else {"messages": told}
            refused = running.http.post(route, json=body)
            check_refusal(refused, 400, "messages[1].token_ids")
        assert ("control token" in refused.text) == (CONTROL in tokens[:-1])
        assert not running.engine.asked


def test_only_the_assistants_messages_have_tokens() -> None:
    with serving(prepare=merging) as running:
        told = [{"role": "user", "content": "q", "token_ids": [113]}]
        check_refusal(running.http.post(CHAT, json=ask(messages=told)), 400, "messages[0].token_ids")
        told = [{"role": "assistant", "content": "q", "token_ids": [-1]}]
        check_refusal(running.http.post(CHAT, json=ask(messages=told)), 400, "messages[0].token_ids[0]")


def test_a_template_that_rewrites_history() -> None:
    with serving(prepare=shouting) as running:
        first = chat(running, "q" * 100)
        second = chat(running, "q" * 100, message(first), "more")
        assert "[assistant]XABY" in read(running)
        reuse = second["headrace"]["reuse"]
        assert (reuse["replayed"], reuse["cause"]) == (0, "text"), reuse
        assert "in other words than the model" in reuse["told"]


def test_a_stop_string_leaves_the_tokens_before_it() -> None:
    with serving(prepare=merging) as running:
        first = chat(running, "q", said="xab.STOP", stop=["STOP"])
        assert message(first)["content"] == "xab." and message(first)["token_ids"] == list(b"xab.")
        assert replayed(chat(running, "q", message(first), "more")) == 1


def test_streamed_tokens_are_sent_back() -> None:
    with serving(prepare=merging) as running:
        running.engine.scripts.append("xaby")
        asked = ask("q", stream=True, return_token_ids=True)
        lines = running.http.post(CHAT, json=asked).text.splitlines()
        chunks = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
        choices = [choice for chunk in chunks for choice in chunk["choices"]]
        text = "".join(choice["delta"].get("content") or "" for choice in choices)
        tokens = [token for choice in choices for token in choice.get("token_ids", ())]
        second = chat(running, "q", {"role": "assistant", "content": text, "token_ids": tokens}, "more")
        assert replayed(second) == 1 and "[assistant]xaby" in read(running)


TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}


def test_calls_of_tools() -> None:
    """The template writes a call in other words here: it is read as that, and other tokens are refused all the same."""
    said = '{"name": "f", "arguments": {"x": "ab"}}'
    with serving(prepare=merging) as running:
        first = chat(running, "q", said=said, tools=[TOOL], max_tokens=100)
        own = message(first)
        assert own["tool_calls"][0]["function"]["name"] == "f" and own["token_ids"] == list(said.encode())
        result = {"role": "tool", "tool_call_id": own["tool_calls"][0]["id"], "content": "ab"}
        second = chat(running, "q", own, result, tools=[TOOL])
        assert second["headrace"]["reuse"]["replayed"] == 1 and '"x": "ab"' in read(running)
        own["tool_calls"][0]["function"]["arguments"] = '{"x": "cd"}'
        refused = running.http.post(
            CHAT, json=ask(messages=[{"role": "user", "content": "q"}, own, result], tools=[TOOL])
        )
        check_refusal(refused, 400, "messages[1].token_ids")


def test_reasoning() -> None:
    """Templates leave it out of earlier answers: honest tokens are no fault then, but they are not used."""
    with serving(prepare=merging, reasoning_parser="think") as running:
        first = chat(running, "q" * 100, said="<think>ab</think>cab", max_tokens=100)
        own = message(first)
        assert (own["reasoning_content"], own["content"]) == ("ab", "cab") and len(own["token_ids"]) == 20
        second = chat(running, "q" * 100, own, "more")
        assert replayed(second) == 0 and "[assistant]c<257>[user]" in read(running)
        del own["reasoning_content"]
        told = [{"role": "user", "content": "q" * 100}, own]
        check_refusal(running.http.post(CHAT, json=ask(messages=told)), 400, "messages[1].token_ids")


def test_the_same_text_in_other_tokens_is_told() -> None:
    with serving(prepare=merging) as running:
        first = chat(running, "q" * 100)
        reuse = chat(running, "q" * 100, message(first)["content"], "more")["headrace"]["reuse"]
        assert (reuse["cause"], reuse["text"], reuse["other_text"], reuse["message"]) == ("tokens", "ab", "a", 1)
        assert "token_ids" in reuse["told"] and "--replay-answers" in reuse["told"]
        assert chat(running, "q" * 100, message(first), "more")["headrace"]["reuse"]["cause"] == "continued"


@pytest.mark.parametrize("remembers", [False, True])
def test_answers_that_the_server_remembers(remembers: bool) -> None:
    with serving(prepare=merging, replay_answers=remembers) as running:
        chat(running, "q", cache_salt="one")
        other = chat(running, "q", "xaby", "more", cache_salt="two")
        assert replayed(other) == 0 and "x<257>y" in read(running), "another caller's answer"
        own = chat(running, "q", "xaby", "more", cache_salt="one")
        assert replayed(own) == remembers and ("x<257>y" in read(running)) != remembers
        later = chat(running, "q", "xaby", "more", "xaby", "and more", cache_salt="one")
        assert replayed(later) == 2 * remembers
        assert replayed(chat(running, "q", "xabz", "more", cache_salt="one")) == 0
        body = {"model": "fake", "max_tokens": 8, "cache_salt": "one", "messages": [{"role": "user", "content": "q"},
                {"role": "assistant", "content": "xaby"}, {"role": "user", "content": "more"}]}  # fmt: skip
        anthropic = running.http.post("/v1/messages", json=body).json()
        assert anthropic["headrace"]["reuse"]["replayed"] == remembers, "whichever route asks"


@pytest.mark.parametrize("stream", [False, True])
def test_a_kept_response_holds_its_tokens(stream: bool) -> None:
    with serving(prepare=merging) as running:
        own = running.client().responses
        answered = []
        previous = None
        for number in range(3):
            running.engine.scripts.append("xaby")
            more: dict[str, Any] = {} if previous is None else {"previous_response_id": previous}
            if stream:
                *_, last = own.create(model="fake", input=f"q{number}", stream=True, **more)
                answered.append(last.response)  # type: ignore[union-attr]
            else:
                answered.append(own.create(model="fake", input=f"q{number}", **more))
            previous = answered[-1].id
            assert answered[-1].headrace["reuse"]["replayed"] == number and "<257>" not in read(running)
        items = running.http.get(f"/v1/responses/{previous}/input_items").json()["data"]
        assert len(items) == 5 and not any("token_ids" in item for item in items)
        counted = running.http.post("/v1/responses/input_tokens", json={"input": "q", "previous_response_id": previous})
        assert counted.json()["input_tokens"] == len("[user]q0[assistant]xaby") * 3 + len("[user]q[assistant]")
        running.app.state.headrace.responses.check()
