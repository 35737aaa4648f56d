"""A GPU that is none: tensors in memory, Triton's kernels in its interpreter, graphs that are launches made again."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TypeVar

import pytest
import torch
from torch import Tensor

from headrace import device
from headrace.device import Device, Event, Graph, GraphPool, Stream
from headrace.engine import preflight
from tests.support.launch_tape import LaunchTape, spoil, tensors_of

T = TypeVar("T")


class FakeEvent(Event):
    """Has always happened."""

    def query(self) -> bool:
        return True

    def elapsed_time(self, later: Event) -> float:
        return 0.5


class FakeStream(Stream):
    """Does its work as it gets it."""

    def record_event(self, event: Event | None = None) -> Event:
        return event or FakeEvent()


class FakeGraph(Graph):
    """Repeats what was launched. others: recordings that share its memory: a replay spoils what they returned
    (Device.graph)."""

    def __init__(self, tape: LaunchTape, made: object, others: list[FakeGraph]) -> None:
        self.tape, self.made, self.replays, self.others = tape, made, 0, others

    def replay(self) -> None:
        self.replays += 1
        for other in self.others:
            for place in tensors_of(other.made) if other is not self else []:
                spoil(place)
        self.tape.replay()


class FakeDevice(Device):
    """memory: bytes that are free; peak: what any step takes. A replay takes half the time of launching."""

    type = "cuda"
    place = torch.device("cpu")
    name = "a fake device"
    processors = 4

    def __init__(self, memory: int = 1 << 32, peak: int = 0) -> None:
        self.memory, self.peak = memory, peak
        self.graphs: list[FakeGraph] = []
        self._sharing: dict[GraphPool | None, list[FakeGraph]] = defaultdict(list)

    def missing(self) -> str | None:
        return None

    def holds(self, x: Tensor) -> bool:
        return True

    def pinned(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        return torch.zeros(*shape, dtype=dtype)

    def graph(self, run: Callable[[], T], pool: GraphPool | None = None) -> tuple[Graph, T]:
        tape = LaunchTape()
        with tape.noting():
            made = run()
        for each in tensors_of(made):
            spoil(each)  # a recording computes nothing
        graph = FakeGraph(tape, made, self._sharing[pool])
        for those in (self.graphs, graph.others):
            those.append(graph)
        return graph, made

    def stream(self) -> Stream:
        return FakeStream()

    current_stream = stream

    def on(self, stream: Stream) -> AbstractContextManager[object]:
        return nullcontext()

    def event(self, timing: bool = False, blocking: bool = False) -> Event:
        return FakeEvent()

    def synchronize(self) -> None:
        return None

    def free_memory(self) -> int:
        return self.memory

    def peak_memory(self, run: Callable[[], object]) -> int:
        run()
        return self.peak

    def timed(self, run: Callable[[], object]) -> tuple[float, float]:
        run()
        return 1.0, 0.5


@contextmanager
def fake_device(monkeypatch: pytest.MonkeyPatch, **given: int) -> Iterator[FakeDevice]:
    """An engine with attention_backend 'triton' computes on it meanwhile."""
    monkeypatch.setattr(preflight, "GPU_DEVICES", ("null",))
    fake = FakeDevice(**given)
    with device.use(fake):
        yield fake
