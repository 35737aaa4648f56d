"""Answers with a shape, by the engine: they have it, they end with it, and every schedule gives the same bits."""

from __future__ import annotations

import itertools
import json
import re
import threading
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import jsonschema
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from headrace import LLM, InvalidRequest, SamplingParams
from headrace.engine.structured import compile as compiling
from headrace.engine.structured.matcher import SequenceMatcher
from headrace.outputs import RequestOutput
from headrace.types import Structured
from tests.support.traces import Trace, engine, same, words

PROMPT = "The code of Lisbon is 4821. What is the code of Lisbon?"
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "favourite colour": {"enum": ["red", "green"]},
    },
    "required": ["name", "age", "favourite colour"],
    "additionalProperties": False,
}
FREE = Structured(regex=r"(.|\n)*")


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with engine() as made:
        yield made


@pytest.fixture(autouse=True)
def nothing_leaks(llm: LLM) -> Iterator[None]:
    yield
    llm.engine.scheduler.check()
    assert llm.engine.cache.used == 0 and not llm.engine.scheduler.has_work
    assert llm.engine.loaded.structured is None or not llm.engine.structured.held


def shaped(structured: Structured | None = None, **params: Any) -> SamplingParams:
    return SamplingParams(structured=structured, **{"temperature": 0.0, "max_tokens": 60, **params})


def ask(llm: LLM, structured: Structured, **params: Any) -> RequestOutput:
    return llm.generate(PROMPT, shaped(structured, **params))[0]


# ---- what an answer is -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("logprobs", [None, 1])
def test_answers_have_their_shape_and_end_with_it(temperature: float, logprobs: int | None, llm: LLM) -> None:
    more: Any = dict(temperature=temperature, seed=1, logprobs=logprobs)
    person = ask(llm, Structured(json=PERSON), **more)
    jsonschema.validate(json.loads(person.text), PERSON)
    code = ask(llm, Structured(regex="[0-9]{3}-[a-z]{4}"), **more)
    assert re.fullmatch("[0-9]{3}-[a-z]{4}", code.text)
    choice = ask(llm, Structured(choice=["Lisbon is far", "Paris is near"]), **more)
    assert choice.text in ("Lisbon is far", "Paris is near")
    grammar = ask(llm, Structured(grammar='start: "a" (" b" | " c")+ " d"'), **more)
    assert re.fullmatch("a( b| c)+ d", grammar.text) or grammar.finish_reason == "length"
    for output in (person, code, choice):
        assert output.finish_reason == "stop" and output.outputs[0].stop_reason is None
        if logprobs is not None:
            assert [token in row for token, row in zip(output.token_ids, output.logprobs or [], strict=True)]


def test_forced_tokens_are_appended_without_sampling(llm: LLM) -> None:
    """The keys of an object: fewer steps than tokens, and no others where log probabilities are asked for."""
    stats = llm.engine.stats
    steps, forced = stats().scheduler.steps, stats().structured.forced
    jumped = ask(llm, Structured(json=PERSON))
    steps, forced = stats().scheduler.steps - steps, stats().structured.forced - forced
    assert forced > 10 and steps <= len(jumped.token_ids) - forced // 2
    before = stats().structured.forced
    sampled = ask(llm, Structured(json=PERSON), logprobs=0)
    assert stats().structured.forced == before and len(sampled.logprobs or []) == len(sampled.token_ids)
    assert json.loads(sampled.text).keys() == json.loads(jumped.text).keys()
    assert sum(each.metrics.cached_tokens for each in (jumped, sampled)) <= 2 * len(jumped.prompt_token_ids)


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_a_shape_that_forbids_nothing_changes_no_bit(temperature: float, llm: LLM) -> None:
    """Tokens and log probabilities; the model draws no special token here, nor half a character."""
    for seed in range(3):
        params = [shaped(each, temperature=temperature, seed=seed, logprobs=2, n=2) for each in (None, FREE)]
        free, masked = llm.generate([PROMPT, PROMPT], params)
        assert [each.token_ids for each in free.outputs] == [each.token_ids for each in masked.outputs]
        assert [each.logprobs for each in free.outputs] == [each.logprobs for each in masked.outputs]
    plain = llm.generate([PROMPT] * 2, [shaped(), shaped(FREE)])
    assert plain[0].token_ids == plain[1].token_ids and plain[0].text == plain[1].text


# ---- how it ends -----------------------------------------------------------------------------------------------------


def test_max_tokens_cuts_forced_tokens(llm: LLM) -> None:
    text = "one two three four five six seven"
    whole = ask(llm, Structured(choice=[text]))
    assert whole.text == text and whole.finish_reason == "stop" and len(whole.token_ids) > 5
    assert not {*llm.capacity.eos_token_ids} & {*whole.token_ids}, "it ends without an end-of-text token"
    cut = ask(llm, Structured(choice=[text]), max_tokens=5)
    assert cut.token_ids == whole.token_ids[:5] and cut.finish_reason == "length" and text.startswith(cut.text)
    exact = ask(llm, Structured(choice=[text]), max_tokens=len(whole.token_ids))
    assert exact.finish_reason == "stop", "complete at the last possible token"


