"""Attention of recorded steps with prompts in them: what is launched on memory of a fixed size for more rows than there
are, in Triton's interpreter, beside a step launched for its plan alone."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
import torch

pytest.importorskip("triton", reason="Triton is built for Linux only")

from hypothesis import given, settings
from hypothesis import strategies as st

from headrace import device
from headrace.attention.plan import Plan, Span, batch_order, build
from headrace.kernels.backend import GraphSizes
from headrace.kernels.records import Pool, StepInputs
from headrace.kernels.triton import attention, graph_step, tile_schedule
from headrace.kernels.triton.graph_step import GraphMemory, TritonGraphStep
from headrace.types import CHUNK
from tests.support.fake_device import FakeDevice

HEADS, DIM, SLOTS, ROWS = 2, 16, 64, 24
WINDOWS: list[int | None] = [None, 70, -96]
SCALE = 0.25
Sequences = list[tuple[int, int]]
"""First position and rows of each."""


@pytest.fixture(scope="module")
def memory() -> Iterator[GraphMemory]:
    """Tasks of four rows, where other steps have as many as fit; runs of more than two rows are long; two programs take
    all tasks of a round, and one merges all rows."""
    sizes = GraphSizes(4, ROWS, 1024, frozenset(WINDOWS), HEADS, (SLOTS, 1, DIM), torch.float32, torch.float32, SCALE)
    with pytest.MonkeyPatch.context() as patch, device.use(FakeDevice()):
        patch.setattr(tile_schedule, "SHORT", 2)
        patch.setattr(graph_step, "MERGES", 1)
        patch.setattr(graph_step, "PROGRAMS", 2)
        found = GraphMemory.of(sizes, None)
        yield replace(found, limits=found.limits._replace(group=tile_schedule.LANES // 4))


def planned(sequences: Sequences, shared: int) -> Plan:
    """Of sequences that have `shared` chunks in common, as far as these lie before their rows."""
    spans, used = [], shared
    for start, rows in sequences:
        count, same = (start + rows - 1) // CHUNK + 1, min(shared, start // CHUNK)
        spans.append(Span(np.array([*range(same), *range(used, used + count - same)], np.int32), start, rows))
        used += count - same
    assert used <= SLOTS
    return build([spans[i] for i in batch_order([span.slots for span in spans])])


def drawn_pool(seed: int) -> Pool:
    g = torch.Generator().manual_seed(seed)
    return Pool(torch.randn(SLOTS, 1, DIM, CHUNK, generator=g), torch.randn(SLOTS, 1, CHUNK, DIM, generator=g))


def launched(plan: Plan, rows: torch.Tensor, pool: Pool) -> list[torch.Tensor]:
    """Of each window: by a step of the plan's own."""
    items = {window: torch.from_numpy(plan.items_within(window)) for window in WINDOWS}
    places = (torch.from_numpy(each) for each in (plan.positions, plan.row_slots, plan.row_offsets))
    step = attention.TritonStep(
        StepInputs(items, *places, heads=HEADS, shape=pool.shape, dtype=torch.float32, scale=SCALE),
        torch.device("cpu"),
    )
    return [step(pool, *rows.split((HEADS, 1, 1), dim=1), window) for window in WINDOWS]


def sent(step: TritonGraphStep, plan: Plan) -> int:
    """The plan lies in the step's memory: its rounds."""
    rounds = step.fill({w: plan.items_within(w) for w in WINDOWS}, plan.positions, plan.row_slots)
    assert rounds is not None
    step.send([0] * plan.rows, plan.positions, plan.row_offsets, [plan.rows - 1])
    return rounds


@pytest.fixture(scope="module")
def step(memory: GraphMemory) -> TritonGraphStep:
    """One for all plans: what they leave there must not matter."""
    return TritonGraphStep(memory, ROWS, drawn=memory.sizes.rows)


