"""LiteLLM, by the routes that lead to servers of one's own."""

from __future__ import annotations

import json
from typing import Any

import litellm
import pytest

from tools.clients.servers import Server
from tools.clients.tests.shapes import ASKED, MODEL, TOOLS, City, check_weather

ROUTES = ["openai", "hosted_vllm", "anthropic"]


def asked(server: Server, route: str, **more: Any) -> dict[str, Any]:
    base = server.url if route == "anthropic" else server.base
    return {
        "model": f"{route}/{MODEL}",
        "api_base": base,
        "api_key": "none",
        "messages": ASKED,
        "max_retries": 0,
        **more,
    }


@pytest.mark.parametrize("route", ROUTES)
def test_completion(real: Server, route: str) -> None:
    made = litellm.completion(**asked(real, route, max_tokens=8))
    assert made.choices[0].message.content and made.usage.completion_tokens <= 8


@pytest.mark.parametrize("route", ROUTES)
def test_stream(real: Server, route: str) -> None:
    chunks = litellm.completion(**asked(real, route, max_tokens=8, stream=True))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks)


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("stream", [False, True])
def test_forced_tools(real: Server, route: str, stream: bool) -> None:
    made = litellm.completion(
        **asked(real, route, max_tokens=200, tools=TOOLS[:1], tool_choice="required", stream=stream)
    )
    if stream:
        made = litellm.stream_chunk_builder(list(made))
    [call, *_] = made.choices[0].message.tool_calls
    assert call.function.name == "get_weather"
    if route == "hosted_vllm":  # which takes additionalProperties out of the schema, so the shipped model writes on
        assert call.function.arguments.startswith('{"city": ')
    else:
        check_weather(json.loads(call.function.arguments))


@pytest.mark.parametrize("route", ROUTES)
def test_tool_loop(scripted: Server, route: str) -> None:
    messages: list[Any] = list(ASKED)
    first = litellm.completion(**asked(scripted, route, tools=TOOLS[:1], max_tokens=200)).choices[0].message
    messages += [first, {"role": "tool", "tool_call_id": first.tool_calls[0].id, "content": "sunny"}]
    request = {**asked(scripted, route, tools=TOOLS[:1], max_tokens=200), "messages": messages}
    assert litellm.completion(**request).choices[0].message.content == "The tool said: sunny"


@pytest.mark.parametrize("route", ["openai", "hosted_vllm"])
def test_response_format(real: Server, route: str) -> None:
    made = litellm.completion(**asked(real, route, max_tokens=400, response_format=City))
    assert City.model_validate_json(made.choices[0].message.content)


def test_text_completion(real: Server) -> None:
    made = litellm.text_completion(
        model=f"text-completion-openai/{MODEL}", api_base=real.base, api_key="none", prompt="In the", max_tokens=8
    )
    assert made.choices[0].text


def test_responses(real: Server) -> None:
    made = litellm.responses(
        model=f"openai/{MODEL}", api_base=real.base, api_key="none", input="What is it?", max_output_tokens=16
    )
    assert made.output[0].content[0].text


def test_embedding(real: Server) -> None:
    made = litellm.embedding(model=f"openai/{MODEL}", api_base=real.base, api_key="none", input=["one", "two"])
    assert len(made.data) == 2
