"""Attention in pieces by the Triton kernels, in Triton's interpreter: states that are gone on with give the bits of one
call."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="Triton is built for Linux only")
if os.environ.get("TRITON_INTERPRET") != "1":  # see tests/conftest.py
    pytest.skip("there is a GPU: tests/gpu has the same kernels, compiled", allow_module_level=True)

from headrace import device
from headrace.attention import plan as planning
from headrace.kernels import reference
from headrace.kernels.backend import in_pieces
from headrace.kernels.records import Mask, Pool
from headrace.kernels.state import RunningState, StateRows, part_of
from headrace.kernels.triton import attention, backend
from headrace.kernels.triton import pieces as triton_pieces
from headrace.kernels.triton.piece_schedule import pieces
from headrace.kernels.triton.tile_schedule import SPAN, Bounds
from headrace.types import CHUNK
from tests.support.attention_testbed import PoolTestbed
from tests.support.fake_device import FakeDevice

KERNELS = in_pieces(backend)


@pytest.fixture(autouse=True)
def fake() -> Iterator[None]:
    with device.use(FakeDevice()):
        yield


SHARES = [(0, 584), (576, 1028), (576, 580)]
"""The second goes into a third span, the others part from it within the second."""


class Call:
    """Rows of sequences that share prefixes: the last `count` of each."""

    def __init__(self, count: int, window: int | None = None, sinks: bool = False) -> None:
        testbed = PoolTestbed(SHARES, (2, 1, 16), torch.float32, apart=False)
        lengths = [len(q) for q, _, _ in testbed.tokens]
        spans = [planning.Span(table, n - count, count) for table, n in zip(testbed.tables, lengths, strict=True)]
        order = planning.batch_order([span.slots for span in spans])
        plan = planning.build([spans[i] for i in order])
        self.q = torch.cat([testbed.tokens[i][0][-count:] for i in order])
        self.pool = Pool(testbed.k, testbed.v)
        self.sinks = torch.tensor([0.3, -2.0]) if sinks else None
        self.items, self.window = torch.from_numpy(plan.items_within(window)), window
        self.positions = torch.from_numpy(plan.positions)

    def mask(self, items: Tensor) -> Mask:
        return Mask(items.contiguous(), self.positions, window=self.window, sinks=self.sinks, scale=0.25)

    def whole(self, kernels: object = backend) -> Tensor:
        pool = Pool(self.pool.k.nan_to_num(), self.pool.v.nan_to_num()) if kernels is reference else self.pool
        return kernels.attend(self.q, pool, self.mask(self.items))  # type: ignore[attr-defined]

    def partial(self, items: Tensor, state: RunningState | None = None) -> RunningState:
        return KERNELS.partial(self.q, self.pool, self.mask(items), state)

    def finish(self, state: RunningState) -> Tensor:
        return KERNELS.finish(state, torch.float32, self.sinks)

    def keys(self, begin: int, end: int) -> Tensor:
        """Items of keys begin .. end-1."""
        return self.items[(self.items[:, 1] >= begin) & (self.items[:, 1] < end)]


@pytest.mark.parametrize(
    ("window", "cuts"),
    [
        (None, [64, 448, 576]),
        pytest.param(None, [512, 1024], marks=pytest.mark.matrix),
        pytest.param(100, [448, 576], marks=pytest.mark.matrix),
        pytest.param(-640, [448, 704], marks=pytest.mark.matrix),
    ],
)
def test_merging_on_gives_the_bits_of_one_call(window: int | None, cuts: list[int]) -> None:
    """Cut inside spans and where they end."""
    call, state = Call(1, window, sinks=window is None), None
    for begin, end in pairwise([0, *cuts, 2048]):
        state = call.partial(call.keys(begin, end), state)
    assert state is not None
    ours = call.finish(state)
    assert torch.equal(ours, call.whole())
    assert (ours - call.whole(reference)).abs().max() < 1e-5


@pytest.mark.matrix
def test_however_few_states_there_is_room_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """One span at a time."""
    call = Call(2)
    truth = call.whole()
    monkeypatch.setattr("headrace.kernels.triton.heads.STATE_BYTES", -1)
    assert torch.equal(call.finish(call.partial(call.items)), truth)


def test_layers_that_see_the_same_are_cut_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """In pieces and at once; the second layer's queries are others."""
    cut: list[int] = []
    for module in (attention, triton_pieces):
        made = module._sent
        monkeypatch.setattr(module, "_sent", lambda *given, made=made: cut.append(1) or made(*given))
    call, arenas = Call(1), []
    mask = replace(call.mask(call.keys(1024, 2048)), kept={})
    with monkeypatch.context() as patch:
        patch.setattr(attention.TileWork, "run", lambda self, q, *_, **__: arenas.append(self.arena) or q)
        for _ in range(2):
            KERNELS.attend(call.q, call.pool, mask)
    first, second = (KERNELS.partial(call.q * factor, call.pool, mask) for factor in (1.0, 0.5))
    assert len(cut) == 2 and arenas[0] is arenas[1]
    truth = KERNELS.partial(call.q * 0.5, call.pool, replace(mask, kept=None))
    assert torch.equal(call.finish(second), call.finish(truth)) and not torch.equal(first.block.m, truth.block.m)