def check(step: TritonGraphStep, sequences: Sequences, shared: int, padding: int) -> None:
    plan, ours, truth = planned(sequences, shared), drawn_pool(1), drawn_pool(1)
    rows = torch.randn(plan.rows, HEADS + 2, DIM, generator=torch.Generator().manual_seed(2))
    expected = launched(plan, rows, truth)
    total = plan.rows + padding
    step.memory.out.zero_()
    layers = step.layers(sent(step, plan), total)
    padded = torch.cat((rows, torch.full((padding, *rows.shape[1:]), float("nan"))))
    for window, wanted in zip(WINDOWS, expected, strict=True):
        made = layers(ours, *padded.split((HEADS, 1, 1), dim=1), window)
        assert torch.equal(made[: plan.rows], wanted)
        assert made.isfinite().all(), "rows of padding must not be without a value"
    assert all(torch.equal(x, y) for x, y in zip(ours.tensors, truth.tensors, strict=True))
    assert step.drawn.tolist() == [plan.rows - 1, 0, 0, 0]
    for window, tasks in step.arena.tasks.items():
        assert tasks.counts.host[-1] <= step.memory.flash_programs(total, window)


def test_a_prompt_beside_sequences_that_decode(step: TritonGraphStep) -> None:
    """Two that decode on a shared chunk and part within a span, one on its first token, a prompt of three tasks, and a
    short one; the longest crosses a span."""
    check(step, [(70, 1), (130, 1), (0, 1), (509, 11), (3, 2)], shared=2, padding=5)


def test_tasks_of_a_step_before(step: TritonGraphStep) -> None:
    """They lie behind those of a smaller step, where there are programs for them and rows."""
    check(step, [(100, 22)], shared=0, padding=0)
    check(step, [(5, 3), (9, 1), (11, 1), (2, 2)], shared=0, padding=5)


def test_short_runs_without_room_for_their_states_are_not_replayed(memory: GraphMemory) -> None:
    """Four sequences that decode, which are flash then, in a recording with two programs for flash."""
    step = TritonGraphStep(replace(memory, limits=memory.limits._replace(states=1)), ROWS, drawn=memory.sizes.rows)
    plan = planned([(100, 1)] * 4, shared=0)
    items = {window: plan.items_within(window) for window in WINDOWS}
    assert step.fill(items, plan.positions, plan.row_slots) is None
    assert TritonGraphStep(memory, ROWS, drawn=4).fill(items, plan.positions, plan.row_slots) == 1


SEQUENCES = st.lists(st.tuples(st.integers(0, 140) | st.integers(440, 520), st.integers(1, 6)), min_size=1, max_size=4)


@settings(max_examples=1, deadline=None)
@given(SEQUENCES, st.integers(0, 2), st.integers(0, 3))
def test_drawn_plans(step: TritonGraphStep, sequences: Sequences, shared: int, padding: int) -> None:
    check(step, sequences, shared, min(padding, ROWS - sum(rows for _, rows in sequences)))


@pytest.mark.matrix
@settings(max_examples=12, deadline=None)
@given(SEQUENCES, st.integers(0, 2), st.integers(0, 8))
def test_more_drawn_plans(step: TritonGraphStep, sequences: Sequences, shared: int, padding: int) -> None:
    check(step, sequences, shared, min(padding, ROWS - sum(rows for _, rows in sequences)))


@given(st.lists(st.integers(1, 40), min_size=1, max_size=4))
def test_flash_has_a_program_for_every_task(memory: GraphMemory, runs: list[int]) -> None:
    """However the rows of a step are divided among its sequences."""
    for window, together in ((None, memory.limits.flash_rows), (70, 4)):
        tasks = sum(-(-rows // together) for rows in runs if rows > tile_schedule.SHORT)
        assert tasks <= memory.flash_programs(sum(runs), window)


def test_what_has_no_room(memory: GraphMemory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows; and items of five prompts, each of which walks those that all share."""
    plan = planned([(900, 3)] * 5, 14)
    items = {w: plan.items_within(w) for w in WINDOWS}
    assert TritonGraphStep(memory, ROWS, drawn=4).fill(items, plan.positions, plan.row_slots) == 0
    small = TritonGraphStep(memory, plan.rows - 1, drawn=4)
    assert small.fill(items, plan.positions, plan.row_slots) is None
    for room in ("COPIES", "TASKS", "LATER_TASKS"):
        monkeypatch.setattr(graph_step, room, 0)
    assert TritonGraphStep(memory, ROWS, drawn=4).fill(items, plan.positions, plan.row_slots) is None


def test_steps_of_decoding_have_no_flash(memory: GraphMemory) -> None:
    step = TritonGraphStep(memory, 4)
    assert [each.flash for each in step.layers(1, 4).work.values()] == [0] * len(WINDOWS)
    assert [each.flash > 0 for each in step.prompts().layers(1, 4).work.values()] == [True] * len(WINDOWS)
