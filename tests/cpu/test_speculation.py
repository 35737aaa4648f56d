"""Speculation changes the number of steps and nothing else: tokens, log probabilities and logits to the bit."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from headrace import LLM, SamplingParams
from headrace.kv.partial import LEAST
from headrace.types import CHUNK, Structured
from tests.support.drafting import abort_one_by_one, answered, drafts_from, free_rows
from tests.support.traces import GREEDY, Trace, engine, prompts_of, run, same

LONG = replace(GREEDY, max_tokens=70)
PARAMS = {
    "greedy": LONG,
    "seeded": replace(LONG, temperature=0.9, seed=7, top_p=0.9),
    "logprobs": replace(LONG, logprobs=3),
    "penalties": replace(LONG, repetition_penalty=1.2, frequency_penalty=0.3, presence_penalty=0.1),
    "several": replace(LONG, temperature=0.8, seed=3, n=3),
    "forbidden": replace(LONG, ignore_eos=False, min_tokens=30, logit_bias={5: 3.0}),
    "grammar": replace(
        LONG, ignore_eos=False, structured=Structured(regex=r"[a-z ]{3,9}: the end of it. [A-z ]{60,80}")
    ),
    "grammar-logprobs": replace(LONG, ignore_eos=False, logprobs=1, structured=Structured(regex=r"[a-z ]{30,40}")),
}


@pytest.fixture(scope="module")
def llm() -> LLM:
    return engine()


def told(llm: LLM, prompts: list[list[int]], params: SamplingParams) -> list[Any]:
    """All that clients see of the answers."""
    outputs = llm.generate(prompts, params)
    llm.engine.scheduler.check()
    assert llm.engine.cache.used == 0
    return [
        (one.token_ids, one.text, one.logprobs, one.finish_reason, one.stop_reason)
        for output in outputs
        for one in output.outputs
    ]


def speculating(llm: LLM, known: list[list[int]], **settings: Any) -> LLM:
    made = engine(speculative="ngram", **settings)
    drafts_from(made, known)
    return made


@pytest.mark.parametrize("kind", PARAMS)
def test_answers_are_those_without(kind: str, llm: LLM) -> None:
    """Sixteen together, and one alone."""
    prompts, params = prompts_of(llm), PARAMS[kind]
    truth = told(llm, prompts, params)
    drafting = speculating(llm, [prompts[i // params.n] + list(one[0]) for i, one in enumerate(truth)])
    assert told(drafting, prompts, params) == truth
    assert told(drafting, prompts[3:4], params) == truth[3 * params.n : 4 * params.n]
    stats = drafting.engine.stats().speculation
    assert 0 < stats.accepted < stats.drafted


@pytest.mark.parametrize("method", ["ngram", "suffix"])
def test_text_that_repeats_itself_takes_fewer_steps(method: str, llm: LLM) -> None:
    base = prompts_of(llm)[6]
    prompts = [base * 3, base * 2 + base[:20]]
    truth = told(llm, prompts, LONG)
    drafting = engine(speculative=method)
    free_rows(drafting)
    assert told(drafting, prompts, LONG) == truth
    before = drafting.engine.stats().scheduler.steps
    assert told(drafting, prompts, LONG) == truth
    assert drafting.engine.stats().speculation.accepted > 0
    if method == "suffix":  # the second time the answer is known
        assert drafting.engine.stats().scheduler.steps - before < 45


def whole(llm: LLM) -> tuple[list[Trace], list[list[int]]]:
    prompts = prompts_of(llm)
    truth = run(llm, prompts, LONG)
    return truth, [answered(prompt, trace) for prompt, trace in zip(prompts, truth, strict=True)]


@pytest.mark.parametrize("settings", [{}, {"kv_cache_tokens": 1280, "max_batch_tokens": 96}], ids=["roomy", "tight"])
def test_logits_are_those_without(settings: dict[str, Any], llm: LLM) -> None:
    """And preempted, with budgets that cut drafts."""
    truth, known = whole(llm)
    drafting = speculating(llm, known, **settings)
    same(run(drafting, prompts_of(llm), LONG), truth)
    stats = drafting.engine.stats()
    assert stats.speculation.accepted > 100
    assert (stats.scheduler.preemptions > 0) == bool(settings)


def test_what_is_kept_of_an_answer_is_what_was_drawn(llm: LLM) -> None:
    """A chunk that a rejected row has touched gets no name until it is written anew: later requests that go on from
    the answer compute what they would without."""
    _, known = whole(llm)
    further = [each[:-1] for each in known if len(each) > 2 * CHUNK]
    truth = run(engine(enable_prefix_caching=False), further, GREEDY)
    drafting = speculating(llm, known)
    run(drafting, prompts_of(llm), LONG)
    before = drafting.engine.stats().tokens.cached
    same(run(drafting, further, GREEDY), truth)
    kept = [len(each) - 1 if (len(each) - 1) % CHUNK >= LEAST else (len(each) - 1) // CHUNK * CHUNK for each in further]
    assert drafting.engine.stats().tokens.cached - before == sum(kept)


def test_abort_in_the_middle(llm: LLM) -> None:
    _, known = whole(llm)
    drafting = speculating(llm, known)
    abort_one_by_one(drafting, prompts_of(llm), LONG, 12)
    assert drafting.engine.stats().speculation.accepted > 0
