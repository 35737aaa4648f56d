"""All layers of a decoder in C++: one call, or where their attention is not a Step's, two for each.

T: rows; H: hidden size; Hq, Hkv: query and KV heads; D: head size; I: MLP width. bf16, packed or rounded weights.
The bits are those of `ops`, one by one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import copy
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from headrace.config import RecurrentSpec
from headrace.config.routing import CORRECTION
from headrace.kernels import cpu, dispatch
from headrace.kernels.adapted_rows import AdaptedRows
from headrace.kernels.backend import Attend
from headrace.kernels.cpu_step import StepOver
from headrace.kernels.experts import OUTSIDE, OutsideColumn, native_routing
from headrace.kernels.extension import address, check, require
from headrace.kernels.layer_shape import ALPHAS, Experts, LayerShape, LayerWeights, Net
from headrace.kernels.native_weights import matrix, norm_of, vector
from headrace.kernels.records import ConvWeights, DeltaWeights, MambaWeights
from headrace.kernels.recurrent import Recur, check_weights, fits_cpp, gates_behind
from headrace.kernels.routing import check_routing
from headrace.kernels.triton.weights import GpuWeight

if TYPE_CHECKING:
    from headrace.kernels import _cpu as native


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
        self.blocks = [_block(shape, layer, query=True) for layer in layers]
        self.turns = max(max(layer.rotation[0], layer.query_first) + layer.rotation[1] for layer in layers)
        self.places = _places(layers)
        heads = shape.attention.heads * shape.attention.head_dim
        whole = shape.latent is None and (heads % cpu.COLUMNS or shape.recurrent is not None)
        self.adapted: AdaptedRows | None = None
        self.without_queries = None if whole else [_block(shape, layer, query=False) for layer in layers]

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
    ) -> Tensor:
        """x [T, H] -> [T, H], which takes x's place in memory; cos_sin [T, N] fp32 as in ops.rotary.

        some, int64 [n]: rows of which alone the result is wanted, [n, H]; watch and recur: see Decoder.forward.

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
            self.check_heads(attend.prepared)
            attended = torch.empty(rows * self._widest, dtype=x.dtype)
            recurrence = None if recur is None else recur.prepared
            attend.prepared.run(
                self.blocks[:begin], x, (turn_at, turned), mixed, attended, scratch, threads, recurrence, numbers
            )
        for index, block in enumerate(self.blocks[begin:], begin):
            if watch is not None:
                watch(index, x)
            block.before(
                x_at, turn_at, mixed_at, scratch_at, rotary=turned, rows=rows, threads=threads, adapted=numbers
            )
            chosen = some if index == last else None
            attended, gates = self._across_rows(index, mixed, rows, attend, recur, chosen)
            if chosen is not None:
                x, rows = x[chosen], len(chosen)
                x_at = x.data_ptr()
                adapted = None if adapted is None else adapted.of(chosen)
                numbers = numbers_of(adapted, rows)
            check("attended", attended, x.dtype, (rows, *attended.shape[1:]))
            if rows:
                block.after(x_at, attended.data_ptr(), scratch_at, rows, threads, **_gates(gates), adapted=numbers)
        return x

    def check_heads(self, over: StepOver) -> None:
        """Raises ValueError for a step of other heads."""
        spec = self.shape.attention
        ours = (spec.heads, spec.kv_heads, spec.head_dim)
        if over.heads != ours:
            raise ValueError(f"the step is of (heads, KV heads, head size) {over.heads}, the model of {ours}")

    @property
    def _widest(self) -> int:
        """Elements of a row that attention or a net leaves, in the layer in which they are most."""
        spec, net = self.shape.attention, self.shape.recurrent
        return max(spec.heads * spec.head_dim, 0 if net is None else net.values)

    def _across_rows(
        self, layer: int, mixed: Tensor, rows: int, attend: Attend, recur: Recur | None, some: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """What the rows of a layer, or `some`, take from others: attended heads [T, Hq, D] and gates for them of this
        shape, if there are any; or what a recurrent layer has made. mixed: what `before` has left."""
        net, place = self.layers[layer].net, self.places[layer]
        if net is not None and recur is not None:
            read = self._recurred(layer, net, mixed, rows, recur)
            return read if some is None else read[some], None
        q, k, v, gates = self._heads(mixed, rows, self.shape.attention.heads)
        attended = attend(place, q, k, v) if some is None else attend(place, q, k, v, some)
        if some is not None:
            q, gates = q[some], gates[some]
        attended = attended.contiguous()
        check("attended", attended, mixed.dtype, q.shape)
        return attended, gates if self.shape.gated else None

    def _heads(self, mixed: Tensor, rows: int, queries: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """q, k, v and gates of so many rows, of a block with so many query heads. Values of latents are their keys."""
        spec, latent = self.shape.attention, self.shape.latent is not None
        parts = (queries, spec.kv_heads, 0 if latent else spec.kv_heads, queries * self.shape.gated)
        heads = mixed[: rows * sum(parts) * spec.head_dim].view(rows, sum(parts), spec.head_dim)
        q, k, v, gates = heads.split(parts, dim=1)
        return q, k, k if latent else v, gates

    def _recurred(self, layer: int, net: Net, mixed: Tensor, rows: int, recur: Recur) -> Tensor:
        """[T, Hv, V]."""
        spec = self.shape.recurrent
        assert spec is not None, "there are recurrent layers"
        width = sum(spec.mixed)
        gates = gates_behind(spec, mixed, rows, self.blocks[layer].gates_at(rows))
        return recur(self.places[layer], mixed[: rows * width].view(rows, width), gates, net.weights)

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
        _, k, v, _ = self._heads(mixed, rows, queries)
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


def _places(layers: Sequence[LayerWeights]) -> list[int]:
    """Each layer's number among those of its kind."""
    kinds = [layer.net is None for layer in layers]
    return [kinds[:index].count(kind) for index, kind in enumerate(kinds)]


def _gates(gates: Tensor | None) -> dict[str, int]:
    """Arguments of Block.after."""
    return {} if gates is None else dict(gates=gates.data_ptr(), gates_stride=gates.stride(0))


def _block(shape: LayerShape, layer: LayerWeights, *, query: bool) -> native.Block:
    """The C++ block, which holds addresses only; without queries it has keys and values alone."""
    ext, spec = require(), shape.attention
    heads, kv = spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim
    sizes = {"qkv": (heads * (1 + shape.gated) + 2 * kv, shape.hidden), "out": (shape.hidden, heads)}
    if layer.net is not None and shape.recurrent is not None:
        net = shape.recurrent
        sizes = {"mixed": (sum(net.mixed), shape.hidden), "out": (shape.hidden, net.values)}
    if shape.latent is not None:
        sizes = {"latent": (kv, shape.hidden), "out": (shape.hidden, spec.heads * shape.latent.value)}
    qkv, out = (
        matrix(layer, name, size, *((heads, 2 * kv) if name == "qkv" and not query else ()))
        for name, size in sizes.items()
    )
    experts = shape.experts if "router.weight" in layer.matrices else None
    mlps = _mlps(shape, layer, experts)
    up, down = mlps[0] if mlps else (None, None)
    # A parallel block without a norm of its own for the MLP feeds both halves from the same one.
    attention_norm, mlp_norm = (
        norm_of(shape, layer.weights, name)
        for name in ("attention_norm", "mlp_norm" if shape.mlp_norm else "attention_norm")
    )
    out_norms = [f"{part}_out_norm" for part in ("attention", "mlp")] if shape.order in ("sandwich", "after") else []
    first, rotated = layer.rotation
    if rotated % 2 or rotated > spec.head_dim:
        raise ValueError(f"cannot rotate {rotated} of {spec.head_dim} elements")
    widths = (
        {"q_norm": heads, "k_norm": kv} if shape.qk_norm_whole else dict.fromkeys(("q_norm", "k_norm"), spec.head_dim)
    )
    q_norm, k_norm = (
        vector(layer.weights, f"{name}.weight", width)
        if f"{name}.weight" in layer.weights and (query or name == "k_norm")
        else 0
        for name, width in widths.items()
    )
    return ext.Block(
        order=getattr(ext.Order, shape.order), activation=getattr(ext.Activation, shape.activation),
        heads=spec.heads if query else 0, kv_heads=spec.kv_heads, dim=spec.head_dim, eps=shape.eps, qkv=qkv, out=out,
        up=up, down=down, attention_norm=attention_norm, mlp_norm=mlp_norm, q_norm=q_norm, k_norm=k_norm,
        out_norms=[norm_of(shape, layer.weights, name) for name in out_norms], turn_first=first, turned=rotated,
        query_first=layer.query_first, norm_whole=shape.qk_norm_whole,
        experts=None if experts is None else _experts(shape, layer, experts, mlps),
        gated=shape.gated and query and layer.net is None, net=_net(shape, layer), mamba=_mamba(shape, layer),
        convolution=_convolution(shape, layer), latent=_latent(shape, layer), alphas=_alphas(shape, layer),
        **shape.more,
    )  # fmt: skip


def _alphas(shape: LayerShape, layer: LayerWeights) -> int:
    """Address of the two numbers of the layer's xIELU; 0: it has another activation."""
    if shape.activation != "xielu":
        return 0
    alphas = layer.weights[ALPHAS]
    check(ALPHAS, alphas, torch.float32, (2,))
    return alphas.data_ptr()


def _net(shape: LayerShape, layer: LayerWeights) -> native.DeltaNet | None:
    """The layer's gated delta net but for its first matrix."""
    vectors, spec = None if layer.net is None else layer.net.weights, shape.recurrent
    if spec is None or not isinstance(vectors, DeltaWeights):
        return None
    check_weights(spec, vectors)
    gates = matrix(layer, "gates", (spec.gates, shape.hidden))
    return require().DeltaNet(gates, [each.data_ptr() for each in vectors[:4]], eps=vectors.eps, **_sizes(spec))


def _mamba(shape: LayerShape, layer: LayerWeights) -> native.MambaNet | None:
    """The layer's Mamba-2 layer but for its first matrix."""
    vectors, spec = None if layer.net is None else layer.net.weights, shape.recurrent
    if spec is None or not isinstance(vectors, MambaWeights):
        return None
    check_weights(spec, vectors)
    gates = matrix(layer, "gates", (spec.gates, shape.hidden))
    return require().MambaNet(gates, vectors.addresses, eps=vectors.eps, **_sizes(spec))


def _sizes(spec: RecurrentSpec) -> dict[str, int]:
    """Of states and convolutions, by the names that C++ has for them."""
    return dict(
        key_heads=spec.key_heads, value_heads=spec.value_heads, key_dim=spec.key_dim, value_dim=spec.value_dim,
        kernel=spec.kernel,
    )  # fmt: skip


def _convolution(shape: LayerShape, layer: LayerWeights) -> native.ShortConvolution | None:
    """The layer's short convolution but for its first matrix."""
    vectors, spec = None if layer.net is None else layer.net.weights, shape.recurrent
    if spec is None or not isinstance(vectors, ConvWeights):
        return None
    check_weights(spec, vectors)
    return require().ShortConvolution(vectors.conv.data_ptr(), channels=spec.channels, kernel=spec.kernel)


def _latent(shape: LayerShape, layer: LayerWeights) -> native.Latent | None:
    """The layer's attention over latents but for the matrix that makes them."""
    spec, heads, vectors = shape.latent, shape.attention.heads, layer.weights
    if spec is None:
        return None

    def own(name: str, outputs: int, inputs: int) -> native.Matrix:
        return matrix(layer, name, (outputs, inputs))

    width = spec.query_rank
    return require().Latent(
        own("queries", heads * spec.query, width or shape.hidden),
        [own(f"keys.{head}", spec.rank, spec.plain) for head in range(heads)],
        [own(f"values.{head}", spec.value, spec.rank) for head in range(heads)],
        latent_norm=vector(vectors, "latent_norm.weight", spec.rank), eps=spec.norm_eps,
        query_in=None if width is None else own("query_in", width, shape.hidden),
        query_norm=0 if width is None else vector(vectors, "query_norm.weight", width),
    )  # fmt: skip


def _mlps(shape: LayerShape, layer: LayerWeights, experts: Experts | None) -> list[tuple[native.Matrix, native.Matrix]]:
    """The layer's MLP, or those of its experts; a layer may have none."""
    if experts is not None:
        return [_mlp(shape, layer, f"experts.{index}.", experts.inner) for index in range(experts.count)]
    return [_mlp(shape, layer, "", shape.inner)] if "up.weight" in layer.matrices else []


def _mlp(shape: LayerShape, layer: LayerWeights, prefix: str, inner: int) -> tuple[native.Matrix, native.Matrix]:
    """Up and down of the layer's MLP, or of an expert."""
    wide = inner * (2 if shape.activation.endswith("_mul") else 1)
    up = matrix(layer, f"{prefix}up", (wide, shape.hidden))
    return up, matrix(layer, f"{prefix}down", (shape.hidden, inner))


def _experts(
    shape: LayerShape, layer: LayerWeights, experts: Experts, mlps: Sequence[tuple[native.Matrix, native.Matrix]]
) -> native.Experts:
    router = matrix(layer, "router", (experts.count, shape.hidden))
    ups, downs = zip(*mlps, strict=True)
    shared = [*_mlp(shape, layer, "shared.", experts.shared)] if experts.shared else []
    if shared and experts.shared_gate:
        shared.append(matrix(layer, "shared_gate", (1, shape.hidden)))
    outside = layer.weights.get(OUTSIDE)
    if outside is not None:
        check(OUTSIDE, outside, torch.int64, (experts.count, len(OutsideColumn)))
    check_routing(experts.routing, experts.count, experts.chosen, layer.weights.get(CORRECTION))
    routing, correction = native_routing(experts.routing, layer.weights.get(CORRECTION), experts.count)
    return require().Experts(
        router, ups, downs, chosen=experts.chosen, normalised=experts.normalised, routing=routing,
        correction=correction, weighted_inputs=experts.routing.weighs_inputs, shared=shared, outside=address(outside),
    )  # fmt: skip


def numbers_of(adapted: AdaptedRows | None, rows: int) -> int:
    """Address of the numbers of so many rows' adapters; 0 for none."""
    if adapted is None:
        return 0
    check("adapters", adapted.numbers, torch.int64, (rows,))
    return adapted.numbers.data_ptr()