def test_stop_strings_within_forced_tokens(llm: LLM) -> None:
    text = "one two three four five six seven"
    output = ask(llm, Structured(choice=[text]), stop=["ee fo"])
    assert (output.text, output.finish_reason, output.outputs[0].stop_reason) == ("one two thr", "stop", "ee fo")
    assert llm.tokenizer is not None and "ee fo" in llm.tokenizer.decode(output.token_ids)
    late = ask(llm, Structured(choice=[text]), stop=["two"], min_tokens=5)
    assert late.text == text


@pytest.mark.parametrize("more", [dict(min_tokens=50), dict(ignore_eos=True), dict(min_tokens=50, ignore_eos=True)])
def test_the_grammar_wins_over_min_tokens_and_ignore_eos(more: dict[str, Any], llm: LLM) -> None:
    """An answer that may be longer goes on; one that has its whole shape ends, without the text of a token."""
    for structured in (Structured(regex="a|b"), Structured(regex="(a|b)?")):
        short = ask(llm, structured, skip_special_tokens=False, **more)
        assert short.text in ("a", "b") and short.finish_reason == "stop"
    empty = ask(llm, Structured(grammar='start: ""'), skip_special_tokens=False, **more)
    assert (empty.text, empty.finish_reason) == ("", "stop"), "the end-of-text token is all that is left"
    long = ask(llm, Structured(regex="[ab]*"), **{"min_tokens": 30, **more})
    assert len(long.token_ids) >= 30 and re.fullmatch("[ab]*", long.text)


def test_stop_tokens_that_the_grammar_has_no_place_for_are_never_drawn(llm: LLM) -> None:
    free = ask(llm, Structured(regex="[a-z ]{20}"))
    assert ask(llm, Structured(regex="[a-z ]{20}"), stop_token_ids=[free.token_ids[2]]).token_ids == free.token_ids[:3]
    assert ask(llm, Structured(regex="[a-z ]{20}"), stop_token_ids=[4]).text == free.text


def test_special_tokens_stand_in_the_text_where_they_are_asked_for(llm: LLM) -> None:
    grammar = 'start: thought <|user|> "done"\nthought[max_tokens=4]: /(.|\\n)*/'
    told = ask(llm, Structured(grammar=grammar), skip_special_tokens=False)
    thought, rest = told.text.split("<|user|>")
    assert rest == "done" and told.finish_reason == "stop" and llm.tokenizer is not None
    assert 0 < len(told.token_ids) - len(llm.tokenizer.encode("<|user|>done", add_special_tokens=False)) <= 4
    assert ask(llm, Structured(grammar=grammar)).text == thought + "done"


def test_a_model_without_end_of_text(monkeypatch: pytest.MonkeyPatch) -> None:
    with engine() as llm:
        loaded = llm.engine.loaded
        loaded.capacity = llm.capacity = replace(llm.capacity, eos_token_ids=())
        assert ask(llm, Structured(regex="ab?c")).finish_reason == "stop"
        empty = ask(llm, Structured(grammar='start: ""'))
        assert (empty.text, empty.token_ids, empty.finish_reason) == ("", [], "stop")


# ---- refusals and failures -------------------------------------------------------------------------------------------


def test_shapes_are_refused_at_the_door(llm: LLM) -> None:
    for wrong in (Structured(regex="[a-z"), Structured(json={"type": "objekt"}), Structured(grammar="start: nothing")):
        with pytest.raises(InvalidRequest) as refused:
            ask(llm, wrong)
        assert refused.value.param == "structured"


