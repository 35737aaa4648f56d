"""LlamaIndex: OpenAILike, its function-calling agent, structured prediction, embeddings."""

from __future__ import annotations

from typing import Any

import pytest
from llama_index.core.agent.workflow import FunctionAgent
from llama_index.core.llms import ChatMessage
from llama_index.core.prompts import PromptTemplate
from llama_index.core.tools import FunctionTool
from llama_index.embeddings.openai_like import OpenAILikeEmbedding
from llama_index.llms.openai_like import OpenAILike

from tools.clients.servers import Server
from tools.clients.tests.shapes import MODEL, City, get_weather, population

HELLO = [ChatMessage(role="user", content="Weather in Paris?")]


def llm(server: Server, **more: Any) -> OpenAILike:
    return OpenAILike(
        model=MODEL, api_base=server.base, api_key="none", is_chat_model=True, is_function_calling_model=True,
        context_window=16_384, max_retries=0, **more,
    )  # fmt: skip


def test_complete(real: Server) -> None:
    assert llm(real, max_tokens=8).complete("What is the code?").text
    plain = OpenAILike(model=MODEL, api_base=real.base, api_key="none", is_chat_model=False, max_tokens=8)
    assert plain.complete("In the beginning").text


def test_chat(real: Server) -> None:
    assert llm(real, max_tokens=8).chat(HELLO).message.content
    assert [part.delta for part in llm(real, max_tokens=8).stream_chat(HELLO)]


async def test_async_chat(real: Server) -> None:
    assert (await llm(real, max_tokens=8).achat(HELLO)).message.content
    assert [part async for part in await llm(real, max_tokens=8).astream_chat(HELLO)]


def test_predict_and_call(scripted: Server) -> None:
    made = llm(scripted).predict_and_call([FunctionTool.from_defaults(get_weather)], user_msg="Weather in Paris?")
    assert str(made) == "21 degrees in Paris"


def test_chat_with_required_tool(real: Server) -> None:
    model, tool = llm(real, max_tokens=200, strict=True), FunctionTool.from_defaults(get_weather)
    made = model.chat_with_tools([tool], user_msg="Weather?", tool_required=True)
    [call, *_] = model.get_tool_calls_from_response(made)
    assert call.tool_name == "get_weather" and set(call.tool_kwargs) == {"city"}


async def test_agent(scripted: Server) -> None:
    agent = FunctionAgent(tools=[get_weather, population], llm=llm(scripted), system_prompt="Use your tools.")
    assert str(await agent.run("Weather in Paris?")) == "The tool said: 2100000"


@pytest.mark.parametrize("structured", [True, False])
def test_structured_predict(real: Server, structured: bool) -> None:
    """By a response_format, or by a forced tool."""
    model = llm(real, max_tokens=400, should_use_structured_outputs=structured)
    assert isinstance(model.structured_predict(City, PromptTemplate("Name a city of {land}"), land="France"), City)


def test_stream_structured_predict(scripted: Server) -> None:
    """By a tool that the model may call or not."""
    model = llm(scripted, max_tokens=400)
    *_, last = model.stream_structured_predict(City, PromptTemplate("Name a city of {land}"), land="France")
    assert last.country in ("France", "Portugal", "Austria")  # type: ignore[union-attr]


def test_embeddings(real: Server) -> None:
    model = OpenAILikeEmbedding(model_name=MODEL, api_base=real.base, api_key="none", max_retries=0)
    assert len(model.get_text_embedding_batch(["one", "two"])) == 2 and len(model.get_query_embedding("one")) > 8
