"""Tools and reasoning over /v1/chat/completions, of a model that says what it is told to."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, ClassVar

import pytest

from headrace.server.chat_body import ChatBody
from headrace.server.parsers.registry import DEEPSEEK_TOKENS, NONE, Formats
from headrace.server.protocol import parse_body
from headrace.server.tool_prompt import WRITTEN, told_in_text
from headrace.server.turn import Reasoning, ToolChoice
from headrace.server.turns import rendered
from tests.support.fake_engine import FakeEngine, FakeTokenizer
from tests.support.fake_server import CHAT, Running, ask, check_refusal, serving, tool

pytestmark = pytest.mark.unit

SAID = '<think>Where?</think>Let me look. <tool_call>\n{"name": "f", "arguments": {"x": "ü}"}}\n</tool_call>'
ARGUMENTS = '{"x": "ü}"}'


class Hermes(FakeTokenizer):
    chat_template = "{{ tools }} <tool_call> </think>"


def speaks_hermes(number: int, engine: FakeEngine) -> None:
    engine.tokenizer = Hermes()


@pytest.fixture(scope="module")
def hermes() -> Iterator[Running]:
    with serving(prepare=speaks_hermes) as running:
        yield running


def told(running: Running, said: str = SAID, **fields: Any) -> dict[str, Any]:
    running.engine.scripts = [said]
    reply = running.http.post(CHAT, json=ask(**{"tools": [tool("f")], "max_tokens": None, **fields}))
    assert reply.status_code == 200, reply.text
    return dict(reply.json())


def test_a_call_is_told_as_such(hermes: Running) -> None:
    choice = told(hermes)["choices"][0]
    message = choice["message"]
    assert choice["finish_reason"] == "tool_calls" and message["reasoning_content"] == "Where?"
    assert message["content"].strip() == "Let me look."
    (call,) = message["tool_calls"]
    assert call["type"] == "function" and call["id"]
    assert call["function"]["name"] == "f" and json.loads(call["function"]["arguments"]) == {"x": "ü}"}


def test_a_stream_adds_up_to_the_same(hermes: Running) -> None:
    hermes.engine.scripts = [SAID]
    body = ask(tools=[tool("f")], stream=True, max_tokens=None)
    text, thought, arguments, names, ends = "", "", [], [], []
    with hermes.http.stream("POST", CHAT, json=body) as reply:
        for line in reply.iter_lines():
            if not line.startswith("data: {"):
                continue
            (choice,) = json.loads(line[6:])["choices"]
            delta = choice["delta"]
            text += delta.get("content") or ""
            thought += delta.get("reasoning_content") or ""
            for call in delta.get("tool_calls") or []:
                assert call["index"] == 0
                names += [call["function"]["name"]] if call.get("id") else []
                arguments.append(call["function"].get("arguments") or "")
            ends.append(choice["finish_reason"])
    assert (text.strip(), thought, names) == ("Let me look.", "Where?", ["f"])
    assert json.loads("".join(arguments)) == json.loads(ARGUMENTS) and len(arguments) > 4  # as they come
    assert ends[-1] == "tool_calls" and not any(ends[:-1])


@pytest.mark.parametrize(
    ("stop", "finish", "arguments"),
    [("ü", "stop", '{"x": "'), ("</tool_call>", "tool_calls", ARGUMENTS), ('name": "f', "stop", None)],
)
@pytest.mark.parametrize("stream", [False, True])
def test_a_call_that_a_stop_string_cuts_is_not_to_be_made(
    hermes: Running, stream: bool, stop: str, finish: str, arguments: str | None
) -> None:
    hermes.engine.scripts = [SAID]
    reply = hermes.http.post(CHAT, json=ask(tools=[tool("f")], max_tokens=None, stop=stop, stream=stream))
    if stream:
        told_last = [json.loads(line[6:]) for line in reply.text.splitlines() if line.startswith("data: {")][-1]
        assert told_last["choices"][0]["finish_reason"] == finish
        return
    (choice,) = reply.json()["choices"]
    assert (choice["finish_reason"], choice["stop_reason"]) == (finish, stop)
    calls = choice["message"].get("tool_calls")
    assert (calls[0]["function"]["arguments"] if calls else None) == arguments


@pytest.mark.parametrize("path", [CHAT, "/v1/messages", "/v1/responses"])
@pytest.mark.parametrize("stream", [False, True])
def test_half_a_surrogate_pair_in_a_name_is_told_as_no_character(hermes: Running, path: str, stream: bool) -> None:
    hermes.engine.scripts = [r'<tool_call>{"name": "f\ud83d", "arguments": {}}</tool_call>']
    body: dict[str, Any] = {"tools": [{"name": "f", "input_schema": {"type": "object"}}], "max_tokens": 99}
    if path == CHAT:
        body = {"tools": [tool("f")]}
    elif path == "/v1/responses":
        body = {"tools": [{"type": "function", "name": "f"}], "input": "?"}
    asked = {} if "input" in body else {"messages": [{"role": "user", "content": "?"}]}
    reply = hermes.http.post(path, json={**asked, **body, "stream": stream})
    assert (
        reply.status_code == 200
        and '"name":"f\ufffd"' in reply.text
        and "error" not in reply.text.replace('"error":null', "")
    )


def test_half_a_surrogate_pair_in_arguments_does_not_end_a_conversation(hermes: Running) -> None:
    said = told(hermes, r'<tool_call>{"name": "f", "arguments": {"x": "\ud83d"}}</tool_call>')["choices"][0]["message"]
    assert said["tool_calls"][0]["function"]["arguments"] == r'{"x": "\ud83d"}', "as the model wrote it"
    calls = parsed(messages=[{"role": "user", "content": "?"}, said]).turn().messages[1]["tool_calls"]
    assert calls[0]["function"]["arguments"] == {"x": "\ufffd"}


@pytest.mark.parametrize("fields", [{"tools": None}, {"tool_choice": "none"}])
def test_without_tools_a_call_is_text(hermes: Running, fields: dict[str, Any]) -> None:
    choice = told(hermes, **fields)["choices"][0]
    assert choice["finish_reason"] == "stop" and "tool_calls" not in choice["message"]
    assert "<tool_call>" in choice["message"]["content"]


def test_a_conversation_goes_on_with_the_result(hermes: Running) -> None:
    message = told(hermes)["choices"][0]["message"]
    result = {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": "42"}
    reply = told(hermes, "It is 42.", messages=[{"role": "user", "content": "?"}, message, result])
    assert reply["choices"][0]["message"]["content"] == "It is 42."
    assert hermes.engine.asked[-1][0].endswith("42\n")


def parsed(**fields: Any) -> ChatBody:
    body = parse_body(ChatBody, json.dumps(ask(**fields)).encode())
    return body


def test_what_openais_client_parsed_may_come_back(hermes: Running) -> None:
    message = told(hermes)["choices"][0]["message"]
    message["parsed"] = None
    message["tool_calls"][0]["parsed_arguments"] = {"x": "ü}"}
    message["tool_calls"][0]["function"]["parsed_arguments"] = {"x": "ü}"}
    result = {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": "sunny"}
    messages = [{"role": "user", "content": "?"}, message, result]
    assert told(hermes, "It is sunny.", messages=messages)["choices"][0]["message"]["content"] == "It is sunny."


def test_what_templates_are_given() -> None:
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    broken = {**call, "function": {"name": "f", "arguments": '{"a": '}}
    empty = {**call, "function": {"name": "f", "arguments": ""}}
    messages = [
        {"role": "developer", "content": "be"},
        {"role": "assistant", "content": None, "tool_calls": [call, broken, empty], "reasoning_content": "r"},
        {
            "role": "tool",
            "tool_call_id": "c",
            "content": [{"type": "text", "text": "4"}, {"type": "text", "text": "2"}],
        },
    ]
    first, second, third = parsed(messages=messages).turn().messages
    assert first == {"role": "system", "content": "be"}
    assert [each["function"]["arguments"] for each in second["tool_calls"]] == [{"a": 1}, '{"a": ', {}]
    assert "content" not in second and second["reasoning_content"] == "r"
    assert third == {"role": "tool", "tool_call_id": "c", "content": "4\n2"}


def test_a_refusal_of_another_model_is_its_answer(hermes: Running) -> None:
    """As a client sends it back that has talked with one of OpenAI's."""
    parts = [{"type": "refusal", "refusal": "No."}, {"type": "text", "text": "Why?"}]
    messages = [
        {"role": "user", "content": "?"},
        {"role": "assistant", "content": None, "refusal": "I cannot."},
        {"role": "assistant", "content": parts, "refusal": None},
    ]
    _, first, second = parsed(messages=messages).turn().messages
    assert [first, second] == [{"role": "assistant", "content": text} for text in ("I cannot.", "No.\nWhy?")]
    for wrong, param in (
        ({"role": "user", "content": "?", "refusal": "No."}, "messages[0].refusal"),
        ({"role": "assistant", "content": [{"type": "refusal"}]}, "messages[0].content[0].text"),
        ({"role": "assistant", "content": None, "refusal": 1}, "messages[0].refusal"),
    ):
        check_refusal(hermes.http.post(CHAT, json=ask(messages=[wrong])), 400, param)


