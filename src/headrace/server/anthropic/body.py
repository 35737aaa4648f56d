"""Bodies of /v1/messages and its count_tokens: which fields exist, and the Turn and parameters that they become."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence, Set
from functools import partial
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field, field_validator

from headrace.server.anthropic.blocks import (
    Conversation,
    GivenMessage,
    TextBlock,
    as_blocks,
    marked_parts,
)
from headrace.server.anthropic.system import has_billing, stable
from headrace.server.breakpoints import MARK, Breakpoint, CacheControl, Part, breakpoints, parts_of
from headrace.server.chat_body import MAX_BUDGET, MAX_MESSAGES, MAX_TOOLS, ToolName, tools_of
from headrace.server.errors import invalid
from headrace.server.protocol import Body, OnlyFalse, StreamedBody, Strict
from headrace.server.turn import Reasoning, Tool, ToolChoice, Turn
from headrace.structured import Structured
from headrace.types import SamplingParams, check_sharing

EFFORTS = {"low": "low", "medium": "medium", "high": "high", "xhigh": "high", "max": "high"}
"""Anthropic's levels of effort -> those that templates know."""

IGNORED = {
    "billing_policy",
    "diagnostics",
    "fallback_credit_token",
    "fallbacks",
    "inference_geo",
    "metadata",
    "service_tier",
    "speed",
    "user_profile_id",
    "workspace_id",
}
"""Fields that change no answer here: accepted with any value, and not used (docs/anthropic.md)."""

REFUSED = {
    "compaction": "conversations are not made shorter here",
    "container": "containers are not supported",
    "mcp_servers": "this server calls no MCP servers; let the client offer their tools",
    "stream_options": "usage comes with every stream",
    "thread": "conversations are not kept here: send all messages",
}
"""Fields known by name and refused unless null or empty."""

MAX_TOLD = 100
"""Characters of a client's text in a message."""


class ClientTool(Strict):
    """A tool of the client. Arguments are streamed as they are written, whether or not eager_input_streaming is set."""

    type: Literal["custom"] | None = None
    name: ToolName
    description: str | None = None
    input_schema: dict[str, Any]
    input_examples: list[dict[str, Any]] | None = None
    strict: bool | None = None
    cache_control: CacheControl | None = None
    eager_input_streaming: bool | None = None
    defer_loading: OnlyFalse | None = None
    allowed_callers: list[Literal["direct"]] | None = None

    def tool(self, number: int) -> Tool:
        """Examples go into the schema, where JSON Schema has a place for them."""
        schema = {**self.input_schema, "examples": self.input_examples} if self.input_examples else self.input_schema
        return Tool(self.name, self.description, schema, bool(self.strict), f"tools[{number}].input_schema")


class AutoChoice(Strict):
    type: Literal["auto", "any"]
    disable_parallel_tool_use: bool | None = None


class NamedChoice(Strict):
    type: Literal["tool"]
    name: str
    disable_parallel_tool_use: bool | None = None


class NoChoice(Strict):
    type: Literal["none"]
    disable_parallel_tool_use: bool | None = None


class _Display(Strict):
    display: Literal["summarized", "omitted"] | None = None


class ThinkingEnabled(_Display):
    type: Literal["enabled"]
    budget_tokens: int = Field(ge=1, le=MAX_BUDGET)


class ThinkingOtherwise(_Display):
    type: Literal["adaptive", "disabled", "between_tools"]


class JsonFormat(Strict):
    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(alias="schema")


class OutputConfig(Strict):
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: JsonFormat | None = None
    task_budget: None = None


class ClearThinking(Strict):
    """The template alone says which earlier thinking the model sees."""

    type: Literal["clear_thinking_20251015"]
    keep: Any = None


class ContextManagement(Strict):
    edits: list[ClearThinking] | None = None


