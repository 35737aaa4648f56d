"""What attention needs to know of a model, for every room."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal, TypeVar

RecurrentKind = Literal["delta", "kda", "mamba2", "conv"]
"""What a recurrent layer is: a gated delta net, a Mamba-2 layer, a short convolution."""


@dataclass(frozen=True, slots=True)
class IndexSpec:
    """Indexers, by whose scores a row chooses the keys that it attends to (DSA; DeepSeek-V3.2, arXiv 2512.02556, 2.1).

    heads, size: of an indexer's queries; its key of a token is the first `size` numbers that are stored of it. chosen:
    keys that a row attends to at most. own: layers with an indexer; in others a row attends to those that it has chosen
    in the nearest such layer before, and the numbers of an indexer's key are 0. norm_eps: of the norm of its keys.

    pool: above 1, a row chooses pools of so many keys (GLM-5.3-Flash), `chosen` keys together, and attends to those
    behind the last whole pool too. A pool's key is the sum of its keys, by weights of each number that are a softmax
    over them, of as many numbers more that are stored of a token.

    block: above 1, a row chooses blocks of so many keys (MiniMax-M3), for each KV head by itself, of which the indexer
    has a head; its own block and local - 1 before it are always among them. The indexer's key lies in those of all KV
    heads, the first size / KV heads numbers of each, and in layers without an indexer a row attends to all keys.
    """

    heads: int
    size: int
    chosen: int
    own: tuple[bool, ...]
    block: int = 1
    local: int = 0
    norm_eps: float = 1e-6
    pool: int = 1

    @property
    def stored(self) -> int:
        """Numbers of a token that are an indexer's: its key, and what it counts in a pool."""
        return self.size * (1 if self.pool == 1 else 2)

    @property
    def most(self) -> int:
        """Keys that a row attends to at most: one that sees no more, attends to all of them."""
        return self.chosen + self.pool - 1


Window = int | None
"""The keys that a row sees: the last w; of a negative number -w those of its own block of w keys, which begins at a
multiple of w (chunked attention, Llama 4); None: all."""
Position = TypeVar("Position")
"""An int, or many of them in an array or a tensor."""


def first_seen(position: Position, window: int) -> Position:
    """Where the keys begin that a row at `position` sees through a window; below 0 for the first rows."""
    if window < 0:
        return position - position % -window  # type: ignore[return-value, operator]
    return position - (window - 1)  # type: ignore[return-value, operator]


@dataclass(frozen=True, slots=True)
class AttentionSpec:
    """What attention needs to know of a model. `windows[layer]`: which keys a row sees (see Window).

    `alibi` asks for a bias per (query head, key position),
    which the model supplies as a table; see attention.plan. With `score_cap` scaled scores s become
    score_cap * tanh(s / score_cap). With `sinks` every row also sees a key without a value, whose score each
    head of each layer has learned.

    With `shapes` layer l has its own number of KV heads and head size, shapes[l]; kv_heads and head_dim are then those
    of most layers, for estimates. The last len(`shared`) layers have no keys and values of their own: each attends to
    those of the layer that stands in `shared`. once: keys and values are the same numbers (latent attention), which lie
    once in pools and tiers, as values. index: rows attend to some keys alone, whose size `head_dim` has in it.
    """

    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    scale: float
    windows: tuple[Window, ...]
    alibi: bool = False
    score_cap: float | None = None
    sinks: bool = False
    shapes: tuple[tuple[int, int], ...] = ()
    shared: tuple[int, ...] = ()
    once: bool = False
    index: IndexSpec | None = None

    @property
    def group(self) -> int:
        """Query heads per KV head."""
        return self.heads // self.kv_heads

    def kv_bytes_per_token(self, element_bytes: int) -> int:
        """Bytes of K and V of one token over all layers."""
        return sum(heads * dim for heads, dim in self._stored_shapes()) * self.planes * element_bytes

    @property
    def planes(self) -> int:
        """Vectors that are stored of a token and KV head: a key and a value, or what is both."""
        return 1 if self.once else 2

    def vectors_per_token(self) -> int:
        """Those of one token over all layers and heads: as int8 each has a scale."""
        return sum(self.planes * heads for heads, _ in self._stored_shapes())

    def shape(self, layer: int) -> tuple[int, int]:
        """(KV heads, head size) of a layer."""
        return self.shapes[layer] if self.shapes else (self.kv_heads, self.head_dim)

    @property
    def index_width(self) -> int:
        """Numbers of what is stored of a token and KV head that are an indexer's."""
        return 0 if self.index is None else self.index.stored // (1 if self.once else self.kv_heads)

    @property
    def own_dim(self) -> int:
        """Head size without those."""
        return self.head_dim - self.index_width

    @property
    def every_shape(self) -> tuple[tuple[int, int], ...]:
        """Each shape that layers have, once."""
        return tuple(dict.fromkeys(map(self.shape, range(self.layers))))

    def windows_of(self, shape: tuple[int, int]) -> frozenset[int | None]:
        """Windows of the layers of a shape."""
        return frozenset(self.windows[layer] for layer in range(self.layers) if self.shape(layer) == shape)

    @property
    def widest(self) -> int:
        """Numbers of a head that a kernel takes together, at most: what lies `once` is taken in two parts, of which the
        first is the greatest power of two below its size."""
        largest = max(dim for _, dim in self.every_shape)
        return 1 << (largest - 1).bit_length() - 1 if self.once else largest

    @property
    def stored(self) -> int:
        """How many layers have keys and values of their own: the first ones."""
        return self.layers - len(self.shared)

    def source(self, layer: int) -> int:
        """The layer whose keys and values a layer attends to."""
        return layer if layer < self.stored else self.shared[layer - self.stored]

    def first(self, layers: int) -> AttentionSpec:
        """Of the first layers alone."""
        shared = self.shared[: max(0, layers - self.stored)]
        index = self.index and replace(self.index, own=self.index.own[:layers])
        return replace(
            self, layers=layers, windows=self.windows[:layers], shapes=self.shapes[:layers], shared=shared, index=index
        )

    def _stored_shapes(self) -> list[tuple[int, int]]:
        return [self.shape(layer) for layer in range(self.stored)]


