"""Content blocks as clients send them, and the conversation that they make for a chat template."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from headrace.server.breakpoints import MARK, CacheControl, Part, parts_of
from headrace.server.errors import invalid
from headrace.server.protocol import OnlyFalse, Strict


def as_blocks(value: Any) -> Any:
    """A text stands for one block of text."""
    return [{"type": "text", "text": value}] if isinstance(value, str) else value


class _Block(Strict):
    cache_control: CacheControl | None = None


class TextBlock(_Block):
    """`citations` come back with texts of other servers, and the text holds what they are about."""

    type: Literal["text"]
    text: str
    citations: list[Any] | None = None

    def as_text(self) -> str:
        return self.text

    def marked(self) -> TextBlock:
        return self.model_copy(update={"text": self.text + MARK})


class PlainSource(Strict):
    type: Literal["text"]
    media_type: Literal["text/plain"]
    data: str


class TextSource(Strict):
    type: Literal["content"]
    content: str | list[TextBlock]


class NoCitations(Strict):
    enabled: OnlyFalse | None = None


class DocumentBlock(_Block):
    """A document of plain text, which the model reads as text under its title and context."""

    type: Literal["document"]
    source: Annotated[PlainSource | TextSource, Field(discriminator="type")]
    title: str | None = None
    context: str | None = None
    citations: NoCitations | None = None

    def as_text(self) -> str:
        source = self.source
        given = source.data if isinstance(source, PlainSource) else source.content
        body = given if isinstance(given, str) else joined(given)
        return "\n".join(part for part in (self.title, self.context, body) if part)

    def marked(self) -> TextBlock:
        return TextBlock(type="text", text=self.as_text() + MARK)


class DirectCaller(Strict):
    type: Literal["direct"]


class ToolUseBlock(_Block):
    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]
    caller: DirectCaller | None = None
    toolset_name: None = None

    def for_template(self) -> dict[str, Any]:
        return {"id": self.id, "type": "function", "function": {"name": self.name, "arguments": self.input}}

    def marked(self) -> ToolUseBlock:
        return self.model_copy(update={"input": {**self.input, MARK: MARK}})


ResultBlock = Annotated[TextBlock | DocumentBlock, Field(discriminator="type")]


class ToolResultBlock(_Block):
    type: Literal["tool_result"]
    tool_use_id: str
    content: Annotated[list[ResultBlock] | None, BeforeValidator(as_blocks, str | list[ResultBlock] | None)] = None
    is_error: bool | None = None
    toolset_name: None = None

    def as_text(self) -> str:
        """Templates know no failed results, so that the text says it."""
        text = joined(self.content or [])
        return f"Error: {text}" if self.is_error else text

    def marked(self) -> ToolResultBlock:
        given = self.content or [TextBlock(type="text", text="")]
        return self.model_copy(update={"content": [*given[:-1], given[-1].marked()]})


class ThinkingBlock(Strict):
    """Comes back as it was told; the template says how much of it the model sees again."""

    type: Literal["thinking"]
    thinking: str
    signature: str | None = None


class RedactedThinkingBlock(Strict):
    """Of another server, which alone can read it."""

    type: Literal["redacted_thinking"]
    data: str


UserBlock = Annotated[TextBlock | ToolResultBlock | DocumentBlock, Field(discriminator="type")]
AssistantBlock = Annotated[
    TextBlock | ToolUseBlock | ThinkingBlock | RedactedThinkingBlock, Field(discriminator="type")
]


UserBlocks = Annotated[list[UserBlock], Field(min_length=1)]


class UserMessage(Strict):
    role: Literal["user"]
    content: Annotated[UserBlocks, BeforeValidator(as_blocks, str | UserBlocks)]


class AssistantMessage(Strict):
    role: Literal["assistant"]
    content: Annotated[list[AssistantBlock], BeforeValidator(as_blocks, str | list[AssistantBlock])]


class SystemMessage(Strict):
    role: Literal["system"]
    content: Annotated[list[TextBlock], BeforeValidator(as_blocks, str | list[TextBlock])]


GivenMessage = Annotated[UserMessage | AssistantMessage | SystemMessage, Field(discriminator="role")]


def marked_parts(blocks: list[Any]) -> Iterator[Part]:
    """Blocks with a breakpoint, those within results of tools before these."""
    for number, block in enumerate(blocks):
        if isinstance(block, ToolResultBlock):
            yield from parts_of(block.content)
        if (control := getattr(block, "cache_control", None)) is not None:
            yield Part(blocks, number, control)


def joined(blocks: list[Any]) -> str:
    return "\n".join(block.as_text() for block in blocks)


def reminder(text: str) -> str:
    """How instructions reach a model within a user's turn: Anthropic's coding client writes its own so."""
    return f"<system-reminder>\n{text}\n</system-reminder>"


@dataclass(slots=True)
class Said:
    """One message for a template, in pieces: joined at the end, however many there are."""

    role: str
    texts: list[str] = field(default_factory=list)
    thoughts: list[str] = field(default_factory=list)
    calls: list[dict[str, Any]] = field(default_factory=list)
    more: dict[str, str] = field(default_factory=dict)

    def for_template(self) -> dict[str, Any]:
        told: dict[str, Any] = {"role": self.role, **self.more, "content": "\n".join(self.texts)}
        if self.thoughts:
            told["reasoning_content"] = "\n".join(self.thoughts)
        if self.calls:
            told["tool_calls"] = self.calls
        return told


class Conversation:
    """Messages for a chat template, one after the other. Neighbours of one role are one message, as Anthropic says.

    Templates know a system message at the beginning only. Later ones go into the user's turn, as a reminder.
    """

    def __init__(self, system: str = "") -> None:
        self.system = [system] if system else []
        self.turns: list[Said] = []
        self._tools: dict[str, str] = {}

    def add(self, message: UserMessage | AssistantMessage | SystemMessage, where: str) -> None:
        """Raises ApiError for the result of a call that is not there."""
        if isinstance(message, UserMessage):
            self._add_user(message, where)
        elif isinstance(message, AssistantMessage):
            self._add_assistant(message)
        elif self.turns:
            self._say("user", reminder(joined(message.content)))
        else:
            self.system.append(joined(message.content))

    def _add_user(self, message: UserMessage, where: str) -> None:
        """Results first: a template expects them right after the calls."""
        for number, block in enumerate(message.content):
            if isinstance(block, ToolResultBlock):
                self._add_result(block, f"{where}.content[{number}]")
        told = [block for block in message.content if not isinstance(block, ToolResultBlock)]
        if told:
            self._say("user", joined(told))

    def _add_result(self, block: ToolResultBlock, where: str) -> None:
        name = self._tools.get(block.tool_use_id)
        if name is None:
            told = f"no tool_use block before it has the id {block.tool_use_id[:100]!r}"
            raise invalid(f"{where}.tool_use_id: {told}", f"{where}.tool_use_id")
        named = {"tool_call_id": block.tool_use_id, "name": name}
        self.turns.append(Said("tool", [block.as_text()], more=named))

    def _add_assistant(self, message: AssistantMessage) -> None:
        turn = self._say("assistant", joined([block for block in message.content if isinstance(block, TextBlock)]))
        for block in message.content:
            if isinstance(block, ThinkingBlock) and block.thinking:
                turn.thoughts.append(block.thinking)
            elif isinstance(block, ToolUseBlock):
                turn.calls.append(block.for_template())
                self._tools[block.id] = block.name

    def _say(self, role: str, text: str) -> Said:
        if not self.turns or self.turns[-1].role != role:
            self.turns.append(Said(role))
        if text:
            self.turns[-1].texts.append(text)
        return self.turns[-1]

    def say_first(self, text: str) -> None:
        """At the beginning of the user's first turn: behind the system text and the tools, before what else is said."""
        first = next((turn for turn in self.turns if turn.role == "user"), None)
        if first is None:
            self.system.append(text)
        else:
            first.texts.insert(0, reminder(text))

    def messages(self) -> list[dict[str, Any]]:
        system = "\n".join(self.system)
        told = [{"role": "system", "content": system}] if system else []
        return told + [turn.for_template() for turn in self.turns]
