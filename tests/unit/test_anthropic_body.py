"""What bodies of the Messages API become: a conversation for a chat template, tools, parameters; or a named refusal."""

from __future__ import annotations

import json
from typing import Any

import pytest

from headrace.server.anthropic.body import CountBody, MessagesBody
from headrace.server.anthropic.messages import NAMES
from headrace.server.anthropic.system import stable
from headrace.server.errors import ApiError
from headrace.server.protocol import parse_body
from headrace.server.turn import Reasoning, Tool, ToolChoice, Turn
from headrace.server.turns import naming
from headrace.types import SamplingParams

pytestmark = pytest.mark.unit

USE = {"type": "tool_use", "id": "t1", "name": "weather", "input": {"city": "Oslo"}}
RESULT = {"type": "tool_result", "tool_use_id": "t1", "content": "cold"}
CALL = {"id": "t1", "type": "function", "function": {"name": "weather", "arguments": {"city": "Oslo"}}}
WEATHER = {"name": "weather", "description": "Now.", "input_schema": {"type": "object"}}
HELLO = {"role": "user", "content": "hello"}
EPHEMERAL = {"type": "ephemeral", "ttl": "1h"}


def user(*blocks: Any) -> dict[str, Any]:
    return {"role": "user", "content": list(blocks)}


def assistant(*blocks: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": list(blocks)}


def text(words: str, **more: Any) -> dict[str, Any]:
    return {"type": "text", "text": words, **more}


def parsed(*messages: dict[str, Any], **more: Any) -> MessagesBody:
    body = {"max_tokens": 5, "messages": list(messages) or [HELLO], **more}
    return parse_body(MessagesBody, json.dumps(body).encode())


def turn(*messages: dict[str, Any], **more: Any) -> Turn:
    return parsed(*messages, **more).turn()


def said(*messages: dict[str, Any], **more: Any) -> list[tuple[str, str]]:
    return [(each["role"], each["content"]) for each in turn(*messages, **more).messages]


# ---- conversations ---------------------------------------------------------------------------------------------------


def test_texts_and_blocks_are_the_same() -> None:
    assert said() == said(user(text("hello"))) == [("user", "hello")]
    assert said(system="be brief") == said(system=[text("be brief")]) == [("system", "be brief"), ("user", "hello")]
    assert said(system=[text("a"), text("b")])[0] == ("system", "a\nb")


def test_neighbours_of_one_role_are_one_message() -> None:
    given = [HELLO, user(text("a"), text("b")), assistant(text("c")), assistant(text("d")), HELLO]
    assert said(*given) == [("user", "hello\na\nb"), ("assistant", "c\nd"), ("user", "hello")]


def test_calls_and_their_results() -> None:
    failed = {**RESULT, "is_error": True, "content": [text("no"), text("net")]}
    messages = turn(HELLO, assistant(text("I look."), USE), user(text("and?"), RESULT, failed)).messages
    assert messages[1] == {"role": "assistant", "content": "I look.", "tool_calls": [CALL]}
    assert messages[2] == {"role": "tool", "tool_call_id": "t1", "name": "weather", "content": "cold"}
    assert messages[3]["content"] == "Error: no\nnet"
    assert messages[4] == {"role": "user", "content": "and?"}  # behind the results, wherever it stood


def test_a_result_may_be_empty() -> None:
    empty = {"type": "tool_result", "tool_use_id": "t1"}
    assert turn(HELLO, assistant(USE), user(empty)).messages[2]["content"] == ""


def test_thinking_is_taken_back() -> None:
    thought = {"type": "thinking", "thinking": "hm", "signature": ""}
    redacted = {"type": "redacted_thinking", "data": "x"}
    messages = turn(HELLO, assistant(thought, redacted, thought, text("a")), HELLO).messages
    assert messages[1] == {"role": "assistant", "content": "a", "reasoning_content": "hm\nhm"}


def test_documents_of_text_are_text() -> None:
    plain = {"type": "text", "media_type": "text/plain", "data": "body"}
    document = {"type": "document", "title": "T", "context": "C", "source": plain, "citations": {"enabled": False}}
    blocks = {"type": "document", "source": {"type": "content", "content": [text("x"), text("y")]}}
    assert said(user(document, blocks, text("?"))) == [("user", "T\nC\nbody\nx\ny\n?")]


def test_later_system_messages_go_into_the_users_turn() -> None:
    system = {"role": "system", "content": "be brief"}
    assert said(system, HELLO) == [("system", "be brief"), ("user", "hello")]
    assert said(system, HELLO, system="top")[0] == ("system", "top\nbe brief")
    reminder = "hello\n<system-reminder>\nbe brief\n</system-reminder>"
    assert said(HELLO, system) == [("user", reminder)]


def test_an_answer_begun_is_gone_on_with() -> None:
    begun = turn(HELLO, assistant(text("The answer is (")))
    assert begun.messages[-1]["content"] == "The answer is ("
    assert begun.template == {"add_generation_prompt": False, "continue_final_message": True}
    nothing = turn(HELLO, assistant())
    assert nothing.template == {} and len(nothing.messages) == 1


# ---- other fields ----------------------------------------------------------------------------------------------------


def test_tools() -> None:
    examples = [{"city": "Oslo"}]
    given = {**WEATHER, "type": "custom", "cache_control": EPHEMERAL, "strict": True, "input_examples": examples}
    schema = {"type": "object", "examples": examples}
    assert turn(tools=[given]).tools == (Tool("weather", "Now.", schema, True),)
    assert turn(tools=[WEATHER]).tools == (Tool("weather", "Now.", {"type": "object"}, False),)


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        (None, ToolChoice("auto")),
        ({"type": "auto", "disable_parallel_tool_use": True}, ToolChoice("auto", (), False)),
        ({"type": "any"}, ToolChoice("required")),
        ({"type": "tool", "name": "weather"}, ToolChoice("required", ("weather",))),
        ({"type": "none"}, ToolChoice("none")),
    ],
)
def test_tool_choice(given: Any, wanted: ToolChoice) -> None:
    assert turn(tools=[WEATHER], tool_choice=given).choice == wanted