def test_a_grammar_that_fails_ends_its_request_alone(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """When it is compiled, and at a token later: refused by llguidance's limits, say."""
    truth = ask(llm, Structured(json=PERSON))
    monkeypatch.setattr(llm._shapes, "check", lambda *given: None)
    good, bad = shaped(Structured(json=PERSON)), shaped(Structured(regex="[a-z"), n=2)
    outputs = llm.generate([PROMPT, PROMPT, PROMPT], [good, bad, good])
    assert [each.token_ids for each in (outputs[0], outputs[2])] == [truth.token_ids] * 2
    for completion in outputs[1].outputs:
        assert completion.finish_reason == "abort" and "regex" in str(completion.stop_reason)

    push, begin, begun = SequenceMatcher.push, llm.engine.structured.begin, list[SequenceMatcher]()

    def note(sequence: Any) -> SequenceMatcher:
        begun.append(begin(sequence))
        return begun[-1]

    def fails(matcher: SequenceMatcher, token: int) -> list[int]:
        if matcher is begun[0]:
            matcher.fail("too complex")
        return push(matcher, token)

    monkeypatch.setattr(llm.engine.structured, "begin", note)
    monkeypatch.setattr(SequenceMatcher, "push", fails)
    broken, whole = llm.generate([PROMPT, PROMPT], [good, good])
    assert broken.finish_reason == "abort" and "too complex" in str(broken.outputs[0].stop_reason)
    assert whole.token_ids == truth.token_ids


def test_a_token_that_the_grammar_refuses_is_no_end(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """An end-of-text token that the mask allowed by a fault of llguidance, say; all of its request ends with it."""
    truth = ask(llm, Structured(json=PERSON), max_tokens=8)
    push, pushed = SequenceMatcher.push, dict[SequenceMatcher, int]()

    def refused(matcher: SequenceMatcher, token: int) -> list[int]:
        pushed[matcher] = pushed.get(matcher, 0) + 1
        (end,) = llm.capacity.eos_token_ids
        return push(matcher, end if matcher is next(iter(pushed)) and pushed[matcher] == 2 else token)

    monkeypatch.setattr(SequenceMatcher, "push", refused)
    broken, whole = llm.generate(
        [PROMPT] * 2, [shaped(Structured(json=PERSON), n=2), shaped(Structured(json=PERSON), max_tokens=8)]
    )
    assert [each.finish_reason for each in broken.outputs] == ["abort"] * 2
    assert "doesn't satisfy" in str(broken.outputs[0].stop_reason)
    assert len(broken.outputs[1].token_ids) < 60 and whole.token_ids == truth.token_ids


def test_prompts_are_read_while_a_grammar_is_compiled(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """To all but the last token; others decode meanwhile, and a grammar known before is not compiled again."""
    ready, grammar_of = threading.Event(), compiling.grammar_of

    def slow(structured: Structured, *added: Any) -> str:
        ready.wait()
        return grammar_of(structured, *added)

    monkeypatch.setattr("headrace.engine.structured.grammars.grammar_of", slow)
    core, tokens = llm.engine, words(llm, 300, seed=77)
    held = llm._request(tokens, shaped(Structured(regex="[a-f]{9}")), None, 0)
    other = llm._request(words(llm, 20, seed=78), shaped(max_tokens=8, ignore_eos=True), None, 0)
    compiled = core.stats().structured.grammars
    core.add(held)
    core.add(other)
    deltas = [delta for _ in range(12) for delta in core.step()]
    assert {delta.request_id for delta in deltas} == {other.request_id} and deltas[-1].finish_reason == "length"
    (sequence,) = core.scheduler.running
    assert sequence.held and sequence.computed == 299 and not core.step()
    ready.set()
    while core.has_work:
        deltas += core.step()
    assert re.fullmatch("[a-f]{9}", "".join(delta.text for delta in deltas if delta.request_id == held.request_id))
    llm.generate([tokens, tokens], shaped(Structured(regex="[a-f]{9}")))
    assert core.stats().structured.grammars == compiled + 1


def test_abort_while_a_grammar_is_compiled_and_while_tokens_are_forced(llm: LLM) -> None:
    for steps in range(8):
        request = llm._request(PROMPT, shaped(Structured(regex=f"[a-z]{{{steps + 3}}} one two three"), n=2), None, 0)
        llm.engine.add(request)
        for _ in range(steps):
            llm.engine.step()
        assert llm.engine.abort(request.request_id) or not llm.engine.has_work
        assert not llm.engine.has_work and llm.engine.cache.used == 0


# ---- the promise -----------------------------------------------------------------------------------------------------


def mixed(llm: LLM) -> tuple[list[list[int]], list[SamplingParams]]:
    """Prompts and parameters with shapes and without, some of them alike."""
    literal = " ".join(str(number) for number in range(40))
    shapes = [
        Structured(json=PERSON), None, Structured(json=PERSON),
        Structured(choice=[literal]), Structured(choice=[literal]),
        Structured(regex="[a-z]{1,9}( one two three four five six [a-z]+)*"), FREE, Structured(json_object=True),
    ]  # fmt: skip
    lengths = [3, 64, 65, 130, 130, 63, 200, 129]
    prompts = [words(llm, length, seed=length) for length in lengths]
    kinds = [dict(temperature=0.0), dict(temperature=0.9, seed=5)]
    return prompts, [shaped(each, ignore_eos=index % 3 == 0, **kinds[index % 2]) for index, each in enumerate(shapes)]


def traced(llm: LLM, prompts: list[list[int]], params: list[SamplingParams]) -> tuple[list[Trace], list[list[int]]]:
    """Logits of all steps that sampled, and the answers."""
    traces: list[Trace] = [{} for _ in prompts]
    first = llm._count + 1

    def keep(sequence: Any, position: int, logits: torch.Tensor) -> None:
        traces[int(sequence.request.request_id.rsplit("-", 1)[1]) - first][position + len(logits) - 1] = logits[
            -1
        ].clone()

    with llm._observed(keep):
        outputs = llm.generate(prompts, params)
    llm.engine.scheduler.check()
    assert llm.engine.cache.used == 0
    return traces, [output.token_ids for output in outputs]


@pytest.fixture(scope="module")
def truth(llm: LLM) -> tuple[list[Trace], list[list[int]]]:
    """Each alone, on an empty cache."""
    found: tuple[list[Trace], list[list[int]]] = [], []
    for prompt, params in zip(*mixed(llm), strict=True):
        llm.engine.cache.tree.clear()
        for all_of, one in zip(found, traced(llm, [prompt], [params]), strict=True):
            all_of += one  # type: ignore[arg-type]
    return found


def test_batched_and_cached_are_the_same_as_alone(llm: LLM, truth: tuple[list[Trace], list[list[int]]]) -> None:
    llm.engine.cache.tree.clear()
    for _ in range(2):
        traces, answers = traced(llm, *mixed(llm))
        assert answers == truth[1]
        same(traces, truth[0])
    assert sum(map(len, answers)) - sum(map(len, truth[0])) > 60, "many were forced, and had no logits"


SCHEDULES: dict[str, dict[str, Any]] = {
    "slices of 9": dict(max_batch_tokens=9),
    "slices of 64": dict(max_batch_tokens=64),
    "unshared": dict(enable_prefix_caching=False),
    "preempted": dict(max_batch_tokens=20),
    "one at a time": dict(max_sequences=1),
    "streamed": dict(kv_cache_tokens=4096, kv_offloading_size=0.5, offload_schedule="row"),
}


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_every_schedule_gives_the_same_bits(
    schedule: str, llm: LLM, truth: tuple[list[Trace], list[list[int]]]
) -> None:
    with engine(**SCHEDULES[schedule]) as other:
        if schedule == "preempted":
            preempt_often(other)
        traces, answers = traced(other, *mixed(llm))
        assert answers == truth[1]
        same(traces, truth[0])


def preempt_often(llm: LLM) -> None:
    """The sequences in turn, before every third step: in the midst of forced tokens, too."""
    scheduler, steps = llm.engine.scheduler, itertools.count(1)
    schedule = scheduler.schedule

    def disturbed() -> Any:
        if (step := next(steps)) % 3 == 0 and scheduler.running:
            scheduler._preempt(scheduler.running[step % len(scheduler.running)])
        return schedule()

    scheduler.schedule = disturbed  # type: ignore[method-assign]


# ---- any schema ------------------------------------------------------------------------------------------------------

NAMES = st.text('abc é"{', min_size=1, max_size=12)
LEAVES = st.one_of(
    st.just({"type": "boolean"}),
    st.just({"type": "null"}),
    st.builds(lambda low: {"type": "integer", "minimum": low, "maximum": low + 30}, st.integers(-50, 50)),
    st.builds(lambda most: {"type": "string", "maxLength": most}, st.integers(0, 6)),
    st.builds(lambda texts: {"enum": texts}, st.lists(NAMES, min_size=1, max_size=3, unique=True)),
    st.builds(lambda text: {"const": text}, NAMES),
)


def objects(inner: st.SearchStrategy[dict[str, Any]]) -> st.SearchStrategy[dict[str, Any]]:
    return st.builds(
        lambda properties: {
            "type": "object", "properties": properties, "required": sorted(properties), "additionalProperties": False,
        },
        st.dictionaries(NAMES, inner, min_size=1, max_size=3),
    )  # fmt: skip


def arrays(inner: st.SearchStrategy[dict[str, Any]]) -> st.SearchStrategy[dict[str, Any]]:
    return st.builds(lambda items: {"type": "array", "items": items, "maxItems": 2}, inner)


SCHEMAS = st.recursive(LEAVES, lambda inner: objects(inner) | arrays(inner), max_leaves=5)


@settings(max_examples=12, suppress_health_check=list(HealthCheck))
@given(schemas=st.lists(SCHEMAS, min_size=2, max_size=3), seed=st.integers(0, 99))
def test_answers_to_any_schema_fit_it_and_are_the_same_alone(schemas: list[Any], seed: int, llm: LLM) -> None:
    params = [shaped(Structured(json=each), temperature=1.0, seed=seed, max_tokens=120) for each in schemas]
    together = llm.generate([PROMPT] * len(schemas), params)
    for schema, each, output in zip(schemas, params, together, strict=True):
        if output.finish_reason == "stop":
            jsonschema.validate(json.loads(output.text), schema)
        else:
            assert output.finish_reason == "length"
        assert llm.generate([PROMPT], each)[0].token_ids == output.token_ids
