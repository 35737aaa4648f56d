"""Rows that prompts copy instead of computing them, without a model: the memory shows whether they are right."""

from __future__ import annotations

import pytest

from headrace.engine.fairness import FairScheduler
from headrace.engine.row_copies import WAITS
from headrace.kv.cache import KVCache
from headrace.kv.partial import LEAST, PartialMatches
from headrace.types import CHUNK
from tests.support.scheduler_harness import Harness, prompt

TEXT = prompt(2 * CHUNK + 40, seed=5)
"""A document that ends within a chunk."""


def pool(**settings: int) -> Harness:
    return Harness(**{"chunks": 100, "budget": 1000, **settings}, copies=True)


def computed(harness: Harness, *prompts: list[int], answer: int = 1, salt: str | None = None) -> int:
    """Prompt tokens that these take, asked at once and answered."""
    before = harness.prefilled
    for tokens in prompts:
        harness.add(tokens, answer, salt)
    harness.finish()
    return harness.prefilled - before - len(prompts) * (answer - 1)


def copied(harness: Harness) -> int:
    assert harness.scheduler.rows is not None
    return harness.scheduler.rows.copied


def test_another_question_on_a_document_is_computed_alone() -> None:
    harness = pool()
    assert computed(harness, TEXT + [1] * 30) == len(TEXT) + 30
    assert computed(harness, TEXT + [2] * 30) == 30
    assert copied(harness) == 40


def test_the_same_prompt_again_takes_one_row() -> None:
    """In a chunk that is not whole, and in one that is."""
    for length in (len(TEXT), 2 * CHUNK, CHUNK):
        harness = pool()
        assert computed(harness, TEXT[:length]) == length
        assert computed(harness, TEXT[:length]) == 1


def test_answers_to_one_prompt_compute_it_once() -> None:
    harness = pool()
    assert computed(harness, *[TEXT] * 5, answer=10) == len(TEXT) + 4


def test_a_turn_of_a_chat_finds_the_answer_before_it() -> None:
    harness = pool()
    first = harness.add(TEXT, 50)
    harness.finish()
    assert computed(harness, first.tokens + [3] * 20) == 21, "the last token of an answer has no row"


def test_a_prompt_waits_for_one_step_and_once() -> None:
    harness = pool()
    one, other = (harness.add([*TEXT, last], 5) for last in (1, 2))
    assert [part.sequence for part in harness.step()] == [one]
    harness.abort(one)
    assert [(part.sequence, part.length) for part in harness.step()] == [(other, 1)], "the first left its tail behind"
    harness.finish()


def test_a_prompt_that_waited_for_nothing_goes_on() -> None:
    """The other is gone, and so is what it computed."""
    harness = pool()
    one, other = (harness.add([*TEXT, last], 5) for last in (1, 2))
    harness.step()
    harness.abort(one)
    harness.cache.tree.clear()
    assert [(part.sequence, part.length) for part in harness.step()] == [(other, 41)]
    harness.finish()


def test_a_prompt_does_not_wait_again_for_one_that_overtakes_it() -> None:
    harness = Harness(100, 1000, policy=FairScheduler, copies=True)
    one, other = (harness.add([*TEXT, last], 5) for last in (1, 2))
    harness.step()
    harness.abort(one)
    harness.cache.tree.clear()
    hurried = harness.add([*TEXT, 3], 5, priority=-5)
    assert [(part.sequence, part.length) for part in harness.step()] == [(hurried, 41), (other, 41)]
    harness.finish()


@pytest.mark.parametrize("rows", [WAITS - 1, WAITS])
def test_a_few_rows_are_not_waited_for(rows: int) -> None:
    harness = pool()
    sequences = [harness.add([*TEXT[: 2 * CHUNK + rows], last], 5) for last in (1, 2)]
    first = [part.sequence for part in harness.step()]
    assert first == (sequences if rows < WAITS else sequences[:1])
    harness.finish()


@pytest.mark.parametrize("rows", [LEAST - 1, LEAST])
def test_a_few_rows_are_not_copied(rows: int) -> None:
    harness = pool()
    computed(harness, TEXT[:rows] + [1] * 80)
    assert computed(harness, TEXT[:rows] + [2] * 80) == 80 + (rows if rows < LEAST else 0)


def test_what_is_computed_in_this_step_is_not_copied_yet() -> None:
    """Two budgets of a prompt, the second of which another one could want."""
    harness = pool(budget=2 * CHUNK + 20)
    one, other = (harness.add([*TEXT, *[last] * 60], 1) for last in (1, 2))
    harness.step()
    harness.step()
    harness.finish()
    assert (one.cached_tokens, other.cached_tokens) == (0, len(TEXT))


def test_a_chunk_that_another_has_attached_may_be_coming_still() -> None:
    """The second takes the first one's second chunk, which this step computes, and waits for its third; the other two
    want rows of the second."""
    harness = pool()
    sequences = [harness.add(tokens, 5) for tokens in ([*TEXT, 1], [*TEXT, 2], TEXT[:100], TEXT[:110])]
    assert [part.sequence for part in harness.step()] == sequences[:1]
    assert sum(part.length for part in harness.step()) == 4
    harness.finish()


def test_tenants_meet_each_others_rows_in_the_public_prefix_alone() -> None:
    harness = pool()
    first = [*TEXT, *[1] * 60]
    assert computed(harness, first, salt="a") == len(first)
    assert computed(harness, [*TEXT, *[2] * 60], salt="b") == len(first)
    assert computed(harness, [*TEXT, *[3] * 60], salt="a") == 60
    public = {name: harness.add(TEXT[:100] + [last] * 50, 1, name, public=CHUNK) for name, last in (("c", 4), ("d", 5))}
    harness.finish()
    assert [public[name].cached_tokens for name in "cd"] == [0, CHUNK], "of its second chunk nothing is public"


