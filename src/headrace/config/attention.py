"""What attention needs to know of a model, for every room."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class AttentionSpec:
    """What attention needs to know of a model. `windows[layer]` is the number of latest keys a row sees (None: all).

    A row at position p with window w attends keys p-w+1 .. p. `alibi` asks for a bias per (query head, key position),
    which the model supplies as a table; see attention.plan. With `score_cap` scaled scores s become
    score_cap * tanh(s / score_cap). With `sinks` every row also sees a key without a value, whose score each
    head of each layer has learned.
    """

    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    scale: float
    windows: tuple[int | None, ...]
    alibi: bool = False
    score_cap: float | None = None
    sinks: bool = False

    @property
    def group(self) -> int:
        """Query heads per KV head."""
        return self.heads // self.kv_heads

    def kv_bytes_per_token(self, element_bytes: int) -> int:
        """Bytes of K and V of one token over all layers."""
        return 2 * self.layers * self.kv_heads * self.head_dim * element_bytes


@dataclass(frozen=True, slots=True)
class RecurrentSpec:
    """The gated delta nets of a model, one for each of its layers with linear attention (docs/hybrids.md).

    kernel: inputs that the causal convolution sees. layers: how many such layers there are. Each value head has a
    matrix [key_dim, value_dim] of its own; `value_heads // key_heads` of them share queries and keys.
    """

    layers: int
    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    kernel: int

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
        """Width of what is convolved: queries, keys and values."""
        return 2 * self.keys + self.values

    def state_bytes(self, element_bytes: int) -> int:
        """Bytes of one state over all layers: the matrices in fp32, and the convolutions' last inputs."""
        matrices = 4 * self.value_heads * self.key_dim * self.value_dim
        return self.layers * (matrices + element_bytes * (self.kernel - 1) * self.channels)
