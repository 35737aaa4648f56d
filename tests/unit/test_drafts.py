"""Drafts: matchers against slow truths, and how many tokens of a draft pay."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from headrace.engine.speculation.lengths import Acceptance, allot
from headrace.engine.speculation.ngram import LEAST, MOST, NgramMatcher, following
from headrace.engine.speculation.suffix import CATCH_UP, Cursor, Remembered, SuffixAutomaton, SuffixMatcher

TEXTS = st.lists(st.integers(0, 3), max_size=60)


def ends(text: list[int], part: list[int]) -> list[int]:
    """Where a part ends in a text."""
    return [end for end in range(len(part), len(text) + 1) if text[end - len(part) : end] == part]


def longest(text: list[int], tail: list[int]) -> int:
    """Of the ends of `tail`, the longest that stands in the text."""
    return max(length for length in range(len(tail) + 1) if ends(text, tail[len(tail) - length :]))


@given(TEXTS)
def test_the_automaton_finds_the_longest_end_that_stood_before(text: list[int]) -> None:
    automaton = SuffixAutomaton()
    for count, token in enumerate(text, 1):
        length, end = automaton.append(token)
        seen = text[:count]
        assert length == longest(seen[:-1], seen), "all but the newest place"
        assert not length or end in ends(seen[:-1], seen[count - length :])


@given(TEXTS, TEXTS, st.integers(0, 60))
def test_a_cursor_follows_another_text_while_the_automaton_grows(text: list[int], other: list[int], late: int) -> None:
    automaton = SuffixAutomaton()
    for token in text[:late]:
        automaton.append(token)
    cursor = Cursor(automaton)
    rest = iter(text[late:])
    for count, token in enumerate(other, 1):
        seen = list(automaton.tokens)
        cursor.step(token)
        assert cursor.matched <= longest(seen, other[:count])
        if late >= len(text):
            assert cursor.matched == longest(seen, other[:count])
        if cursor.matched:
            assert cursor.end in ends(automaton.tokens, other[count - cursor.matched : count])
        automaton.append(next(rest, 9))


@given(TEXTS, st.integers(1, 8))
def test_ngrams_propose_what_followed_the_longest_match(text: list[int], most: int) -> None:
    draft = NgramMatcher().propose(text, most)
    length = min(MOST, longest(text[:-1], text)) if text else 0
    if length < LEAST:
        assert draft == []
        return
    last = ends(text[:-1], text[len(text) - length :])[-1]
    assert draft == following(text, last, most) and len(draft) == most


@given(st.lists(TEXTS, min_size=1, max_size=4))
def test_a_matcher_may_be_asked_at_any_length(parts: list[list[int]]) -> None:
    grown: list[int] = []
    matcher = NgramMatcher()
    for part in parts:
        grown += part
        assert matcher.propose(grown, 4) == NgramMatcher().propose(grown, 4)


def test_what_repeats_goes_on_beyond_its_end() -> None:
    assert following([7, 1, 2, 3], 1, 8) == [1, 2, 3, 1, 2, 3, 1, 2]
    assert following([1, 2], 2, 3) == []


def test_earlier_answers_of_the_tenant_are_repeated_and_not_beyond_their_ends() -> None:
    earlier = Remembered()
    earlier.add([5, 6, 7, 8])
    earlier.add([9, 9, 9])
    matcher = SuffixMatcher(earlier)
    assert matcher.propose([1, 5, 6, 7], 4) == [8]
    assert SuffixMatcher(Remembered()).propose([1, 5, 6, 7], 4) == []


def test_a_long_prompt_is_taken_in_bit_by_bit() -> None:
    prompt = [*range(CATCH_UP), 0, 1, 2]
    matcher = SuffixMatcher(Remembered())
    assert matcher.propose(prompt, 2) == []
    assert matcher.propose(prompt, 2) == [3, 4]


def test_old_answers_make_room() -> None:
    earlier = Remembered()
    for number in range(5):
        earlier.add([number] * 20_000)
    assert len(earlier.old.tokens) + len(earlier.young.tokens) <= 4 * 20_000


@given(st.lists(st.tuples(st.floats(0, 1), st.integers(0, 8)), max_size=6), st.floats(0.001, 1.0), st.integers(0, 4))
def test_rows_are_added_while_they_pay(asked: list[tuple[float, int]], row: float, others: int) -> None:
    shares, drafts = [share for share, _ in asked], [count for _, count in asked]
    decoding = len(asked) + others
    taken = allot(decoding, shares, drafts, row)
    assert all(0 <= got <= most for got, most in zip(taken, drafts, strict=True))

    def rate(counts: list[int]) -> float:
        tokens = decoding + sum(share**j for share, got in zip(shares, counts, strict=True) for j in range(1, got + 1))
        return tokens / (1 + row * sum(counts))

    if decoding:
        assert rate(taken) >= rate([0] * len(asked)) - 1e-9
        for i in range(len(asked)):
            for step in (-1, 1):
                near = [count + step * (j == i) for j, count in enumerate(taken)]
                if 0 <= near[i] <= drafts[i]:
                    assert rate(taken) >= rate(near) * (1 - 1e-9)


def test_a_sequence_that_does_not_repeat_itself_is_left_alone_and_tried_again() -> None:
    acceptance = Acceptance()
    assert acceptance.share == 0.5
    for _ in range(20):
        acceptance.note(4, 0)
    assert acceptance.share < 0.05 and not allot(1, [acceptance.share], [8], 0.05)[0]
    waited = 0
    while not allot(1, [acceptance.share], [8], 0.05)[0]:
        acceptance.rest()
        waited += 1
    assert 50 < waited < 1000


@given(st.floats(0, 1), st.integers(0, 8), st.floats(0.001, 1.0))
def test_rows_that_are_computed_again_are_counted_in(share: float, most: int, row: float) -> None:
    """As many are drafted as make most tokens of a second, if a step costs what its draft leaves to be done, too."""

    def rate(count: int) -> float:
        again = sum(a * share**a * (1 - share) for a in range(count))
        return sum(share**j for j in range(count + 1)) / (1 + row * (count + again))

    (taken,) = allot(1, [share], [most], row, again=True)
    assert taken <= allot(1, [share], [most], row)[0]
    assert all(rate(count) <= rate(taken) * (1 + 1e-9) for count in range(taken))
    assert taken == most or rate(taken + 1) <= rate(taken) * (1 + 1e-9)
