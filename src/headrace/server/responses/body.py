"""Bodies of POST /v1/responses: what is asked, in OpenAI's words, and what the engine is to do about it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Set
from dataclasses import replace
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Discriminator, Field, StringConstraints, Tag, field_validator

from headrace.server.chat_body import MAX_BUDGET, MAX_TOOLS, ToolName
from headrace.server.errors import invalid
from headrace.server.protocol import UNION_TAGS, OnlyFalse, SampledBody, Strict
from headrace.server.responses.namespaces import Split, flat_name
from headrace.server.responses.output import Told
from headrace.server.turn import Reasoning, Tool, ToolChoice
from headrace.types import MAX_LOGPROBS, SamplingParams, Structured

MAX_NAME = 128
"""Characters of a function's name, its namespace included."""

LOGPROBS = "message.output_text.logprobs"
SEALED = "reasoning.encrypted_content"

Includable = Literal[
    "message.output_text.logprobs",
    "reasoning.encrypted_content",
    # Of items that this server never makes:
    "file_search_call.results",
    "web_search_call.results",
    "web_search_call.action.sources",
    "message.input_image.image_url",
    "computer_call_output.output.image_url",
    "code_interpreter_call.outputs",
]

IGNORED = {"client_metadata", "prompt_cache_options", "prompt_cache_retention"}

REFUSED = {
    "access_programs": "there are none",
    "background": "responses are answered while the client waits; leave it out",
    "background_options": "responses are answered while the client waits; leave it out",
    "context_management": "nothing is left out of a conversation here; send what is to be read",
    "conversation": "conversations are not kept; use previous_response_id",
    "image": "images are not supported",
    "max_completion_tokens": "it is called max_output_tokens here",
    "max_tokens": "it is called max_output_tokens here",
    "messages": "they are called input here",
    "moderation": "moderation is not supported",
    "n": "a response is one answer; ask several times",
    "prompt": "prompts are not kept at the server; send instructions and input",
    "prompt_logprobs": "they are for /v1/completions and /v1/chat/completions",
    "prompt_logprobs_start": "it is for /v1/completions and /v1/chat/completions",
    "reasoning_effort": "it is called reasoning.effort here",
    "response_format": "it is called text.format here",
    "return_progress": "it is for /v1/completions and /v1/chat/completions",
    "return_token_ids": "it is for /v1/completions and /v1/chat/completions",
    "verbosity": "it is called text.verbosity here",
}

HARMLESS: dict[str, tuple[Any, ...]] = {
    "background": (False,),
    "n": (1,),
    "return_progress": (False,),
    "return_token_ids": (False,),
    "context_management": ([],),
}


class FunctionTool(Strict):
    """async, allowed_callers, defer_loading and output_schema are for tools that OpenAI runs; only their defaults mean
    nothing here."""

    type: Literal["function"]
    name: ToolName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None
    async_: OnlyFalse | None = Field(None, alias="async")
    allowed_callers: list[Literal["direct"]] | None = None
    defer_loading: OnlyFalse | None = None
    output_schema: None = None

    @field_validator("type", mode="before")
    @classmethod
    def _runs_at_the_client(cls, value: Any) -> Any:
        if isinstance(value, str) and value != "function":
            raise ValueError(f"there is no tool {value[:60]!r} at this server; give functions, which the client calls")
        return value

    def tool(self, number: int) -> Tool:
        schema = {"type": "object", "properties": {}} if self.parameters is None else self.parameters
        return Tool(self.name, self.description, schema, bool(self.strict), f"tools[{number}].parameters")


class NamespaceTool(Strict):
    """Functions in a group, as Codex sends those of an MCP server. The model sees each with the group's description."""

    type: Literal["namespace"]
    name: ToolName
    description: str | None = None
    tools: list[FunctionTool] = Field(max_length=MAX_TOOLS)

    def flat(self, number: int) -> Iterator[Tool]:
        for inner, each in enumerate(self.tools):
            tool = each.tool(number)
            told = "\n".join(text for text in (self.description, tool.description) if text) or None
            where = f"tools[{number}].tools[{inner}].parameters"
            yield replace(tool, name=flat_name(self.name, each.name), description=told, where=where)


