"""Bodies of /v1/chat/completions: messages, tools and their choice, reasoning."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal, Protocol

from pydantic import Field, StringConstraints, field_validator, model_validator

from headrace.server.breakpoints import MARK, Breakpoint, CacheControl, Part, breakpoints, parts_of
from headrace.server.errors import invalid
from headrace.server.json_body import SURROGATE
from headrace.server.parsers.json_calls import well_formed
from headrace.server.protocol import SampledBody, Strict
from headrace.server.strict import refusal_as
from headrace.server.turn import Reasoning, Tool, ToolChoice, Turn
from headrace.types import SamplingParams

RESERVED = {"self", "messages", "tools", "documents", "add_generation_prompt"}
"""Names that are no variables of a chat template; the tokenizer knows of more."""

MAX_TOOLS = 512
MAX_MESSAGES = 10_000
"""Of a conversation; the Responses API bounds its items alike."""
MAX_CALLS = 1024
"""Of one message."""
MAX_BUDGET = 2**31

ToolName = Annotated[str, StringConstraints(pattern=r"^[a-zA-Z0-9_.-]{1,128}$")]


class TextPart(Strict):
    """Or a refusal, as OpenAI's models reply with: its text."""

    type: Literal["text"]
    text: str
    cache_control: CacheControl | None = None

    @model_validator(mode="before")
    @classmethod
    def _refusal_is_text(cls, raw: Any) -> Any:
        return refusal_as(raw, "text")

    def marked(self) -> TextPart:
        return self.model_copy(update={"text": self.text + MARK})


class CalledFunction(Strict):
    """parsed_arguments: what OpenAI's client made of the arguments; it sends that back and nobody reads it."""

    name: str
    arguments: str
    parsed_arguments: Any = None


class ToolCall(Strict):
    id: str
    type: Literal["function"] = "function"
    function: CalledFunction
    index: int | None = None
    parsed_arguments: Any = None

    def for_template(self) -> dict[str, Any]:
        """Arguments as an object, which is what templates write as JSON; text that is no object stays text."""
        function = {"name": self.function.name, "arguments": arguments_object(self.function.arguments)}
        return {"id": self.id, "type": "function", "function": function}


def arguments_object(text: str) -> Any:
    """The object that a call's arguments are, {} where they are empty, the text where they are no JSON object."""
    try:
        value = json.loads(text or "{}")
        if SURROGATE.search(text):
            value = json.loads(well_formed(json.dumps(value, ensure_ascii=False)))
    except (ValueError, RecursionError):
        return text
    return value if isinstance(value, dict) else text


class Message(Strict):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: list[TextPart] | None = Field(None, fail_fast=True)
    name: str | None = None
    tool_calls: list[ToolCall] | None = Field(None, max_length=MAX_CALLS, fail_fast=True)
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    token_ids: list[Annotated[int, Field(ge=0, lt=2**31)]] | None = Field(None, fail_fast=True)
    parsed: Any = None
    refusal: str | None = None
    cache_control: CacheControl | None = None
    # Fields of our own replies, so that a client may send them back; only the empty values mean nothing.
    audio: None = None
    function_call: None = None
    annotations: list[None] | None = None

    @field_validator("content", mode="before", json_schema_input_type=str | list[TextPart] | None)
    @classmethod
    def _text_is_one_part(cls, value: Any) -> Any:
        return [{"type": "text", "text": value}] if isinstance(value, str) else value

    def check(self, where: str) -> None:
        """Fields that are right alone and wrong together."""
        if self.tool_calls and self.role != "assistant":
            raise invalid(f"{where}: only the assistant has tool_calls", f"{where}.tool_calls")
        if self.token_ids and self.role != "assistant":
            raise invalid(f"{where}: only the assistant has token_ids", f"{where}.token_ids")
        if self.refusal is not None and self.role != "assistant":
            raise invalid(f"{where}: only the assistant has a refusal", f"{where}.refusal")
        if self.tool_call_id is not None and self.role != "tool":
            raise invalid(f"{where}: only a tool has tool_call_id", f"{where}.tool_call_id")
        if self.role == "tool" and self.tool_call_id is None:
            raise invalid(f"{where}.tool_call_id is required: the id of the call it answers", f"{where}.tool_call_id")
        if self.content is None and self.role != "assistant":
            raise invalid(f"{where}.content is required", f"{where}.content", "missing")

    def for_template(self) -> dict[str, Any]:
        """OpenAI's 'developer' is the newer name of 'system', which is what templates know."""
        content = self.refusal if self.content is None else "\n".join(part.text for part in self.content)
        given = {
            "role": "system" if self.role == "developer" else self.role,
            "content": content if self.tool_calls else content or "",
            "name": self.name,
            "tool_calls": [call.for_template() for call in self.tool_calls] if self.tool_calls else None,
            "tool_call_id": self.tool_call_id,
            "reasoning_content": self.reasoning_content,
            "token_ids": self.token_ids or None,
        }
        return {name: value for name, value in given.items() if value is not None}


