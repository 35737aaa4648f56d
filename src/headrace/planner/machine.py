"""The profile: the measured machine, of ranks, of the links between them and of those to tiers; the sizes of the model;
and how long one piece of work takes by them (a roofline).

Units: seconds, bytes, operations (a multiply-add is two). The records go to JSON and back with `msgspec.json`. What is
observed later corrects the profile in one place: planner.profile.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any, Protocol

import msgspec

from headrace.planner.schedule import BLOCK

STATE_BYTES = 4
"""States travel in fp32: head_dim numbers and two more (maximum, sum) per row and head."""


class ComputeRates(msgspec.Struct, frozen=True, kw_only=True):
    """What computing attains on so many cores. Each figure: see Machine."""

    cores: int
    linear_flops_s: float
    attention_flops_s: tuple[tuple[int, float], ...]
    memory_bytes_s: float
    attention_call_s: float = 0.0
    layer_s: float = 0.0


class PieceRate(msgspec.Struct, frozen=True):
    """Seconds of so many units in one go: fixed_s + units * unit_s, and piece_s for each piece they come in. Raises
    ValueError unless unit_s is positive and the others are at least 0."""

    unit_s: float
    fixed_s: float = 0.0
    piece_s: float = 0.0

    def __post_init__(self) -> None:
        if not self.unit_s > 0 or not (self.fixed_s >= 0 and self.piece_s >= 0):
            raise ValueError(
                f"profile: a rate needs unit_s above 0, the rest at least 0: {self.unit_s}, {self.fixed_s}, "
                f"{self.piece_s}; measure it again (`headrace tune`)"
            )

    def behind(self, bytes_s: float | None, latency_s: float) -> PieceRate:
        """The same beyond a link, which takes its time meanwhile: EmulatedLink. bytes_s None: however many."""
        return PieceRate(max(self.unit_s, 1.0 / bytes_s if bytes_s else 0.0), self.fixed_s + latency_s, self.piece_s)


class TierLink(msgspec.Struct, frozen=True, kw_only=True):
    """A rank's link to its tier of this kind: bytes in pieces (chunks). cpu_s_per_byte: what a byte takes from the
    computing cores, None where it was not measured."""

    kind: str
    rate: PieceRate
    cpu_s_per_byte: float | None = None


class Machine(msgspec.Struct, frozen=True, kw_only=True):
    """What one rank attains, as measured with all ranks at work: the profile.

    linear_flops_s: rate of the linear layers at many rows. attention_flops_s: (rows, rate) pairs by rising rows, for
    the unmasked products; between them the rate is interpolated over log(rows), outside it is that of the nearest.
    attention_call_s: fixed time of one attention call; layer_s: fixed time of a layer beside it. memory_bytes_s:
    reading weights and KV, a floor under both rates. link_bytes_s, latency_s: a link between two ranks, one way;
    a rank sends one message at a time and receives one at a time. link_cpu_s_per_byte: time that a message takes from
    the computing cores, on each side. one_engine: what a rank attains by itself with the cores of all ranks of its
    host, where they share one and it may use them all. exchange_s: by strategy, what an exchange adds to each
    layer beyond all that: threads that are woken and wait for a core. tiers: a rank's links to where KV is stored
    outside its pool. project: K and V of one layer from activations, by tokens; None where none are kept. fold_tokens:
    keys that go into one state of ring-q, the length of a block of the backend's canonical order.

    Raises ValueError for a figure that is not positive (fixed times, latency and link_cpu_s_per_byte may be 0).
    """

    name: str
    cores: int
    isa: str
    date: str
    linear_flops_s: float
    attention_flops_s: tuple[tuple[int, float], ...]
    memory_bytes_s: float
    link_bytes_s: float
    latency_s: float = 0.0
    attention_call_s: float = 0.0
    layer_s: float = 0.0
    link_cpu_s_per_byte: float = 0.0
    one_engine: ComputeRates | None = None
    exchange_s: tuple[tuple[str, float], ...] = ()
    tiers: tuple[TierLink, ...] = ()
    project: PieceRate | None = None
    fold_tokens: int = BLOCK

    def __post_init__(self) -> None:
        rates = {name: getattr(self, name) for name in ("linear_flops_s", "memory_bytes_s", "link_bytes_s")}
        rates |= {f"attention_flops_s at {rows} rows": rate for rows, rate in self.attention_flops_s}
        for name, value in rates.items():
            if not value > 0:
                raise ValueError(f"profile: {name} must be above 0, got {value}; measure it again (`headrace tune`)")
        for name in ("latency_s", "attention_call_s", "layer_s", "link_cpu_s_per_byte"):
            if not getattr(self, name) >= 0:
                raise ValueError(f"profile: {name} must be at least 0; measure it again (`headrace tune`)")
        rows = [pair[0] for pair in self.attention_flops_s]
        if not rows or rows[0] < 1 or any(a >= b for a, b in pairwise(rows)):
            raise ValueError(
                f"profile: attention_flops_s needs rising row counts from 1 up, got {rows}; "
                "measure it again (`headrace tune`)"
            )
        if self.one_engine is not None:
            _ = self.alone  # its figures are checked likewise

    @property
    def alone(self) -> Machine:
        """The profile of a rank that computes by itself while the others wait."""
        if self.one_engine is None:
            return self
        return msgspec.structs.replace(self, one_engine=None, **msgspec.structs.asdict(self.one_engine))

    @property
    def fingerprint(self) -> str:
        """What must be the same for a tuned table to fit: the machine, not the rates of one measurement."""
        return f"{self.name}, {self.cores} cores, {self.isa}"

    def attention_rate(self, rows: int) -> float:
        """Operations a second of an attention call with so many rows."""
        table = self.attention_flops_s
        for (low, slow), (high, fast) in pairwise(table):
            if rows <= high:
                weight = math.log(max(rows, low) / low) / math.log(high / low)
                return slow + weight * (fast - slow)
        return table[-1][1]


class _Attention(Protocol):
    """The sizes of headrace.config.AttentionSpec that count here."""

    @property
    def heads(self) -> int: ...
    @property
    def kv_heads(self) -> int: ...
    @property
    def head_dim(self) -> int: ...
    @property
    def once(self) -> bool: ...


class ModelShape(msgspec.Struct, frozen=True, kw_only=True):
    """Sizes of a decoder as one rank computes it (divide heads, mlp and vocab by the tensor-parallel size).

    mlp is the inner width; gated: three matrices instead of two. element_bytes: of weights, K, V, Q. before, behind:
    elements of the matrices before a layer's attention, and between that and its MLP, of latent attention; 0: those of
    Q, K and V, and of the output. once: values are the keys, and are kept and sent once.
    """

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    mlp: int
    vocab: int
    gated: bool = True
    element_bytes: int = 2
    before: int = 0
    behind: int = 0
    once: bool = False

    def __post_init__(self) -> None:
        for name in ("layers", "hidden", "heads", "kv_heads", "head_dim", "element_bytes"):
            if getattr(self, name) < 1:
                raise ValueError(f"shape: {name} must be at least 1, got {getattr(self, name)}")

    @classmethod
    def of(cls, model: Any, element_bytes: int = 2, tensor_ranks: int = 1) -> ModelShape:
        """Of a headrace.models.spec.ModelConfig (or anything with its fields), for one of `tensor_ranks` ranks."""
        spec: _Attention = model.attention
        heads, latent = -(-spec.heads // tensor_ranks), getattr(model, "latent", None)
        before, behind = (0, 0) if latent is None else latent.weights(heads, model.hidden_size)
        return cls(
            layers=model.layers,
            hidden=model.hidden_size,
            heads=heads,
            kv_heads=-(-spec.kv_heads // tensor_ranks),
            head_dim=spec.head_dim,
            mlp=-(-model.mlp_width // tensor_ranks),
            vocab=-(-model.vocab_size // tensor_ranks),
            gated=model.gated,
            element_bytes=element_bytes,
            before=before,
            behind=behind,
            once=spec.once,
        )

    @property
    def qkv_weights(self) -> int:
        """Elements of a layer's Q, K and V projections."""
        return self.before or self.hidden * (self.heads + 2 * self.kv_heads) * self.head_dim

    @property
    def rest_weights(self) -> int:
        """Elements of a layer's output projection and MLP: what follows its attention."""
        out = self.behind or self.hidden * self.heads * self.head_dim
        return out + (3 if self.gated else 2) * self.hidden * self.mlp

    @property
    def linear_flops(self) -> int:
        """Operations of all layers' linear maps for one token, the head not counted."""
        return 2 * self.layers * (self.qkv_weights + self.rest_weights)

    @property
    def pair_flops(self) -> int:
        """Operations of one row meeting one key in one layer: two products over all heads."""
        return 4 * self.heads * self.head_dim

    @property
    def kv_bytes(self) -> int:
        """K and V of one token in one layer."""
        return self.sent_vectors * self.kv_heads * self.head_dim * self.element_bytes

    @property
    def sent_vectors(self) -> int:
        """A key and a value of a KV head, or what is both."""
        return 1 if self.once else 2

    @property
    def q_bytes(self) -> int:
        """Q of one token in one layer."""
        return self.heads * self.head_dim * self.element_bytes

    @property
    def state_bytes(self) -> int:
        """One row's attention state over one segment, in one layer."""
        return self.heads * (self.head_dim + 2) * STATE_BYTES


