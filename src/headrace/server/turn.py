"""One request for an assistant's next turn, by whichever route it came: messages, tools, and how they may be used."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal


@dataclass(frozen=True, slots=True)
class Tool:
    """A function that the model may call. parameters: the JSON Schema of its arguments, an object. where: the place of
    that schema in the request, as its client knows it."""

    name: str
    description: str | None = None
    parameters: dict[str, Any] = field(default_factory=lambda: {"type": "object", "properties": {}})
    strict: bool = False
    where: str = field(default="tools", compare=False)

    def for_template(self) -> dict[str, Any]:
        """As chat templates take it: OpenAI's chat form."""
        told = {"name": self.name, "description": self.description or "", "parameters": self.parameters}
        return {"type": "function", "function": told}


@dataclass(frozen=True, slots=True)
class ToolChoice:
    """none: no call; auto: as the model likes; required: at least one call. `names`: the tools that may be called,
    all where empty."""

    mode: Literal["none", "auto", "required"] = "auto"
    names: tuple[str, ...] = ()
    parallel: bool = True
    """Several calls in one answer are allowed."""


@dataclass(frozen=True, slots=True)
class Reasoning:
    """enabled: None leaves it to the template. budget: most tokens of reasoning (None: no limit), after which it is
    ended and the answer begins. effort: 'low', 'medium', 'high', for templates that know it."""

    enabled: bool | None = None
    budget: int | None = None
    effort: str | None = None


@dataclass(frozen=True, slots=True)
class Turn:
    """messages: in the form of chat templates (role, content as text, tool_calls with arguments as objects,
    tool_call_id, reasoning_content, and token_ids: by which tokens an earlier answer is to be read). template: further
    variables of the template. given_tokens: token_ids are the client's, and to be checked."""

    messages: list[dict[str, Any]]
    tools: tuple[Tool, ...] = ()
    choice: ToolChoice = ToolChoice()
    reasoning: Reasoning = Reasoning()
    documents: tuple[dict[str, Any], ...] = ()
    template: dict[str, Any] = field(default_factory=dict)
    given_tokens: bool = False
