"""What the engine says of prompts that it reads, and LLM of its work, on stderr."""

from __future__ import annotations

from dataclasses import replace
from io import StringIO
from typing import Any

import pytest
from rich.console import Console

from headrace import LLM, SamplingParams, console
from headrace.progress import Prefill
from headrace.types import CHUNK

PARAMS = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM("tiny", kv_cache_tokens=20_000, max_batch_tokens=256)


@pytest.fixture
def told(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> list[list[Prefill]]:
    """Every call of on_prefill."""
    heard: list[list[Prefill]] = []
    monkeypatch.setattr(llm.engine, "on_prefill", lambda prefills, expected_s: heard.append(prefills))
    return heard


def test_every_step_of_a_prompt_is_told_as_it_begins(llm: LLM, told: list[list[Prefill]]) -> None:
    steps = llm.engine.stats().scheduler.steps
    llm.generate([list(range(10, 710))], PARAMS)
    facts = [[(each.done, each.cached, each.total, each.step) for each in prefills] for prefills in told]
    assert facts == [[(0, 0, 700, 256)], [(256, 0, 700, 256)], [(512, 0, 700, 188)]]
    assert llm.engine.stats().scheduler.steps == steps + 6, "the steps of decoding say nothing"


def test_cached_tokens_are_told_apart(llm: LLM, told: list[list[Prefill]]) -> None:
    llm.generate([list(range(1000, 1300))], PARAMS)
    told.clear()
    llm.generate([[*range(1000, 1300), *range(30, 330)]], PARAMS)
    assert [(each.done, each.cached, each.total, each.step) for prefills in told for each in prefills] == [
        (300, 300, 600, 256)
    ], "the last step computes less than a chunk"


def test_what_is_read_within_a_moment_is_not_told(llm: LLM, told: list[list[Prefill]]) -> None:
    llm.generate([list(range(40, 40 + CHUNK - 1))], PARAMS)
    assert told == []


def test_a_request_is_told_once_and_leaves_with_its_first_token(llm: LLM, told: list[list[Prefill]]) -> None:
    """Several answers share their prompt; a second prompt is read while the first is being answered."""
    prompts = [list(range(20, 220)), list(range(400, 900))]
    llm.generate(prompts, replace(PARAMS, n=3, temperature=1.0, seed=1))
    first = [prefills[0].request_id for prefills in told]
    for prefills in told:
        names = [each.request_id for each in prefills]
        assert len(names) == len(set(names))
    assert first[0] != first[-1] and [each.step for each in told[0]] == [200, 40], "the others take the end of theirs"
    assert told[-1][0].done + told[-1][0].step == 500
    assert all(first[0] not in {each.request_id for each in prefills} for prefills in told[1:])


@pytest.fixture
def stderr(monkeypatch: pytest.MonkeyPatch) -> StringIO:
    """Of a pipe 80 wide."""
    written = StringIO()
    monkeypatch.setattr(console, "err", Console(file=written, width=80, soft_wrap=True, highlight=False))
    return written


def test_many_prompts_and_their_summary(llm: LLM, stderr: StringIO) -> None:
    prompts = [[*range(1, 201), last] for last in range(8)]
    assert len(llm.generate(prompts, PARAMS, progress=True)) == 8
    (line,) = stderr.getvalue().splitlines()
    assert line.startswith("answered 8 prompts in ")
    assert " s: 1,608 prompt tokens (84 % cached, 264 computed), 32 tokens written, " in line
    assert line.endswith(" prompts/s")
    assert llm.engine.on_prefill is None


def test_quiet_on_a_pipe(llm: LLM, stderr: StringIO, capfd: Any) -> None:
    llm.generate([[1, 2, 3], [4, 5, 6]], PARAMS)
    LLM("tiny", kv_cache_tokens=4096)
    assert stderr.getvalue() == "" and capfd.readouterr() == ("", "")


def test_loading_is_told_on_a_terminal(stderr: StringIO, monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[str] = []
    monkeypatch.setattr(console.Loading, "__call__", lambda self, phase: shown.append(phase.name))
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    LLM("tiny", kv_cache_tokens=4096)
    assert list(dict.fromkeys(shown)) == [
        "reading the configuration", "tokenizer", "weights", "packing", "memory for the KV cache",
    ]  # fmt: skip
