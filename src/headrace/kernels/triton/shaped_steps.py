"""Recorded steps of models whose layers differ in their heads: index data and tasks of each shape of heads.

T: rows of a recording. How many lanes a task has, and how many tasks fill the device, depends on head size and number
of KV heads (graph_step), so each shape has plans of its own. What attention leaves meanwhile lies in shared memory,
since layers are computed one after another.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor

from headrace.kernels.backend import GraphSizes, GraphStep, LayerStep
from headrace.kernels.records import Pool, QKRotary
from headrace.kernels.triton.graph_step import GraphMemory, TritonGraphStep
from headrace.kernels.triton.tile_schedule import Int32, Int64

Shape = tuple[int, int]
"""KV heads and head size."""


def step_of(kinds: Sequence[GraphSizes], bias: Tensor | None) -> GraphStep:
    """The steps of layers of these kinds, each of which has another shape. Raises ValueError for a type or size that
    has no kernel."""
    memories: list[GraphMemory] = []
    for sizes in sorted(kinds, key=lambda each: each.shape[2], reverse=True):  # the largest lends its memory
        memories.append(GraphMemory.of(sizes, bias, memories[0] if memories else None))
    steps = {each.sizes.shape[1:]: TritonGraphStep(each, each.sizes.rows) for each in memories}
    return next(iter(steps.values())) if len(steps) == 1 else ShapedGraphStep(steps)


class ShapedGraphStep(GraphStep):
    """See kernels.backend.GraphStep: a step of each shape. Tokens, and whatever else is the same for all of them, are
    the first one's."""

    def __init__(self, steps: Mapping[Shape, TritonGraphStep]) -> None:
        self.steps = steps
        self.first = first = next(iter(steps.values()))
        self.tokens, self.positions, self.chosen, self.drawn = first.tokens, first.positions, first.chosen, first.drawn
        self.adapters = first.adapters

    def known(self, rows: int) -> Tensor:
        return self.first.known(rows)

    def prompts(self) -> GraphStep:
        return ShapedGraphStep({shape: step.prompts() for shape, step in self.steps.items()})

    def fill(self, items: Mapping[int | None, Int32], positions: Int64, slots: Int32) -> int | None:
        most = 0
        for step in self.steps.values():
            own = {window: items[window] for window in step.memory.sizes.windows}
            rounds = step.fill(own, positions, slots)
            if rounds is None:
                return None
            most = max(most, rounds)
        return most

    def grow(self, rows: Int64, slots: Int32, positions: Int64) -> bool:
        return all([step.grow(rows, slots, positions) for step in self.steps.values()])

    def send(
        self,
        tokens: list[int],
        positions: Int64,
        offsets: Int32,
        drawn: Sequence[int] = (),
        adapters: Int64 | None = None,
    ) -> None:
        for step in self.steps.values():
            step.send(tokens, positions, offsets, drawn, adapters)

    def keep(self, pools: Sequence[Tensor], layer: int, x: Tensor) -> None:
        self.first.keep(pools, layer, x)

    def layers(self, rounds: int, rows: int) -> LayerStep:
        return ShapedLayers({shape: step.layers(rounds, rows) for shape, step in self.steps.items()})


class ShapedLayers(LayerStep):
    """append and attend, of each layer by the step of its shape."""

    def __init__(self, steps: Mapping[Shape, LayerStep]) -> None:
        self.steps = steps

    def __call__(
        self, pool: Pool, q: Tensor, k: Tensor, v: Tensor, window: int | None, sinks: Tensor | None = None
    ) -> Tensor:
        return self.steps[pool.shape[1:]](pool, q, k, v, window, sinks)

    def projected(
        self, pool: Pool, heads: Tensor, rotary: QKRotary, window: int | None, sinks: Tensor | None = None
    ) -> Tensor:
        return self.steps[pool.shape[1:]].projected(pool, heads, rotary, window, sinks)
