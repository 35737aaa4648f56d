"""LangChain: chat models of OpenAI's and Anthropic's packages, structured output, agents (which run on LangGraph)."""

from __future__ import annotations

from typing import Any

import pytest
from langchain.agents import create_agent
from langchain_anthropic import ChatAnthropic
from langchain_core.messages import AIMessage, HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAI, OpenAIEmbeddings

from tools.clients.servers import Server
from tools.clients.tests.shapes import MODEL, City, get_weather, population


def chat(server: Server, **more: Any) -> ChatOpenAI:
    return ChatOpenAI(model=MODEL, base_url=server.base, api_key="none", max_retries=0, **more)  # type: ignore[arg-type]


def claude(server: Server, **more: Any) -> ChatAnthropic:
    return ChatAnthropic(model=MODEL, base_url=server.url, api_key="none", max_retries=0, **more)  # type: ignore[call-arg]


def test_invoke(real: Server) -> None:
    made = chat(real, max_tokens=8, temperature=0).invoke("What is the code?")
    assert made.content and made.usage_metadata["output_tokens"] <= 8
    assert len(chat(real, max_tokens=4, n=1).batch(["a", "b", "c"])) == 3


def test_stream(real: Server) -> None:
    chunks = list(chat(real, max_tokens=8, stream_usage=True).stream("What is the code?"))
    whole = chunks[0]
    for chunk in chunks[1:]:
        whole += chunk
    assert whole.content and whole.usage_metadata["output_tokens"] <= 8


async def test_async_stream(real: Server) -> None:
    assert [chunk async for chunk in chat(real, max_tokens=8).astream("What is the code?")]


@pytest.mark.parametrize("choice", ["any", "get_weather"])
def test_bind_tools(real: Server, choice: str) -> None:
    bound = chat(real, max_tokens=200).bind_tools([tool(get_weather)], tool_choice=choice, strict=True)
    [call, *_] = bound.invoke("Weather in Paris?").tool_calls
    assert call["name"] == "get_weather" and set(call["args"]) == {"city"}


def test_bind_tools_stream(scripted: Server) -> None:
    chunks = list(chat(scripted).bind_tools([tool(get_weather)]).stream("Weather in Paris?"))
    whole = chunks[0]
    for chunk in chunks[1:]:
        whole += chunk
    [call] = whole.tool_calls
    assert call["name"] == "get_weather" and call["args"] == {"city": "Paris"}


def test_tool_turns(scripted: Server) -> None:
    bound = chat(scripted).bind_tools([tool(get_weather)])
    first = bound.invoke([HumanMessage("Weather in Paris?")])
    assert isinstance(first, AIMessage)
    told = ToolMessage("sunny", tool_call_id=first.tool_calls[0]["id"])
    assert bound.invoke([HumanMessage("Weather in Paris?"), first, told]).content == "The tool said: sunny"


@pytest.mark.parametrize("method", ["json_schema", "function_calling", "json_mode"])
def test_structured_output(real: Server, method: str) -> None:
    model = chat(real, max_tokens=400, temperature=0)
    structured = model.with_structured_output(City, method=method, include_raw=True)  # type: ignore[arg-type]
    made = structured.invoke("Name a city, as JSON")
    if method != "json_mode":  # which any object fits
        assert made["parsing_error"] is None and isinstance(made["parsed"], City)
    else:
        assert made["raw"].content.lstrip().startswith("{")


def test_structured_output_strict(real: Server) -> None:
    model = chat(real, max_tokens=400)
    assert isinstance(model.with_structured_output(City, method="function_calling", strict=True).invoke("A city"), City)


@pytest.mark.parametrize("make", [chat, claude])
def test_agent(scripted: Server, make: Any) -> None:
    agent = create_agent(make(scripted), [tool(get_weather), tool(population)], system_prompt="Use your tools.")
    made = agent.invoke({"messages": [{"role": "user", "content": "Weather in Paris?"}]})
    kinds = [message.type for message in made["messages"]]
    assert kinds == ["human", "ai", "tool", "ai", "tool", "ai"]
    assert made["messages"][-1].text == "The tool said: 2100000"


async def test_agent_stream(scripted: Server) -> None:
    agent = create_agent(chat(scripted), [tool(get_weather)])
    asked: Any = {"messages": [{"role": "user", "content": "Weather in Paris?"}]}
    told = [chunk.text async for chunk, _ in agent.astream(asked, stream_mode="messages")]
    assert "".join(told).endswith("The tool said: 21 degrees in Paris")


def test_langgraph_react_agent(scripted: Server) -> None:
    from langgraph.prebuilt import create_react_agent

    made = create_react_agent(chat(scripted), [tool(get_weather)]).invoke({"messages": [("user", "Weather in Paris?")]})
    assert made["messages"][-1].content == "The tool said: 21 degrees in Paris"


def test_agent_with_response_format(scripted: Server) -> None:
    agent = create_agent(chat(scripted), [], response_format=City)
    made = agent.invoke({"messages": [{"role": "user", "content": "Name a city"}]})
    assert made["structured_response"].country == "France"


def test_responses(real: Server) -> None:
    assert chat(real, max_tokens=16, use_responses_api=True).invoke("What is the code?").text
    assert "".join(c.text for c in chat(real, max_tokens=16, use_responses_api=True).stream("What is the code?"))


def test_responses_agent(scripted: Server) -> None:
    made = create_agent(chat(scripted, use_responses_api=True), [tool(get_weather)]).invoke(
        {"messages": [{"role": "user", "content": "Weather in Paris?"}]}
    )
    assert made["messages"][-1].text == "The tool said: 21 degrees in Paris"


def test_completions(real: Server) -> None:
    model = OpenAI(model=MODEL, base_url=real.base, api_key="none", max_tokens=8, max_retries=0)  # type: ignore[arg-type]
    assert model.invoke("In the beginning")


def test_embeddings(real: Server) -> None:
    """It sends token ids by default; check_embedding_ctx_length=False: texts."""
    model = OpenAIEmbeddings(
        model=MODEL,
        base_url=real.base,
        api_key="none",
        check_embedding_ctx_length=False,
        max_retries=0,  # type: ignore[arg-type]
    )
    assert len(model.embed_documents(["one", "two"])) == 2 and len(model.embed_query("one")) > 8


def test_anthropic(real: Server) -> None:
    assert claude(real, max_tokens=8).invoke("What is the code?").content
    assert "".join(chunk.text for chunk in claude(real, max_tokens=8).stream("What is the code?"))


def test_anthropic_structured_output(real: Server) -> None:
    assert isinstance(claude(real, max_tokens=400).with_structured_output(City).invoke("Name a city"), City)
