"""`headrace generate`: texts in, continuations out."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any, TextIO

from headrace.cli.engine import CollectedAnswer, check_adapter, engine, figures, streamed
from headrace.cli.hints import check_file
from headrace.config import EngineConfig
from headrace.console import ProgressLine, changes_in_place, err
from headrace.progress import Answering
from headrace.types import Delta, SamplingParams

Ask = Callable[[str], AsyncGenerator[Delta, None]]
"""A prompt to the deltas of its answer."""

LONGEST = 2**28
"""Characters of a text that is read: a device, or a pipe from one, may never end."""


def read_prompts(given: list[str], file: Path | None) -> list[str]:
    """From the command line, a file or standard input (- as well); ValueError where there is none, or more than one."""
    if given and file is not None:
        raise ValueError("give prompts or --file, not both")
    if given and given != ["-"]:
        prompts = given
    elif file is not None:
        prompts = [read_text(file).removesuffix("\n")]
        check_file(file, prompts[0])
    elif sys.stdin.isatty():
        raise ValueError("no prompt: give one as an argument, with --file, or on standard input")
    else:
        prompts = [_whole(sys.stdin, "standard input").removeprefix("\ufeff").removesuffix("\n")]
    if not all(prompts):
        raise ValueError("the prompt is empty")
    return prompts


def read_text(path: Path) -> str:
    """Without the mark of its encoding that some editors begin a file with. Raises ValueError."""
    try:
        with path.open(encoding="utf-8-sig") as file:
            return _whole(file, str(path))
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"cannot read {path}: {error}") from None


def _whole(file: TextIO, name: str) -> str:
    text = file.read(LONGEST + 1)
    if len(text) > LONGEST:
        raise ValueError(f"{name} has more than {LONGEST:,} characters, which no context holds; give a shorter text")
    return text


def run(
    config: EngineConfig, params: SamplingParams, prompts: list[str], *, json_lines: bool, quiet: bool, adapter: str
) -> None:
    check_adapter(config, adapter)
    asyncio.run(_run(config, params, prompts, json_lines, quiet, adapter))


async def _run(
    config: EngineConfig, params: SamplingParams, prompts: list[str], json_lines: bool, quiet: bool, adapter: str
) -> None:
    async with engine(config, quiet) as llm:
        ask = partial(llm.generate, params=params, adapter=adapter)
        if len(prompts) == 1:
            await _only(llm, ask, prompts[0], json_lines, quiet)
        else:
            await _several(llm, ask, prompts, json_lines, quiet)


async def _only(llm: Any, ask: Ask, prompt: str, json_lines: bool, quiet: bool) -> None:
    """An answer that is written as it comes, unless it is to be JSON."""
    answer = CollectedAnswer()
    # What goes into a file while a person watches stderr is not seen either; two pipes may be one.
    unseen = json_lines or (not sys.stdout.isatty() and changes_in_place())
    async for delta in streamed(llm, ask(prompt), quiet, unseen=unseen):
        answer.add(delta)
        if not json_lines:
            sys.stdout.write(delta.text)
            sys.stdout.flush()
    _show(prompt, answer, json_lines, not json_lines, quiet)


async def _several(llm: Any, ask: Ask, prompts: list[str], json_lines: bool, quiet: bool) -> None:
    """Answers in the order of the prompts, each as soon as it and those before it are there; then a summary."""
    answering = Answering(len(prompts))
    tasks = [asyncio.ensure_future(_answer(ask(prompt), answering)) for prompt in prompts]
    line = ProgressLine(lambda: answering.text(llm.prefills, llm.prefill_rate), answering.share)
    with nullcontext() if quiet else line:
        for prompt, task in zip(prompts, tasks, strict=True):
            answer = await task
            with line.hidden():
                _show(prompt, answer, json_lines, False, quiet)
    if not quiet:
        err.print(answering.summary(), style="dim")


async def _answer(deltas: AsyncIterator[Delta], answering: Answering) -> CollectedAnswer:
    answer = CollectedAnswer()
    async for delta in deltas:
        answer.add(delta)
        answering.note(delta)
    return answer


def _show(prompt: str, answer: CollectedAnswer, json_lines: bool, streamed: bool, quiet: bool) -> None:
    if json_lines:
        print(json.dumps(_record(prompt, answer), ensure_ascii=False), flush=True)
    else:
        print("" if streamed else answer.text, flush=True)
    if answer.metrics and not quiet:
        err.print(figures(answer.metrics), style="dim")


def _record(prompt: str, answer: CollectedAnswer) -> dict[str, Any]:
    m = answer.metrics
    counts: dict[str, Any] = {}
    if m is not None:
        counts = {"prompt_tokens": m.prompt_tokens, "cached_tokens": m.cached_tokens}
        if m.strategy:
            counts |= {"strategy": m.strategy, "strategy_reason": m.strategy_reason}
        if m.restore_reason:
            counts |= {"restored_tokens": m.restored_tokens, "restore_reason": m.restore_reason}
    output = {"text": answer.text, "finish_reason": answer.finish_reason, "output_tokens": len(answer.token_ids)}
    return {"prompt": prompt, **output, **counts}