class CountBody(Body):
    """What a prompt is made of."""

    ignored: ClassVar[Set[str]] = IGNORED
    refused: ClassVar[Mapping[str, str]] = REFUSED
    harmless: ClassVar[Mapping[str, tuple[Any, ...]]] = dict.fromkeys(REFUSED, ([], {}))

    messages: list[GivenMessage] = Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)
    system: Annotated[list[TextBlock] | None, BeforeValidator(as_blocks, str | list[TextBlock] | None)] = None
    tools: list[ClientTool] | None = Field(None, max_length=MAX_TOOLS)
    tool_choice: Annotated[AutoChoice | NamedChoice | NoChoice, Field(discriminator="type")] | None = None
    thinking: Annotated[ThinkingEnabled | ThinkingOtherwise, Field(discriminator="type")] | None = None
    output_config: OutputConfig | None = None
    output_format: JsonFormat | None = None
    context_management: ContextManagement | None = None
    cache_control: CacheControl | None = None

    @field_validator("tools", mode="before", json_schema_input_type=list[ClientTool] | None)
    @classmethod
    def _tools_of_the_client(cls, value: Any) -> Any:
        for number, tool in enumerate(value if isinstance(value, list) else ()):
            kind = tool.get("type") if isinstance(tool, dict) else None
            if kind not in (None, "custom"):
                told = f"tools[{number}].type: {str(kind)[:MAX_TOLD]!r} is not supported; describe the tool"
                raise invalid(f"{told} by name and input_schema", f"tools[{number}].type", "unsupported_parameter")
        return value

    @property
    def has_billing(self) -> bool:
        """Whether the system text begins with the coding client's billing header, which changes with each request."""
        return has_billing([block.text for block in self.system or []])

    @property
    def omits_thinking(self) -> bool:
        return self.thinking is not None and self.thinking.display == "omitted"

    @property
    def format(self) -> JsonFormat | None:
        return (self.output_config.format if self.output_config else None) or self.output_format

    def turn(self, stable_system: bool = False) -> Turn:
        """Raises ApiError for what cannot be said to a template."""
        texts, moved = [block.text for block in self.system or []], ""
        if stable_system:
            texts, moved = stable(texts)
        talk = Conversation("\n".join(texts))
        for number, message in enumerate(self.messages):
            talk.add(message, f"messages[{number}]")
        if moved:
            talk.say_first(moved)
        tools = tools_of(self.tools)
        template = _prefilled(talk)
        return Turn(talk.messages(), tools, self._choice(tools), self._reasoning(), template=template)

    def breakpoints(self, stable_system: bool = False) -> list[Breakpoint]:
        """Raises ApiError for too many."""
        return breakpoints(self._parts(), partial(self.turn, stable_system))

    def _parts(self) -> Iterator[Part]:
        """Those with a breakpoint; that of the body itself lies behind the last message."""
        yield from parts_of(self.tools, lambda tool: tool.model_copy(update={"name": MARK}))
        yield from marked_parts(self.system or [])
        for message in self.messages:
            yield from marked_parts(message.content)
        last = next((message.content for message in reversed(self.messages) if message.content), None)
        if self.cache_control is not None and last and hasattr(last[-1], "marked"):
            yield Part(last, len(last) - 1, self.cache_control)

    def _choice(self, tools: Sequence[Tool]) -> ToolChoice:
        given = self.tool_choice
        if given is None:
            return ToolChoice("auto" if tools else "none")
        if given.type in ("any", "tool") and not tools:
            raise invalid(f"tool_choice {given.type!r} needs tools", "tool_choice")
        parallel = not given.disable_parallel_tool_use
        if isinstance(given, NamedChoice):
            if given.name not in {tool.name for tool in tools}:
                raise invalid(f"tool_choice.name: no tool is called {given.name[:MAX_TOLD]!r}", "tool_choice.name")
            return ToolChoice("required", (given.name,), parallel)
        if isinstance(given, NoChoice):
            return ToolChoice("none")
        return ToolChoice("required" if given.type == "any" else "auto", (), parallel)

    def _reasoning(self) -> Reasoning:
        effort = EFFORTS[self.output_config.effort] if self.output_config and self.output_config.effort else None
        if self.thinking is None:
            return Reasoning(effort=effort)
        if isinstance(self.thinking, ThinkingEnabled):
            return Reasoning(True, self.thinking.budget_tokens, effort)
        return Reasoning(self.thinking.type != "disabled", None, effort)


class MessagesBody(CountBody, StreamedBody):
    """`cache_salt`, `public_prefix_tokens`: as on the other routes. max_tokens 0: the prompt is read, so that it is
    cached, and nothing is told of the one token that follows."""

    max_tokens: int = Field(ge=0, le=2**31)
    stop_sequences: list[str] | None = None
    temperature: float | None = Field(default=None, ge=0, le=1)
    top_p: float | None = Field(default=None, gt=0, le=1)
    top_k: int | None = Field(default=None, ge=0, le=2**31)
    cache_salt: str | None = None
    public_prefix_tokens: int | None = None

    def to_params(self) -> SamplingParams:
        """Raises InvalidRequest for values out of range."""
        check_sharing(self.cache_salt, self.public_prefix_tokens or 0)
        given: dict[str, Any] = {"temperature": self.temperature, "top_p": self.top_p, "top_k": self.top_k}
        given = {name: value for name, value in given.items() if value is not None}
        shape = None if self.format is None else Structured(json=self.format.schema_)
        return SamplingParams(
            max_tokens=self.max_tokens or 1, stop=tuple(self.stop_sequences or ()), structured=shape, **given
        )


def _prefilled(talk: Conversation) -> dict[str, Any]:
    """Variables of a template that goes on with the assistant's last message, if that is where the messages end."""
    last = talk.turns[-1] if talk.turns else None
    if last is None or last.role != "assistant":
        return {}
    if last.calls:
        raise invalid("messages: the last message ends in a tool_use; send its tool_result after it", "messages")
    if not last.texts:
        talk.turns.pop()
        return {}
    return {"add_generation_prompt": False, "continue_final_message": True}
