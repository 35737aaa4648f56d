"""All layers of a decoder in C++: one call, or where their attention is not a Step's, two for each.

T: rows; H: hidden size; Hq, Hkv: query and KV heads; D: head size; I: MLP width. bf16, packed or rounded weights.
The bits are those of `ops`, one by one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from headrace.config import AttentionSpec
from headrace.kernels import cpu, dispatch
from headrace.kernels.backend import Attend
from headrace.kernels.experts import OUTSIDE, OutsideColumn
from headrace.kernels.extension import address, check, require
from headrace.kernels.ops import Weight

if TYPE_CHECKING:
    from headrace.kernels import _cpu as native


class Experts(Protocol):
    """models.spec.ExpertsSpec, as far as it counts here."""

    @property
    def count(self) -> int: ...
    @property
    def chosen(self) -> int: ...
    @property
    def inner(self) -> int: ...
    @property
    def normalised(self) -> bool: ...


Watch = Callable[[int, Tensor], object]
"""watch(layer, x [T, H]): x is what enters the layer, and is overwritten after the call."""


@dataclass(frozen=True, slots=True)
class LayerShape:
    """What the layers of a model have in common. order: as models.spec.Block. activation: silu_mul or gelu_tanh_mul
    (gated MLPs), gelu, gelu_tanh or relu. rms: the norm is RMS norm where it has weights, to which norm_offset is
    added, else LayerNorm. qk_norm_whole: over all heads together. experts: of layers that have a router.
    more: facts that C++ alone needs, by the names of its Block (csrc/binding/binding.cpp)."""

    attention: AttentionSpec
    hidden: int
    inner: int
    order: str
    activation: str
    rms: bool
    eps: float
    mlp_norm: bool
    qk_norm: bool
    norm_offset: float = 0.0
    qk_norm_whole: bool = False
    experts: Experts | None = None
    more: Mapping[str, Any] = field(default_factory=dict)


class LayerWeights(Protocol):
    """A layer's vectors and matrices by our names, without the layer's prefix. rotation: models.spec.rotation."""

    @property
    def rotation(self) -> tuple[int, int]: ...

    @property
    def weights(self) -> Mapping[str, Tensor]: ...

    @property
    def matrices(self) -> Mapping[str, Weight]: ...


def obstacle(layers: Sequence[LayerWeights], dtype: torch.dtype) -> str | None:
    """Why Blocks does not take these layers of a model in `dtype`; None where it does."""
    choice = dispatch.layer_choice()
    if choice.implementation != "cpu":
        return choice.reason
    loose = {name for each in layers for name, weight in each.matrices.items() if isinstance(weight, Tensor)}
    if loose:
        return f"not packed: {', '.join(sorted(loose)[:8])}"
    return None if dtype == torch.bfloat16 else "not in bfloat16"


class Blocks:
    """The layers of a model, called like layers.OneByOne. Raises ValueError for weights that do not fit `shape`."""

    def __init__(self, shape: LayerShape, layers: Sequence[LayerWeights]) -> None:
        self.shape = shape
        self.layers = layers  # keeps the memory that the blocks point to
        self.blocks = [_block(shape, layer, query=True) for layer in layers]
        self.turns = max(sum(layer.rotation) for layer in layers)
        heads = shape.attention.heads * shape.attention.head_dim
        self.without_queries = None if heads % cpu.COLUMNS else [_block(shape, layer, query=False) for layer in layers]

    def __call__(
        self,
        x: Tensor,
        cos_sin: Tensor | None,
        attend: Attend,
        some: Tensor | None = None,
        watch: Watch | None = None,
    ) -> Tensor:
        """x [T, H] -> [T, H], which takes x's place in memory; cos_sin [T, N] fp32 as in ops.rotary.

        some, int64 [n]: rows of which alone the result is wanted, [n, H]; watch: see Decoder.forward.

        All layers hand the same memory to `attend`: q, k and v are views of it.
        """
        spec, rows, threads = self.shape.attention, len(x), torch.get_num_threads()
        check("x", x, torch.bfloat16, (rows, self.shape.hidden))
        qkv = torch.empty((rows, spec.heads + 2 * spec.kv_heads, spec.head_dim), dtype=x.dtype)
        q, k, v = qkv.split((spec.heads, spec.kv_heads, spec.kv_heads), dim=1)
        scratch = torch.empty(max(block.scratch(rows) for block in self.blocks), dtype=x.dtype)
        x_at, qkv_at, scratch_at = x.data_ptr(), qkv.data_ptr(), scratch.data_ptr()
        turn_at, turned = self.turn_of(cos_sin, rows)
        last = len(self.blocks) - 1
        begin = 0
        if attend.prepared is not None and watch is None:
            begin = last + (some is None)
            attend.prepared.run(self.blocks[:begin], x, (turn_at, turned), qkv, scratch, threads)
        for index, block in enumerate(self.blocks[begin:], begin):
            if watch is not None:
                watch(index, x)
            block.before(x_at, turn_at, qkv_at, scratch_at, rotary=turned, rows=rows, threads=threads)
            if index == last and some is not None:
                attended, x, q = attend(index, q, k, v, some).contiguous(), x[some], q[some]
                x_at, rows = x.data_ptr(), len(some)
            else:
                attended = attend(index, q, k, v).contiguous()
            check("attended", attended, x.dtype, q.shape)
            if rows:
                block.after(x_at, attended.data_ptr(), scratch_at, rows, threads)
        return x

    def project(self, layer: int, x: Tensor, cos_sin: Tensor | None) -> tuple[Tensor, Tensor]:
        """The keys and values [n, Hkv, D] that the layer makes of x [n, H], as `attend` gets them."""
        spec, rows = self.shape.attention, len(x)
        check("x", x, torch.bfloat16, (rows, self.shape.hidden))
        block, queries = self.blocks[layer], spec.heads
        if self.without_queries is not None:
            block, queries = self.without_queries[layer], 0
        heads = torch.empty((rows, queries + 2 * spec.kv_heads, spec.head_dim), dtype=x.dtype)
        scratch = torch.empty(block.scratch(rows), dtype=x.dtype)
        turn_at, turned = self.turn_of(cos_sin, rows)
        block.before(
            x.data_ptr(), turn_at, heads.data_ptr(), scratch.data_ptr(), rotary=turned, rows=rows,
            threads=torch.get_num_threads(),
        )  # fmt: skip
        _, k, v = heads.split((queries, spec.kv_heads, spec.kv_heads), dim=1)
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


def _block(shape: LayerShape, layer: LayerWeights, *, query: bool) -> native.Block:
    """The C++ block, which holds addresses only; without queries it has keys and values alone."""
    ext, spec = require(), shape.attention
    heads, kv = spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim
    sizes = {"qkv": (heads + 2 * kv, shape.hidden), "out": (shape.hidden, heads)}
    qkv, out = (
        matrix_of(layer.weights, layer.matrices, name, size, 0 if query or name != "qkv" else heads)
        for name, size in sizes.items()
    )
    experts = shape.experts if "router.weight" in layer.matrices else None
    prefixes = [""] if experts is None else [f"experts.{index}." for index in range(experts.count)]
    mlps = [_mlp(shape, layer, prefix, shape.inner if experts is None else experts.inner) for prefix in prefixes]
    # A parallel block without a norm of its own for the MLP feeds both halves from the same one.
    attention_norm, mlp_norm = (
        norm_of(shape, layer.weights, name)
        for name in ("attention_norm", "mlp_norm" if shape.mlp_norm else "attention_norm")
    )
    out_norms = [f"{part}_out_norm" for part in ("attention", "mlp")] if shape.order == "sandwich" else []
    first, rotated = layer.rotation
    if rotated % 2 or rotated > spec.head_dim:
        raise ValueError(f"cannot rotate {rotated} of {spec.head_dim} elements")
    widths = (
        {"q_norm": heads, "k_norm": kv} if shape.qk_norm_whole else dict.fromkeys(("q_norm", "k_norm"), spec.head_dim)
    )
    q_norm, k_norm = (
        _vector(layer.weights, f"{name}.weight", width) if shape.qk_norm and (query or name == "k_norm") else 0
        for name, width in widths.items()
    )
    return ext.Block(
        order=getattr(ext.Order, shape.order), activation=getattr(ext.Activation, shape.activation),
        heads=spec.heads if query else 0, kv_heads=spec.kv_heads, dim=spec.head_dim, eps=shape.eps, qkv=qkv, out=out,
        up=mlps[0][0], down=mlps[0][1], attention_norm=attention_norm, mlp_norm=mlp_norm, q_norm=q_norm, k_norm=k_norm,
        out_norms=[norm_of(shape, layer.weights, name) for name in out_norms], turn_first=first, turned=rotated,
        norm_whole=shape.qk_norm_whole, experts=None if experts is None else _experts(shape, layer, experts, mlps),
        **shape.more,
    )  # fmt: skip


def _mlp(shape: LayerShape, layer: LayerWeights, prefix: str, inner: int) -> tuple[native.Matrix, native.Matrix]:
    """Up and down of the layer's MLP, or of an expert."""
    wide = inner * (2 if shape.activation.endswith("_mul") else 1)
    up = matrix_of(layer.weights, layer.matrices, f"{prefix}up", (wide, shape.hidden))
    return up, matrix_of(layer.weights, layer.matrices, f"{prefix}down", (shape.hidden, inner))


