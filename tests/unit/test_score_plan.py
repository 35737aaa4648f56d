"""Scores as requests: what is tokenized with what, which request reports what, what is refused. No model."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncGenerator, Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.config.server import ServerSettings
from headrace.engine import scoring
from headrace.engine.async_scores import Places, all_of
from headrace.engine.scoring import Joined, ScoreAborted, ScorePlan, at_once, plan_score
from headrace.types import Delta, InvalidRequest, Logprob, Overloaded, SamplingParams, TokenLogprobs


class Words:
    """A token is a word with the space before it, or a run of spaces; a number stands for each. 1 begins a text."""

    def __init__(self, bos: bool = True) -> None:
        self.bos = bos
        self.ids: dict[str, int] = {}
        self.characters = 0

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        self.characters += len(text)
        found = [self.ids.setdefault(piece, 2 + len(self.ids)) for piece in re.findall(r" ?\S+|\s+(?!\S)|\s", text)]
        return [1, *found] if self.bos and add_special_tokens else found


def told(plan: ScorePlan) -> list[tuple[int, int, int]]:
    """Of each request its tokens, the first position of the prompt that it reports, and what it shares."""
    return [(len(r.token_ids), r.params.prompt_logprobs_start, r.shared) for r in plan.requests]


def test_one_request_reads_the_text_and_one_each_option() -> None:
    plan = plan_score([5, 6, 7], [[8, 9], [10], [8, 11, 12]], None)
    assert told(plan) == [(3, 0, 0), (5, 4, 3), (6, 4, 3)], "an option of one token needs no request"
    first = plan.requests[0].params
    assert (first.max_tokens, first.logprob_token_ids) == (1, (8, 10))
    assert all(r.params.max_tokens == 0 for r in plan.requests[1:])


def test_scores_are_put_together() -> None:
    def row(*tokens: int, rank: int = 1) -> TokenLogprobs:
        return {token: Logprob(-float(token), rank) for token in tokens}

    plan = plan_score([5, 6, 7], [[8, 9], [10]], None)
    scores = plan.scores([[row(8, 10)], [None, None, None, None, row(9, rank=3)]])
    assert [s.token_logprobs for s in scores] == [[-8.0, -9.0], [-10.0]]
    assert [s.greedy for s in scores] == [False, True] and scores[0].mean_logprob == -8.5
    assert repr(scores[0]) == "Score(-17.0000, 2 tokens)"
    with pytest.raises(ScoreAborted):
        plan.scores([[row(8, 10)], []])


def test_a_few_prompts_are_put_together_at_a_time() -> None:
    plan = plan_score([5] * 10, [[6, 7]] * 7, None)
    assert [len(group) for group in plan.groups()] == [8]
    for most, want in ((36, [3, 3, 2]), (1, [1] * 8), (12, [1] * 8), (22, [2] + [1] * 6)):
        groups = list(plan.groups(most))
        assert [len(group) for group in groups] == want
        assert [each for group in groups for each in group] == plan.requests


def test_prompts_whose_keys_depend_on_their_length_report_all_themselves() -> None:
    plan = plan_score([5] * 10, [[6], [6, 7, 8]], None, alike=12)
    assert told(plan) == [(10, 0, 0), (13, 10, 10)]
    assert told(plan_score([5] * 12, [[6], [7]], None, alike=12)) == [(13, 12, 0), (13, 12, 12)]


def test_options_that_invoke_an_adapter_report_all_themselves() -> None:
    """What begins in an option, or across the seam, begins later than in the text, or there alone."""
    plan = plan_score([5, 6, 9, 5], [[6, 7], [7, 6], [5, 6], [6], [8]], None, invocation=(5, 6))
    assert told(plan) == [(4, 0, 0), (6, 4, 4), (6, 5, 4), (6, 4, 4), (5, 4, 4)]
    assert plan.requests[0].params.logprob_token_ids == (7, 8)
    assert told(plan_score([9], [[5, 6]], None, invocation=(5, 6))) == [(3, 1, 0)], "the text alone invokes nothing"


@pytest.mark.parametrize("space", ["", " "])
def test_spaces_at_the_seam_are_the_options(space: str) -> None:
    words = Words()
    plan = plan_score("the code is" + space, [" 4" if not space else "4"], words)
    assert plan.options[0].token_ids == [words.ids[" 4"]] and plan.options[0].start == 4


def test_a_word_that_is_joined_is_the_options() -> None:
    words = Words()
    plan = plan_score("the beg", ["inning of", " of"], words)
    assert [(o.start, o.token_ids) for o in plan.options] == [
        (2, [words.ids[" beginning"], words.ids[" of"]]),
        (3, [words.ids[" of"]]),
    ]
    assert told(plan) == [(3, 0, 0), (4, 2, 2)]


def test_strings_beside_token_ids_are_tokenized_by_themselves() -> None:
    words = Words()
    assert plan_score([5, 6], ["b", [7]], words).options[0].token_ids == [words.ids["b"]]
    assert plan_score("a b", [[7, 8]], words).options[0].token_ids == [7, 8]


def test_only_the_texts_end_is_tokenized_with_each_option() -> None:
    words, text = Words(), "word " * 10_000 + "end"
    plan = plan_score(text, [f" option {i}" for i in range(100)], words)
    assert words.characters < len(text) + 2 * scoring.TAIL + 100 * (scoring.TAIL + 20)
    assert all(option.start == len(plan.text) for option in plan.options)


def test_a_text_without_a_place_to_cut_is_bounded() -> None:
    with pytest.raises(InvalidRequest) as caught:
        plan_score("x" * 50_000, ["a"] * 100, Words())
    assert caught.value.param == "text" and "token ids" in str(caught.value)


@given(st.text("ab ", max_size=700), st.text("ab ", min_size=1, max_size=9), st.booleans())
def test_the_tokens_are_those_of_text_and_option_together(text: str, option: str, bos: bool) -> None:
    words = Words(bos)
    whole = words.encode(text + option)
    try:
        plan = plan_score(text, [option], words)
    except InvalidRequest:
        assert not words.encode(text) or whole[0] != words.encode(text)[0]
        return
    assert plan.text[: plan.options[0].start] + plan.options[0].token_ids == whole
    assert plan.options[0].start == len(plan.text) or whole[plan.options[0].start] != plan.text[plan.options[0].start]


@pytest.mark.parametrize(
    ("text", "options", "param"),
    [
        ("a", [], "options"),
        ("a", "b", "options"),
        ("a", [[]], "options"),
        ("a", ["b"] * 1025, "options"),
        ([], [[1]], "text"),
        ([1.5], [[1]], "text"),
        ([1], [[True]], "options"),
    ],
)
def test_refusals(text: object, options: object, param: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        plan_score(text, options, Words())  # type: ignore[arg-type]
    assert caught.value.param == param


def test_strings_need_a_tokenizer() -> None:
    for text, options in (("a", [[1]]), ([1], ["a"])):
        with pytest.raises(InvalidRequest, match="token ids"):
            plan_score(text, options, None)  # type: ignore[arg-type]


def test_prompts_are_put_together_where_they_are_used() -> None:
    joined = Joined([1, 2, 3], [4, 5])
    assert list(joined) == [1, 2, 3, 4, 5] and len(joined) == 5 and (joined[0], joined[-1]) == (1, 5)
    for where in (slice(0, 2), slice(2, 4), slice(-2, None), slice(None, None, 2), slice(4, 1)):
        assert joined[where] == [1, 2, 3, 4, 5][where]
    assert (joined.text, joined.option) == ([1, 2, 3], [4, 5])


@pytest.mark.parametrize(
    ("text", "options", "param"),
    [
        ([1, 400], [[2], [3]], "text"),
        ([1], [[2], [400]], "options"),
        ([1], [[2], [3, 400]], "options"),
        ([1] * 10, [[2], [3] * 6, [4] * 7], "options"),
        ([1] * 16, [[2]], "text"),
    ],
)
def test_what_the_engine_cannot_take_is_named(text: list[int], options: list[list[int]], param: str) -> None:
    def check(tokens: list[int], params: SamplingParams) -> SamplingParams:
        if max(tokens) > 300 or len(tokens) + (params.max_tokens or 0) > 16:
            raise InvalidRequest("no", "prompt", "why")
        return params

    plan = plan_score(text, options, None)
    with pytest.raises(InvalidRequest, match=r"options\[[12]\]: no" if param == "options" else "^no") as caught:
        plan.check(check)
    assert (caught.value.param, caught.value.code) == (param, "why")


def test_at_once_leaves_places_for_others() -> None:
    limits = dict(max_queued_requests=512, max_queued_tokens=10**6)
    assert at_once(102, 256, ServerSettings(**limits)) == 256
    assert at_once(102, 256, ServerSettings(**{**limits, "max_queued_requests": 10})) == 5
    assert at_once(102, 256, ServerSettings(**{**limits, "max_queued_tokens": 2040})) == 10
    assert at_once(102, 256, ServerSettings(**{**limits, "max_queued_tokens": 1})) == 1


@pytest.mark.parametrize(("full", "refused"), [({3, 4, 9}, False), ({0}, True), ({1}, True)])
def test_a_queue_that_fills_meanwhile_delays(full: set[int], refused: bool) -> None:
    """What was told at once still is: a caller with two of ten requests in the queue waits for places for the rest."""
    calls: list[int] = []
    taken: list[Delta] = []

    async def stream(queued: Callable[[], None]) -> AsyncGenerator[Delta, None]:
        calls.append(len(calls))
        if calls[-1] in full:
            raise Overloaded("full", 0.001)
        queued()
        await asyncio.sleep(0.001)
        yield Delta("a", 0, finish_reason="length")

    async def ten() -> None:
        places = Places(2)
        await all_of(places.run(stream, taken.append) for _ in range(10))

    if refused:
        with pytest.raises(Overloaded):
            asyncio.run(ten())
        assert len(calls) <= 4
    else:
        asyncio.run(ten())
        assert (len(taken), len(calls)) == (10, 13)
