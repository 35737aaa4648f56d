"""Weights that stay outside the fast memory: two buffers of one layer's matrices take turns.

KVPR, section 3.4 ("fine-grained"): the part of a layer's weights that makes keys and values comes first, so that
projecting may start; then queries, output and MLP. Vectors (norms, biases) are small and stay. Experts stay outside:
a step reads those that its rows meet where they lie, so that of a file the system keeps the most used in memory. For a
GPU, which cannot, all of them are loaded with their layer.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Literal, Protocol

import torch
from torch import Tensor

from headrace import memory
from headrace.kernels import ops
from headrace.kernels.records import Allocate
from headrace.models.decoder import Decoder
from headrace.models.layers import Layer, OneByOne
from headrace.offload.copy_streams import CopyStream, copy_alone
from headrace.offload.ticket import Ticket
from headrace.offload.weights.layers import (
    OneLayer,
    form_of,
    layers_of,
    moved,
    on_tensors,
    query_rows,
    shape_of,
    tensors_of,
)

WeightPart = Literal["kv", "q", "out", "up", "down"]
PART_OF: Mapping[str, WeightPart] = {
    "router": "up", "shared_gate": "up",
    "latent": "kv", "query_in": "q", "queries": "q", "keys": "q", "heads": "q", "values": "out",
}  # fmt: skip
"""By the first word of a matrix's name: routers and gates; and those of latent attention, whose `keys` multiply queries
and whose `values` stand behind attention, or, on a GPU, `heads` both."""
WEIGHT_PARTS: tuple[WeightPart, ...] = ("kv", "q", "out", "up", "down")
"""In the order in which a layer needs them."""
WeightSlice = Literal["first", "rest", "coarse"]
BUFFERS = 2
ALIGN = 256
"""Bytes between whose multiples tensors lie in a buffer, as a GPU's memory begins: kernels are chosen by it."""
CopyPairs = list[tuple[Tensor, Tensor]]
"""(into, source) of each, flat."""


class LayerSource(Protocol):
    """Where the layers of a step come from."""

    def start(self) -> None:
        """Before the first layer of a step."""

    def load(self, layer: int, index: int, of: int, what: WeightSlice) -> None:
        """Issues slice `index` of `of` of the layer's weights: of these what makes keys and values (first), the rest,
        or all of them as one transfer, of which nothing is usable before its end (coarse)."""

    def layer(self, layer: int) -> OneLayer:
        """The layer, whose weights may still be on their way."""

    def wait(self, layer: int, *parts: WeightPart) -> None:
        """Until these parts of the layer's weights are there."""

    def done(self, layer: int) -> None:
        """The layer is not needed again in this step."""


class ResidentLayers:
    """Layers whose weights are in fast memory."""

    def __init__(self, decoder: Decoder) -> None:
        shape = shape_of(decoder)
        self.layers = [OneLayer(layer, shape) for layer in layers_of(decoder)]

    def start(self) -> None:
        pass

    def load(self, layer: int, index: int, of: int, what: WeightSlice) -> None:
        pass

    def layer(self, layer: int) -> OneLayer:
        return self.layers[layer]

    def wait(self, layer: int, *parts: WeightPart) -> None:
        pass

    def done(self, layer: int) -> None:
        pass


@dataclass(slots=True, eq=False)
class _LayerBuffer:
    """Fast memory for one layer's matrices, bytes by name: which layer it has, whose matrices lie there, and the
    transfers that bring its parts."""

    room: dict[str, Tensor]
    matrices: dict[str, ops.Weight] = field(default_factory=dict)
    layer: int | None = None
    tickets: dict[WeightPart, list[Ticket]] = field(default_factory=dict)


