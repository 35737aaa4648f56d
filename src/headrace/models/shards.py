"""A tensor rank's share of a decoder: which heads it computes, and which rows of each weight it holds.

H: hidden size, I: MLP width, Hq, Hkv: query and KV heads, D: head size, M: tensor ranks, T: rows (tokens) of a step.
Every matrix is cut by outputs and none by inputs. An output element is then one sum over all inputs, in the order of
one rank, and has the same bits; Megatron-LM (arXiv 1909.08053, section 3) cuts `out` and `down` by inputs instead, and
adds partial sums in an order that depends on M. What that costs in traffic: parallel.tensor.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Literal, Protocol

from headrace.config import AttentionSpec, RecurrentSpec
from headrace.models import recurrent_shares
from headrace.models.layer_parts import LatentSpec
from headrace.models.recurrent_shares import LEAST, RecurrentShare
from headrace.models.slots import expected
from headrace.models.spec import CLASSIFIER, ModelConfig

if TYPE_CHECKING:
    from torch import Tensor

Width = Literal["queries", "keys", "heads", "recurrent", "inner", "expert_inner", "shared_inner", "hidden"]
"""What ranks gather: queries [T, Hq D] and keys [T, Hkv D] normed over all heads, attended heads [T, Hq D], what a
recurrent layer has made [T, Hv V], the MLP's activations [T, I], those of the experts that rows meet [T k, an expert's
I] and of the one that all meet [T, its I], a block's output [T, H]."""

UNIT = 64
"""Widths are cut at multiples of this where they are long enough: packed weights come in blocks of 64 outputs. Else at
LEAST, which each rank has: torch's fp32 product, the fallback, adds up in another order for fewer outputs than 12, and
its elementwise functions compute by 32."""


class ShardGroup(Protocol):
    """The ranks that compute a decoder together, seen from one of them."""

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    def gather(self, x: Tensor, widths: Sequence[int]) -> Tensor:
        """x [T, widths[rank]] of this rank -> [T, sum(widths)], the ranks' columns in order; every rank gets them.

        All ranks call it equally often, with the same T and widths.
        """
        ...

    def scatter(self, parts: Sequence[Tensor] | None, own: Tensor) -> Tensor:
        """parts, on rank 0: a tensor for each rank -> this rank's, of the shape and type of `own`. All ranks call it
        equally often."""
        ...