def _tool_kind(given: Any) -> str:
    kind = given.get("type") if isinstance(given, dict) else getattr(given, "type", None)
    return NAMESPACE if kind == "namespace" else FUNCTION


FUNCTION, NAMESPACE = UNION_TAGS
AnyTool = Annotated[
    Annotated[FunctionTool, Tag(FUNCTION)] | Annotated[NamespaceTool, Tag(NAMESPACE)], Discriminator(_tool_kind)
]


class ChosenFunction(Strict):
    type: Literal["function"]
    name: str
    namespace: str | None = None


class AllowedFunctions(Strict):
    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: list[ChosenFunction] = Field(max_length=MAX_TOOLS)


def _choice_kind(given: Any) -> str:
    return "mode" if isinstance(given, str) else str(given.get("type") if isinstance(given, dict) else given)


Choice = Annotated[
    Annotated[Literal["none", "auto", "required"], Tag("mode")]
    | Annotated[ChosenFunction, Tag("function")]
    | Annotated[AllowedFunctions, Tag("allowed_tools")],
    Discriminator(_choice_kind),
]


class TextFormat(Strict):
    type: Literal["text"] = "text"


class ObjectFormat(Strict):
    type: Literal["json_object"]


class SchemaFormat(Strict):
    """strict: the schema always holds."""

    type: Literal["json_schema"]
    name: Annotated[str, StringConstraints(pattern=r"^[a-zA-Z0-9_-]{1,64}$")]
    schema_: dict[str, Any] = Field(alias="schema")
    description: str | None = None
    strict: bool | None = None


Format = Annotated[TextFormat | ObjectFormat | SchemaFormat, Field(discriminator="type")]


class TextOptions(Strict):
    """verbosity: models here know no other than the usual."""

    format: Format | None = None
    verbosity: Literal["medium"] | None = None


class ReasoningOptions(Strict):
    """summary, generate_summary (its older name): the reasoning itself is told as its summary."""

    effort: Literal["none", "minimal", "low", "medium", "high", "xhigh"] | None = None
    summary: Literal["auto", "detailed"] | None = None
    generate_summary: Literal["auto", "detailed"] | None = None
    context: Literal["auto"] | None = None
    mode: Literal["standard"] | None = None


Key = Annotated[str, StringConstraints(max_length=64)]
Value = Annotated[str, StringConstraints(max_length=512)]


