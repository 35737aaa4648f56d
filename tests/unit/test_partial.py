"""Chunks by their place: which of them begins most like a prompt."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from headrace.kv.node import Node
from headrace.kv.partial import PartialMatches, Place, common, words

HERE: Place = (b"parent", b"", b"")
THERE: Place = (b"parent", b"salt", b"")

few = st.lists(st.sampled_from([0, 1, 255, 256, 70_000]), min_size=1, max_size=6)


def node(number: int) -> Node:
    return Node(number, bytes([number]), None, None)


@given(one=few, other=few)
def test_common_is_the_length_of_the_common_beginning(one: list[int], other: list[int]) -> None:
    length = 0
    while length < min(len(one), len(other)) and one[length] == other[length]:
        length += 1
    assert common(words(one), words(other)) == length


@given(chunks=st.lists(few, max_size=12, unique_by=tuple), gone=st.sets(st.integers(0, 11)), wanted=few)
def test_the_longest_is_found_among_those_that_are_left(
    chunks: list[list[int]], gone: set[int], wanted: list[int]
) -> None:
    matches, nodes = PartialMatches(), [node(number) for number in range(len(chunks))]
    for each, tokens in zip(nodes, chunks, strict=True):
        matches.enter(each, HERE, tokens)
    for number in gone & set(range(len(nodes))):
        matches.leave(nodes[number])
    matches.check({each.digest or b"": each for number, each in enumerate(nodes) if number not in gone})
    left = [
        (common(words(tokens), words(wanted)), number) for number, tokens in enumerate(chunks) if number not in gone
    ]
    found, rows = matches.longest(HERE, words(wanted))
    assert rows == max([0, *(rows for rows, _ in left)])
    assert (found is None) == (rows == 0)
    assert found is None or common(words(chunks[found.slot]), words(wanted)) == rows


def test_another_place_has_other_chunks() -> None:
    matches, one = PartialMatches(), node(1)
    matches.enter(one, HERE, [1, 2, 3])
    assert matches.longest(THERE, words([1, 2, 3])) == (None, 0)
    assert matches.longest(HERE, words([1, 2, 4])) == (one, 2)


def test_it_keeps_nothing_of_chunks_that_have_left() -> None:
    matches, nodes = PartialMatches(), [node(number) for number in range(3)]
    for each in nodes:
        matches.enter(each, HERE, [each.slot])
    for each in nodes:
        matches.leave(each)
        matches.leave(each)  # as one that never was there
    assert not matches._places
