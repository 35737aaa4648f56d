"""Instructor over OpenAI's and Anthropic's clients, in the modes that people use."""

from __future__ import annotations

from typing import Any

import anthropic
import instructor
import openai
import pytest

from tools.clients.servers import Server
from tools.clients.tests.shapes import ASKED, MODEL, City

MODES = [instructor.Mode.TOOLS, instructor.Mode.TOOLS_STRICT, instructor.Mode.JSON_SCHEMA]


def client(server: Server, mode: instructor.Mode) -> Any:
    return instructor.from_openai(openai.OpenAI(base_url=server.base, api_key="none", max_retries=0), mode=mode)


@pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode.name)
def test_modes(real: Server, mode: instructor.Mode) -> None:
    made = client(real, mode).chat.completions.create(
        model=MODEL, messages=ASKED, response_model=City, max_tokens=400, max_retries=0
    )
    assert isinstance(made, City)


def test_json_mode(real: Server) -> None:
    """Any object fits this mode's request, so the class may refuse it: that the answer is JSON is what counts."""
    with pytest.raises(Exception) as caught:
        client(real, instructor.Mode.JSON).chat.completions.create(
            model=MODEL, messages=ASKED, response_model=City, max_tokens=60, max_retries=0
        )
    told = str(caught.value)
    assert "validation error" in told or "max_tokens" in told, told


def test_partial(real: Server) -> None:
    stream = client(real, instructor.Mode.TOOLS).chat.completions.create_partial(
        model=MODEL, messages=ASKED, response_model=City, max_tokens=400
    )
    *_, last = stream
    assert last.country in ("France", "Portugal", "Austria")


def test_responses(real: Server) -> None:
    made = client(real, instructor.Mode.RESPONSES_TOOLS).chat.completions.create(
        model=MODEL, messages=ASKED, response_model=City, max_retries=0
    )
    assert isinstance(made, City)


def test_anthropic(real: Server) -> None:
    over = instructor.from_anthropic(anthropic.Anthropic(base_url=real.url, api_key="none", max_retries=0))
    made = over.messages.create(model=MODEL, max_tokens=400, messages=ASKED, response_model=City, max_retries=0)
    assert isinstance(made, City)
