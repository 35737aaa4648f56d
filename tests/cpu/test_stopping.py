"""When sequences end: tokens, length, and stop strings against their brute-force definition."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from headrace.engine.stopping import (
    Finish,
    StopMatcher,
    ends_sequence,
    finish_reason,
    forbidden_tokens,
)
from headrace.types import SamplingParams

EOS = (2, 7)


def test_below_min_tokens_all_that_could_end_the_sequence_is_forbidden() -> None:
    params = SamplingParams(min_tokens=3, stop_token_ids=(9, 2))
    assert forbidden_tokens(params, 2, EOS) == (2, 7, 9)
    assert forbidden_tokens(params, 3, EOS) == ()
    assert forbidden_tokens(SamplingParams(), 0, EOS) == ()


def test_ignore_eos_does_not_lift_min_tokens() -> None:
    assert forbidden_tokens(SamplingParams(min_tokens=1, ignore_eos=True), 0, EOS) == EOS


@pytest.mark.parametrize(
    ("params", "output", "expected"),
    [
        (SamplingParams(max_tokens=9), [5], None),
        (SamplingParams(max_tokens=9), [5, 7], Finish("stop", None)),
        (SamplingParams(max_tokens=9), [7, 5], None),
        (SamplingParams(max_tokens=9, ignore_eos=True), [5, 7], None),
        (SamplingParams(max_tokens=9, stop_token_ids=(4,)), [5, 4], Finish("stop", 4)),
        (SamplingParams(max_tokens=9, stop_token_ids=(7,)), [7], Finish("stop", None)),
        (SamplingParams(max_tokens=9, stop_token_ids=(7,), ignore_eos=True), [7], Finish("stop", 7)),
        (SamplingParams(max_tokens=9, min_tokens=2), [7], None),
        (SamplingParams(max_tokens=9, min_tokens=2), [5, 7], Finish("stop", None)),
        (SamplingParams(max_tokens=2), [5, 5], Finish("length", None)),
        (SamplingParams(max_tokens=2), [5, 7], Finish("stop", None)),
        (SamplingParams(max_tokens=2, ignore_eos=True), [5, 7], Finish("length", None)),
        (SamplingParams(max_tokens=None), [5] * 99, None),
    ],
)
def test_finish_reason(params: SamplingParams, output: list[int], expected: Finish | None) -> None:
    assert finish_reason(params, output[-1], len(output), EOS) == expected


def test_the_context_ends_a_sequence_as_max_tokens_does() -> None:
    for params in (SamplingParams(max_tokens=None), SamplingParams(max_tokens=50)):
        assert finish_reason(params, 5, 9, EOS, room=10) is None
        assert finish_reason(params, 5, 10, EOS, room=10) == Finish("length")
    assert finish_reason(SamplingParams(max_tokens=1), 5, 1, EOS, room=10) == Finish("length")


def test_ends_sequence_counts_from_one() -> None:
    assert not ends_sequence(SamplingParams(min_tokens=2), 7, 1, EOS)
    assert ends_sequence(SamplingParams(min_tokens=2), 7, 2, EOS)


# ---- stop strings ----------------------------------------------------------------------------------------------------

texts = st.text("ab", max_size=30)
stop_lists = st.lists(st.text("ab", min_size=1, max_size=9), min_size=1, max_size=4)


def first_completed(text: str, stops: list[str], begin: int = 0) -> tuple[int, str] | None:
    """The definition: the first character after `begin` that completes a stop string, and the longest one it does."""
    for end in range(begin + 1, len(text) + 1):
        done = [stop for stop in stops if text[:end].endswith(stop)]
        if done:
            return end, max(done, key=len)
    return None


def cut(text: str, places: list[int]) -> list[str]:
    edges = [0, *sorted(place % (len(text) + 1) for place in places), len(text)]
    return [text[a:b] for a, b in pairwise(edges)]


@given(texts, stop_lists, st.lists(st.integers(0, 99)))
@example("aabaaabaaaab", ["aabaaaab"], [3])
def test_matcher_finds_the_first_completed_stop_however_the_text_is_cut(
    text: str, stops: list[str], places: list[int]
) -> None:
    matcher, read, found = StopMatcher(stops), 0, None
    for piece in cut(text, places):
        if match := matcher.feed(piece):
            found = (read + match.end, match.stop)
            break
        read += len(piece)
    assert found == first_completed(text, stops)


@given(texts, texts, stop_lists)
def test_matcher_passes_over_stops_that_do_not_count_yet(early: str, late: str, stops: list[str]) -> None:
    matcher = StopMatcher(stops)
    assert matcher.feed(early, accept=False) is None
    match = matcher.feed(late)
    expected = first_completed(early + late, stops, begin=len(early))
    assert (match and (len(early) + match.end, match.stop)) == expected


@given(texts, stop_lists)
def test_pending_is_the_longest_end_that_may_begin_a_stop(text: str, stops: list[str]) -> None:
    matcher = StopMatcher(stops)
    matcher.feed(text, accept=False)
    beginnings = {stop[:n] for stop in stops for n in range(1, len(stop))}
    expected = max((len(b) for b in beginnings if text.endswith(b)), default=0)
    assert matcher.pending == expected


def test_a_long_repetitive_stop_costs_linear_time() -> None:
    matcher = StopMatcher(["a" * 20_000 + "b"])
    for _ in range(200):
        assert matcher.feed("a" * 1_000) is None
    assert matcher.pending == 20_000
    match = matcher.feed("b")
    assert match is not None and match.end == 1