@dataclass(frozen=True, slots=True)
class RecurrentSpec:
    """What stands in place of attention in some layers of a model: gated delta nets, Kimi Delta Attention (kda),
    Mamba-2 layers, or short convolutions (docs/hybrids.md).

    kernel: inputs that the causal convolution sees. layers: how many such layers there are. Each value head has a
    matrix [key_dim, value_dim] of its own; `value_heads // key_heads` of them share queries and keys. Those of Mamba-2
    are what its paper calls C and B, its values are x. Kimi Delta Attention is a net each channel of whose keys decays
    by itself, with as many key heads as value heads. A short convolution is one head without queries, keys and matrix
    (`short_convolutions`). normed: of Mamba-2, whether the heads of a group are normed together. bound: below 0,
    channels of Kimi Delta Attention decay by e^bound at most (kernels.gated_delta).
    """

    layers: int
    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    kernel: int
    kind: RecurrentKind = "delta"
    normed: bool = True
    bound: float = 0.0

    @classmethod
    def short_convolutions(cls, layers: int, channels: int, kernel: int) -> RecurrentSpec:
        """Of layers that convolve their rows, gated before it and behind it, and do nothing else."""
        return cls(layers, key_heads=1, value_heads=1, key_dim=0, value_dim=channels, kernel=kernel, kind="conv")

    @property
    def keys(self) -> int:
        """Width of all queries, and of all keys."""
        return self.key_heads * self.key_dim

    @property
    def values(self) -> int:
        """Width of all values."""
        return self.value_heads * self.value_dim

    @property
    def channels(self) -> int:
        """Width of what is convolved: queries, keys and values; in Mamba-2 values, keys and queries."""
        return 2 * self.keys + self.values

    @property
    def channel_parts(self) -> tuple[int, ...]:
        """Widths of the parts of `channels`, in their order."""
        if self.kind == "conv":
            return (self.values,)
        return (self.values, self.keys, self.keys) if self.kind == "mamba2" else (self.keys, self.keys, self.values)

    @property
    def mixed_parts(self) -> tuple[int, ...]:
        """`mixed` with channels by their parts."""
        if self.kind == "kda":
            return (*self.channel_parts, self.key_dim, self.key_dim)
        if self.kind == "conv":
            return self.mixed
        return (*self.channel_parts, self.values) if self.kind == "delta" else (self.values, *self.channel_parts)

    @property
    def mixed(self) -> tuple[int, ...]:
        """Widths of what a layer first makes of its rows: channels and what gates a net's output, in Mamba-2 the other
        way round; what gates a convolution's inputs, its output, and what is gated; in Kimi Delta Attention channels,
        and a few numbers each that decays and the output's gates are made of."""
        if self.kind == "kda":
            return self.mixed_parts
        if self.kind == "conv":
            return (self.channels,) * 3
        return (self.channels, self.values) if self.kind == "delta" else (self.values, self.channels)

    @property
    def width(self) -> int:
        """Numbers of a row that the recurrence takes beside its gates: `mixed`, and in Kimi Delta Attention what gates
        the output in place of the few that it is made of."""
        return self.channels + self.values if self.kind == "kda" else sum(self.mixed)

    @property
    def gate_rows(self) -> int:
        """Numbers that the matrix of fp32 gates makes of a row: of each value head two of a net, else one."""
        return {"delta": 2, "kda": 1, "mamba2": 1, "conv": 0}[self.kind] * self.value_heads

    @property
    def gates(self) -> int:
        """Numbers of a row that its fp32 gates are: those, and in Kimi Delta Attention one of each channel of keys."""
        return self.gate_rows + (self.keys if self.kind == "kda" else 0)

    def state_bytes(self, element_bytes: int) -> int:
        """Bytes of one state over all layers: the matrices in fp32, and the convolutions' last inputs."""
        matrices = 4 * self.value_heads * self.key_dim * self.value_dim
        return self.layers * (matrices + element_bytes * (self.kernel - 1) * self.channels)
