"""Log probabilities of prompts and scores of options: those of whole prompts, to the bit, on every schedule."""

from __future__ import annotations

import math
import time
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace import LLM, InvalidRequest, SamplingParams
from headrace.engine.reports import Head
from headrace.engine.sampler import target_logprobs
from headrace.kv.partial import LEAST
from headrace.types import CHUNK, Request
from tests.support.checkpoints import FolderOf, TheirsOf
from tests.support.kind_sizes import VOCAB
from tests.support.traces import words

GREEDY = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
WHOLE = SamplingParams(max_tokens=0, prompt_logprobs=0)
ONE = SamplingParams(max_tokens=1, temperature=0.0)


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM("tiny", kv_cache_tokens=20_000)


@pytest.fixture(autouse=True)
def nothing_leaks(llm: LLM) -> Any:
    yield
    assert not llm.engine.has_work and llm.engine.cache.used == 0
    llm.engine.scheduler.check()


def by_definition(llm: LLM, tokens: list[int]) -> list[float]:
    """Log probability of each token but the first, of logits that were computed alone, in one piece, uncached."""
    rows = target_logprobs(llm.logits(tokens)[:-1], tokens[1:], 0)
    return [row[token].logprob for row, token in zip(rows, tokens[1:], strict=True)]


def reported(llm: LLM, tokens: list[int], params: SamplingParams) -> tuple[list[float | None], int]:
    """What a prompt reports of its tokens, and how many came from the cache."""
    (output,) = llm.generate([tokens], params)
    assert output.prompt_logprobs is not None
    rows = zip(output.prompt_logprobs, tokens, strict=True)
    return [row and row[token].logprob for row, token in rows], output.metrics.cached_tokens


# ---- log probabilities of a prompt -----------------------------------------------------------------------------------


