"""Chat templates that rewrite what they wrote are told of at the start."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from headrace.server.history import rewrites_history
from headrace.types import InvalidRequest
from tests.support.fake_engine import FakeEngine, FakeTokenizer
from tests.support.fake_server import serving

pytestmark = pytest.mark.unit


class Written(FakeTokenizer):
    """write(number of the message from the end, message) is what the template makes of it."""

    def __init__(self, write: Any) -> None:
        self.write = write

    def render_chat(self, messages: Any, *args: Any, **kwargs: Any) -> str:
        last = len(messages) - 1
        return "".join(self.write(last - i, message) for i, message in enumerate(messages)) + "<assistant>"


def plain(from_end: int, message: dict[str, str]) -> str:
    return f"<{message['role']}>{message['content']}"


def numbered(from_end: int, message: dict[str, str]) -> str:
    return f"<{from_end}>" + plain(from_end, message)


def forgetful(from_end: int, message: dict[str, str]) -> str:
    """Answers of turns before the last one are cut short."""
    cut = message["role"] == "assistant" and from_end > 1
    return plain(from_end, message | {"content": message["content"][:4]} if cut else message)


def test_templates() -> None:
    assert rewrites_history(Written(plain)) == ""
    told = rewrites_history(Written(numbered))
    assert "turn 1" in told and "'0><user>" in told and "'2><user>" in told
    assert "turn 2" in rewrites_history(Written(forgetful))


def test_nothing_to_look_at() -> None:
    def refuses(from_end: int, message: dict[str, str]) -> str:
        raise InvalidRequest("this template takes no questions", "messages")

    assert rewrites_history(None) == ""
    assert rewrites_history(Written(refuses)) == ""


def test_told_at_the_start(caplog: pytest.LogCaptureFixture) -> None:
    def prepare(number: int, engine: FakeEngine) -> None:
        engine.tokenizer = Written(numbered)

    with caplog.at_level(logging.WARNING, "headrace.server"), serving(prepare=prepare):
        assert "writes turn 1 in other words" in caplog.text
