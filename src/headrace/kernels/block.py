"""All layers of a decoder in C++: one call, or where their attention is not a Step's, two for each.

T: rows; H: hidden size; Hq, Hkv: query and KV heads; D: head size; I: MLP width. bf16, packed or rounded weights.
The bits are those of `ops`, one by one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import copy

import torch
from torch import Tensor

from headrace.config import RecurrentSpec
from headrace.kernels import cpu, dispatch
from headrace.kernels.adapted_rows import AdaptedRows
from headrace.kernels.backend import Attend
from headrace.kernels.cpu_step import StepOver
from headrace.kernels.extension import check
from headrace.kernels.layer_shape import LayerShape, LayerWeights, Net
from headrace.kernels.native_block import native_block
from headrace.kernels.recurrent import Recur, fits_cpp, gates_behind
from headrace.kernels.recurrent_step import PreparedRecurrence
from headrace.kernels.triton.weights import GpuWeight

Made = dict[int, tuple[Tensor, Tensor]]
"""Keys and values [T, Hkv, D] of a step by the layer that made them, of layers whose others attend to them too."""
Watch = Callable[[int, Tensor], object]
"""watch(layer, x [T, H]): x is what enters the layer, and is overwritten after the call."""


def obstacle(layers: Sequence[LayerWeights], dtype: torch.dtype, recurrent: RecurrentSpec | None = None) -> str | None:
    """Why Blocks does not take these layers of a model in `dtype`; None where it does."""
    choice = dispatch.layer_choice()
    if choice.implementation != "cpu":
        return choice.reason
    loose = {name for each in layers for name, w in each.matrices.items() if isinstance(w, Tensor | GpuWeight)}
    if loose:
        return f"not packed: {', '.join(sorted(loose)[:8])}"
    if recurrent is not None and not fits_cpp(recurrent):
        return f"recurrent layers with keys of {recurrent.key_dim}, or convolutions of {recurrent.kernel}"
    if any(each.net is not None and each.net.tiled is not None for each in layers):
        return "value heads in the order of a GGUF file"
    return None if dtype == torch.bfloat16 else "not in bfloat16"


class Blocks:
    """The layers of a model, called like layers.OneByOne. Raises ValueError for weights that do not fit `shape`."""

    def __init__(self, shape: LayerShape, layers: Sequence[LayerWeights]) -> None:
        self.shape = shape
        self.layers = layers  # keeps the memory that the blocks point to
        self.blocks = [native_block(shape, layer, query=True) for layer in layers]
        self.turns = max(max(layer.rotation[0], layer.query_first) + layer.rotation[1] for layer in layers)
        self.places = _places(shape, layers)
        self.heads = tuple((shape.attention.heads, *each.kv_shape) for each in layers if _attends(shape, each))
        """Query heads, KV heads and their size, of each layer with attention."""
        heads = shape.attention.heads * shape.attention.head_dim
        alike = len(shape.attention.every_shape) == 1 and not shape.attention.shared
        whole = shape.latent is None and (heads % cpu.COLUMNS or shape.recurrent is not None or not alike)
        self.adapted: AdaptedRows | None = None
        self.without_queries = None if whole else [native_block(shape, layer, query=False) for layer in layers]

    def first(self, count: int) -> Blocks:
        """The first layers alone."""
        return Blocks(self.shape, self.layers[:count])

    def adapted_by(self, rows: AdaptedRows) -> Blocks:
        """The layers in a step some rows of which have an adapter. They are for that step alone."""
        other = copy(self)
        other.adapted = rows
        return other

    def __call__(
        self,
        x: Tensor,
        cos_sin: Tensor | None,
        attend: Attend,
        some: Tensor | None = None,
        watch: Watch | None = None,
        recur: Recur | None = None,
        inputs: Tensor | None = None,
    ) -> Tensor:
        """x [T, H] -> [T, H], which takes x's place in memory; cos_sin [T, N] fp32 as in ops.rotary.

        some, int64 [n]: rows of which alone the result is wanted, [n, H]; watch and recur: see Decoder.forward.
        inputs [T, L, P]: what enters each layer beside x, of a model that has that. watch is told of layers that have
        keys and values of their own.

        All layers hand the same memory to `attend`: q, k and v are views of it.
        """
        rows, threads = len(x), torch.get_num_threads()
        check("x", x, torch.bfloat16, (rows, self.shape.hidden))
        if recur is None and self.shape.recurrent is not None:
            raise ValueError("this model has recurrent layers: forward needs `recur`, which keeps their states")
        mixed = torch.empty(max(block.mixed_size(rows) for block in self.blocks), dtype=x.dtype)
        scratch = torch.empty(max(block.scratch(rows) for block in self.blocks), dtype=x.dtype)
        x_at, mixed_at, scratch_at = x.data_ptr(), mixed.data_ptr(), scratch.data_ptr()
        turn_at, turned = self.turn_of(cos_sin, rows)
        adapted, numbers = self.adapted, numbers_of(self.adapted, rows)
        last, begin = len(self.blocks) - 1, 0
        if attend.prepared is not None and watch is None and (recur is None or recur.prepared is not None):
            begin = last + (some is None)
            recurrence, own = None if recur is None else recur.prepared, self._inputs_of(inputs, rows, 0)
            self._run_first(begin, attend.prepared, x, (turn_at, turned), mixed, scratch, recurrence, numbers, own)
        made: Made = {}
        for index, block in enumerate(self.blocks[begin:], begin):
            if watch is not None and self.layers[index].projected[1:]:
                watch(index, x)
            block.before(
                x_at, turn_at, mixed_at, scratch_at, rotary=turned, rows=rows, threads=threads, adapted=numbers
            )
            chosen = some if index == last else None
            attended, gates = self._across_rows(index, mixed, rows, attend, recur, chosen, made)
            if chosen is not None:
                x, rows, inputs = x[chosen], len(chosen), None if inputs is None else inputs[chosen]
                x_at = x.data_ptr()
                adapted = None if adapted is None else adapted.of(chosen)
                numbers = numbers_of(adapted, rows)
            if rows:
                at, stride = self._inputs_of(inputs, rows, index)
                block.after(
                    x_at, attended.data_ptr(), scratch_at, rows, threads, **_gates(gates), adapted=numbers, inputs=at,
                    inputs_stride=stride,
                )  # fmt: skip
        return x

    def _run_first(self, count: int, over: StepOver, x: Tensor, turn: tuple[int, int], mixed: Tensor, scratch: Tensor,
                   recurrence: PreparedRecurrence | None, adapted: int, inputs: tuple[int, int]) -> None:  # fmt: skip
        """So many layers in one call: see StepOver.run."""
        self.check_heads(over)
        attended = torch.empty(max(block.attended_size(len(x)) for block in self.blocks), dtype=x.dtype)
        blocks, threads = self.blocks[:count], torch.get_num_threads()
        over.run(blocks, x, turn, mixed, attended, scratch, threads, recurrence, adapted, inputs)

    def check_heads(self, over: StepOver) -> None:
        """Raises ValueError for a step of other heads."""
        if over.heads == self.heads:
            return
        for theirs, ours in zip(over.heads, self.heads, strict=False):
            if theirs != ours:
                raise ValueError(f"the step is of (heads, KV heads, head size) {theirs}, the model of {ours}")

    def _inputs_of(self, inputs: Tensor | None, rows: int, layer: int) -> tuple[int, int]:
        """Address of a layer's first row among inputs [T, L, P], and how far apart rows lie; zeros for none. There may
        be more layers than these."""
        width = self.shape.inputs
        if not width:
            return 0, 0
        if inputs is None:
            raise ValueError("the layers of this model have inputs of their own: hand these over")
        layers = max(len(self.layers), inputs.shape[1])
        check("inputs", inputs, torch.bfloat16, (rows, layers, width))
        return inputs.data_ptr() + layer * width * inputs.element_size(), layers * width

    def _across_rows(
        self,
        layer: int,
        mixed: Tensor,
        rows: int,
        attend: Attend,
        recur: Recur | None,
        some: Tensor | None,
        lent: Made,
    ) -> tuple[Tensor, Tensor | None]:
        """What the rows of a layer, or `some`, take from others: attended heads [T, Hq, D] and gates for them of this
        shape, if there are any; or what a recurrent layer has made; or both, as `after` takes them. mixed: what
        `before` has left."""
        net, place = self.layers[layer].net, self.places[layer]
        made = None if net is None or recur is None else self._recurred(layer, net, mixed, rows, recur)
        made = made if made is None or some is None else made[some]
        if made is not None and not _attends(self.shape, self.layers[layer]):
            check("attended", made, mixed.dtype, made.shape)
            return made, None
        q, k, v, gates = self._heads(layer, mixed, rows, self.shape.attention.heads)
        source = self.shape.attention.source(place)
        if source == place and place in self.shape.attention.shared:
            lent[place] = k.clone(), v.clone()  # all layers have the same memory
        if source != place and source not in lent:
            attended = attend.stored(place, q, some)
        else:
            k, v = lent.get(source, (k, v))
            attended = attend(place, q, k, v) if some is None else attend(place, q, k, v, some)
        if some is not None:
            q, gates = q[some], gates[some]
        attended = attended.contiguous()
        check("attended", attended, mixed.dtype, q.shape)
        if made is not None:
            return self._both(layer, attended, made), None
        return attended, gates if self.shape.gated else None

    def _both(self, layer: int, attended: Tensor, made: Tensor) -> Tensor:
        """Of n rows what attention makes and the recurrent layer beside it, in one memory."""
        rows, block = len(attended), self.blocks[layer]
        both = torch.empty(block.attended_size(rows), dtype=attended.dtype)
        both[: attended.numel()] = attended.flatten()
        first = block.recurred_at(rows)
        both[first : first + made.numel()] = made.flatten()
        return both

    def _heads(self, layer: int, mixed: Tensor, rows: int, queries: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """q, k, v and gates of so many rows of a layer, from a block with so many query heads. Values of latents are
        their keys."""
        latent, (kv_heads, dim) = self.shape.latent is not None, self.layers[layer].kv_shape
        own = kv_heads if self.layers[layer].projected[1:] else 0
        parts = (queries, own, 0 if latent else own, queries * self.shape.gated)
        heads = mixed[: rows * sum(parts) * dim].view(rows, sum(parts), dim)
        q, k, v, gates = heads.split(parts, dim=1)
        return q, k, k if latent else v, gates

    def _recurred(self, layer: int, net: Net, mixed: Tensor, rows: int, recur: Recur) -> Tensor:
        """[T, Hv, V]."""
        spec = self.shape.recurrent
        assert spec is not None, "there are recurrent layers"
        width, block = sum(spec.mixed), self.blocks[layer]
        first = block.mixed_at(rows)
        gates = gates_behind(spec, mixed, rows, block.gates_at(rows))
        return recur(self.places[layer], mixed[first : first + rows * width].view(rows, width), gates, net.weights)

    def project(self, layer: int, x: Tensor, cos_sin: Tensor | None) -> tuple[Tensor, Tensor]:
        """The keys and values [n, Hkv, D] that the layer makes of x [n, H], as `attend` gets them."""
        spec, rows = self.shape.attention, len(x)
        check("x", x, torch.bfloat16, (rows, self.shape.hidden))
        block, queries = self.blocks[layer], spec.heads
        if self.without_queries is not None:
            block, queries = self.without_queries[layer], 0
        mixed = torch.empty(block.mixed_size(rows), dtype=x.dtype)
        scratch = torch.empty(block.scratch(rows), dtype=x.dtype)
        turn_at, turned = self.turn_of(cos_sin, rows)
        block.before(
            x.data_ptr(), turn_at, mixed.data_ptr(), scratch.data_ptr(), rotary=turned, rows=rows,
            threads=torch.get_num_threads(), adapted=numbers_of(self.adapted, rows),
        )  # fmt: skip
        _, k, v, _ = self._heads(layer, mixed, rows, queries)
        return k, v

    def turn_of(self, cos_sin: Tensor | None, rows: int) -> tuple[int, int]:
        """Address of cos_sin and the length of its rows; zeros for none."""
        if cos_sin is None:
            return 0, 0
        width = cos_sin.shape[-1]
        if width < self.turns:
            raise ValueError(f"cos_sin has rows of {width} elements, the layers rotate by the first {self.turns}")
        check("cos_sin", cos_sin, torch.float32, (rows, width))
        return cos_sin.data_ptr(), width


def _attends(shape: LayerShape, layer: LayerWeights) -> bool:
    return layer.net is None or shape.beside is not None


def _places(shape: LayerShape, layers: Sequence[LayerWeights]) -> list[int]:
    """Each layer's number among those of its kind."""
    kinds = [_attends(shape, layer) for layer in layers]
    return [kinds[:index].count(kind) for index, kind in enumerate(kinds)]


def _gates(gates: Tensor | None) -> dict[str, int]:
    """Arguments of Block.after."""
    return {} if gates is None else dict(gates=gates.data_ptr(), gates_stride=gates.stride(0))


def numbers_of(adapted: AdaptedRows | None, rows: int) -> int:
    """Address of the numbers of so many rows' adapters; 0 for none."""
    if adapted is None:
        return 0
    check("adapters", adapted.numbers, torch.int64, (rows,))
    return adapted.numbers.data_ptr()