@pytest.mark.parametrize("start", [0, 1, 2, 64, 65, 128, 129, 199, 200])
def test_prompt_logprobs_from_a_position_on(start: int, llm: LLM) -> None:
    """Rows from start - 1 on are computed; what is before them comes from the cache."""
    tokens = words(llm, 200, seed=start)
    want = by_definition(llm, tokens)
    for params in (replace(WHOLE, prompt_logprobs_start=start), replace(GREEDY, prompt_logprobs=0)):
        llm.generate([tokens], ONE)
        params = replace(params, prompt_logprobs_start=start)
        found, cached = reported(llm, tokens, params)
        first = max(1, start)
        assert found == [None] * first + want[first - 1 :]
        most = min(max(0, start - 1), len(tokens) - 1 - (params.max_tokens == 0))
        assert cached == (most if most % CHUNK >= LEAST else most // CHUNK * CHUNK)


def test_a_whole_prompt_is_computed_whole_and_shared_with_later_ones(llm: LLM) -> None:
    tokens = words(llm, 200, seed=500)
    first, cached = reported(llm, tokens, WHOLE)
    again, cached_again = reported(llm, tokens, WHOLE)
    assert first == again and (cached, cached_again) == (0, 0)
    assert llm.generate([tokens], ONE)[0].metrics.cached_tokens == 192, "its chunks were not published"


@pytest.mark.parametrize("budget", [64, 70, 2048])
def test_preempted_and_sliced(budget: int, llm: LLM) -> None:
    """Answers outgrow a small cache while their prompts report; the text before comes from the cache where it can."""
    text = words(llm, 130, seed=1)
    prompts = [text + words(llm, 70, seed=i) for i in range(4)]
    params = replace(GREEDY, max_tokens=150, prompt_logprobs=0, prompt_logprobs_start=131)
    small = LLM("tiny", kv_cache_tokens=640, max_batch_tokens=budget)
    got = small.generate(prompts, params)
    assert small.engine.stats().scheduler.preemptions
    for output, prompt in zip(got, prompts, strict=True):
        assert output.prompt_logprobs is not None
        rows = [row and row[token].logprob for row, token in zip(output.prompt_logprobs, prompt, strict=True)]
        assert rows == [None] * 131 + by_definition(llm, prompt)[130:]


def test_several_answers_report_their_prompt_once(llm: LLM) -> None:
    tokens = words(llm, 150, seed=3)
    params = SamplingParams(n=3, seed=1, max_tokens=2, prompt_logprobs=1, prompt_logprobs_start=100)
    (output,) = llm.generate([tokens], params)
    assert output.prompt_logprobs is not None and output.prompt_logprobs[99] is None
    rows = [row[token].logprob for row, token in zip(output.prompt_logprobs[100:], tokens[100:], strict=True) if row]
    assert rows == by_definition(llm, tokens)[99:] and len(output.outputs) == 3


def test_named_tokens_in_answer_and_prompt(llm: LLM) -> None:
    tokens, named = words(llm, 20, seed=4), (7, 300, 5, 2000)
    params = replace(GREEDY, logprob_token_ids=named, prompt_logprobs=0, logprobs=5)
    (output,) = llm.generate([tokens], params)
    table = llm.logits(tokens + output.token_ids[:-1]).double().log_softmax(-1)
    assert output.logprobs is not None and output.prompt_logprobs is not None
    every = [*output.prompt_logprobs[1:], *output.logprobs]
    for row, (token, entry) in enumerate(zip(tokens[1:] + output.token_ids, every, strict=True)):
        assert entry is not None and set(entry) == {token, *named}
        assert [i.logprob for i in entry.values()] == sorted((i.logprob for i in entry.values()), reverse=True)
        for each, info in entry.items():
            assert info.logprob == pytest.approx(float(table[row, each]), abs=1e-9)
            assert info.rank == 1 + int((table[row] > table[row, each]).sum())
    alone = llm.generate([tokens], replace(GREEDY, logprob_token_ids=named))[0]
    assert alone.logprobs == output.logprobs and alone.token_ids == output.token_ids and not alone.prompt_logprobs


def test_named_tokens_that_are_impossible_are_told() -> None:
    (entry,) = target_logprobs(torch.tensor([[1.0, -math.inf, 0.0, 1.0]]), [0], 2, [1, 3])
    assert list(entry) == [0, 3, 1] and entry[1].logprob == -math.inf and [i.rank for i in entry.values()] == [1, 1, 4]


def test_a_prompt_without_an_answer(llm: LLM) -> None:
    for count in (1, 2, 64, 65):
        tokens = words(llm, count, seed=count)
        (output,) = llm.generate([tokens], WHOLE)
        assert (output.finish_reason, output.text, output.token_ids) == ("length", "", [])
        assert output.prompt_logprobs is not None and len(output.prompt_logprobs) == count
        assert output.metrics.output_tokens == 0 and output.metrics.decode_tokens_per_s is None
    small = LLM("tiny", kv_cache_tokens=512, max_model_len=130)
    (full,) = small.generate([words(llm, 130, seed=0)], replace(WHOLE, prompt_logprobs_start=129))
    assert full.prompt_logprobs is not None and full.prompt_logprobs[-1] and len(full.prompt_logprobs) == 130


@pytest.mark.parametrize(
    ("given", "param"),
    [
        (dict(max_tokens=0), "max_tokens"),
        (dict(max_tokens=0, prompt_logprobs=0, n=2), "n"),
        (dict(prompt_logprobs_start=1), "prompt_logprobs_start"),
        (dict(prompt_logprobs=0, prompt_logprobs_start=4), "prompt_logprobs_start"),
        (dict(logprob_token_ids=[10**6]), "logprob_token_ids"),
        (dict(logprob_token_ids=list(range(1025))), "logprob_token_ids"),
        (dict(logprob_token_ids=list(range(1024)), max_tokens=1025), "logprob_token_ids"),
        (dict(logprob_token_ids=list(range(1024)), max_tokens=None), "logprob_token_ids"),
    ],
)
def test_refusals_name_the_parameter(llm: LLM, given: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        llm.generate([[5, 6, 7]], SamplingParams(**given))
    assert caught.value.param == param


def test_abort_at_any_moment(llm: LLM) -> None:
    for steps in range(4):
        for name, length in (("a", 300), ("b", 3000)):
            tokens = [11 + length % 7 + steps] * length
            llm.engine.add(Request(name, tokens, WHOLE, arrival_s=time.monotonic()))
        for _ in range(steps):
            llm.engine.step()
        assert [llm.engine.abort(name) for name in "ab"] == [steps < 1, steps < 2], "a step has 2,048 tokens"
        llm.engine.scheduler.check()
        assert not llm.engine.has_work and llm.engine.cache.used == 0


def test_broken_logits_of_a_prompt_end_its_request_alone(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    honest = Head.logits

    def poisoned(head: Head, hidden: torch.Tensor) -> torch.Tensor:
        logits = honest(head, hidden).clone()
        logits[3] = torch.nan
        return logits

    want = llm.generate([[30, 31, 32]], WHOLE)[0].prompt_logprobs
    monkeypatch.setattr(Head, "logits", poisoned)
    broken, sound = llm.generate([[20] * 9, [30, 31, 32]], [replace(GREEDY, prompt_logprobs=0), WHOLE])
    if sound.finish_reason == "abort":  # which of them comes first in a step is the plan's choice
        broken, sound = sound, broken
    assert broken.finish_reason == "abort" and "NaN" in str(broken.outputs[0].stop_reason)
    assert sound.finish_reason == "length"
    assert len(sound.prompt_token_ids) == 9 or sound.prompt_logprobs == want


# ---- scores ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("length", [1, 63, 64, 65, 200])
def test_scores_are_those_of_whole_prompts(length: int, llm: LLM) -> None:
    text = words(llm, length, seed=length)
    options = [words(llm, n, seed=100 + n) for n in (1, 2, 16, 64, 70)] + [words(llm, 16, seed=116)]
    scores = llm.score(text, options)
    for score, option in zip(scores, options, strict=True):
        want = by_definition(llm, text + option)[length - 1 :]
        assert score.token_logprobs == want and score.token_ids == option and score.start == length
        assert score.logprob == sum(want) and score.mean_logprob == sum(want) / len(option)
    assert [score.token_logprobs for score in llm.score(text, options)] == [s.token_logprobs for s in scores], "cached"


@settings(max_examples=12)
@given(data=st.data())
def test_scores_of_any_text_and_options(llm: LLM, data: st.DataObject) -> None:
    """Options that share beginnings with each other and with the text; cached or not."""
    token = st.integers(20, 24)
    text = data.draw(st.lists(token, min_size=1, max_size=140))
    options = data.draw(st.lists(st.lists(token, min_size=1, max_size=70), min_size=1, max_size=4))
    if data.draw(st.booleans()):
        llm.engine.cache.tree.clear()
    scores = llm.score(text, options)
    for score, option in zip(scores, options, strict=True):
        assert score.token_logprobs == by_definition(llm, text + option)[len(text) - 1 :]


def test_a_greedy_answer_is_a_greedy_option(llm: LLM) -> None:
    text = "The code of Lisbon is 4821. What is the code of Lisbon?"
    answer = llm.generate(text, GREEDY)[0].token_ids
    good, other = llm.score(text, [answer, [answer[0] + 1, *answer[1:]]])
    assert good.greedy and not other.greedy and good.logprob > other.logprob


def test_the_text_is_computed_once(llm: LLM) -> None:
    text, options = words(llm, 64 * 20, seed=7), [words(llm, 16, seed=i) for i in range(10)]
    before = llm.engine.stats().tokens.prefilled
    llm.score(text, options)
    assert llm.engine.stats().tokens.prefilled - before == len(text) + 10 * 15


def test_strings_are_tokenized_together(llm: LLM) -> None:
    assert llm.tokenizer is not None
    for text, option in (("The code is", " 4821."), ("The code is ", "4821"), ("In the begin", "ning God")):
        whole = llm.tokenizer.encode(text + option)
        (score,) = llm.score(text, [option])
        assert score.token_ids == whole[score.start :]
        assert score.token_logprobs == by_definition(llm, whole)[score.start - 1 :]


@pytest.mark.parametrize("kind", ["llama", "llama_dynamic"])
def test_multiple_choice_agrees_with_transformers(kind: str, folder_of: FolderOf, theirs_of: TheirsOf) -> None:
    """Dynamic rotation makes keys depend on the prompt's length, so that options beyond it share nothing."""
    ours = LLM(str(folder_of(kind)), kv_cache_tokens=8192)
    g = torch.Generator().manual_seed(0)
    for length in (20, 126, 200):
        text = torch.randint(3, VOCAB, (length,), generator=g).tolist()
        options = [torch.randint(3, VOCAB, (n,), generator=g).tolist() for n in (1, 4, 4, 7)]
        want = []
        for option in options:
            with torch.inference_mode():
                table = theirs_of(kind)(torch.tensor([text + option])).logits[0].double().log_softmax(-1)
            want.append([float(table[length - 1 + i, token]) for i, token in enumerate(option)])
        scores = ours.score(text, options)
        for score, expected in zip(scores, want, strict=True):
            assert score.token_logprobs == pytest.approx(expected, abs=2e-4)
        for key in (lambda found: sum(found), lambda found: sum(found) / len(found)):
            best = max(range(4), key=lambda i: key(want[i]))
            assert max(range(4), key=lambda i: key(scores[i].token_logprobs)) == best
