"""OpenAI's Agents SDK, over chat completions and responses. (It needs a newer client than some frameworks: it is in
.venv-clients-newest only.)"""

from __future__ import annotations

from typing import Any

import pytest

from tools.clients.servers import Server
from tools.clients.tests.shapes import MODEL, City, get_weather, population

agents = pytest.importorskip("agents", reason="is tried in .venv-clients-newest")
openai = pytest.importorskip("openai")
agents.set_tracing_disabled(True)

EACH = pytest.mark.parametrize("kind", ["OpenAIChatCompletionsModel", "OpenAIResponsesModel"])
TOOLS = [agents.function_tool(get_weather), agents.function_tool(population)]


def agent(kind: str, server: Server, **more: Any) -> Any:
    client = openai.AsyncOpenAI(base_url=server.base, api_key="none", max_retries=0)
    return agents.Agent(name="one", instructions="Use your tools.", model=getattr(agents, kind)(MODEL, client), **more)


@EACH
async def test_tools(scripted: Server, kind: str) -> None:
    made = await agents.Runner.run(agent(kind, scripted, tools=TOOLS), "Weather in Paris?")
    assert made.final_output == "The tool said: 2100000"


@EACH
async def test_tools_stream(scripted: Server, kind: str) -> None:
    made = agents.Runner.run_streamed(agent(kind, scripted, tools=TOOLS), "Weather in Paris?")
    kinds = {event.type async for event in made.stream_events()}
    assert {"raw_response_event", "run_item_stream_event"} <= kinds
    assert made.final_output == "The tool said: 2100000"


@EACH
async def test_output_type(real: Server, kind: str) -> None:
    made = await agents.Runner.run(agent(kind, real, output_type=City), "Name a city")
    assert isinstance(made.final_output, City)


@EACH
async def test_handoff(scripted: Server, kind: str) -> None:
    """A hand-over is a call of a tool without arguments."""
    other = agent(kind, scripted)
    other.name = "other"
    made = await agents.Runner.run(agent(kind, scripted, handoffs=[other]), "Hand over")
    assert made.last_agent.name == "other"
