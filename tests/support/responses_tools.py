"""Tools that requests to /v1/responses have: a function, and some in a namespace; and an engine that knows tools."""

from __future__ import annotations

from tests.support.fake_engine import FakeEngine, FakeTokenizer

ADD = {
    "type": "function",
    "name": "add",
    "description": "adds",
    "parameters": {
        "type": "object",
        "properties": {"a": {"type": "integer"}},
        "required": ["a"],
        "additionalProperties": False,
    },
    "strict": True,
}
FILES = {"type": "namespace", "name": "mcp__files", "description": "Files.", "tools": [ADD, {**ADD, "name": "_sub"}]}


class Hermes(FakeTokenizer):
    chat_template = "{{ tools }} <tool_call> </think>"


def speaks_hermes(number: int, engine: FakeEngine) -> None:
    engine.tokenizer = Hermes()
