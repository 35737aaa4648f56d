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
