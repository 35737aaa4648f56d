"""`headrace chat`: a conversation on the terminal, or turns from a pipe."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterator
from contextlib import AsyncExitStack, suppress
from pathlib import Path
from typing import Any

from headrace.cli.engine import CollectedAnswer, engine, figures, streamed
from headrace.cli.generate import read_text
from headrace.config import EngineConfig
from headrace.console import err, out
from headrace.types import InvalidRequest, SamplingParams


class Conversation:
    """The messages so far; a turn that was not answered leaves none."""

    def __init__(self, llm: Any, params: SamplingParams, system: str | None, quiet: bool) -> None:
        self.llm, self.params, self.quiet = llm, params, quiet
        self.start: list[dict[str, str]] = [] if system is None else [{"role": "system", "content": system}]
        self.messages = list(self.start)

    def forget(self) -> None:
        self.messages = list(self.start)

    async def turn(self, text: str) -> None:
        asked = [*self.messages, {"role": "user", "content": text}]
        answer = CollectedAnswer()
        try:
            async for delta in streamed(self.llm, self.llm.tokenizer.apply_chat(asked), self.params, self.quiet):
                answer.add(delta)
                sys.stdout.write(delta.text)
                sys.stdout.flush()
        finally:
            print(flush=True)
        self.messages = [*asked, {"role": "assistant", "content": answer.text}]
        if answer.metrics and not self.quiet:
            err.print(figures(answer.metrics), style="dim")


def run(config: EngineConfig, params: SamplingParams, system: str | None, file: Path | None, *, quiet: bool) -> None:
    """Runs the event loop only while something is to be awaited: ctrl-c then stops an answer, not the program."""
    if system is not None and file is not None:
        raise ValueError("give --system or --system-file, not both")
    told = system if file is None else read_text(file)
    with asyncio.Runner() as runner:
        stack = AsyncExitStack()
        try:
            llm = runner.run(_enter(stack, config, quiet))
            _talk(runner, Conversation(llm, params, told, quiet))
        finally:
            runner.run(stack.aclose())


async def _enter(stack: AsyncExitStack, config: EngineConfig, quiet: bool) -> Any:
    llm = await stack.enter_async_context(engine(config, quiet))
    if llm.tokenizer is None:
        raise ValueError("the model folder has no tokenizer, so there is nothing to chat with")
    return llm


def _talk(runner: asyncio.Runner, conversation: Conversation) -> None:
    for line in _lines():
        if line in ("/exit", "/quit"):
            return
        if line == "/reset":
            conversation.forget()
            continue
        try:
            runner.run(conversation.turn(line))
        except InvalidRequest as error:
            if not sys.stdin.isatty():
                raise
            err.print(f"headrace: {error}", style="red", markup=False)
        except KeyboardInterrupt:
            if not sys.stdin.isatty():
                raise
            err.print("stopped", style="dim")


def _lines() -> Iterator[str]:
    """The user's turns, empty ones left out."""
    if not sys.stdin.isatty():
        yield from filter(None, map(str.strip, sys.stdin))
        return
    err.print("/reset forgets the conversation, /exit leaves, ctrl-c stops an answer", style="dim")
    with suppress(EOFError, KeyboardInterrupt):
        while True:
            if line := out.input("[bold cyan]> [/]").strip():
                yield line
