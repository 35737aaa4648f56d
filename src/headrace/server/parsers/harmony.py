"""Harmony, the format of gpt-oss: messages in channels, some of them to a tool.

<|channel|>analysis<|message|>...<|end|><|start|>assistant<|channel|>commentary to=functions.NAME <|constrain|>json
<|message|>{...}<|call|>, and <|channel|>final<|message|>...<|return|>. The prompt ends with <|start|>assistant, so the
first recipient may come before any mark: ` to=functions.NAME<|channel|>commentary json<|message|>`.

Checked against the openai-harmony package, which reads tokens of one vocabulary only: tests/unit/test_harmony.py.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

from headrace.server.parsers.lark import Grammar
from headrace.server.parsers.scan import Flow, Marks, Parser, Reading
from headrace.server.turn import Tool

START, CHANNEL, MESSAGE = "<|start|>", "<|channel|>", "<|message|>"
END, CALL, RETURN, CONSTRAIN = "<|end|>", "<|call|>", "<|return|>", "<|constrain|>"
MARKS = (START, CHANNEL, MESSAGE, END, CALL, RETURN, CONSTRAIN)
_RECIPIENT = re.compile(r"\bto=([^\s<]+)(?=[\s<])")
_NAME, MOST_NAME = re.compile(r"[^\s<]+"), 200
_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")
_OUTSIDE = Marks(START, CHANNEL, END, CALL, RETURN)
_HEADER = Marks(MESSAGE, END, CALL, RETURN)


class HarmonyParser(Parser):
    """A message to functions.NAME, or to a name of the request's tools, is a call. The channel analysis, and messages
    to the model's own tools, are reasoning; other messages are text, and so is what stands outside of messages. A
    header that the text's end cuts is left out, but for a call whose name is complete.

    Without tools, messages to them are text, with their headers.
    """

    def __init__(self, new_id: Callable[[], str], tools: Sequence[Tool] = ()) -> None:
        super().__init__(new_id, tools)
        self._thought = Flow(self.reasoning)
        self._thought.gap()

    def read(self) -> Reading[None]:
        mark = yield from self._first()
        while mark:
            if mark in (START, CHANNEL):
                mark = yield from self._message(mark)
            else:
                mark = yield from self.reader.until(_OUTSIDE, self.flow.text)

    def _first(self) -> Reading[str]:
        """Reads up to the first mark outside of messages; with it a message whose header the prompt has begun."""
        self.reader.hold()
        yield from self.reader.skip_space()
        if (yield from self.reader.literal("to=")) and (yield from self.reader.whole(_NAME, MOST_NAME)):
            yield from self.reader.skip_space()
            if (yield from self.reader.literal(CHANNEL)):
                return (yield from self._message(self.reader.release()))
        self.flow.text(self.reader.release())
        return (yield from self.reader.until(_OUTSIDE, self.flow.text))

    def _message(self, begin: str) -> Reading[str]:
        """Reads a message whose header begins so; the mark that ends it."""
        pieces = [begin]
        ended = yield from self.reader.until(_HEADER, pieces.append)
        header = "".join([*pieces, ended])
        channel, name = _CHANNEL.search(header), self._called(header)
        if ended != MESSAGE:
            if name and self.tools and not ended:
                self.start(name)
            return ended
        if name and self.tools:
            return (yield from self._call(name))
        hidden = (channel is not None and channel[1] == "analysis") or ("to=" in header and not name)
        flow = self._thought if hidden and not name else self.flow
        flow.part()
        flow.text(header if name else "")
        return (yield from self.reader.until(_OUTSIDE, flow.text))

    def _called(self, header: str) -> str:
        """The name of the called tool; '' if it calls none."""
        found = _RECIPIENT.search(header)
        recipient = found[1] if found else ""
        name = recipient.removeprefix("functions.")
        return name if name != recipient or name in self.tools else ""

    def _call(self, name: str) -> Reading[str]:
        number = self.start(name)
        told = Flow(lambda piece: self.arguments(number, piece))
        told.gap()
        mark = yield from self.reader.until(_OUTSIDE, told.text)
        if mark and not told.told:
            self.arguments(number, "{}")
        return mark


def calls_grammar(grammar: Grammar, tools: Sequence[Tool], most: int) -> str:
    """One call: the model ends its turn with it."""
    calls = []
    for tool in tools:
        before = f"{CHANNEL}commentary to=functions.{tool.name} {CONSTRAIN}json{MESSAGE}"
        calls.append(f"{grammar.text(before, MARKS)} {grammar.arguments(tool)}")
    return grammar.rule(" | ".join(calls))
