"""In which order layers and batches of a step are computed, and what is on its way meanwhile. Plain data, no tensors.

KVPR, Algorithm 1 (column) and section 3.2 (row). Column: for each layer all batches, so that a layer's weights are
loaded once for all of them, in as many slices as there are batches. Row: for each batch all layers. An operation, one
layer over one batch, takes its chunks from staging in one piece, or in several where they do not fit.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

Schedule = Literal["row", "column"]
PrefetchKind = Literal["weights", "rest", "hidden", "x", "kv"]
CHUNK_KINDS: tuple[PrefetchKind, ...] = ("x", "kv")
"""What a piece consists of, in the order in which it is issued: projecting may begin before K and V are there."""


@dataclass(frozen=True, slots=True)
class Prefetch:
    """One prefetch. kv, x, hidden: what (layer, batch, piece) needs. weights, rest: slice `batch` of the layer's
    weights (with fine order the part that makes keys and values, and the rest; else all at once).

    wraps: the layer belongs to the next step (only weights, which do not depend on its tokens)."""

    kind: PrefetchKind
    layer: int
    batch: int = 0
    piece: int = 0
    wraps: bool = False


@dataclass(frozen=True, slots=True)
class Stage:
    """One piece of one layer over one batch. prefetch: issued as it begins, in order. first, last: of its operation.
    stores_hidden: the operation's result leaves the fast memory until the next layer."""

    layer: int
    batch: int
    piece: int
    first: bool
    last: bool
    prefetch: tuple[Prefetch, ...]
    stores_hidden: bool


@dataclass(frozen=True, slots=True)
class StepShape:
    """A step: its layers and batches, how they are ordered, and what is streamed beside K and V.

    weights: whether they are. fine: in parts, by need.
    Raises ValueError for a step without layers or batches.
    """

    layers: int
    batches: int
    schedule: Schedule
    weights: bool = False
    fine: bool = True

    def __post_init__(self) -> None:
        if self.layers < 1 or self.batches < 1:
            raise ValueError(f"no schedule of {self.layers} layers and {self.batches} batches")

    @property
    def moves_hidden(self) -> bool:
        """Whether hidden states of other batches wait outside while one is computed."""
        return self.schedule == "column" and self.batches > 1

    @property
    def slices(self) -> int:
        """Parts in which the weights of a layer are loaded."""
        return self.batches if self.schedule == "column" else 1

    def order(self) -> list[tuple[int, int]]:
        """(layer, batch) of each operation."""
        layers, batches = range(self.layers), range(self.batches)
        if self.schedule == "column":
            return [(layer, batch) for layer in layers for batch in batches]
        return [(layer, batch) for batch in batches for layer in layers]


PieceCounts = Callable[[int, int], int]
"""(layer, batch) -> pieces of that operation."""


def stages(form: StepShape, pieces: PieceCounts = lambda layer, batch: 1) -> list[Stage]:
    """The stages of a step. Before the first of them, `first_loads` are issued."""
    order = form.order()
    keys = [(layer, batch, piece) for layer, batch in order for piece in range(pieces(layer, batch))]
    found = []
    for index, (layer, batch, piece) in enumerate(keys):
        last = index + 1 == len(keys) or keys[index + 1][:2] != (layer, batch)
        after = keys[index + 1] if last and index + 1 < len(keys) else None
        weights = _weights(form, layer, batch) if last else []
        loads = [load for load in weights if load.kind == "weights"]
        if after is not None and form.moves_hidden and after[0] > 0:
            loads.append(Prefetch("hidden", *after))
        loads += [Prefetch(kind, *key) for key in keys[index + 1 : index + 2] for kind in CHUNK_KINDS]
        loads += [load for load in weights if load.kind == "rest"]
        stores = last and form.moves_hidden and layer + 1 < form.layers
        found.append(Stage(layer, batch, piece, piece == 0, last, tuple(loads), stores))
    return found


def first_loads(form: StepShape) -> tuple[Prefetch, ...]:
    """What is issued before the first stage of a step, whose weights are there or on their way."""
    return tuple(Prefetch(kind, *form.order()[0]) for kind in CHUNK_KINDS)


def _weights(form: StepShape, layer: int, batch: int) -> list[Prefetch]:
    """load_weight(i, j + 1, k): slice k of the next layer; of layer 0, of the next step or batch, after the last one.
    A model of one layer keeps its weights."""
    if not form.weights or form.layers == 1:
        return []
    following, last = (layer + 1) % form.layers, layer + 1 == form.layers
    column = form.schedule == "column"
    wraps = last and (column or batch + 1 == form.batches)
    kinds: tuple[PrefetchKind, ...] = ("weights", "rest") if form.fine else ("weights",)
    return [Prefetch(kind, following, batch if column else 0, 0, wraps) for kind in kinds]
