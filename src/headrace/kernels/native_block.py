"""A layer of a decoder as C++ takes it: kernels.layer_shape's facts, its vectors and its matrices, checked.

Hq, Hkv: query and KV heads; D: head size; H: hidden size. What is made here holds addresses only: whoever has the
tensors keeps them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from headrace.config import RecurrentSpec
from headrace.config.routing import CORRECTION
from headrace.kernels.experts import OUTSIDE, OutsideColumn, native_routing
from headrace.kernels.extension import address, check, require
from headrace.kernels.layer_shape import ALPHAS, SHARE_SCALES, Experts, LayerShape, LayerWeights
from headrace.kernels.native_weights import matrix, norm_of, vector
from headrace.kernels.records import ConvWeights, DeltaWeights, MambaWeights
from headrace.kernels.recurrent import check_weights
from headrace.kernels.routing import check_routing

if TYPE_CHECKING:
    from headrace.kernels import _cpu as native


def native_block(shape: LayerShape, layer: LayerWeights, *, query: bool) -> native.Block:
    """The C++ block; without queries it has keys and values alone."""
    ext, spec, (kv_heads, dim) = require(), shape.attention, layer.kv_shape
    heads, kv, own = spec.heads * dim, kv_heads * dim, layer.projected[1:]
    keys = sum(own) * dim  # and values, unless keys are both
    sizes = {"qkv": (heads * (1 + shape.gated) + keys, shape.hidden), "out": (shape.hidden, heads)}
    if layer.net is not None and shape.recurrent is not None and shape.beside is None:
        net = shape.recurrent
        sizes = {"mixed": (sum(net.mixed), shape.hidden), "out": (shape.hidden, net.values)}
    if shape.latent is not None:
        sizes = {"latent": (kv, shape.hidden), "out": (shape.hidden, spec.heads * shape.latent.value)}
    qkv, out = (
        matrix(layer, name, size, *((heads, keys) if name == "qkv" and not query else ()))
        for name, size in sizes.items()
    )
    experts = shape.experts if "router.weight" in layer.matrices else None
    mlps = _mlps(shape, layer, experts)
    dense = experts is not None and experts.beside
    up, down = _mlp(shape, layer, "", layer.inner) if dense else mlps[0] if mlps else (None, None)
    # A parallel block without a norm of its own for the MLP feeds both halves from the same one.
    attention_norm, mlp_norm = (
        norm_of(shape, layer.weights, name)
        for name in ("attention_norm", "mlp_norm" if shape.mlp_norm else "attention_norm")
    )
    out_norms = [f"{part}_out_norm" for part in ("attention", "mlp")] if shape.order in ("sandwich", "after") else []
    first, rotated = layer.rotation
    if rotated % 2 or rotated > dim:
        raise ValueError(f"cannot rotate {rotated} of {dim} elements")
    q_norm = vector(layer.weights, "q_norm.weight", heads if shape.qk_norm_whole else dim) if query else 0
    k_norm, v_norm = (
        vector(layer.weights, f"{name}.weight", width) if own else 0
        for name, width in (("k_norm", kv if shape.qk_norm_whole else dim), ("v_norm", dim))
    )
    return ext.Block(
        order=getattr(ext.Order, shape.order), activation=getattr(ext.Activation, shape.activation),
        heads=spec.heads if query else 0, kv_heads=kv_heads if own else 0, dim=dim, eps=shape.eps, qkv=qkv, out=out,
        up=up, down=down, attention_norm=attention_norm, mlp_norm=mlp_norm, q_norm=q_norm, k_norm=k_norm, v_norm=v_norm,
        keys_as_values=len(own) == 1, beside_mlp=_beside_mlp(shape, layer, experts), inputs=_inputs(shape, layer),
        scale=_scale(layer),
        out_norms=[norm_of(shape, layer.weights, name) for name in out_norms], turn_first=first, turned=rotated,
        query_first=layer.query_first, norm_whole=shape.qk_norm_whole,
        experts=None if experts is None else _experts(shape, layer, experts, mlps),
        gated=shape.gated and query and layer.net is None, beside=_beside(shape, layer),
        net=_net(shape, layer), mamba=_mamba(shape, layer),
        convolution=_convolution(shape, layer), latent=_latent(shape, layer), alphas=_alphas(shape, layer),
        **shape.more,
    )  # fmt: skip


def _scale(layer: LayerWeights) -> float:
    """By which what leaves the layer is multiplied."""
    found = layer.weights.get("whole.layer_scalar")
    return 1.0 if found is None else float(found)


def _beside_mlp(shape: LayerShape, layer: LayerWeights, experts: Experts | None) -> native.BesideMlp | None:
    """What experts beside a dense MLP have of their own."""
    if experts is None or not experts.beside:
        return None
    router = require().Scale(True, vector(layer.weights, "routing.scale", shape.hidden), 0, 0.0)
    entering, dense, met = (
        norm_of(shape, layer.weights, name) for name in ("experts_norm", "dense_out_norm", "experts_out_norm")
    )
    return require().BesideMlp(router, entering, dense, met, shape.hidden**-0.5)


def _inputs(shape: LayerShape, layer: LayerWeights) -> native.LayerInputs | None:
    """What the layer has for what enters it beside its stream."""
    if not shape.inputs:
        return None
    gate = matrix(layer, "input_gate", (shape.inputs, shape.hidden))
    out = matrix(layer, "input_out", (shape.hidden, shape.inputs))
    return require().LayerInputs(gate, out, norm_of(shape, layer.weights, "input_norm"))


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


def _beside(shape: LayerShape, layer: LayerWeights) -> native.Beside | None:
    """What the layer's recurrent half has of its own, where attention is beside it."""
    spec = shape.recurrent
    if spec is None or shape.beside is None:
        return None
    mixed = matrix(layer, "mixed", (sum(spec.mixed), shape.hidden))
    return require().Beside(mixed, matrix(layer, "recurrent_out", (shape.hidden, spec.values)), shape.beside)


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
    return [_mlp(shape, layer, "", layer.inner)] if "up.weight" in layer.matrices else []


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
        scales=_share_scales(layer, experts),
    )  # fmt: skip


def _share_scales(layer: LayerWeights, experts: Experts) -> int:
    """Address of what the shares of each expert are multiplied by; 0: of none."""
    scales = layer.weights.get(SHARE_SCALES)
    if scales is not None:
        check(SHARE_SCALES, scales, torch.float32, (experts.count,))
    return address(scales)