class FunctionBody(Strict):
    name: ToolName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class ToolBody(Strict):
    type: Literal["function"]
    function: FunctionBody
    cache_control: CacheControl | None = None

    def tool(self, number: int) -> Tool:
        given = self.function
        schema = {"type": "object", "properties": {}} if given.parameters is None else given.parameters
        where = f"tools[{number}].function.parameters"
        return Tool(given.name, given.description, schema, bool(given.strict), where)


class DescribedTool(Protocol):
    """Tools as a client describes them, of any route. number: its place in the list."""

    def tool(self, number: int) -> Tool: ...


def marked_parts(tools: list[ToolBody] | None, messages: Sequence[Message]) -> Iterator[Part]:
    """Those with a breakpoint, in the order of a prompt; that of a message lies behind its last part."""
    yield from parts_of(tools, _another)
    for message in messages:
        yield from parts_of(message.content)
        if message.cache_control is not None and message.content:
            yield Part(message.content, len(message.content) - 1, message.cache_control)


def _another(tool: ToolBody) -> ToolBody:
    return tool.model_copy(update={"function": tool.function.model_copy(update={"name": MARK})})


def tools_of(given: Sequence[DescribedTool] | None) -> tuple[Tool, ...]:
    """Raises ApiError for two of one name."""
    tools = tuple(each.tool(number) for number, each in enumerate(given or ()))
    names = [tool.name for tool in tools]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise invalid(f"two tools have the name {twice!r}", "tools")
    return tools


def template_variables(given: Mapping[str, Any] | None) -> dict[str, Any]:
    """Raises ApiError for names that are arguments of the rendering call, not variables of the template."""
    variables = dict(given or {})
    for name in variables:
        if name in RESERVED or not name.isidentifier():
            raise invalid(f"chat_template_kwargs may not set {name!r}", "chat_template_kwargs")
    return variables


class NamedFunction(Strict):
    name: str


class NamedTool(Strict):
    type: Literal["function"]
    function: NamedFunction


class AllowedList(Strict):
    mode: Literal["auto", "required"]
    tools: list[NamedTool]


class AllowedTools(Strict):
    type: Literal["allowed_tools"]
    allowed_tools: AllowedList


class ChatBody(SampledBody):
    messages: list[Message] = Field(max_length=MAX_MESSAGES, fail_fast=True)
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    modalities: list[Literal["text"]] | None = None
    add_generation_prompt: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tools: list[ToolBody] | None = Field(None, max_length=MAX_TOOLS)
    tool_choice: Literal["none", "auto", "required"] | NamedTool | AllowedTools | None = None
    parallel_tool_calls: bool | None = None
    documents: list[dict[str, Any]] | None = None
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh"] | None = None
    thinking_token_budget: int | None = Field(None, ge=0, le=MAX_BUDGET)

    def to_params(self) -> SamplingParams:
        self.check_together()
        if not self.messages:
            raise invalid("messages must not be empty", "messages")
        if self.top_logprobs is not None and not self.logprobs:
            raise invalid("top_logprobs needs logprobs=true", "top_logprobs")
        if None not in (self.max_tokens, self.max_completion_tokens) and self.max_tokens != self.max_completion_tokens:
            raise invalid("max_tokens and max_completion_tokens differ; give one", "max_tokens")
        most = self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens
        return self.sampling(max_tokens=most, logprobs=(self.top_logprobs or 0) if self.logprobs else None)

    def turn(self) -> Turn:
        """What is asked of the model. Raises ApiError naming the field."""
        for number, message in enumerate(self.messages):
            message.check(f"messages[{number}]")
        tools = tools_of(self.tools)
        return Turn(
            [message.for_template() for message in self.messages],
            tools,
            self._choice([tool.name for tool in tools]),
            self._reasoning(),
            tuple(self.documents or ()),
            self._template(),
            given_tokens=True,
        )

    def breakpoints(self) -> list[Breakpoint]:
        """Raises ApiError for too many."""
        return breakpoints(marked_parts(self.tools, self.messages), self.turn)

    def _choice(self, names: list[str]) -> ToolChoice:
        given, parallel = self.tool_choice, self.parallel_tool_calls is not False
        if not names:
            if given not in (None, "none", "auto"):
                raise invalid("tool_choice needs tools", "tool_choice")
            return ToolChoice("none", (), parallel)
        if given is None or isinstance(given, str):
            return ToolChoice(given or "auto", (), parallel)
        listed = [given] if isinstance(given, NamedTool) else given.allowed_tools.tools
        allowed = tuple(each.function.name for each in listed)
        if unknown := next((name for name in allowed if name not in names), None):
            raise invalid(f"tool_choice: no tool has the name {unknown!r}", "tool_choice")
        if isinstance(given, NamedTool):
            return ToolChoice("required", allowed, False)
        return ToolChoice(given.allowed_tools.mode if allowed else "none", allowed, parallel)

    def _reasoning(self) -> Reasoning:
        if self.reasoning_effort == "none":
            return Reasoning(False)
        return Reasoning(True if self.reasoning_effort else None, self.thinking_token_budget, self.reasoning_effort)

    def _template(self) -> dict[str, Any]:
        kwargs = template_variables(self.chat_template_kwargs)
        if self.add_generation_prompt is not None:
            kwargs["add_generation_prompt"] = self.add_generation_prompt
        return kwargs
