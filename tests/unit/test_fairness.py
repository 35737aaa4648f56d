"""The scheduler between tenants: who waits for whom, what is lent, who gives way, and that all comes to an end."""

from __future__ import annotations

import pytest

from headrace.engine.fairness import MOST_NAMED, MOST_YIELDS, OTHERS, PATIENCE, FairScheduler
from headrace.engine.sequence import SequenceState
from headrace.stats import EngineStats
from headrace.types import CHUNK
from tests.support.scheduler_harness import Harness, prompt


def fair(chunks: int, budget: int, sequences: int = 64, **more: int) -> Harness:
    return Harness(chunks, budget, sequences, policy=FairScheduler, shares=False, **more)


def of(harness: Harness) -> FairScheduler:
    assert isinstance(harness.scheduler, FairScheduler)
    return harness.scheduler


def tokens_by_tenant(harness: Harness) -> dict[str, int]:
    """Of the prompts of the next step."""
    had: dict[str, int] = {}
    for part in harness.step():
        if not part.decodes:
            name = part.sequence.request.tenant
            had[name] = had.get(name, 0) + part.length
    return had


def test_a_short_prompt_waits_for_the_step_under_way_alone() -> None:
    harness = fair(chunks=2000, budget=512)
    for seed in range(20):
        harness.add(prompt(4096, seed), 4, tenant="many")
    harness.step()
    for seed in range(5):
        few = harness.add(prompt(100, 100 + seed), 1, tenant="few")
        assert sum(part.length for part in harness.step()) == 512, "and what it leaves is lent"
        assert few not in harness.live, "answered by the first step that begins after it came"
    harness.finish()


def test_backlogged_tenants_share_by_weight() -> None:
    harness = fair(chunks=4000, budget=1024)
    for seed in range(20):
        harness.add(prompt(2000, seed), 1, tenant="one")
        harness.add(prompt(2000, 50 + seed), 1, tenant="three", weight=3.0)
    had = {"one": 0, "three": 0}
    for _ in range(24):
        for name, count in tokens_by_tenant(harness).items():
            had[name] += count
    assert had["three"] / had["one"] == pytest.approx(3, rel=0.05)
    harness.finish()


def test_a_blocked_tenant_lends_its_share_in_the_same_step() -> None:
    """Its prompt waits for its grammar: nothing of it can be computed now."""
    harness = fair(chunks=2000, budget=512)
    held = harness.add(prompt(1), 1, tenant="held")
    held.held = True
    harness.step()
    for seed in range(4):
        harness.add(prompt(2000, seed), 1, tenant="a")
    held.tokens.append(3)
    assert tokens_by_tenant(harness) == {"held": 1, "a": 511}
    assert tokens_by_tenant(harness) == {"a": 512}
    held.held = False
    harness.abort(held)
    harness.finish()


def test_a_started_prompt_goes_on_before_another_of_its_tenant_begins() -> None:
    harness = fair(chunks=2000, budget=256)
    first = harness.add(prompt(2000), 1, tenant="a")
    harness.step()
    second = harness.add(prompt(900, 1), 1, tenant="a")
    quick = harness.add(prompt(100, 2), 1, tenant="a")
    assert [part.sequence for part in harness.step()] == [quick, first], "much shorter ones alone go before it"
    while first in harness.live:
        assert second.table is None
        harness.step()
    harness.finish()


def test_priority_is_a_matter_of_the_tenant_itself() -> None:
    harness = fair(chunks=2000, budget=200)
    late = harness.add(prompt(200), 1, tenant="a", priority=5)
    soon = harness.add(prompt(200, 1), 1, tenant="a", priority=-5)
    other = harness.add(prompt(200, 2), 1, tenant="b", priority=1000)
    while other in harness.live:
        harness.step()
        assert late.table is None or soon not in harness.live
    assert late in harness.live, "another's priority has cost it nothing"
    harness.finish()


def test_the_oldest_prompt_of_a_tenant_is_overtaken_by_a_few_steps_worth() -> None:
    harness = fair(chunks=2000, budget=200)
    blocker = harness.add(prompt(150, 7), 1, tenant="a")
    old = harness.add(prompt(1000), 1, tenant="a")
    overtaken = 0
    for seed in range(60):
        harness.add(prompt(200, seed), 1, tenant="a")
        for part in harness.step():
            overtaken += part.length * (part.sequence not in (old, blocker))
        if old.table is not None:
            break
    assert PATIENCE * 200 <= overtaken <= (PATIENCE + 1) * 200
    harness.finish()


