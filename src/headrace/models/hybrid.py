"""What layers of hybrid models do that plain attention does not: gated delta nets, Mamba-2 layers, short convolutions,
and gates behind attention.

T: rows; H: hidden size; Hq: query heads, D: their size; Hv, V: value heads of a gated delta net, and their size.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from headrace.config import RecurrentSpec
from headrace.kernels import dispatch, mamba2, ops
from headrace.kernels.records import ConvWeights, DeltaWeights, MambaWeights
from headrace.kernels.recurrent import Recur, fits_cpp
from headrace.models.shards import Whole
from headrace.models.spec import ModelConfig

Linear = Callable[[str, Tensor], Tensor]
"""A layer's matrix of that name times x [T, H], with what adapters have for it; of WIDE in fp32."""
WIDE = ("gates", "decays")
"""Matrices that decide how much a state takes in and forgets."""


class DeltaNet:
    """A gated delta net in place of a layer's attention. place: its number among the recurrent layers."""

    def __init__(self, config: ModelConfig, index: int, weights: Mapping[str, Tensor], whole: Whole) -> None:
        self.place, self.whole = config.place(index), whole
        conv, rate = weights["conv.weight"].squeeze(1).t().contiguous(), weights["delta.A_log"].exp()
        self.weights = DeltaWeights(conv, rate, weights["delta.dt_bias"], weights["delta_norm.weight"], config.norm_eps)
        self.tiled = whole.recurrent(config.recurrent) if config.tiled_values else None

    def __call__(self, x: Tensor, recur: Recur | None, linear: Linear) -> Tensor:
        """x [T, H], normed -> this rank's heads [T, Hv, V]. Raises ValueError without `recur`."""
        return needed(recur)(self.place, linear("mixed", x), linear("gates", x), self.weights)

    def together(self, heads: Tensor) -> Tensor:
        """Those of all ranks [T, Hv V] as the columns of `out` take them (ModelConfig.tiled_values)."""
        heads = self.whole("recurrent", heads.flatten(1))
        return heads if self.tiled is None else as_tiled(self.tiled, heads)


class KimiDelta(DeltaNet):
    """Kimi Delta Attention (arXiv 2510.26692) in place of a layer's attention: a net each channel of whose keys decays
    by itself. Decays, and what gates the output, go through a few numbers on their way, `key_dim` each."""

    def __init__(self, config: ModelConfig, index: int, weights: Mapping[str, Tensor], whole: Whole) -> None:
        super().__init__(config, index, weights, whole)
        assert config.recurrent is not None, "the layer is recurrent"
        self.parts = (config.recurrent.channels, config.recurrent.key_dim, config.recurrent.key_dim)

    def __call__(self, x: Tensor, recur: Recur | None, linear: Linear) -> Tensor:
        """x [T, H], normed -> this rank's heads [T, Hv, V]. Raises ValueError without `recur`."""
        channels, decays, gates = linear("mixed", x).split(self.parts, dim=1)
        mixed = torch.cat((channels, linear("out_gates", gates.contiguous())), dim=1)
        wide = torch.cat((linear("gates", x), linear("decays", decays.contiguous())), dim=1)
        return needed(recur)(self.place, mixed, wide, self.weights)


class MambaLayer:
    """A Mamba-2 layer in place of a layer's attention. place: as of a DeltaNet.

    Where tensor ranks share a group of heads, which the norm goes over, each makes its heads without it, in fp32. Some
    models have none.
    """

    tiled = None

    def __init__(self, config: ModelConfig, index: int, weights: Mapping[str, Tensor], whole: Whole) -> None:
        self.place, self.whole = config.place(index), whole
        conv, rate = weights["conv.weight"].squeeze(1).t().contiguous(), weights["delta.A_log"].exp()
        self.norm, self.joined = weights.get("delta_norm.weight"), whole.joined_groups
        vectors = (rate, weights["delta.dt_bias"], weights["delta.D"], None if self.joined else self.norm)
        self.weights = MambaWeights(conv, weights.get("conv.bias"), *vectors, config.norm_eps)

    def __call__(self, x: Tensor, recur: Recur | None, linear: Linear) -> Tensor:
        """x [T, H], normed -> this rank's heads [T, Hv, V]. Raises ValueError without `recur`."""
        return needed(recur)(self.place, linear("mixed", x), linear("gates", x), self.weights)

    def together(self, heads: Tensor) -> Tensor:
        """Those of all ranks [T, Hv V]; in fp32 where they are normed now, or not at all."""
        heads = self.whole("recurrent", heads.flatten(1))
        if self.joined is None or self.norm is None:
            return heads
        return mamba2.normed(self.joined, heads, self.norm, self.weights.eps)


class ShortConvolution:
    """A short convolution between two gates, in place of a layer's attention. place: as of a DeltaNet."""

    tiled = None

    def __init__(self, config: ModelConfig, index: int, weights: Mapping[str, Tensor], whole: Whole) -> None:
        self.place, self.whole = config.place(index), whole
        self.weights = ConvWeights(weights["conv.weight"].squeeze(1).t().contiguous())

    def __call__(self, x: Tensor, recur: Recur | None, linear: Linear) -> Tensor:
        """x [T, H], normed -> this rank's channels [T, C]. Raises ValueError without `recur`."""
        return needed(recur)(self.place, linear("mixed", x), None, self.weights)

    def together(self, made: Tensor) -> Tensor:
        """Those of all ranks [T, H]."""
        return self.whole("recurrent", made)


KINDS: Mapping[str, type[DeltaNet | MambaLayer | ShortConvolution]] = {
    "delta": DeltaNet,
    "kda": KimiDelta,
    "mamba2": MambaLayer,
    "conv": ShortConvolution,
}


def recurrent_layer(
    config: ModelConfig, index: int, weights: Mapping[str, Tensor], whole: Whole
) -> DeltaNet | MambaLayer | ShortConvolution | None:
    """What a layer has in place of attention; None: it has attention. whole: puts together what several ranks make."""
    if config.recurrent is None or index not in config.recurrent_layers:
        return None
    return KINDS[config.recurrent.kind](config, index, weights, whole)


def check_shared(config: ModelConfig, size: int, on_gpu: bool) -> None:
    """Raises ValueError for recurrent layers that `size` tensor ranks are to share and C++ does not compute: torch's
    bits depend on how many heads there are."""
    if config.recurrent is None or on_gpu:
        return
    if not (dispatch.in_cpp() and fits_cpp(config.recurrent)):
        raise ValueError(
            f"tensor_parallel_size {size}: {config.architecture} has recurrent layers, which tensor ranks share "
            f"where the C++ kernels compute them, and these do not; use 1"
        )


def as_tiled(spec: RecurrentSpec, heads: Tensor) -> Tensor:
    """Values [n, Hv V] that lie by key head in the order of ModelConfig.tiled_values."""
    by_key = heads.view(len(heads), spec.key_heads, -1, spec.value_dim)
    return by_key.transpose(1, 2).reshape(heads.shape)


def needed(recur: Recur | None) -> Recur:
    """Raises ValueError where there is none."""
    if recur is None:
        raise ValueError("this model has recurrent layers: forward needs `recur`, which keeps their states")
    return recur


def let_through(heads: Tensor, gates: Tensor) -> Tensor:
    """heads [T, Hq, D] times the sigmoid of gates [T, Hq, D]; or [T, H] both."""
    both = torch.cat((gates.flatten(1), heads.flatten(1)), dim=1)
    return ops.sigmoid_mul(both).view(heads.shape)
