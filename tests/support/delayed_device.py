"""A fake device that is late: it does what it is given when somebody waits for it, and no earlier.

Until then results on the host are poison, and what the host writes into pinned memory meanwhile is what the device
will find there.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import pytest
import torch
from torch import Tensor

from headrace import device
from headrace.device import Event, Graph, GraphPool, Stream
from headrace.engine import preflight
from headrace.engine.graph_buckets import PromptGraphs
from headrace.engine.graphs import CudaGraphs, Key, Recorded
from headrace.kernels import step_copies
from headrace.kernels.triton import changing
from headrace.kernels.triton.replays import Replays
from tests.support.fake_device import FakeDevice, FakeGraph

T = TypeVar("T")
POISON = 0x7F7F7F7F


class DelayedEvent(Event):
    def __init__(self, late: DelayedDevice) -> None:
        self.late, self.place = late, 0

    def record(self, stream: Stream | None = None) -> None:
        self.place = self.late.given

    def synchronize(self) -> None:
        self.late.work_until(self.place)


class DelayedGraph(FakeGraph):
    late: DelayedDevice

    def replay(self) -> None:
        self.late.begin(super().replay)


class DelayedDevice(FakeDevice):
    """given: how many things it was given to do. steps: how many are not done; most_ahead: at most. haste: how often it
    does at once all that it was given."""

    def __init__(self, haste: float = 0.0) -> None:
        super().__init__()
        self.haste, self.random = haste, random.Random(5)
        self.given = self.steps = self.most_ahead = 0
        self._work: list[Callable[[], object]] = []
        self._pinned: set[int] = set()

    def give(self, work: Callable[[], object]) -> None:
        self._work.append(work)
        self.given += 1
        if self.random.random() < self.haste:
            self.synchronize()

    def begin(self, step: Callable[[], object]) -> None:
        """`give` of a step."""

        def work() -> None:
            step()
            self.steps -= 1

        self.steps += 1
        self.most_ahead = max(self.most_ahead, self.steps)
        self.give(work)

    @torch.inference_mode()
    def work_until(self, place: int) -> None:
        while self._work and self.given - len(self._work) < place:
            self._work.pop(0)()

    def synchronize(self) -> None:
        self.work_until(self.given)

    def pinned(self, shape: Any, dtype: torch.dtype) -> Tensor:
        made = super().pinned(shape, dtype)
        self._pinned.add(made.data_ptr())
        return made

    def event(self, timing: bool = False, blocking: bool = False) -> Event:
        return DelayedEvent(self)

    def graph(self, run: Callable[[], T], pool: GraphPool | None = None) -> tuple[Graph, T]:
        graph, made = super().graph(run, pool)
        assert isinstance(graph, FakeGraph)
        late = DelayedGraph(graph.tape, graph.made, graph.others)
        late.late = self
        self.graphs[-1] = late
        return late, made

    def copy(self, into: Tensor, source: Tensor) -> None:
        if into.untyped_storage().data_ptr() in self._pinned:
            into.fill_(POISON)
        self.give(lambda: into.copy_(source))


@contextmanager
def delayed_device(monkeypatch: pytest.MonkeyPatch, haste: float = 0.0) -> Iterator[DelayedDevice]:
    """An engine with attention_backend 'triton' computes on it meanwhile."""
    late = DelayedDevice(haste)
    choose, record, find = Replays.choose, CudaGraphs._record, PromptGraphs._recording
    change, count = changing.change, changing.count

    def choose_late(self: Replays, *given: Any) -> None:
        """What is read at once, with no step under way, is not late."""
        late.give(lambda: choose(self, *given))
        if not late.steps:
            late.synchronize()

    def record_in_order(self: CudaGraphs, key: Key) -> Recorded:
        """What a recording computes by the way is behind what was sent to the device."""
        assert not late.steps, "no step is under way when another is recorded"
        late.synchronize()
        return record(self, key)

    def find_in_order(self: PromptGraphs, key: Key) -> Recorded | None:
        """The same of a recording, and of the replay that it is compared by."""
        if key in self._recorded:
            return self._recorded[key]
        assert not late.steps, "no step is under way when another is recorded"
        late.synchronize()
        haste, late.haste = late.haste, 1.0
        found = find(self, key)
        late.haste = haste
        return found

    monkeypatch.setattr(preflight, "GPU_DEVICES", ("null",))
    monkeypatch.setattr(step_copies, "copy", late.copy)
    monkeypatch.setattr(Replays, "choose", choose_late)
    monkeypatch.setattr(changing, "change", lambda *given: late.give(lambda: change(*given)))
    monkeypatch.setattr(changing, "count", lambda *given: late.give(lambda: count(*given)))
    monkeypatch.setattr(CudaGraphs, "_record", record_in_order)
    monkeypatch.setattr(PromptGraphs, "_recording", find_in_order)
    with device.use(late):
        yield late