@pytest.mark.parametrize(
    ("thinking", "effort", "wanted"),
    [
        (None, None, Reasoning()),
        ({"type": "enabled", "budget_tokens": 2000}, None, Reasoning(True, 2000)),
        ({"type": "adaptive", "display": "summarized"}, "max", Reasoning(True, None, "high")),
        ({"type": "disabled"}, "low", Reasoning(False, None, "low")),
    ],
)
def test_thinking(thinking: Any, effort: Any, wanted: Reasoning) -> None:
    assert turn(thinking=thinking, output_config={"effort": effort}).reasoning == wanted


def test_parameters() -> None:
    assert parsed().to_params() == SamplingParams(max_tokens=5)
    given = parsed(temperature=0, top_p=0.5, top_k=7, stop_sequences=["a", "b"]).to_params()
    assert given == SamplingParams(max_tokens=5, temperature=0, top_p=0.5, top_k=7, stop=("a", "b"))


@pytest.mark.parametrize("field", ["output_config", "output_format"])
def test_a_schema_of_the_answer(field: str) -> None:
    shape = {"type": "json_schema", "schema": {"type": "object"}}
    params = parsed(**{field: {"format": shape} if field == "output_config" else shape}).to_params()
    assert params.structured is not None and json.loads(params.structured.json or "") == {"type": "object"}