@pytest.mark.parametrize(
    ("fields", "choice"),
    [
        ({}, ToolChoice("auto")),
        ({"tool_choice": "required"}, ToolChoice("required")),
        ({"parallel_tool_calls": False}, ToolChoice("auto", (), False)),
        ({"tool_choice": {"type": "function", "function": {"name": "f"}}}, ToolChoice("required", ("f",), False)),
        (
            {"tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [tool("g")]}}},
            ToolChoice("auto", ("g",)),
        ),
    ],
)
def test_choices(fields: dict[str, Any], choice: ToolChoice) -> None:
    assert parsed(tools=[tool("f"), tool("g")], **fields).turn().choice == choice


def test_reasoning_that_is_asked_for() -> None:
    assert parsed(reasoning_effort="none").turn().reasoning == Reasoning(False)
    assert parsed(reasoning_effort="low", thinking_token_budget=7).turn().reasoning == Reasoning(True, 7, "low")


def test_a_template_that_knows_no_tools_is_told_in_text() -> None:
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"a": "ü"}'}}
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "?"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "assistant", "content": "Both.", "tool_calls": [call, call]},
        {"role": "tool", "tool_call_id": "c", "content": "42"},
    ]
    turn = parsed(messages=messages, tools=[tool("f"), tool("g")]).turn()
    first, user, one, both, result = told_in_text(turn.messages, turn.tools)
    lines = first["content"].split("\n")
    assert [json.loads(line)["name"] for line in lines[1:3]] == ["f", "g"] and lines[-1] == "Be brief."
    assert user == {"role": "user", "content": "?"}
    assert json.loads(one["content"]) == {"name": "f", "arguments": {"a": "ü"}}
    assert both["content"].startswith("Both.\n[{") and "tool_calls" not in both
    assert result == {"role": "user", "content": "Result of the call c: 42"}
    assert told_in_text([user], turn.tools)[0]["role"] == "system" and told_in_text([user], []) == [user]