def test_a_given_state_stays_as_it_is() -> None:
    call = Call(1)
    first = call.partial(call.keys(0, 576))
    before = [x.clone() for x in (first.total.acc, first.block.acc, first.block.m, first.block_of)]
    call.partial(call.keys(576, 2048), first)
    after = [first.total.acc, first.block.acc, first.block.m, first.block_of]
    assert all(torch.equal(x, y) for x, y in zip(before, after, strict=True))


def test_spans_computed_apart_merge_to_the_bits_of_one_call() -> None:
    """By merge_blocks, and by merge_into in parts of their rows."""
    call = Call(1, sinks=True)
    apart = [call.partial(call.keys(begin, begin + SPAN)) for begin in (0, 512, 1024)]
    one = apart[0]
    for block in apart[1:]:
        one = KERNELS.merge_blocks(one, block)
    assert torch.equal(call.finish(one), call.whole())
    total = KERNELS.empty_running(len(call.q), 2, 16, torch.float32)
    rows = len(call.q)
    parts = [StateRows(row, end, part_of(block.block, row, end)) for block in apart for row, end in ((0, 1), (1, rows))]
    KERNELS.merge_into(total.total, parts, total.unit)
    assert torch.equal(call.finish(total), call.whole())
    states = KERNELS.states_of(one)
    plain = Call(1)
    torch.testing.assert_close(states.out, plain.whole(reference), rtol=1e-5, atol=1e-5)


def test_rows_without_keys_are_empty() -> None:
    call = Call(1)
    state = call.partial(call.items[:0])
    assert not call.finish(state).any() and (state.block_of == -1).all()
    state = call.partial(call.keys(1024, 2048))  # which one sequence alone has
    assert (KERNELS.states_of(state).lse == -torch.inf).any(1).sum() == 2


def test_other_units_are_refused() -> None:
    state = KERNELS.empty_running(1, 2, 16, torch.float32)
    with pytest.raises(ValueError, match="natural logarithms"):
        KERNELS.merge_into(state.total, [StateRows(0, 1, state.block)], 1.0)
    with pytest.raises(ValueError, match="rows, heads"):
        Call(1).partial(torch.empty(0, 4, dtype=torch.int32), state)


def test_pieces_have_room_for_what_they_touch() -> None:
    """Rows far into a sequence have no states of the spans before, nor of those behind them."""
    positions = np.arange(10 * SPAN - 2, 10 * SPAN + 2)
    items = np.array([(0, 8 * SPAN, 0, 4), (1, 10 * SPAN, 0, 4)], dtype=np.int32)
    [piece] = pieces(items, positions, Bounds(1, 100, 1))
    assert piece.first.tolist() == [8] * 4 and piece.last.tolist() == [9, 9, 10, 10]
    assert piece.schedule.states == 10 and len(piece.schedule.rounds) == 1
    one, two = pieces(items, positions, Bounds(1, 8, 1))
    assert (one.schedule.states, two.schedule.states) == (4, 2)
    assert (two.last - two.first).tolist() == [-1, -1, 0, 0]
    assert sorted(CHUNK * np.unique(two.schedule.items[:, 1]) // CHUNK) == [10 * SPAN]
