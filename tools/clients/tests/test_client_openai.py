"""OpenAI's Python client."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest

from tools.clients.servers import Server
from tools.clients.tests.shapes import ASKED, MODEL, TOOLS, WEATHER, City, check_code, check_weather, tool

RESPONSES_TOOL: dict[str, Any] = {"type": "function", "name": "get_weather", "parameters": WEATHER, "strict": True}


@pytest.fixture(scope="module")
def client(real: Server) -> openai.OpenAI:
    return openai.OpenAI(base_url=real.base, api_key="none", max_retries=0)


@pytest.fixture(scope="module")
def chooser(scripted: Server) -> openai.OpenAI:
    return openai.OpenAI(base_url=scripted.base, api_key="none", max_retries=0)


def test_models(client: openai.OpenAI) -> None:
    assert MODEL in [model.id for model in client.models.list()]
    assert client.models.retrieve(MODEL).id == MODEL


def test_chat(client: openai.OpenAI) -> None:
    made = client.chat.completions.create(model=MODEL, messages=ASKED, max_completion_tokens=8)
    assert made.choices[0].message.content and made.usage.total_tokens > 8


def test_chat_as_others_spell_it(client: openai.OpenAI) -> None:
    """Fields that the client's users send by habit."""
    made = client.chat.completions.create(
        model=MODEL, messages=[{"role": "developer", "content": "Be short."}, *ASKED], max_tokens=8, temperature=0.2,
        top_p=0.9, user="me", store=False, metadata={"a": "b"}, parallel_tool_calls=True, tools=TOOLS,
        tool_choice="none", seed=1, n=2, stop=["\n\n"], logprobs=True, top_logprobs=2, frequency_penalty=0.1,
    )  # fmt: skip
    assert len(made.choices) == 2 and not made.choices[0].message.tool_calls


def test_chat_stream(client: openai.OpenAI) -> None:
    chunks = list(
        client.chat.completions.create(
            model=MODEL, messages=ASKED, max_tokens=8, stream=True, stream_options={"include_usage": True}
        )
    )
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert chunks[-1].usage.completion_tokens <= 8


def test_chat_stream_helper(client: openai.OpenAI) -> None:
    with client.chat.completions.stream(model=MODEL, messages=ASKED, max_tokens=400) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_completion()
    assert "content.delta" in kinds and kinds[-1] in ("content.done", "chunk") and final.choices[0].message.content


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "get_weather"}}])
def test_forced_tools(client: openai.OpenAI, choice: Any) -> None:
    made = client.chat.completions.create(
        model=MODEL, messages=ASKED, tools=TOOLS, tool_choice=choice, max_tokens=200, temperature=0
    )
    assert made.choices[0].finish_reason == "tool_calls" and not made.choices[0].message.content
    for call in made.choices[0].message.tool_calls:
        assert call.type == "function" and call.id
        check = {"get_weather": check_weather, "get_code": check_code}[call.function.name]
        check(json.loads(call.function.arguments))


def test_forced_tools_stream(client: openai.OpenAI) -> None:
    asked: dict[str, Any] = {
        "model": MODEL, "messages": ASKED, "tools": TOOLS[:1], "tool_choice": "required", "max_tokens": 200,
        "temperature": 0, "parallel_tool_calls": False,
    }  # fmt: skip
    whole = client.chat.completions.create(**asked).choices[0].message.tool_calls
    pieces: dict[int, list[str]] = {}
    heads = {}
    reasons = []
    for chunk in client.chat.completions.create(**asked, stream=True):
        reasons.append(chunk.choices[0].finish_reason)
        for call in chunk.choices[0].delta.tool_calls or []:
            if call.id:
                heads[call.index] = (call.id, call.function.name)
            pieces.setdefault(call.index, []).append(call.function.arguments or "")
    assert len(heads) == len(whole) == 1 and heads[0][1] == "get_weather" and reasons[-1] == "tool_calls"
    assert len([piece for piece in pieces[0] if piece]) > 1, "arguments come as they are made"
    assert "".join(pieces[0]) == whole[0].function.arguments
    check_weather(json.loads("".join(pieces[0])))


