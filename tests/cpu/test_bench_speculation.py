"""`headrace bench speculation`: answers that are known, texts that repeat as they say, and its result."""

from __future__ import annotations

import json
import random
from itertools import pairwise
from pathlib import Path

import pytest
from typer.testing import CliRunner

from headrace import LLM, SamplingParams
from headrace.bench import speculation
from headrace.bench.known_answers import FIRST, QUOTINGS, TokenCycle, write_known
from headrace.bench.shapes import SHAPES, CheckpointShape, write_checkpoint
from headrace.bench.speculation import KnownDrafts
from headrace.cli.main import app

pytestmark = pytest.mark.cpu

TINY = CheckpointShape(hidden=64, layers=2, heads=2, kv_heads=1, head_dim=32, mlp=64, vocab=2000, context=4096)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_known(TINY, tmp_path_factory.mktemp("known"))


def test_greedy_answers_are_the_known_ones_by_a_wide_margin(folder: Path) -> None:
    cycle, rng = TokenCycle(TINY.vocab), random.Random(0)
    prompts = [rng.choices(cycle.order, k=count) for count in (1, 7, 70, 300)]
    gaps: list[float] = []
    with LLM(str(folder), dtype="bfloat16", kv_cache_tokens=2048) as llm:
        llm.engine.on_logits = lambda _, position, row: gaps.append(float(-row.flatten().topk(2).values.diff()))
        outputs = llm.generate(prompts, SamplingParams(temperature=0.0, max_tokens=90, ignore_eos=True))
    assert [list(each.outputs[0].token_ids) for each in outputs] == [cycle.answer(each[-1], 90) for each in prompts]
    assert len(gaps) >= 4 * 90 and min(gaps) > 1


def test_the_cycle_has_all_tokens_but_special_ones_once() -> None:
    cycle = TokenCycle(50)
    assert sorted(cycle.answer(FIRST, 50 - FIRST)) == list(range(FIRST, 50))
    assert cycle.answer(FIRST, 50 - FIRST)[-1] == FIRST, "it comes round"


def quoted(document: list[int], answer: list[int]) -> list[bool]:
    """Of each token of an answer, whether it stands in the document behind the token before it."""
    pairs = set(pairwise(document))
    return [pair in pairs for pair in pairwise(answer)]


@pytest.mark.parametrize("name", QUOTINGS)
def test_an_answer_repeats_its_document_as_much_as_it_is_to(name: str) -> None:
    text, cycle, rng = QUOTINGS[name], TokenCycle(32_000), random.Random(1)
    document, asked = text.draw(rng, cycle, 40_000, 20_000)
    assert len(document) == 40_000
    found = quoted(document, cycle.answer(asked, 20_000))
    begins = sum(now and not before for before, now in zip([False, *found], found, strict=False))
    if text.new == 1:
        assert sum(found) < 20
        return
    assert sum(found) + begins == pytest.approx(20_000 * (1 - text.new), rel=0.1), "a quote's first token has no pair"
    assert sum(found) / begins + 1 == pytest.approx(text.quote, rel=0.25)


def test_texts_are_seeded() -> None:
    cycle, text = TokenCycle(2000), QUOTINGS["quotes"]
    first, again, other = (text.draw(random.Random(seed), cycle, 200, 100) for seed in (1, 1, 2))
    assert first == again != other


def test_drafts_are_right_as_often_as_they_are_to_be() -> None:
    cycle = TokenCycle(2000)
    right = sum(
        a == b
        for token in cycle.order[:500]
        for a, b in zip(KnownDrafts(cycle, 0.7, token).propose([token], 4), cycle.answer(token, 4), strict=True)
    )
    assert 0.65 < right / 2000 < 0.75
    assert KnownDrafts(cycle, 1.0, 0).propose([FIRST], 8) == cycle.answer(FIRST, 8)


@pytest.fixture
def tiny(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setitem(SHAPES, "S1", TINY)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HEADRACE_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(speculation, "SETTLE_S", 0.0)
    monkeypatch.setattr(speculation, "OURS", {"kv_cache_tokens": 4096, "dtype": "bfloat16"})
    return tmp_path


def test_it_writes_the_fixed_format(tiny: Path) -> None:
    file = tiny / "result.json"
    asked = ["--quick", "--texts", "edits,random", "--right", "0,1", "--sequences", "1,2", "--json", str(file)]
    answer = CliRunner().invoke(app, ["bench", "speculation", *asked, "--engine", "vllm-cpu-ngram"])
    assert answer.exit_code == 0, answer.output
    result = json.loads(file.read_text())
    assert result["quick_lengths"] == {"512": 256, "128": 64}
    cases = {(case["text"], case["sequences"], case["method"]): case for case in result["cases"]}
    assert len(cases) == 2 * 2 * 4 + 2 * 2, "the last without drafts stands for the one of the same text"
    assert all(case["decode_tok_s"] > 0 for case in cases.values() if "error" not in case)
    assert cases["random", 2, "suffix"]["accepted"] is cases["edits", 1, "without"]["accepted"] is None
    assert cases["random", 1, "right 1"]["accepted"] == 1 and cases["random", 1, "right 1"]["per_draft"] >= 1
    assert cases["random", 1, "right 0"]["accepted"] in (0, None)
    assert "tools/bench_peers" in cases["edits", 1, "vllm-cpu-ngram"]["error"]


def test_answers_that_are_not_the_known_ones_are_a_failure(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(speculation, "known_checkpoint", lambda _: write_checkpoint(TINY, tiny / "other"))
    answer = CliRunner().invoke(app, ["bench", "speculation", "--quick", "--texts", "random", "--sequences", "1"])
    assert answer.exit_code != 0 and "not the one that is known" in answer.output


@pytest.mark.parametrize(
    ("option", "given"),
    [("--texts", "poems"), ("--methods", "guesses"), ("--engine", "nobody"), ("--right", "2"), ("--right", "x")],
)
def test_what_it_does_not_know_is_refused(option: str, given: str, tiny: Path) -> None:
    answer = CliRunner().invoke(app, ["bench", "speculation", "--quick", option, given])
    assert answer.exit_code != 0 and repr(given) in answer.output