def shard(config: ModelConfig, rank: int, size: int) -> AttentionSpec:
    """Attention of the tensor rank `rank` of `size`: its own heads. More ranks than KV heads hold copies of them.

    Raises ValueError, with the remedy, where the heads cannot be shared out evenly.
    """
    if not 0 <= rank < size:
        raise ValueError(f"tensor rank {rank} does not exist in a group of {size}")
    spec = config.attention
    if not _fits(config, size):
        fitting = [str(n) for n in range(1, spec.heads + 1) if _fits(config, n)]
        raise ValueError(
            f"tensor_parallel_size {size} does not divide {spec.heads} query heads and "
            f"{' or '.join(str(kv) for kv, _ in spec.every_shape)} KV heads{_recurrent_heads(config)}; "
            f"this model can use {', '.join(fitting)}"
        )
    shapes = tuple((max(1, heads // size), dim) for heads, dim in spec.shapes)
    return replace(spec, heads=spec.heads // size, kv_heads=max(1, spec.kv_heads // size), shapes=shapes)


def recurrent_share(config: ModelConfig, size: int) -> RecurrentSpec | None:
    """Recurrent layers of that of `size` tensor ranks whose states take most. Raises ValueError as Share does."""
    if size == 1 or config.recurrent is None:
        return config.recurrent
    shares = [each.spec for each in Share(config, 0, size).recurrent_shares]
    return max(shares, key=lambda spec: spec.state_bytes(1))


def _fits(config: ModelConfig, size: int) -> bool:
    spec, recurrent = config.attention, config.recurrent
    divides = spec.heads % size == 0 and all(max(kv, size) % min(kv, size) == 0 for kv, _ in spec.every_shape)
    return divides and (recurrent is None or recurrent_shares.fits(recurrent, size))


def _recurrent_heads(config: ModelConfig) -> str:
    spec = config.recurrent
    if spec is None:
        return ""
    if spec.kind == "conv":
        return f", or leaves a rank less than {LEAST} of {spec.values} channels"
    return f", and {spec.value_heads} value heads and {spec.key_heads} key heads of recurrent layers"


def cut(name: str, total: int, size: int) -> list[range]:
    """The columns of a width that each rank computes; the last ranks have more where it does not divide.

    Raises ValueError for a width of less than LEAST columns a rank.
    """
    if total < LEAST * size:
        raise ValueError(
            f"tensor_parallel_size {size} leaves less than {LEAST} of {name} {total} to a rank; "
            f"use {max(1, total // LEAST)} or fewer"
        )
    unit = UNIT if total >= UNIT * size else LEAST
    bounds = [rank * (total // unit) // size * unit for rank in range(size)] + [total]
    return [range(*pair) for pair in pairwise(bounds)]


@dataclass(frozen=True)
class Share:
    """What tensor rank `rank` of `size` computes of the model `config`. Raises ValueError as `shard` and `cut` do."""

    config: ModelConfig
    rank: int
    size: int

    def __post_init__(self) -> None:
        shard(self.config, self.rank, self.size)
        for width in self.gathered:
            self.widths(width)

    @property
    def gathered(self) -> list[Width]:
        """The widths that layers of the model have."""
        found: list[Width] = ["heads", "hidden"]
        found += ["recurrent"] if self.config.recurrent is not None else []
        if self.config.has_dense_mlp:
            found.append("inner")
        if self.config.experts is not None:
            found.append("expert_inner")
            found += ["shared_inner"] if self.config.experts.shared else []
        return [*found, "queries", "keys"] if self.config.qk_norm_whole else found

    @property
    def own(self) -> ModelConfig:
        """The facts of this share: its own heads, whatever mixes rows."""
        recurrent = None if self.recurrent is None else self.recurrent.spec
        return replace(self.config, attention=self.attention, recurrent=recurrent)

    @property
    def attention(self) -> AttentionSpec:
        return shard(self.config, self.rank, self.size)

    @cached_property
    def recurrent_shares(self) -> list[RecurrentShare]:
        """What each rank computes of the recurrent layers; none where there are none."""
        spec = self.config.recurrent
        if spec is None:
            return []
        channels = cut("channels", spec.values, self.size) if spec.kind == "conv" else None
        return [RecurrentShare.of(spec, rank, self.size, channels) for rank in range(self.size)]

    @property
    def recurrent(self) -> RecurrentShare | None:
        """This rank's."""
        return self.recurrent_shares[self.rank] if self.recurrent_shares else None

    @property
    def heads(self) -> range:
        """Query heads of this rank, by their numbers in the model."""
        count = self.attention.heads
        return range(self.rank * count, (self.rank + 1) * count)

    @property
    def kv_heads(self) -> range:
        """KV heads of this rank in the first layer: those that its query heads attend."""
        return self.kv_heads_of(0)

    def kv_heads_of(self, layer: int) -> range:
        """The same in any layer."""
        first = self.rank * self.config.attention.shape(layer)[0] // self.size
        return range(first, first + self.attention.shape(layer)[0])

    def widths(self, width: Width, layer: int = 0) -> list[int]:
        """How many columns each rank has of what is gathered in a layer."""
        if width == "recurrent":
            return [each.spec.values for each in self.recurrent_shares]
        if width in ("heads", "queries", "keys"):
            kv_heads, dim = self.attention.shape(layer)
            if self.config.latent is not None:
                return [self.attention.heads * self.config.latent.value] * self.size
            return [(kv_heads if width == "keys" else self.attention.heads) * dim] * self.size
        return [len(columns) for columns in self._cut(width, layer)]

    def each_once(self, keys: Tensor) -> Tensor:
        """Gathered keys [T, ranks x own] -> [T, Hkv D]: without the copies that more ranks than KV heads hold."""
        copies = max(1, self.size // self.config.attention.kv_heads)
        return keys.unflatten(1, (self.size, -1))[:, ::copies].flatten(1)

    def columns(self, width: Width) -> range:
        """This rank's columns among all of the queries or the keys."""
        heads, dim = self.kv_heads if width == "keys" else self.heads, self.attention.head_dim
        return range(heads.start * dim, heads.stop * dim)

    def _cut(self, width: Width, layer: int = 0) -> list[range]:
        if width == "inner":
            return cut("intermediate_size", self.config.inner(layer), self.size)
        if width == "expert_inner" and self.config.experts is not None:
            return cut("an expert's width", self.config.experts.inner, self.size)
        if width == "shared_inner" and self.config.experts is not None:
            return cut("the shared expert's width", self.config.experts.shared, self.size)
        return cut("hidden_size", self.config.hidden_size, self.size)

    @property
    def outputs(self) -> dict[str, int]:
        """Rows that each of our tensors has on all ranks together, by name: on a GPU they are part of the order of sums
        of weights in codes (kernels.triton.weights)."""
        return {name: sum(slot.parts) for name, slot in expected(self.config).items()}

    def holds(self, name: str) -> bool:
        """Whether this rank has any of the tensor `name`. Heads stand whole on rank 0, where logits are wanted."""
        return name not in ("head.weight", "head.bias", CLASSIFIER) or self.rank == 0

    def rows(self, name: str) -> list[range] | None:
        """Rows of our tensor `name` (see models.spec) that this rank holds, in order; None: all of them.

        Embeddings, norms and the projections around the layers are small or cheap, and whole on every rank.
        """
        first, number, *_ = name.split(".")
        *_, module, kind = name.split(".")
        layer = int(number) if first == "layers" else 0
        if module == "qkv":
            return self._qkv_rows(layer)
        if module in ("queries", "heads", "attention_gates"):
            return [self._rows_of_heads(module, self.config.latent)]
        if kind == "sinks":
            return [self.heads]
        if self.recurrent is not None and (found := self.recurrent.rows(module, kind)) is not None:
            return found
        if module == "up":
            parts = self._cut(_inner_of(name), layer)
            mine, inner = parts[self.rank], parts[-1].stop
            return [mine, range(mine.start + inner, mine.stop + inner)] if self.config.gated else [mine]
        return [self._cut("hidden")[self.rank]] if module in ("out", "recurrent_out", "down") else None

    def _rows_of_heads(self, module: str, latent: LatentSpec | None) -> range:
        """Rows of this rank's heads in the matrices that latent attention has for each head."""
        assert latent is not None, "other models have no such matrices"
        rows = {"queries": latent.query, "heads": latent.plain + latent.value, "attention_gates": latent.value}[module]
        return range(self.heads.start * rows, self.heads.stop * rows)

    def _qkv_rows(self, layer: int) -> list[range]:
        counts, dim = self.config.projected_heads(layer), self.config.attention.shape(layer)[1]
        mine = [self.heads, *(self.kv_heads_of(layer),) * (len(counts) - 1)]
        if self.config.attention_gate:
            counts, mine = (*counts, counts[0]), [*mine, self.heads]
        parts = zip(accumulate((0, *counts[:-1])), mine, strict=True)
        return [range((start + heads.start) * dim, (start + heads.stop) * dim) for start, heads in parts]


def _inner_of(name: str) -> Width:
    """The width that a matrix called `up` makes."""
    if ".experts." in name:
        return "expert_inner"
    return "shared_inner" if ".shared." in name else "inner"


class Whole:
    """The widths of a layer where one rank computes all of them.

    joined_groups: all heads of Mamba-2 layers, where several ranks have a part of each group; else None.
    """

    joined_groups: RecurrentSpec | None = None

    def recurrent(self, own: RecurrentSpec | None) -> RecurrentSpec | None:
        """Recurrent layers of all ranks together. own: this rank's."""
        return own

    def __call__(self, width: Width, x: Tensor) -> Tensor:
        """x [T, this rank's share of a width] -> [T, that width]."""
        return x

    def mine(self, width: Width, x: Tensor) -> Tensor:
        """x [T, a width] -> [T, this rank's share of it]."""
        return x


class Gathered(Whole):
    """The same of one of several tensor ranks: all call with the same widths in the same order."""

    def __init__(self, share: Share, tensor: ShardGroup, layer: int = 0) -> None:
        self.share, self.tensor = share, tensor
        self.widths: dict[Width, list[int]] = {width: share.widths(width, layer) for width in share.gathered}
        if share.recurrent is not None and share.recurrent.joins_groups:
            self.joined_groups = share.recurrent.whole

    def recurrent(self, own: RecurrentSpec | None) -> RecurrentSpec | None:
        return self.share.config.recurrent

    def __call__(self, width: Width, x: Tensor) -> Tensor:
        every = self.tensor.gather(x, self.widths[width])
        return every if width != "keys" else self.share.each_once(every)

    def mine(self, width: Width, x: Tensor) -> Tensor:
        columns = self.share.columns(width)
        return x[:, columns.start : columns.stop]


@dataclass(frozen=True)
class Unsent:
    """A ShardGroup of one rank's own: what the others would give is zeros. For measurements."""

    rank: int
    size: int

    def gather(self, x: Tensor, widths: Sequence[int]) -> Tensor:
        return x.new_zeros(len(x), sum(widths))

    def scatter(self, parts: Sequence[Tensor] | None, own: Tensor) -> Tensor:
        return own.new_zeros(own.shape)


ALONE = Whole()