@dataclass(frozen=True)
class LayerTimes:
    """Seconds of one layer's pieces on one rank; no rows or no pairs take no time."""

    machine: Machine
    shape: ModelShape

    def linear(self, rows: int, weights: int) -> float:
        if not rows:
            return 0.0
        read = weights * self.shape.element_bytes / self.machine.memory_bytes_s
        return max(2 * rows * weights / self.machine.linear_flops_s, read)

    def qkv(self, rows: int) -> float:
        """Projections before the attention, and the fixed time of a layer."""
        return self.linear(rows, self._qkv_weights) + (self.machine.layer_s if rows else 0.0)

    def rest(self, rows: int) -> float:
        """What follows the attention: output projection and MLP."""
        return self.linear(rows, self._rest_weights)

    def head(self) -> float:
        """Logits of one token."""
        return self.linear(1, self.shape.hidden * self.shape.vocab)

    def attend(self, rows: int, pairs: int, keys: int) -> float:
        """`rows` rows meet `keys` keys in `pairs` unmasked pairs, in one call."""
        if not pairs:
            return 0.0
        compute = pairs * self._pair_flops / self.machine.attention_rate(rows)
        return self.machine.attention_call_s + max(compute, keys * self._kv_bytes / self.machine.memory_bytes_s)

    @cached_property
    def _qkv_weights(self) -> int:
        return self.shape.qkv_weights

    @cached_property
    def _rest_weights(self) -> int:
        return self.shape.rest_weights

    @cached_property
    def _pair_flops(self) -> int:
        return self.shape.pair_flops

    @cached_property
    def _kv_bytes(self) -> int:
        return self.shape.kv_bytes

    def copy(self, tokens: float) -> float:
        """K and V of so many tokens from one place in memory to another: read and written."""
        return 2 * tokens * self._kv_bytes / self.machine.memory_bytes_s

    def fold(self, states: int) -> float:
        """Merging so many states of one row into a result: they are read once."""
        return states * self.shape.state_bytes / self.machine.memory_bytes_s


def count_of(number: int, name: str) -> str:
    """'1 core', '2 cores'."""
    return f"{number} {name}{'' if number == 1 else 's'}"


def shares(cached_on: Sequence[float] | None, ranks: int) -> tuple[float, ...]:
    """Fraction of the cached tokens that lies on each rank, from any non-negative measure; None: spread evenly.

    Raises ValueError for a wrong number of ranks or a negative figure.
    """
    if cached_on is None or not any(cached_on):
        return (1 / ranks,) * ranks
    if len(cached_on) != ranks or min(cached_on) < 0:
        raise ValueError(f"cached_on must be {ranks} figures of at least 0, one per rank, got {list(cached_on)}")
    return tuple(x / sum(cached_on) for x in cached_on)