class DeepSeek(FakeTokenizer):
    """As DeepSeek-V3.1's: a template that shows calls, but no tools, and marks among the special tokens."""

    chat_template = "{{ message.tool_calls }} '<｜tool▁sep｜>' </think>"
    added_tokens: ClassVar = {token: 300 + i for i, token in enumerate(DEEPSEEK_TOKENS)}
    special_tokens: ClassVar = frozenset(DEEPSEEK_TOKENS)


def speaks_deepseek(number: int, engine: FakeEngine) -> None:
    engine.tokenizer = DeepSeek()


def test_deepseek_is_told_of_tools_in_its_own_format() -> None:
    call = WRITTEN["deepseek_v31"].replace("NAME", "f").replace("ARGUMENTS", ARGUMENTS)
    with serving(prepare=speaks_deepseek) as running:
        message = told(running, f"Let me look.{call}")["choices"][0]["message"]
        prompt, params = running.engine.asked[-1]
        assert message["content"] == "Let me look." and not params.skip_special_tokens
        assert message["tool_calls"][0]["function"] == {"name": "f", "arguments": ARGUMENTS}
        assert "### f\nDescription: " in prompt and WRITTEN["deepseek_v31"] in prompt
        result = {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": "42"}
        told(running, "It is 42.", messages=[{"role": "user", "content": "?"}, message, result])
        assert running.engine.asked[-1][0].endswith("Let me look.\n42\n"), "calls and results are the template's"


def test_a_flag_decides_how_deepseek_is_told_of_tools() -> None:
    turn = parsed(tools=[tool("f")]).turn()
    for called, shown in (("deepseek_v3", True), ("json", False), (NONE, False)):
        assert (WRITTEN["deepseek_v3"] in rendered(DeepSeek(), turn, Formats(called)).text) == shown
    assert WRITTEN["deepseek_v31"] in rendered(DeepSeek(), turn).text
    assert DEEPSEEK_TOKENS[0] not in rendered(FakeTokenizer(), turn, Formats("deepseek_v31")).text, "no calls are shown"


def test_a_template_that_shows_calls_gets_their_arguments_as_text() -> None:
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"a": "ü"}'}}
    messages = [{"role": "user", "content": "?"}, {"role": "assistant", "content": None, "tool_calls": [call]}]
    turn = parsed(messages=messages, tools=[tool("f")]).turn()
    system, user, said = told_in_text(turn.messages, turn.tools, WRITTEN["deepseek_v3"])
    assert system["role"] == "system" and user == turn.messages[0]
    assert said["tool_calls"][0]["function"] == {"name": "f", "arguments": '{"a": "ü"}'}
    assert turn.messages[1]["tool_calls"][0]["function"]["arguments"] == {"a": "ü"}