class StreamedLayers:
    """Layers whose matrices lie outside, and come over `stream` when asked for. The decoder's own are given up: its
    layers read the outside ones from then on. allocate: where those shall lie; None: where they are. fast: where the
    buffers lie. experts: they are loaded with their layer.
    """

    def __init__(
        self,
        decoder: Decoder,
        stream: CopyStream,
        allocate: Allocate | None = None,
        fast: Allocate = memory.zeros,
        experts: bool = False,
    ) -> None:
        self.stream, self.experts = stream, experts
        self.shape = shape_of(decoder)
        self.outside = layers_of(decoder)
        if allocate is not None:
            self._move(decoder, allocate)
        self.spec = decoder.config.attention
        loaded = [self._loaded(layer) for layer in self.outside]
        self.buffers = [_LayerBuffer(_room(loaded, fast)) for _ in range(BUFFERS)]
        self._forms = [tuple((name, form_of(weight)) for name, weight in each.items()) for each in loaded]
        self._placed: dict[tuple[Hashable, int], dict[str, ops.Weight]] = {}
        self._runs: dict[tuple[int, int], OneLayer] = {}
        self._next = 0

    def _move(self, decoder: Decoder, allocate: Allocate) -> None:
        """Moves the matrices outside, but for experts that lie there already."""
        placed = decoder.outside is not None
        for index, layer in enumerate(self.outside):
            leaving = {name: w for name, w in layer.matrices.items() if not (placed and _of_expert(name))}
            there = {name: moved(weight, allocate) for name, weight in leaving.items()}
            self.outside[index] = layer.on(layer.matrices | there)
            decoder.matrices.update({f"layers.{layer.index}.{name}": weight for name, weight in there.items()})
        decoder.layers = OneByOne(self.outside)

    @property
    def bytes_per_layer(self) -> int:
        """Bytes of a layer's matrices that are loaded, of the largest layer: their formats may differ."""
        return max(sum(map(_nbytes, self._loaded(layer).values())) for layer in self.outside)

    def _loaded(self, layer: Layer) -> dict[str, ops.Weight]:
        """The matrices that are loaded for their layer."""
        return loaded_of(layer, self.experts)

    def start(self) -> None:
        """Layer 0 is on its way since the last step, but for the first one."""
        if self._buffer_of(0) is None:
            self.load(0, 0, 1, "first")
            self.load(0, 0, 1, "rest")

    def load(self, layer: int, index: int, of: int, what: WeightSlice) -> None:
        buffer = self._claim(layer)
        slices = self._slice(self.outside[layer], buffer, index, of)
        if what == "coarse":
            self._submit(buffer, WEIGHT_PARTS, [copy for copies in slices.values() for copy in copies])
            return
        for part, copies in slices.items():
            if (part == "kv") == (what == "first"):
                self._submit(buffer, (part,), copies)

    def _submit(self, buffer: _LayerBuffer, parts: tuple[WeightPart, ...], copies: CopyPairs) -> None:
        """Sends copies that parts of a layer wait for."""
        ticket = self.stream.submit(partial(_run, copies), sum(source.nbytes for _, source in copies), "weights")
        for part in parts:
            buffer.tickets.setdefault(part, []).append(ticket)

    def _claim(self, layer: int) -> _LayerBuffer:
        """The buffer that has the layer, or takes it from now on: the one that is not in use."""
        found = self._buffer_of(layer)
        if found is None:
            found = self.buffers[self._next]
            self._next = 1 - self._next
            found.layer, found.tickets = layer, {}
            found.matrices = self._matrices_in(found, layer)
        return found

    def _matrices_in(self, buffer: _LayerBuffer, layer: int) -> dict[str, ops.Weight]:
        """The layer's matrices in a buffer, the same objects as of other layers of its forms: what kernels find out of
        a weight, they find once for a buffer."""
        key = (self._forms[layer], self.buffers.index(buffer))
        if key not in self._placed:
            self._placed[key] = placed_in(self._loaded(self.outside[layer]), buffer.room)
        return self._placed[key]

    def _buffer_of(self, layer: int) -> _LayerBuffer | None:
        return next((buffer for buffer in self.buffers if buffer.layer == layer), None)

    def layer(self, layer: int) -> OneLayer:
        buffer = self._claim(layer)
        key = (layer, self.buffers.index(buffer))
        if key not in self._runs:
            outside = self.outside[layer]
            self._runs[key] = OneLayer(outside.on(outside.matrices | buffer.matrices), self.shape)
        return self._runs[key]

    def wait(self, layer: int, *parts: WeightPart) -> None:
        buffer = self._buffer_of(layer)
        for ticket in [] if buffer is None else [each for part in parts for each in buffer.tickets.get(part, ())]:
            ticket.wait()

    def done(self, layer: int) -> None:
        buffer = self._buffer_of(layer)
        if buffer is not None:
            buffer.layer = None

    def _slice(self, layer: Layer, buffer: _LayerBuffer, index: int, of: int) -> dict[WeightPart, CopyPairs]:
        """Slice `index`, an equal share of the layer's bytes in the order in which they are needed, by part."""
        pairs = {part: self._pairs(layer, buffer, part) for part in WEIGHT_PARTS}
        total = sum(source.nbytes for each in pairs.values() for _, source in each)
        low, high, at = index * total // of, (index + 1) * total // of, 0
        found: dict[WeightPart, CopyPairs] = {}
        for part in WEIGHT_PARTS:
            for into, source in pairs[part]:
                begin, end = max(low, at) - at, min(high, at + source.nbytes) - at
                at += source.nbytes
                if begin < end:
                    found.setdefault(part, []).append((_flat(into)[begin:end], _flat(source)[begin:end]))
        return found

    def _pairs(self, layer: Layer, buffer: _LayerBuffer, part: WeightPart) -> CopyPairs:
        """What a part consists of: (into, source)."""
        if part in ("q", "kv") and "qkv.weight" in buffer.matrices:
            return self._pairs_of_qkv(layer, buffer, part)
        names = [name for name in buffer.matrices if _part_of(name) == part]
        into = {name: tensors_of(buffer.matrices[name]) for name in names}
        return [(into[name][kind], x) for name in names for kind, x in tensors_of(layer.matrices[name]).items()]

    def _pairs_of_qkv(self, layer: Layer, buffer: _LayerBuffer, part: WeightPart) -> CopyPairs:
        weight = layer.matrices["qkv.weight"]
        sources, into = tensors_of(weight), tensors_of(buffer.matrices["qkv.weight"])
        cuts = query_rows(weight, self.spec)
        rows = {kind: slice(0, cut) if part == "q" else slice(cut, None) for kind, cut in cuts.items()}
        return [(into[kind][rows[kind]], source[rows[kind]]) for kind, source in sources.items()]


