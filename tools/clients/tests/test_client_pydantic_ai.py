"""Pydantic AI over chat completions and responses. (Its model of Anthropic's needs an older client of theirs.)"""

from __future__ import annotations

from typing import Any

import pytest
from pydantic_ai import Agent, NativeOutput, PromptedOutput, ToolOutput
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider

from tools.clients.servers import Server
from tools.clients.tests.shapes import MODEL, City, get_weather, population


def chat(server: Server) -> Any:
    return OpenAIChatModel(MODEL, provider=OpenAIProvider(base_url=server.base, api_key="none"))


def responses(server: Server) -> Any:
    return OpenAIResponsesModel(MODEL, provider=OpenAIProvider(base_url=server.base, api_key="none"))


EACH = pytest.mark.parametrize("make", [chat, responses])


@EACH
def test_text(real: Server, make: Any) -> None:
    assert Agent(make(real)).run_sync("What is the code?", model_settings={"max_tokens": 16}).output


@EACH
def test_tools(scripted: Server, make: Any) -> None:
    agent = Agent(make(scripted), tools=[get_weather, population], system_prompt="Use your tools.")
    assert agent.run_sync("Weather in Paris?").output == "The tool said: 2100000"


@EACH
async def test_tools_stream(scripted: Server, make: Any) -> None:
    async with Agent(make(scripted), tools=[get_weather]).run_stream("Weather in Paris?") as made:
        assert [text async for text in made.stream_text()][-1] == "The tool said: 21 degrees in Paris"


@EACH
def test_output_by_tool(scripted: Server, make: Any) -> None:
    made = Agent(make(scripted), tools=[get_weather], output_type=ToolOutput(City)).run_sync("Name a city")
    assert made.output.country == "France"


@EACH
def test_output_by_forced_tool(real: Server, make: Any) -> None:
    made = Agent(make(real), output_type=City, retries=0).run_sync("Name a city", model_settings={"max_tokens": 400})
    assert isinstance(made.output, City)


@pytest.mark.parametrize("make", [chat, responses])
def test_native_output(real: Server, make: Any) -> None:
    agent = Agent(make(real), output_type=NativeOutput(City), retries=0)
    assert isinstance(agent.run_sync("Name a city", model_settings={"max_tokens": 400}).output, City)


def test_prompted_output_is_asked_as_json(real: Server) -> None:
    agent = Agent(chat(real), output_type=PromptedOutput(City), retries=0)
    with pytest.raises(Exception, match=r"retries|token limit|validation"):  # any object fits, so the class refuses it
        agent.run_sync("Name a city", model_settings={"max_tokens": 60})
