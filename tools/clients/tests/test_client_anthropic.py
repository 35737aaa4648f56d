"""Anthropic's Python client."""

from __future__ import annotations

from typing import Any

import anthropic
import pytest

from tools.clients.servers import Server
from tools.clients.tests.shapes import ASKED, MODEL, WEATHER, check_weather

TOOL: Any = {"name": "get_weather", "description": "the weather of a city", "input_schema": WEATHER}


@pytest.fixture(scope="module")
def client(real: Server) -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=real.url, api_key="none", max_retries=0)


@pytest.fixture(scope="module")
def chooser(scripted: Server) -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=scripted.url, api_key="none", max_retries=0)


def test_messages(client: anthropic.Anthropic) -> None:
    made = client.messages.create(model=MODEL, max_tokens=8, messages=ASKED)
    assert made.content[0].type == "text" and made.content[0].text and made.role == "assistant"
    assert made.stop_reason in ("end_turn", "max_tokens") and 0 < made.usage.output_tokens <= 8


def test_messages_as_its_coding_client_sends_them(client: anthropic.Anthropic) -> None:
    system: Any = [{"type": "text", "text": "Be short.", "cache_control": {"type": "ephemeral"}}]
    messages: Any = [{"role": "user", "content": [
        {"type": "text", "text": "Hello", "cache_control": {"type": "ephemeral"}}]}]  # fmt: skip
    made = client.beta.messages.create(
        model=MODEL, max_tokens=8, system=system, messages=messages, metadata={"user_id": "me"},
        tools=[TOOL], tool_choice={"type": "none"}, betas=["fine-grained-tool-streaming-2025-05-14"],
    )  # fmt: skip
    assert made.content[0].type == "text"


def test_stream(client: anthropic.Anthropic) -> None:
    with client.messages.stream(model=MODEL, max_tokens=8, messages=ASKED) as stream:
        told = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert told == final.content[0].text != "" and final.usage.output_tokens <= 8 and final.stop_reason
    kinds = [event.type for event in client.messages.create(model=MODEL, max_tokens=8, messages=ASKED, stream=True)]
    assert kinds[0] == "message_start" and kinds[-1] == "message_stop" and "content_block_delta" in kinds


@pytest.mark.parametrize("choice", [{"type": "any"}, {"type": "tool", "name": "get_weather"}])
def test_forced_tools(client: anthropic.Anthropic, choice: Any) -> None:
    once = {**choice, "disable_parallel_tool_use": True}  # the shipped model would go on calling
    made = client.messages.create(model=MODEL, max_tokens=200, messages=ASKED, tools=[TOOL], tool_choice=once)
    calls = [block for block in made.content if block.type == "tool_use"]
    assert calls and made.stop_reason == "tool_use"
    check_weather(calls[0].input)


def test_forced_tools_stream(client: anthropic.Anthropic) -> None:
    asked: Any = {"model": MODEL, "max_tokens": 200, "messages": ASKED, "tools": [TOOL],
                  "tool_choice": {"type": "any", "disable_parallel_tool_use": True}}  # fmt: skip
    with client.messages.stream(**asked) as stream:
        pieces = [event.partial_json for event in stream if event.type == "input_json"]
        final = stream.get_final_message()
    assert len(pieces) > 1, "arguments come as they are made"
    check_weather(next(block.input for block in final.content if block.type == "tool_use"))


@pytest.mark.parametrize("stream", [False, True])
def test_tool_loop(chooser: anthropic.Anthropic, stream: bool) -> None:
    messages: list[Any] = list(ASKED)
    made: Any = None
    for _ in range(3):
        asked: Any = {"model": MODEL, "max_tokens": 200, "messages": messages, "tools": [TOOL]}
        if stream:
            with chooser.messages.stream(**asked) as events:
                made = events.get_final_message()
        else:
            made = chooser.messages.create(**asked)
        calls = [block for block in made.content if block.type == "tool_use"]
        if not calls:
            break
        results = [{"type": "tool_result", "tool_use_id": call.id, "content": "sunny"} for call in calls]
        messages += [{"role": "assistant", "content": made.content}, {"role": "user", "content": results}]
    assert made.content[0].text == "The tool said: sunny" and len(messages) == 3 and made.stop_reason == "end_turn"


def test_tool_runner(chooser: anthropic.Anthropic) -> None:
    @anthropic.beta_tool
    def get_weather(city: str) -> str:
        """The weather of a city.

        Args:
            city: its name
        """
        return f"sunny in {city}"

    runner = chooser.beta.messages.tool_runner(model=MODEL, max_tokens=200, messages=ASKED, tools=[get_weather])
    assert runner.until_done().content[0].text == "The tool said: sunny in Paris"


def test_count_tokens(client: anthropic.Anthropic) -> None:
    counted = client.messages.count_tokens(model=MODEL, messages=ASKED).input_tokens
    made = client.messages.create(model=MODEL, max_tokens=1, messages=ASKED)
    usage = made.usage
    assert counted == usage.input_tokens + (usage.cache_read_input_tokens or 0) + (
        usage.cache_creation_input_tokens or 0
    )
    assert (
        client.messages.count_tokens(model=MODEL, messages=ASKED, tools=[TOOL], system="Be short.").input_tokens
        > counted
    )


def test_errors_are_its_own(client: anthropic.Anthropic) -> None:
    with pytest.raises(anthropic.NotFoundError) as caught:
        client.messages.create(model="no-such-model", max_tokens=8, messages=ASKED)
    assert caught.value.body["error"]["type"] == "not_found_error"  # type: ignore[index]
    with pytest.raises(anthropic.BadRequestError) as refused:
        client.messages.create(model=MODEL, max_tokens=-1, messages=ASKED)
    assert refused.value.body["error"]["type"] == "invalid_request_error"  # type: ignore[index]


def test_models(client: anthropic.Anthropic) -> None:
    assert MODEL in [model.id for model in client.models.list()]


async def test_async_client(real: Server) -> None:
    client = anthropic.AsyncAnthropic(base_url=real.url, api_key="none", max_retries=0)
    async with client, client.messages.stream(model=MODEL, max_tokens=8, messages=ASKED) as stream:
        assert [text async for text in stream.text_stream]