def loaded_of(layer: Layer, experts: bool) -> dict[str, ops.Weight]:
    """The layer's matrices that are loaded for it: all, or all but its experts'."""
    return {name: weight for name, weight in layer.matrices.items() if experts or not _of_expert(name)}


def bytes_of_buffers(layers: Sequence[Layer], experts: bool) -> int:
    """Fast memory that StreamedLayers takes for these layers. experts: as there."""
    return BUFFERS * sum(ends_of([loaded_of(layer, experts) for layer in layers]).values())


def _of_expert(name: str) -> bool:
    return name.startswith("experts.")


def _part_of(name: str) -> str:
    """The part that a matrix comes with: its own name, but an expert's matrices come with the MLP's of that name, and
    some with what they are needed beside."""
    first, module = name.split(".")[0], name.removesuffix(".weight").rsplit(".", 1)[-1]
    return PART_OF.get(first, module)


def _nbytes(weight: ops.Weight) -> int:
    return sum(tensor.nbytes for tensor in tensors_of(weight).values())


def _run(copies: CopyPairs) -> None:
    for into, source in copies:
        copy_alone(into, source)


def _flat(x: Tensor) -> Tensor:
    return x.view(-1).view(torch.uint8)


def _room(layers: Sequence[dict[str, ops.Weight]], fast: Allocate) -> dict[str, Tensor]:
    """Fast memory for these matrices of any of the layers, uint8 by name."""
    return {name: fast((end,), torch.uint8) for name, end in ends_of(layers).items()}


def ends_of(layers: Sequence[dict[str, ops.Weight]]) -> dict[str, int]:
    """Bytes of the largest matrix of each name. Layers with experts and dense ones differ."""
    ends: dict[str, int] = {}
    for matrices in layers:
        for name, weight in matrices.items():
            ends[name] = max(ends.get(name, 0), _end(weight))
    return ends


def placed_in(matrices: dict[str, ops.Weight], room: dict[str, Tensor]) -> dict[str, ops.Weight]:
    """Matrices of these forms in that memory, whatever it holds."""
    found: dict[str, ops.Weight] = {}
    for name, weight in matrices.items():
        at, views = 0, {}
        for kind, x in tensors_of(weight).items():
            views[kind] = room[name][at : at + x.nbytes].view(x.dtype).view(x.shape)
            at += _rounded(x.nbytes)
        found[name] = on_tensors(weight, views)
    return found


def _end(weight: ops.Weight) -> int:
    return sum(_rounded(x.nbytes) for x in tensors_of(weight).values())


def _rounded(size: int) -> int:
    return -(-size // ALIGN) * ALIGN