@pytest.mark.parametrize("stream", [False, True])
def test_tool_loop(chooser: openai.OpenAI, stream: bool) -> None:
    """Call, result, answer: the assistant's turn goes back as the client gave it."""
    messages: list[Any] = list(ASKED)
    names = []
    for _ in range(4):
        asked: dict[str, Any] = {"model": MODEL, "messages": messages, "tools": TOOLS}
        if stream:
            with chooser.chat.completions.stream(**asked) as events:
                message = events.get_final_completion().choices[0].message
        else:
            message = chooser.chat.completions.create(**asked).choices[0].message
        if not message.tool_calls:
            break
        messages.append(message)
        for call in message.tool_calls:
            names.append(call.function.name)
            messages.append({"role": "tool", "tool_call_id": call.id, "content": f"sunny in {call.function.name}"})
    assert names == ["get_weather", "get_code"] and message.content == "The tool said: sunny in get_code"


def test_parse(client: openai.OpenAI) -> None:
    made = client.chat.completions.parse(model=MODEL, messages=ASKED, response_format=City, max_tokens=300)
    assert isinstance(made.choices[0].message.parsed, City)


def test_parse_stream(client: openai.OpenAI) -> None:
    with client.chat.completions.stream(model=MODEL, messages=ASKED, response_format=City, max_tokens=300) as stream:
        for _ in stream:
            pass
        assert isinstance(stream.get_final_completion().choices[0].message.parsed, City)


def test_parse_tool(client: openai.OpenAI) -> None:
    made = client.chat.completions.parse(
        model=MODEL, messages=ASKED, tools=[openai.pydantic_function_tool(City)], tool_choice="required",
        max_tokens=300, parallel_tool_calls=False,
    )  # fmt: skip
    assert isinstance(made.choices[0].message.tool_calls[0].function.parsed_arguments, City)


@pytest.mark.parametrize("kind", ["json_object", "json_schema"])
def test_response_format(client: openai.OpenAI, kind: str) -> None:
    form: Any = {"type": kind}
    if kind == "json_schema":
        form["json_schema"] = {"name": "weather", "schema": WEATHER, "strict": True}
    made = client.chat.completions.create(
        model=MODEL, messages=ASKED, response_format=form, max_tokens=400, temperature=0.7, seed=3
    )
    if made.choices[0].finish_reason == "stop":
        told = json.loads(made.choices[0].message.content)
        assert isinstance(told, dict)
        if kind == "json_schema":
            check_weather(told)
    else:
        assert kind == "json_object" and made.choices[0].message.content.lstrip().startswith("{")


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("structured_outputs", {"choice": ["red", "blue"]}),
        ("structured_outputs", {"regex": "[0-9]{4}"}),
        ("guided_choice", ["red", "blue"]),
        ("guided_regex", "[0-9]{4}"),
    ],
)
def test_structured_outputs_of_vllm(client: openai.OpenAI, field: str, value: Any) -> None:
    made = client.chat.completions.create(model=MODEL, messages=ASKED, max_tokens=20, extra_body={field: value})
    told = made.choices[0].message.content
    assert told in ("red", "blue") or (told.isdigit() and len(told) == 4)


def test_bad_schema_is_named(client: openai.OpenAI) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "no such type"}}}
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model=MODEL, messages=ASKED, response_format=form)  # type: ignore[call-overload]
    assert "response_format" in (caught.value.param or "") and "type" in caught.value.message


def test_completions(client: openai.OpenAI) -> None:
    made = client.completions.create(model=MODEL, prompt="In the beginning", max_tokens=8, logprobs=2, echo=True)
    assert made.choices[0].text.startswith("In the beginning") and made.choices[0].logprobs.tokens
    stream = client.completions.create(model=MODEL, prompt=["In the", "And the"], max_tokens=4, stream=True)
    assert {choice.index for chunk in stream for choice in chunk.choices} == {0, 1}


