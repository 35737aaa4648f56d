"""What kernels.block needs to know of a model's layers: what they have in common, and what each one has."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from torch import Tensor

from headrace.config import AttentionSpec, RecurrentSpec, RoutingSpec
from headrace.kernels.adapted_rows import PlacedPairs
from headrace.kernels.ops import Weight
from headrace.kernels.records import RecurrentWeights


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
    @property
    def shared(self) -> int: ...
    @property
    def shared_gate(self) -> bool: ...
    @property
    def beside(self) -> bool: ...
    @property
    def routing(self) -> RoutingSpec: ...


class Latent(Protocol):
    """models.spec.LatentSpec, as far as it counts here."""

    @property
    def rank(self) -> int: ...
    @property
    def plain(self) -> int: ...
    @property
    def value(self) -> int: ...
    @property
    def query(self) -> int: ...
    @property
    def query_rank(self) -> int | None: ...
    @property
    def norm_eps(self) -> float: ...


class Net(Protocol):
    """A layer of models.hybrid, as far as it counts here."""

    @property
    def weights(self) -> RecurrentWeights: ...

    @property
    def tiled(self) -> object | None:
        """Something where value heads go to the output in another order, as in GGUF's files of Qwen3.5."""


ALPHAS = "activation.alphas"
"""The two numbers of a layer's xIELU among its vectors, fp32 [2]."""


@dataclass(frozen=True, slots=True)
class LayerShape:
    """What the layers of a model have in common. order: as models.spec.Block. activation: silu_mul or gelu_tanh_mul
    (gated MLPs), gelu, gelu_tanh, relu, relu2 or xielu. rms: the norm is RMS norm where it has weights, to which
    norm_offset is added, else LayerNorm. qk_norm_whole: over all heads together. experts: of layers that have a
    router. gated: attention is let through by gates, which lie behind q, k and v. recurrent: of layers that have a
    net. latent: of attention over latents (models.latent). beside: where layers have a net beside attention,
    models.layer_parts' Multipliers but for those of channels. inputs: how many numbers enter each layer
    beside its stream (models.layer_parts.LayerInputs). more: facts that C++ alone needs, by the names of its Block
    (csrc/binding/model.cpp)."""

    attention: AttentionSpec
    hidden: int
    order: str
    activation: str
    rms: bool
    eps: float
    mlp_norm: bool
    qk_norm: bool
    norm_offset: float = 0.0
    qk_norm_whole: bool = False
    experts: Experts | None = None
    gated: bool = False
    recurrent: RecurrentSpec | None = None
    latent: Latent | None = None
    beside: tuple[float, ...] | None = None
    inputs: int = 0
    more: Mapping[str, Any] = field(default_factory=dict)


SHARE_SCALES = "routing.share_scales"
"""Of each expert, by which shares are multiplied: among a layer's vectors, fp32."""


class LayerWeights(Protocol):
    """A layer's vectors and matrices by our names, without the layer's prefix. rotation, query_first: as in
    models.spec.ModelConfig."""

    @property
    def kv_shape(self) -> tuple[int, int]:
        """Its KV heads and their size."""

    @property
    def projected(self) -> tuple[int, ...]:
        """As models.spec.ModelConfig.projected_heads."""

    @property
    def inner(self) -> int:
        """Width of its dense MLP."""

    @property
    def rotation(self) -> tuple[int, int]: ...

    @property
    def query_first(self) -> int: ...

    @property
    def net(self) -> Net | None: ...

    @property
    def weights(self) -> Mapping[str, Tensor]: ...

    @property
    def matrices(self) -> Mapping[str, Weight]: ...

    @property
    def pairs(self) -> Mapping[str, PlacedPairs]:
        """What adapters have for its matrices, by their names without `.weight`."""