def _experts(
    shape: LayerShape, layer: LayerWeights, experts: Experts, mlps: Sequence[tuple[native.Matrix, native.Matrix]]
) -> native.Experts:
    router = matrix_of(layer.weights, layer.matrices, "router", (experts.count, shape.hidden))
    ups, downs = zip(*mlps, strict=True)
    outside = layer.weights.get(OUTSIDE)
    if outside is not None:
        check(OUTSIDE, outside, torch.int64, (experts.count, len(OutsideColumn)))
    return require().Experts(
        router, ups, downs, chosen=experts.chosen, normalised=experts.normalised, outside=address(outside)
    )


def matrix_of(
    weights: Mapping[str, Tensor], matrices: Mapping[str, Weight], name: str, shape: tuple[int, int], first: int = 0
) -> native.Matrix:
    """The outputs of a matrix of this shape from `first` on, as C++ takes it."""
    weight = matrices[f"{name}.weight"]
    if isinstance(weight, Tensor) or weight.shape != shape:
        raise ValueError(f"{name}.weight must be packed and {list(shape)}, got {list(weight.shape)}")
    return weight.outputs_from(first).matrix(_vector(weights, f"{name}.bias", shape[0], first))


def norm_of(shape: LayerShape, weights: Mapping[str, Tensor], name: str) -> native.Scale:
    """The norm of that name, as C++ takes it."""
    weight, bias = (_vector(weights, f"{name}.{kind}", shape.hidden) for kind in ("weight", "bias"))
    return require().Scale(shape.rms and weight != 0, weight, bias, shape.norm_offset)


def _vector(weights: Mapping[str, Tensor], name: str, size: int, first: int = 0) -> int:
    """Address of a vector's element `first`; 0 where there is none of that name."""
    vector = weights.get(name)
    if vector is None:
        return 0
    check(name, vector, torch.bfloat16, (size,))
    return vector[first:].data_ptr()