def test_nothing_is_copied_where_nothing_is_shared() -> None:
    harness = Harness(100, 1000, shares=False, copies=True)
    computed(harness, TEXT)
    assert computed(harness, TEXT) == len(TEXT) and copied(harness) == 0


# ---- tails -----------------------------------------------------------------------------------------------------------


def tails(harness: Harness) -> list[int]:
    return [node.rows for node in harness.cache.tree.nodes.values() if not node.whole]


def test_a_tail_is_left_behind_once() -> None:
    harness = pool()
    for _ in range(2):
        computed(harness, TEXT)
        assert tails(harness) == [40]
    computed(harness, TEXT[: 2 * CHUNK + 20])
    assert tails(harness) == [40], "a shorter one is part of it"


def test_a_tail_goes_where_it_is_copied_whole() -> None:
    harness = pool()
    computed(harness, TEXT)
    computed(harness, [*TEXT, *[2] * 10])
    assert tails(harness) == [50], "that of the second begins with it"


def test_whole_chunks_do_not_go() -> None:
    harness = pool()
    computed(harness, TEXT)
    before = list(harness.cache.tree.nodes.values())
    for node in before:
        harness.cache.tree.drop(node)
    assert list(harness.cache.tree.nodes.values()) == [node for node in before if node.whole]
    harness.scheduler.check()


def test_a_table_of_nothing_leaves_nothing() -> None:
    harness = pool()
    harness.cache.close(harness.cache.open([]))
    assert tails(harness) == []


def test_tails_are_evicted_before_what_is_before_them() -> None:
    harness = pool(chunks=4)
    computed(harness, TEXT)
    assert tails(harness) == [40]
    computed(harness, prompt(70, seed=6))
    assert len(harness.cache.tree.idle) == 3 and tails(harness) == [], "of the other prompt six rows are not kept"
    assert computed(harness, [*TEXT[: 2 * CHUNK], 1]) == 1


def test_a_tail_leaves_before_older_whole_chunks() -> None:
    """It serves one prompt, where they may serve many: a pool that is full keeps no more of tails than has room."""
    harness = pool(chunks=4)
    computed(harness, older := prompt(CHUNK + 6, seed=6))
    computed(harness, TEXT)
    assert tails(harness) == [40] and len(harness.cache.tree.idle) == 4, "the pool is full"
    computed(harness, prompt(60, seed=8))
    assert tails(harness) == [60], "the newest has room where the one before it was"
    assert computed(harness, older) == 6 and tails(harness) == []
    harness.scheduler.check()


def test_of_tails_the_least_recently_used_leaves_first() -> None:
    harness = pool(chunks=3)
    for rows in (20, 30, 40):
        computed(harness, prompt(rows, seed=rows))
    assert tails(harness) == [20, 30, 40], "the pool is full"
    computed(harness, prompt(50, seed=50))
    assert tails(harness) == [30, 40, 50]


def test_a_tail_outlives_the_chunks_before_it() -> None:
    """They may be evicted first. Computed again with what follows, they leave no second one."""
    harness = pool()
    computed(harness, TEXT)
    [tail] = [node for node in harness.cache.tree.nodes.values() if not node.whole]
    for node in [each for each in harness.cache.tree.nodes.values() if each.whole][::-1]:
        harness.cache.tree._evict(node)
    assert list(harness.cache.tree.nodes.values()) == [tail]
    assert computed(harness, TEXT) == len(TEXT) and tails(harness) == [40]


def test_the_rows_of_a_wrong_draft_are_not_left_behind() -> None:
    harness = Harness(100, 1000, drafts=True, copies=True)
    for seed in range(30):
        sequence = harness.add(prompt(60 + seed, seed), 40)
        harness.finish()
        longer = harness.add([*sequence.tokens, 1, 2, 3], 5)
        harness.finish()
        assert longer.cached_tokens > 0
    assert copied(harness) > 500


def test_the_newest_token_has_no_row_or_that_of_a_draft() -> None:
    """A sequence may end with a token that was drafted, in place of another one, before the draft is settled."""
    cache = KVCache(4)
    cache.tree.partial = PartialMatches()
    table = cache.open(prompt(100))
    assert cache.extend(table, 105, drafted=5)
    cache.commit()
    table.tokens += [1, 2]
    cache.close(table)
    assert [node.rows for node in cache.tree.nodes.values()] == [CHUNK, 101 - CHUNK]


def test_a_preempted_sequence_finds_its_own_tail() -> None:
    harness = pool()
    sequence = harness.add(TEXT, 50)
    for _ in range(10):
        harness.step()
    before = harness.prefilled
    harness.scheduler._preempt(sequence)
    harness.step()
    assert harness.prefilled - before == 1 and sequence.cached_tokens == 0


def test_rows_without_activations_make_a_chunk_without() -> None:
    harness = pool()
    computed(harness, TEXT)
    for node in harness.cache.tree.nodes.values():
        node.activations = node.whole
    sequence = harness.add([*TEXT, *[2] * 10], 5)
    harness.step()
    assert sequence.table is not None
    assert [node.activations for node in sequence.table.nodes] == [True, True, False]
    harness.finish()


def test_a_held_sequence_copies_all_but_its_last_token() -> None:
    harness = pool()
    computed(harness, TEXT)
    sequence = harness.add(TEXT, 3)
    sequence.held = True
    assert harness.scheduler.schedule() == [] and sequence.computed == len(TEXT) - 1
    sequence.held = False
    harness.finish()