def test_places_are_taken_back_from_a_tenant_beyond_its_share() -> None:
    """At most its share of them, one in each step, the latest first; nobody goes back and forth."""
    harness = fair(chunks=2000, budget=200, sequences=8)
    greedy = [harness.add(prompt(10, seed), 60, tenant="greedy") for seed in range(12)]
    harness.step()
    few = [harness.add(prompt(10, 50 + seed), 30, tenant="few") for seed in range(6)]
    for step in range(1, 8):
        harness.step()
        running = [sum(each.table is not None for each in some) for some in (few, greedy)]
        assert running == [min(step, 4), 8 - min(step, 4)]
    assert [each.preemptions for each in greedy] == [0, 0, 0, 0, 1, 1, 1, 1, 0, 0, 0, 0]
    assert of(harness).yielded == {"greedy": 4} and not any(each.preemptions for each in few)
    harness.finish()


def test_chunks_are_taken_back_for_a_tenant_within_its_share() -> None:
    """In the step in which its prompt is computed; and only as many as it lacks."""
    harness = fair(chunks=36, budget=4000)
    greedy = [harness.add(prompt(500, seed), 100, tenant="greedy") for seed in range(4)]
    harness.step()
    few = harness.add(prompt(300, 9), 40, tenant="few")
    harness.step()
    assert few.n_output == 1 and [each.preemptions for each in greedy] == [0, 0, 0, 1]
    for _ in range(20):
        harness.step()
    assert not few.preemptions, "decoding sequences of the other take no chunks of it"
    harness.finish()
    assert all(each.yields <= MOST_YIELDS for each in greedy)


def test_nothing_is_preempted_in_vain() -> None:
    """The prompt is beyond its own tenant's share: it waits until there is room."""
    harness = fair(chunks=40, budget=4000)
    greedy = [harness.add(prompt(500, seed), 10, tenant="greedy") for seed in range(4)]
    harness.step()
    large = harness.add(prompt(2000, 9), 2, tenant="few")
    while large in harness.live:
        harness.step()
    assert not any(each.preemptions for each in greedy)
    harness.finish()


def test_a_large_prompt_is_not_passed_by_for_good() -> None:
    """Small ones of another tenant come all the time; after PATIENCE steps' worth of them they wait for it."""
    harness = fair(chunks=20, budget=200)
    for seed in range(3):
        harness.add(prompt(150, seed), 60, tenant="small")
    harness.step()
    large = harness.add(prompt(1100, 99), 1, tenant="large")
    for seed in range(400):
        if large not in harness.live:
            break
        if len(harness.live) < 5:
            harness.add(prompt(150, seed), 60, tenant="small")
        harness.step()
    assert large not in harness.live
    harness.finish()


def test_a_sequence_gives_way_a_few_times_and_then_no_more() -> None:
    harness = fair(chunks=200, budget=200, sequences=2)
    old = harness.add(prompt(10), 2000, tenant="a")
    late = harness.add(prompt(10, 1), 400, tenant="a")
    harness.step()
    for seed in range(40):
        harness.add(prompt(10, 2 + seed), 3, tenant="b")
        for _ in range(8):
            harness.step()
    assert (late.yields, old.yields) == (MOST_YIELDS, MOST_YIELDS) == (late.preemptions, old.preemptions)
    for each in (old, late):
        if each in harness.live:
            harness.abort(each)
    harness.finish()


def test_one_tenant_is_served_as_without_tenants() -> None:
    """Arrival decides where lengths are equal: the same steps as first come, first served."""
    slices = []
    for policy in (Harness(300, 200, shares=False), fair(300, 200)):
        for seed in range(8):
            policy.add(prompt(300, seed), 10)
        slices.append([[(part.sequence.order, part.start, part.length) for part in policy.step()] for _ in range(25)])
        policy.finish()
    assert slices[0] == slices[1]


def test_figures_of_tenants() -> None:
    harness, stats = fair(chunks=100, budget=100, sequences=2), EngineStats()
    harness.add(prompt(70), 5)
    harness.step()
    of(harness).add_stats(stats)
    assert not stats.tenants, "nobody has a name"
    for seed in range(3):
        harness.add(prompt(50, seed), 5, tenant="a")
    harness.step()
    of(harness).add_stats(stats)
    assert stats.tenants["a"].prefilled == 50 and stats.tenants[""].prefilled == 70
    assert (stats.tenants["a"].waiting, stats.tenants["a"].waiting_tokens) == (2, 100)
    harness.finish()
    of(harness).add_stats(stats)
    assert (stats.tenants["a"].waiting, stats.tenants["a"].prefilled) == (0, 150)
    for number in range(MOST_NAMED + 10):
        harness.add(prompt(10, number), 1, tenant=f"t{number}")
    harness.finish()
    of(harness).add_stats(stats)
    assert len(stats.tenants) == MOST_NAMED + 1 and stats.tenants[OTHERS].prefilled == 120


def test_what_has_ended_is_forgotten() -> None:
    harness = fair(chunks=100, budget=100)
    gone: list[SequenceState] = [harness.add(prompt(CHUNK, seed), 5, tenant=str(seed)) for seed in range(9)]
    harness.step()
    for each in gone[::2]:
        harness.abort(each)
    harness.finish()
    assert not of(harness).lines