def test_what_changes_no_answer_is_accepted() -> None:
    harmless = {
        "metadata": {"user_id": "x"}, "service_tier": "auto", "speed": "fast", "inference_geo": "eu",
        "diagnostics": {"previous_message_id": None}, "container": None, "mcp_servers": [],
        "cache_control": EPHEMERAL,
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
    }  # fmt: skip
    plain, more = parsed(), parsed(user(text("hello", cache_control=EPHEMERAL)), **harmless)
    assert more.turn() == plain.turn() and more.to_params() == plain.to_params()


IMAGE = {"type": "image", "source": {"type": "url", "url": "x"}}
PDF = {"type": "document", "source": {"type": "base64", "media_type": "application/pdf", "data": ""}}
SERVER_USE = {"type": "server_tool_use", "id": "1", "name": "web_search", "input": {}}


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"messages": [user(text("a"), IMAGE)]}, r"^messages\[0\].content\[1\].type: 'image' is not supported"),
        ({"messages": [user(PDF)]}, r"^messages\[0\].content\[0\].source.type: 'base64' is not supported"),
        ({"messages": [HELLO, assistant(SERVER_USE)]}, r"^messages\[1\].content\[0\].type: 'server_tool_use'"),
        ({"messages": [user({"type": "text", "text": 5})]}, r"^messages\[0\].content\[0\].text: .*string"),
        ({"messages": [user(text("a", mood="good"))]}, r"unknown field 'messages\[0\].content\[0\].mood'"),
        ({"system": [{"type": "text", "text": 5}]}, r"^system\[0\].text: .*string"),
        ({"system": [{"type": "text"}]}, r"^system\[0\].text is required"),
        ({"messages": [user({"type": "text"})]}, r"^messages\[0\].content\[0\].text is required"),
        ({"messages": [user({"text": "a"})]}, r"^messages\[0\].content\[0\].type is required"),
        ({"messages": [{"role": "boss", "content": "a"}]}, r"^messages\[0\].role: 'boss' is not supported"),
        ({"messages": [user()]}, r"^messages\[0\].content: .*at least 1"),
        ({"messages": []}, r"^messages: .*at least 1"),
        ({"messages": [user(USE)]}, r"^messages\[0\].content\[0\].type: 'tool_use' is not supported"),
        ({"messages": [HELLO, user(RESULT)]}, r"^messages\[1\].content\[0\].tool_use_id: no tool_use block .*'t1'"),
        ({"messages": [HELLO, assistant(USE)]}, "ends in a tool_use"),
        ({"messages": [HELLO, assistant(USE), user({**RESULT, "content": [IMAGE]})]},
         r"^messages\[2\].content\[0\].content\[0\].type: 'image'"),
        ({"tools": [{"type": "web_search_20250305", "name": "x"}]}, r"^tools\[0\].type: 'web_search_20250305'"),
        ({"tools": [{"name": "f"}]}, r"^tools\[0\].input_schema is required"),
        ({"tools": [{**WEATHER, "name": "a b"}]}, r"^tools\[0\].name"),
        ({"tools": [{**WEATHER, "defer_loading": True}]}, r"^tools\[0\].defer_loading"),
        ({"tools": [WEATHER, WEATHER]}, "two tools have the name 'weather'"),
        ({"tool_choice": {"type": "any"}}, "^tool_choice 'any' needs tools"),
        ({"tools": [WEATHER], "tool_choice": {"type": "tool", "name": "f"}}, "^tool_choice.name: no tool .*'f'"),
        ({"tools": [WEATHER], "tool_choice": {"type": "some"}}, "^tool_choice.type: 'some' is not supported"),
        ({"thinking": {"type": "enabled"}}, "^thinking.budget_tokens is required"),
        ({"thinking": {"type": "enabled", "budget_tokens": 0}}, "^thinking.budget_tokens"),
        ({"temperature": 1.5}, "^temperature"),
        ({"max_tokens": None}, "^max_tokens"),
        ({"max_tokens": -1}, "^max_tokens"),
        ({"stop_sequences": [""]}, "^stop_sequences must have texts of 1 to"),
        ({"stop_sequences": ["a"] * 17}, "^stop_sequences must have at most 16 texts, got 17"),
        ({"container": "c"}, "^container: "),
        ({"stream_options": {"include_usage": True}}, "^stream_options: "),
        ({"mcp_servers": [{}]}, "^mcp_servers: "),
        ({"context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]}}, "^context_management.edits"),
        ({"output_config": {"task_budget": {}}}, "^output_config.task_budget"),
        ({"tempereture": 1}, "unknown field 'tempereture'"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)  # fmt: skip
def test_refusals_name_the_field(given: dict[str, Any], words: str) -> None:
    with pytest.raises(ApiError, match=words) as told, naming(NAMES):
        body = {"max_tokens": 5, "messages": [HELLO], **given}
        found = parse_body(MessagesBody, json.dumps(body).encode())
        found.turn()
        found.to_params()
    assert told.value.status == 400 and told.value.param


def test_bodies_that_count_need_no_max_tokens() -> None:
    counted = parse_body(CountBody, json.dumps({"messages": [HELLO], "tools": [WEATHER]}).encode())
    assert counted.turn() == turn(tools=[WEATHER])
    with pytest.raises(ApiError, match="unknown field 'stream'"):
        parse_body(CountBody, json.dumps({"messages": [HELLO], "stream": True}).encode())


# ---- what the coding client changes ----------------------------------------------------------------------------------


BILLING = "x-anthropic-billing-header: cc_version=2.1.104.{0}; cc_entrypoint=cli; cch={0};"
STATUS = "gitStatus: This is the git status.\n\nCurrent branch: {0}\n\nStatus:\nM {0}.py\n"
ENV = "<env>\nPlatform: linux\nToday's date: 2026-11-{0}\n</env>\n"


def system(n: int) -> list[dict[str, Any]]:
    return [text(BILLING.format(n)), text("You code."), text("Rules.\n" + ENV.format(n) + STATUS.format(n))]


def test_a_changed_system_text_shares_its_prefix() -> None:
    one, other = (parsed(HELLO, system=system(n)).turn(stable_system=True).messages for n in (10, 11))
    assert one[0] == other[0] == {"role": "system", "content": "You code.\nRules.\n<env>\nPlatform: linux\n</env>\n"}
    moved = "Today's date: 2026-11-10\n" + STATUS.format(10).strip()
    assert one[1] == {"role": "user", "content": f"<system-reminder>\n{moved}\n</system-reminder>\nhello"}


def test_without_the_flag_the_text_is_as_it_was_sent() -> None:
    body = parsed(HELLO, system=system(10))
    assert body.has_billing and body.turn().messages[0]["content"] == "\n".join(block["text"] for block in system(10))
    assert not parsed(HELLO, system="You code. x-anthropic-billing-header: no").has_billing


@pytest.mark.parametrize(
    ("given", "kept", "moved"),
    [
        ("You code.", ["You code."], ""),
        (BILLING.format(1), [], ""),
        (BILLING.format(1) + "You code.", ["You code."], ""),
        ("a\n" + BILLING.format(1) + "\nb", ["a\nb"], ""),
        ("see x-anthropic-billing-header: a=b;", ["see x-anthropic-billing-header: a=b;"], ""),
        ("Today's date is 2026-11-25.", [], "Today's date is 2026-11-25."),
        ("Today's date is a day like others.", ["Today's date is a day like others."], ""),
        ("talk of gitStatus: here", ["talk of gitStatus: here"], ""),
    ],
)
def test_lines_that_change(given: str, kept: list[str], moved: str) -> None:
    assert stable([given]) == (kept, moved)


def test_what_changes_is_kept_where_no_user_speaks() -> None:
    body = parsed(assistant(text("begun")), system="Today's date: 2026-11-25")
    assert body.turn(stable_system=True).messages[0] == {"role": "system", "content": "Today's date: 2026-11-25"}