def test_tools_are_told_to_a_model_without_a_format() -> None:
    with serving() as plain:
        plain.engine.scripts = ['{"name": "f", "arguments": {"x": 1}}']
        reply = plain.http.post(CHAT, json=ask(tools=[tool("f")], max_tokens=None)).json()["choices"][0]
        assert reply["finish_reason"] == "tool_calls"
        assert reply["message"]["tool_calls"][0]["function"] == {"name": "f", "arguments": '{"x": 1}'}
        assert '"name": "f"' in plain.engine.asked[-1][0]


@pytest.mark.parametrize(
    ("route", "body", "where"),
    [
        (CHAT, ask(tool_choice="required"), "tools[1].function.parameters"),
        ("/v1/responses", {"input": "a", "tool_choice": "required"}, "tools[1].parameters"),
        (
            "/v1/messages",
            {"model": "fake", "max_tokens": 9, **ask(), "tool_choice": {"type": "any"}},
            "tools[1].input_schema",
        ),
    ],
)
def test_a_schema_that_cannot_be_forced_is_named_by_its_place_and_tool(
    route: str, body: dict[str, Any], where: str, hermes: Running
) -> None:
    schema = {"type": "object", "properties": {"x": {"not": {}}}}
    made = []
    for name, given in (("good", {"type": "object"}), ("bad", schema)):
        described: dict[str, Any] = {"name": name, where.split(".")[-1]: given}
        if "function" in where:
            described = {"function": described}
        made.append(described if "input_schema" in where else {"type": "function", **described})
    reply = hermes.http.post(route, json={**body, "tools": made})
    error = reply.json()["error"]
    assert reply.status_code == 400 and error.get("param", where) == where, error
    assert error["message"].startswith(f"{where} (tool 'bad'): ") and "#/properties/x/not" in error["message"]
