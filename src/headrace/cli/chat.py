"""`headrace chat`: a conversation on the terminal, or turns from a pipe."""

from __future__ import annotations

import asyncio
import sys
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path
from typing import Any

from headrace.cli.chat_commands import obey
from headrace.cli.chat_input import turns
from headrace.cli.conversation import Conversation
from headrace.cli.engine import CollectedAnswer, check_adapter, engine, figures, streamed
from headrace.cli.generate import Ask, read_text
from headrace.config import EngineConfig
from headrace.console import err
from headrace.types import SamplingParams


def run(
    config: EngineConfig, params: SamplingParams, system: str | None, file: Path | None, *, quiet: bool, adapter: str
) -> None:
    """Runs the event loop only while something is to be awaited: ctrl-c then stops an answer, not the program."""
    if system is not None and file is not None:
        raise ValueError("give --system or --system-file, not both")
    check_adapter(config, adapter)
    conversation = Conversation(config.model.folder, system if file is None else read_text(file))
    with asyncio.Runner() as runner:
        stack = AsyncExitStack()
        try:
            llm = runner.run(_enter(stack, config, quiet))
            Chat(runner, llm, partial(llm.generate, params=params, adapter=adapter), conversation, quiet).talk()
        finally:
            runner.run(stack.aclose())


async def _enter(stack: AsyncExitStack, config: EngineConfig, quiet: bool) -> Any:
    from headrace.engine.tokenizer import NO_TEMPLATE

    llm = await stack.enter_async_context(engine(config, quiet))
    if not llm.tokenizer.has_chat_template:
        raise ValueError(NO_TEMPLATE)
    return llm


class Chat:
    """Turns and commands, until there are no more. An error ends the command on a pipe, and is told on a terminal."""

    def __init__(self, runner: asyncio.Runner, llm: Any, ask: Ask, conversation: Conversation, quiet: bool) -> None:
        self.runner, self.llm, self.ask, self.conversation, self.quiet = runner, llm, ask, conversation, quiet

    def talk(self) -> None:
        """Raises ValueError, on a pipe, for a turn or a command that cannot be."""
        for line in turns():
            try:
                if not self.take(line):
                    return
            except ValueError as error:
                if not sys.stdin.isatty():
                    raise
                err.print(f"headrace: {error}", style="red", markup=False)
            except KeyboardInterrupt:
                if not sys.stdin.isatty():
                    raise
                err.print("stopped; this turn is not kept", style="dim")

    def take(self, line: str) -> bool:
        """A command or a turn, of which two slashes begin one that begins with a slash. False: the chat ends."""
        if line.startswith("/") and not line.startswith("//"):
            return obey(line, self.conversation, self.llm)
        self.runner.run(self.turn(line.removeprefix("/")))
        return True

    async def turn(self, text: str) -> None:
        asked = self.conversation.asking(text)
        answer = CollectedAnswer()
        try:
            async for delta in streamed(self.llm, self.ask(self.llm.tokenizer.apply_chat(asked)), self.quiet):
                answer.add(delta)
                sys.stdout.write(delta.text)
                sys.stdout.flush()
        finally:
            print(flush=True)
        self.conversation.answered(text, answer.text, answer.metrics)
        if answer.metrics and not self.quiet:
            err.print(figures(answer.metrics), style="dim")
