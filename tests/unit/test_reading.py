"""The line that tells how far a prompt is read, before the first token of its answer."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from io import StringIO
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from headrace import console
from headrace.cli import engine as cli_engine
from headrace.cli.engine import streamed, written_rate
from headrace.console import ProgressLine
from headrace.progress import Prefill
from headrace.stats import EngineStats
from headrace.types import Delta, SamplingParams

pytestmark = pytest.mark.unit

READING = "reading 2,048 of 5,957 tokens, 1,570/s, 2 s left"


class ReadingEngine:
    """It reads a prompt until `read` is called, and answers with two deltas."""

    def __init__(self) -> None:
        self.prefills = [Prefill("a", 2048, 0, 5957)]
        self.prefill_rate = 1570.0
        self.begun, self.finished, self.closed = asyncio.Event(), asyncio.Event(), False

    async def generate(self, prompt: str, params: SamplingParams) -> AsyncIterator[Delta]:
        try:
            self.begun.set()
            await self.finished.wait()
            for token, text in enumerate(("an", "swer")):
                yield Delta("a", 0, text=text, token_ids=[token])
        finally:
            self.closed = True

    def read(self) -> None:
        self.prefills = []
        self.finished.set()


@pytest.fixture
def lines(monkeypatch: pytest.MonkeyPatch) -> list[ProgressLine]:
    """All that are made; they are brought up to date by the tests alone."""
    made: list[ProgressLine] = []

    class Line(ProgressLine):
        def __init__(self, *given: Any, **more: Any) -> None:
            super().__init__(*given, **more)
            made.append(self)

        def _run(self) -> None:
            pass

    monkeypatch.setattr(cli_engine, "ProgressLine", Line)
    monkeypatch.setattr(cli_engine, "READING_S", 0.0)
    return made


def stderr(monkeypatch: pytest.MonkeyPatch, **given: Any) -> StringIO:
    written = StringIO()
    monkeypatch.setattr(console, "err", Console(file=written, width=80, highlight=False, soft_wrap=True, **given))
    return written


async def answered(lines: list[ProgressLine], written: StringIO, quiet: bool = False) -> tuple[str, str]:
    """(stderr while the prompt is read, stderr when the first delta is handed out)."""
    llm, seen = ReadingEngine(), ["", ""]

    async def read() -> None:
        async for delta in streamed(llm, llm.generate("prompt", SamplingParams()), quiet):
            if delta.text == "an":
                seen[1] = written.getvalue()

    task = asyncio.ensure_future(read())
    await llm.begun.wait()
    for line in lines:
        line.tick()
    seen[0] = written.getvalue()
    llm.read()
    await task
    assert llm.closed and written.getvalue() == seen[1], "nothing comes between the tokens"
    return seen[0], seen[1]


def test_on_a_pipe(lines: list[ProgressLine], monkeypatch: pytest.MonkeyPatch) -> None:
    during, after = asyncio.run(answered(lines, stderr(monkeypatch)))
    assert during == after == READING + "\n"


def test_on_a_terminal_it_vanishes_before_the_first_token(
    lines: list[ProgressLine], monkeypatch: pytest.MonkeyPatch
) -> None:
    written = stderr(monkeypatch, force_terminal=True, color_system=None, _environ={"TERM": "xterm"})
    during, after = asyncio.run(answered(lines, written))
    assert READING in during and "\x1b[2K" not in during
    assert after.endswith("\x1b[1A\x1b[2K") and after.startswith(during)


def test_an_answer_that_is_not_seen_is_told_of_until_its_end(
    lines: list[ProgressLine], monkeypatch: pytest.MonkeyPatch
) -> None:
    written = stderr(monkeypatch, force_terminal=True, color_system=None, _environ={"TERM": "xterm"})

    async def read() -> None:
        llm = ReadingEngine()
        llm.read()
        async for delta in streamed(llm, llm.generate("prompt", SamplingParams()), False, unseen=True):
            lines[0].tick()
            assert delta.token_ids

    asyncio.run(read())
    assert "1 token written, " in written.getvalue()
    assert "2 tokens written, " in written.getvalue() and written.getvalue().endswith("\x1b[1A\x1b[2K")


def test_an_engine_that_stores_chunks_as_it_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """It may take half a minute, and is told in words of its own."""
    now = [100.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    llm = SimpleNamespace(stats=EngineStats())
    tell = cli_engine._ending(llm)
    now[0] += 12
    assert tell() == "ending the engine: 12 s"
    llm.stats.restore.unstored = 1234
    assert tell() == "storing 1,234 chunks: 12 s"


def test_rate_of_what_is_written() -> None:
    assert written_rate(1, 0.0) == "- tokens/s"
    assert written_rate(1025, 20.0) == "51.2 tokens/s"


def test_quiet(lines: list[ProgressLine], monkeypatch: pytest.MonkeyPatch) -> None:
    assert asyncio.run(answered(lines, stderr(monkeypatch), quiet=True)) == ("", "") and not lines


def test_a_client_that_leaves_ends_line_and_request(lines: list[ProgressLine], monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-c while the prompt is read."""
    written = stderr(monkeypatch)

    async def leave() -> ReadingEngine:
        llm = ReadingEngine()
        task = asyncio.ensure_future(anext(streamed(llm, llm.generate("prompt", SamplingParams()), False)))
        await llm.begun.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        return llm

    assert asyncio.run(leave()).closed
    lines[0].tick()
    assert written.getvalue() == ""
