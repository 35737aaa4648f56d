"""Experts in a file, for a GPU: slots of its memory hold some of them, and a step brings those that its rows meet.

Routes are made on the GPU. The host waits for where each expert's rows begin, reads the experts that are missing into
the slots used least recently, and shifts the addresses that the kernels find matrices by. Copies are given to the
stream that computes, so that a slot is overwritten behind its last use. E: experts of a layer.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from headrace.kernels import experts, ops
from headrace.kernels.experts import OUTSIDE, OutsideColumn
from headrace.models.layers import Layer
from headrace.models.sizes import refuse_slots
from headrace.models.spec import ModelConfig
from headrace.offload.weights.experts import ExpertFile
from headrace.offload.weights.layers import tensors_of
from headrace.offload.weights.streamed import ends_of, placed_in

PARTS = ("up", "down")


class GpuExpertFile(ExpertFile):
    """An ExpertFile whose experts a GPU computes with. room: bytes of the GPU's memory for slots."""

    def __init__(self, folder: str, config: ModelConfig, room: int) -> None:
        super().__init__(folder, config, 0)
        self.room = room
        self._first: dict[str, ops.Weight] = {}

    def place(self, name: str, weight: ops.Weight) -> ops.Weight:
        """See ExpertFile. Raises ValueError where `room` does not hold the experts of a layer, once it knows one."""
        there = super().place(name, weight)
        if len(self._first) < len(PARTS):
            self._first[name] = there
            if len(self._first) == len(PARTS):
                refuse_slots(self.room, self._count, sum(ends_of([self._first]).values()))
        return there

    def serve(self, layers: Sequence[Layer], place: torch.device) -> None:
        """See models.packing.ExpertsPlace. Raises ValueError where `room` does not hold the experts of a layer."""
        every = {layer.index: _matrices(layer) for layer in layers if layer.experts is not None}
        ends = ends_of([matrices for of_layer in every.values() for matrices in of_layer])
        size = sum(ends.values())
        refuse_slots(self.room, self._count, size)
        count = min(self.room // size, self._count * len(every))
        self.slots = ExpertSlots(torch.zeros(count, size, dtype=torch.uint8, device=place))
        for layer in layers:
            if layer.index in every:
                self._hand_over(layer, every[layer.index], ends)

    def _hand_over(self, layer: Layer, matrices: list[dict[str, ops.Weight]], ends: dict[str, int]) -> None:
        """The layer's experts, each as it lies in the first slot."""
        first = dict(zip(ends, self.slots.room[0].split(list(ends.values())), strict=True))
        there = [placed_in(each, first) for each in matrices]
        bring = partial(self.slots.bring, layer.index, layer.weights[OUTSIDE], matrices, there)
        named = {f"experts.{e}.{part}.weight": w for e, each in enumerate(there) for part, w in each.items()}
        layer.bring_experts(named, bring)


class ExpertSlots:
    """Slots uint8 [slots, bytes], at least E of them, and which expert of which layer each holds."""

    def __init__(self, room: Tensor) -> None:
        self.room = room
        self._used: OrderedDict[tuple[int, int], int] = OrderedDict()  # slot by (layer, expert), the last used last
        self._tables: dict[int, Tensor] = {}

    def bring(
        self,
        layer: int,
        table: Tensor,
        sources: Sequence[dict[str, ops.Weight]],
        first: Sequence[dict[str, ops.Weight]],
        begin: Tensor,
    ) -> Tensor:
        """Has the experts that rows meet in slots: bytes of each one's slot behind the first, int64 [E], on the device.

        begin: of kernels.triton.experts.GpuRoutes, for which the host waits. table: the layer's (OutsideColumn), which
        counts. sources: matrices in the file; first: how they lie in the first slot.
        """
        self._tables[layer] = table
        ends = begin.tolist()
        experts.fetch(table, ends)
        met = [e for e in range(len(sources)) if ends[e] < ends[e + 1]]
        for e in met:
            if (layer, e) in self._used:
                self._used.move_to_end((layer, e))
        for e in met:
            if (layer, e) not in self._used:
                self._load(layer, e, sources[e], first[e])
        size = self.room.shape[1]
        return torch.tensor([size * self._used.get((layer, e), 0) for e in range(len(sources))]).to(self.room.device)

    def _load(self, layer: int, expert: int, source: dict[str, ops.Weight], first: dict[str, ops.Weight]) -> None:
        slot = len(self._used)
        if slot == len(self.room):
            (old_layer, old), slot = self._used.popitem(last=False)
            self._tables[old_layer][old, OutsideColumn.kept] = 0
        for part, weight in source.items():
            into = tensors_of(first[part])
            for kind, x in tensors_of(weight).items():
                at = into[kind].data_ptr() - self.room.data_ptr()
                self.room[slot, at : at + x.nbytes].copy_(x.view(-1).view(torch.uint8))
        self._used[layer, expert] = slot
        self._tables[layer][expert, OutsideColumn.kept] = 1


def _matrices(layer: Layer) -> list[dict[str, ops.Weight]]:
    """up and down of each expert."""
    assert layer.experts is not None
    return [{part: layer.matrices[f"experts.{e}.{part}.weight"] for part in PARTS} for e in range(layer.experts.count)]
