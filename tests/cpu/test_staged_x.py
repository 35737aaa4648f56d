"""Which chunks of a rank's store are projected: those of which it computed all rows, in earlier steps."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from headrace.config import AttentionSpec
from headrace.kv.own_chunks import OwnChunks
from headrace.models.x_turns import XTurns
from headrace.offload.streaming.staged_x import StagedX
from headrace.offload.streaming.store import OutsideStore

SLOTS, HIDDEN = 12, 8


class Group:
    """The second of `size` tensor ranks. told: what the others would say, as often as asked."""

    rank = 1

    def __init__(self, size: int, told: Sequence[int] = ()) -> None:
        self.size, self.told = size, told

    def gather(self, x: torch.Tensor, widths: Sequence[int]) -> torch.Tensor:
        others = [x.new_full(x.shape, told) for told in self.told]
        return torch.cat([*others[:1], x, *others[1:]], dim=1)


def made(group: Any = None, capacity: int = SLOTS, weight_bytes: int = 0) -> StagedX:
    spec = AttentionSpec(layers=1, heads=1, kv_heads=1, head_dim=16, windows=(None,), scale=1.0)
    turns = XTurns(group)
    store = OutsideStore(spec, SLOTS, torch.bfloat16, torch.bfloat16, HIDDEN, x_turns=turns.ranks)
    decoder: Any = SimpleNamespace(turns=turns)
    backend: Any = None
    found = StagedX(decoder, backend, store, capacity, 2, weight_bytes=weight_bytes)
    found.share = 1.0
    return found


def own(
    slots: Sequence[int], cached: Sequence[int] = (), begun: Sequence[int] = (), foreign: Sequence[int] = (),
    rows: int = 1,
) -> OwnChunks:  # fmt: skip
    """All of slots."""
    of = np.array(sorted(slots), dtype=np.int32)
    seen, new, others = (np.searchsorted(of, np.array(some, dtype=np.int32)).astype(np.int32) for some in
                         (cached, begun, foreign))  # fmt: skip
    return OwnChunks(of, {None: seen}, np.union1d(new, others).astype(np.int32), rows, of, of, new, others)


def chosen(x: StagedX, *groups: OwnChunks) -> list[list[int]]:
    """Slots that each group projects."""
    return [group.slots[some[None]].tolist() for group, some in zip(groups, x.choose(groups), strict=True)]


def test_what_has_activations() -> None:
    x = made()
    assert chosen(x, own([0, 1, 2], cached=[0, 1, 2])) == [[]], "nobody has computed them"
    begun = own([0, 1, 2, 3], begun=[0, 1, 2, 3], foreign=[1])
    assert chosen(x, begun, own([0, 2], cached=[0, 2])) == [[], []], "they are on their way out"
    assert chosen(x, own([0, 1, 2, 3], cached=[0, 1, 2, 3])) == [[0, 2, 3]]
    assert chosen(x, own([2, 3], cached=[2, 3], foreign=[3])) == [[2]], "one that is written is loaded"
    assert chosen(x, own([2, 3], cached=[2, 3])) == [[2]], "another rank has gone on with it"
    assert chosen(x, own([3], begun=[3])) == [[]] and chosen(x, own([3], cached=[3])) == [[3]]


def test_a_rank_without_rows_whose_weights_are_outside() -> None:
    for weight_bytes, expected in ((0, [0]), (100, [])):
        x = made(weight_bytes=weight_bytes)
        chosen(x, own([0], begun=[0]))
        assert chosen(x, own([0], cached=[0], rows=0)) == [expected]
        assert chosen(x, own([0], cached=[0])) == [[0]]


def test_tensor_ranks_project_alike() -> None:
    """The mean of what they wish; no more of any rank's than its buffer holds."""
    every = list(range(8))
    for capacity, told, expected in ((SLOTS, 4, 6), (SLOTS, 8, 8), (4, 4, 4)):
        x = made(Group(2, [told]), capacity)
        assert len(x.store.x[0]) == SLOTS // 2 and x.most == capacity // 2
        chosen(x, own(every, begun=every))
        assert chosen(x, own(every, cached=every)) == [every[:expected]]


def test_each_tensor_rank_keeps_and_loads_its_own() -> None:
    x, sent = made(Group(2, [0])), []
    group, rows = own([3, 4, 7]), torch.arange(4.0).bfloat16()[:, None].expand(4, HIDDEN).contiguous()
    places, offsets = (np.array(some, dtype=np.int32) for some in ([0, 1, 2, -1], [5, 6, 7, 8]))
    watch = x.keep(group, places, offsets, lambda run, size: (run(), sent.append(size)))  # type: ignore[func-returns-value]
    watch(0, rows)
    assert sent == [2 * HIDDEN * 2]
    kept = x.store.x[0]
    assert kept[1, 5].tolist() == [0.0] * HIDDEN and kept[3, 7].tolist() == [2.0] * HIDDEN and kept.sum() == 2 * HIDDEN
    x.load(1, 0, group.slots)
    assert torch.equal(x.buffers[1][:2], kept[[1, 3]]) and x.bytes_of(group.slots) == 2 * x.store.x_bytes