def test_responses(client: openai.OpenAI) -> None:
    made = client.responses.create(model=MODEL, input="What is the code?", max_output_tokens=16)
    assert made.output_text and made.usage.output_tokens <= 16 and made.status in ("completed", "incomplete")
    listed = client.responses.create(
        model=MODEL, instructions="Be short.", max_output_tokens=16, store=False,
        input=[{"role": "user", "content": [{"type": "input_text", "text": "What is the code?"}]}],
    )  # fmt: skip
    assert listed.output_text


def test_responses_stream(client: openai.OpenAI) -> None:
    events = list(client.responses.create(model=MODEL, input="What is it?", max_output_tokens=16, stream=True))
    kinds = [event.type for event in events]
    assert kinds[0] == "response.created" and kinds[-1] in ("response.completed", "response.incomplete")
    told = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    assert told == events[-1].response.output_text != ""
    assert [event.sequence_number for event in events] == list(range(len(events)))
    with client.responses.stream(model=MODEL, input="What is it?", max_output_tokens=16) as stream:
        assert [event.type for event in stream]
        assert stream.get_final_response().output_text


def test_responses_parse(client: openai.OpenAI) -> None:
    made = client.responses.parse(model=MODEL, input="Name a city", text_format=City, max_output_tokens=300)
    assert isinstance(made.output_parsed, City)


def test_responses_tools(client: openai.OpenAI) -> None:
    made = client.responses.create(
        model=MODEL, input="Weather?", tools=[RESPONSES_TOOL], tool_choice="required", max_output_tokens=200
    )
    calls = [item for item in made.output if item.type == "function_call"]
    assert calls and calls[0].name == "get_weather" and calls[0].call_id
    check_weather(json.loads(calls[0].arguments))


@pytest.mark.parametrize("stream", [False, True])
def test_responses_tool_loop(chooser: openai.OpenAI, stream: bool) -> None:
    items: list[Any] = [{"role": "user", "content": "Weather in Paris?"}]
    asked: dict[str, Any] = {"model": MODEL, "tools": [RESPONSES_TOOL]}
    made: Any = None
    for _ in range(3):
        if stream:
            with chooser.responses.stream(input=items, **asked) as events:
                made = events.get_final_response()
        else:
            made = chooser.responses.create(input=items, **asked)
        calls = [item for item in made.output if item.type == "function_call"]
        if not calls:
            break
        items += made.output
        items += [{"type": "function_call_output", "call_id": c.call_id, "output": "sunny"} for c in calls]
    assert made.output_text == "The tool said: sunny" and len(items) > 2


def test_responses_goes_on(client: openai.OpenAI) -> None:
    first = client.responses.create(model=MODEL, input="What is the code?", max_output_tokens=8)
    second = client.responses.create(model=MODEL, input="And?", previous_response_id=first.id, max_output_tokens=8)
    assert second.usage.input_tokens > first.usage.input_tokens
    assert client.responses.retrieve(first.id).output_text == first.output_text
    client.responses.delete(first.id)


def test_embeddings(client: openai.OpenAI) -> None:
    """The client asks for base64 unless told otherwise."""
    made = client.embeddings.create(model=MODEL, input=["In the beginning", "And the earth"])
    assert len(made.data) == 2 and len(made.data[0].embedding) == len(made.data[1].embedding) > 8
    plain = client.embeddings.create(model=MODEL, input="In the beginning", encoding_format="float")
    assert plain.data[0].embedding == pytest.approx(made.data[0].embedding, abs=1e-6)
    assert made.usage.prompt_tokens > 0


async def test_async_client(real: Server) -> None:
    async with openai.AsyncOpenAI(base_url=real.base, api_key="none", max_retries=0) as client:
        stream = await client.chat.completions.create(model=MODEL, messages=ASKED, max_tokens=8, stream=True)
        assert [chunk async for chunk in stream]


def test_strict_tools(client: openai.OpenAI) -> None:
    made = client.chat.completions.create(
        model=MODEL, messages=ASKED, tools=[tool("get_weather", WEATHER, strict=True)], tool_choice="required",
        max_tokens=200,
    )  # fmt: skip
    check_weather(json.loads(made.choices[0].message.tool_calls[0].function.arguments))