class ResponsesBody(SampledBody):
    """input is read by responses.items. Sampling options beyond OpenAI's are those of all bodies."""

    ignored: ClassVar[Set[str]] = IGNORED
    refused: ClassVar[Mapping[str, str]] = REFUSED
    harmless: ClassVar[Mapping[str, tuple[Any, ...]]] = HARMLESS

    input: Any = None
    instructions: str | None = None
    tools: list[AnyTool] | None = Field(None, max_length=MAX_TOOLS)
    tool_choice: Choice | None = None
    parallel_tool_calls: bool | None = None
    max_tool_calls: int | None = Field(None, ge=1)
    """It bounds calls of tools that the server runs, and there are none."""
    text: TextOptions | None = None
    reasoning: ReasoningOptions | None = None
    thinking_token_budget: int | None = Field(None, ge=0, le=MAX_BUDGET)
    max_output_tokens: int | None = None
    top_logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    include: list[Includable] | None = Field(None, max_length=64)
    truncation: Literal["disabled"] | None = None
    metadata: Annotated[dict[Key, Value], Field(max_length=16)] | None = None
    store: bool | None = None
    previous_response_id: str | None = None
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    service_tier: str | None = None

    def includes(self, what: str) -> bool:
        return what in (self.include or ())

    def to_params(self) -> SamplingParams:
        """Raises ApiError and InvalidRequest, naming the field."""
        self.check_together()
        if self.top_logprobs and not self.includes(LOGPROBS):
            raise invalid(f"top_logprobs needs include: [{LOGPROBS!r}]", "top_logprobs")
        if self.logprob_token_ids and not self.includes(LOGPROBS):
            raise invalid(f"logprob_token_ids needs include: [{LOGPROBS!r}]", "logprob_token_ids")
        if self.max_output_tokens is not None and self.max_output_tokens < 1:
            raise invalid(f"max_output_tokens must be 1 or more, got {self.max_output_tokens}", "max_output_tokens")
        logprobs = (self.top_logprobs or 0) if self.includes(LOGPROBS) else None
        return self.sampling(max_tokens=self.max_output_tokens, logprobs=logprobs)

    def shape(self) -> Structured | None:
        """Of text.format, or of the fields that other routes have for it."""
        other = super().shape()
        if isinstance(self.form, TextFormat):
            return other
        if other is not None:
            raise invalid(f"text.format and {self.shape_field} both give the answer a shape; give one", "text")
        if isinstance(self.form, SchemaFormat):
            return Structured(json=self.form.schema_)
        return Structured(json_object=True)

    @property
    def has_form(self) -> bool:
        """Whether text.format gives the answer a shape."""
        return not isinstance(self.form, TextFormat)

    @property
    def form(self) -> TextFormat | ObjectFormat | SchemaFormat:
        return (self.text.format if self.text is not None else None) or TextFormat()

    def functions(self) -> tuple[Tool, ...]:
        """Raises ApiError where two have one name, or there are too many."""
        tools: dict[str, Tool] = {}
        for number, each in enumerate(self.tools or ()):
            for tool in each.flat(number) if isinstance(each, NamespaceTool) else (each.tool(number),):
                if tool.name in tools or len(tool.name) > MAX_NAME:
                    why = "two tools have the name" if tool.name in tools else "too long with its namespace:"
                    field = tool.where.removesuffix("parameters") + "name"
                    raise invalid(f"{field}: {why} {tool.name!r}", field)
                tools[tool.name] = tool
        if len(tools) > MAX_TOOLS:
            raise invalid(f"tools: at most {MAX_TOOLS} functions, got {len(tools):,}", "tools")
        return tuple(tools.values())

    def split_names(self) -> Split:
        groups = (each for each in self.tools or () if isinstance(each, NamespaceTool))
        return {flat_name(group.name, each.name): (group.name, each.name) for group in groups for each in group.tools}

    def choice(self, tools: tuple[Tool, ...]) -> ToolChoice:
        """Raises ApiError for a tool that there is not."""
        given, parallel = self.tool_choice, self.parallel_tool_calls is not False
        if not tools:
            if given not in (None, "none", "auto"):
                raise invalid("tool_choice needs tools", "tool_choice")
            return ToolChoice("none", (), parallel)
        if given is None or isinstance(given, str):
            return ToolChoice(given or "auto", (), parallel)
        chosen = [given] if isinstance(given, ChosenFunction) else given.tools
        allowed = tuple(flat_name(each.namespace, each.name) for each in chosen)
        known = {tool.name for tool in tools}
        if unknown := next((name for name in allowed if name not in known), None):
            raise invalid(f"tool_choice: no tool has the name {unknown[:128]!r}", "tool_choice")
        if isinstance(given, ChosenFunction):
            return ToolChoice("required", allowed, False)
        return ToolChoice(given.mode if allowed else "none", allowed, parallel)

    def thinking(self) -> Reasoning:
        effort = self.reasoning.effort if self.reasoning is not None else None
        if effort == "none":
            return Reasoning(False)
        return Reasoning(True if effort else None, self.thinking_token_budget, effort)

    def told(self) -> Told:
        asked = self.reasoning is not None and (self.reasoning.summary or self.reasoning.generate_summary)
        return Told(bool(asked), self.includes(SEALED), self.split_names())
