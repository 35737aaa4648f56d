"""What the splits of a run of stored chunks take: the pieces' costs, put together.

    chunk   0          tokens        tokens + x              chunks
            | recomputed | projected   | loaded as K and V     |  then the suffix: new tokens
            | from tokens| from stored X                       |

The copy stream carries, layer after layer, X of the layer and then its K and V, from the beginning on and without a
pause. The engine first prefills the recomputed part (all layers), then takes the layers in turn: waits for X, projects,
waits for K and V, computes the suffix rows. With X and KV its seconds of one layer, P the projection, S the
suffix rows of one layer and C the prefill, layer j = 0 .. L-1 cannot project before j (X + KV) + X, nor take its
suffix rows before (j + 1) (X + KV). What ends last is the longest of the paths that start with C or with one of these;
the starts of the layers are evenly spaced, so only the first and the last layer's can be the longest:

    end = max(C + L (P + S),  X + L (P + S),  X + KV + (L - 1) P + L S,            first layer
              (L - 1) (X + KV) + X + P + S,  L (X + KV) + S)                       last layer

Moving bytes takes a share f of the computing cores while the copy stream is busy. Computing then advances by 1 - f a
second until that ends and by 1 a second after it; measured in work that could have been done, the formula stays as it
is. What threads that meet after every product lose beyond that, and the copy stream to them, is observed:
Costs.contention.

Of several ranks each loads and projects its own chunks, all at the same time, and may have few rows of the suffix, or
none: it then projects while others compute. X and KV are each rank's own (or what their tier gives to all of them
together), and so are P and three figures of the planner's timeline (planner.choice.Pace): A from when the rank has the
first layer's chunks until the end, D from when it has the last layer's, and W, what it computes itself of a layer. With
B = (L - 1) (P + W) + D of the rank of which that is longest, and T all of the suffix with everything there:

    end = max(C + T,  and of each rank: C + min(T - A, W) + P + max(A, B),       W: the projections of its rows
              X + P + max(A, B),  X + KV + max(A, B),
              (L - 1) (X + KV) + X + P + D,  L (X + KV) + D)

which is the formula above where one rank computes everything: A = T = L S, D = W = S. C and T depend on the strategies;
the end never rises where one of them falls, so the best of each can be taken by itself, C at each split and T by trying
all.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from headrace.planner.estimators import FloatArray
from headrace.planner.strategy_rates import Closing
from headrace.types import CHUNK

Ints = NDArray[np.int64]

MOST_TAKEN = 0.95
"""Share of the computing cores that a copy stream can take at most."""


@dataclass(frozen=True, slots=True)
class StoredRun:
    """A run of stored chunks: the first `first` chunks of the prompt are resident, `chunks` are stored, and `suffix`
    new tokens follow. kv_bytes, x_bytes: a chunk's stored bytes over all `layers` (x_bytes None: no activations are
    stored). has_x: of which chunks they are; none given: of all. tiers: where it is stored; of several, one per chunk.
    ranks: who brings each chunk and projects it, all at the same time; none: one rank. held: resident chunks of each
    of several ranks. x_turns: tensor ranks that take turns to bring activations, whole rows, where each brings its own
    heads of K and V (kv_bytes). Raises ValueError.
    """

    first: int
    chunks: int
    suffix: int
    kv_bytes: float
    x_bytes: float | None
    layers: int
    tiers: str | tuple[str, ...]
    ranks: tuple[int, ...] = ()
    has_x: tuple[bool, ...] = ()
    held: tuple[int, ...] = ()
    x_turns: int = 1

    def __post_init__(self) -> None:
        if min(self.first, self.chunks, self.suffix) < 0 or not self.kv_bytes > 0:
            raise ValueError(f"a run needs counts of at least 0, and kv_bytes above 0: {self}")
        if min(self.layers, self.x_turns) < 1:
            raise ValueError(f"a run needs layers and x_turns of at least 1: {self}")
        if self.x_bytes is not None and not self.x_bytes > 0:
            raise ValueError(f"a run's x_bytes must be above 0, or None for none; got {self.x_bytes}")
        if not isinstance(self.tiers, str) and len(self.tiers) != self.chunks:
            raise ValueError(f"a run of {self.chunks} chunks needs as many tiers, got {len(self.tiers)}")
        if any(each and len(each) != self.chunks for each in (self.ranks, self.has_x)):
            raise ValueError(f"a run of {self.chunks} chunks needs as many ranks, or has_x")

    def projects(self, tokens: Ints, x: Ints) -> NDArray[np.bool_]:
        """Whether each of the chunks that these splits project has activations, elementwise."""
        if self.x_bytes is None or not self.has_x:
            return np.logical_or(x == 0, self.x_bytes is not None)
        without = np.concatenate([[0], np.cumsum(np.logical_not(self.has_x))])
        return np.equal(without[tokens + x], without[tokens])

    @property
    def tier_of(self) -> tuple[str, ...]:
        """Where each chunk is stored."""
        return (self.tiers,) * self.chunks if isinstance(self.tiers, str) else self.tiers

    @property
    def by_place(self) -> dict[tuple[int, str], Ints]:
        """(rank, tier) -> how many of the chunks before each bound 0 .. chunks come that way."""
        if isinstance(self.tiers, str) and not self.ranks:
            return {(0, self.tiers): np.arange(self.chunks + 1)}
        places = list(zip(self.ranks or (0,) * self.chunks, self.tier_of, strict=True))
        numbers = {place: number for number, place in enumerate(dict.fromkeys(places))}
        of = np.array([numbers[place] for place in places], np.int64)
        return {place: np.append(0, np.cumsum(of == number)) for place, number in numbers.items()}

    @property
    def lies(self) -> list[float]:
        """Tokens on each rank once all is loaded."""
        brought = np.bincount(self.ranks or (0,) * self.chunks, minlength=len(self.held))
        held = np.append(self.held, np.zeros(len(brought) - len(self.held)))
        return (CHUNK * (held + brought)).tolist()


class Costs(Protocol):
    """Seconds of the pieces, elementwise over arrays; see planner.profile."""

    def transfer(self, tier: str, size: FloatArray, pieces: FloatArray) -> FloatArray:
        """`size` bytes in `pieces` pieces (chunks) from a tier, in one go; 0 for none."""

    def contention(self, loading: bool) -> float:
        """Seconds lost for each second that copy stream and engine compete for the cores, beyond those it takes:
        where nothing but the new tokens is computed beside `loading`, and where more is."""

    def cpu_s_per_byte(self, tier: str) -> float:
        """Seconds that a byte from the tier takes from the computing cores."""

    def project(self, tokens: FloatArray) -> FloatArray:
        """K and V of so many tokens from X, in one layer; 0 for none."""

    def together_s_per_byte(self, tier: str) -> float:
        """What a byte takes where several ranks load from the tier at the same time; 0.0: they do not hold up each
        other."""

    def prefill(self, start: FloatArray, count: FloatArray) -> FloatArray:
        """One step of `count` tokens after `start` others, all layers; 0 for none. By the best strategy."""

    def closings(self, opening: int, end: int, lies: Sequence[float], loads: Collection[int]) -> Sequence[Closing]:
        """Ways to compute `opening` tokens after `end` others, at least one: see planner.profile."""


class Prediction(NamedTuple):
    """seconds: until the suffix is computed; link_s: the copy stream is at work; waited_s: of these the engine waits;
    shared_s: copy stream and engine compete for the cores. closing_s: the suffix takes by itself."""

    seconds: float
    link_s: float
    waited_s: float
    shared_s: float = 0.0
    closing_s: float = 0.0


class CostTables:
    """What the pieces of a run cost; transfers and projections by how many chunks they take (arrays over 0 .. chunks).

    closings: how the suffix may be computed, the likeliest first.
    """

    def __init__(self, run: StoredRun, costs: Costs, max_batch_tokens: int) -> None:
        if max_batch_tokens < 1:
            raise ValueError(f"max_batch_tokens must be at least 1, got {max_batch_tokens}")
        self.run, self.costs, self.most = run, costs, max_batch_tokens
        counts = np.arange(run.chunks + 1, dtype=np.float64)
        self.places = run.by_place
        tiers = {tier for _, tier in self.places}
        self.kv_s = {tier: self._transfers(tier, run.kv_bytes, counts) for tier in tiers}
        self.x_counts = -(-counts // run.x_turns)  # of the tensor rank that brings most
        self.x_s = {tier: self._transfers(tier, run.x_bytes or 0.0, self.x_counts) for tier in tiers}
        self.project_s = costs.project(counts * CHUNK) if run.x_bytes else np.zeros(len(counts))
        end, opening = (run.first + run.chunks) * CHUNK, min(run.suffix, max_batch_tokens)
        self.closings = costs.closings(opening, end, run.lies, set(run.ranks or (0,)))
        self.after_s = self._prefilled(end + opening, run.suffix - opening)
        self.all_s = self._prefilled(run.first * CHUNK, run.chunks * CHUNK + run.suffix)

    def _transfers(self, tier: str, size: float, counts: FloatArray) -> FloatArray:
        return self.costs.transfer(tier, counts * size / self.run.layers, counts) if size else np.zeros(len(counts))

    def _prefilled(self, start: int, count: int) -> float:
        return float(prefill(self.costs, start, np.array([float(count)]), self.most)[0])

    def splits(self, tokens: Ints, x: Ints) -> Splits:
        """What these splits take beside the suffix."""
        carried, none = self._carried(tokens, x), np.zeros(tokens.shape)
        some, places = np.unique(tokens, return_inverse=True)
        return Splits(
            tokens=tokens,
            x=x,
            carried=carried,
            prefix_s=prefill(self.costs, self.run.first * CHUNK, np.asarray(some * CHUNK, np.float64), self.most)[
                places
            ],
            busy_s=self.run.layers * _most([each.x_s + each.kv_s for each in carried.values()], none),
            taken_s=_most([each.cpu_s for each in carried.values()], none),
        )

    def _carried(self, tokens: Ints, x: Ints) -> dict[int, Carried]:
        """What each rank does of the splits. Ranks load at the same time, unless a tier gives less to all together."""
        found: dict[int, Carried] = {}
        given, run_bytes = np.zeros(tokens.shape), self.run.kv_bytes / self.run.layers
        for (rank, tier), before in self.places.items():
            projected = before[tokens + x] - before[tokens]
            loaded = before[-1] - before[tokens + x]
            size = self.x_counts[projected] * (self.run.x_bytes or 0.0) + loaded * self.run.kv_bytes
            own = Carried(self.x_s[tier][projected], self.kv_s[tier][loaded],
                          size * self.costs.cpu_s_per_byte(tier), projected)  # fmt: skip
            found[rank] = found[rank].plus(own) if rank in found else own
            given = given + loaded * run_bytes * self.costs.together_s_per_byte(tier)
        if len(found) > 1 and given.any():
            return {rank: each._replace(kv_s=np.maximum(each.kv_s, given)) for rank, each in found.items()}
        return found

    def predict(self, of: Splits) -> tuple[FloatArray, FloatArray, FloatArray, FloatArray]:
        """The first four figures of Prediction: [closings, splits]."""
        free = 1.0 - np.minimum(of.taken_s / np.maximum(of.busy_s, 1e-12), MOST_TAKEN)
        work, end = self._ends(of, free)
        idle = np.clip((end - of.prefix_s - work) / free, 0.0, of.busy_s)
        shared = np.minimum(of.taken_s, of.prefix_s + work)
        seconds = np.where(end <= of.busy_s * free, end / free, end + of.busy_s * (1.0 - free)) + self.after_s
        losing = self.costs.contention(loading=True), self.costs.contention(loading=False)
        beside_s = np.array([[each.beside_s] for each in self.closings])
        seconds = seconds + np.where(of.tokens + of.x == 0, *losing) * shared + beside_s
        none = of.tokens == self.run.chunks
        busy_s = np.broadcast_to(of.busy_s, end.shape)
        return np.where(none, self.all_s, seconds), busy_s, np.where(none, 0.0, idle), shared

    def _ends(self, of: Splits, free: FloatArray) -> tuple[FloatArray, FloatArray]:
        """Of the suffix, what it takes if everything is there but projected, and its end, in work that could have been
        done: a moment m of the copy stream is m * free."""
        layers, suffix_s = self.run.layers, np.array([[each.seconds] for each in self.closings])
        paces = {
            rank: np.array([each.pace(rank, layers) for each in self.closings]).T[:, :, None] for rank in of.carried
        }
        projects = {rank: self.project_s[each.projected] for rank, each in of.carried.items()}
        longest = _most([(layers - 1) * (projects[rank] + own) + last for rank, (_, last, own) in paces.items()], 0.0)
        work = suffix_s + np.zeros(of.tokens.shape)
        arrived = np.zeros(work.shape)
        for rank, each in of.carried.items():
            layer_s, project, (first_s, last_s, own_s) = each.x_s + each.kv_s, projects[rank], paces[rank]
            left = np.maximum(first_s, longest)
            work = np.maximum(work, np.minimum(suffix_s - first_s, own_s) + project + left)
            first = np.maximum(each.x_s * free + project, layer_s * free) + left
            last = np.maximum(((layers - 1) * layer_s + each.x_s) * free + project, layers * layer_s * free) + last_s
            arrived = np.maximum(arrived, np.maximum(first, last))
        return work, np.maximum(of.prefix_s + work, arrived)


class Splits(NamedTuple):
    """Splits of a run, elementwise: chunks recomputed and projected; what each rank brings; seconds of recomputing;
    seconds that the copy streams are at work, and that they take from the cores."""

    tokens: Ints
    x: Ints
    carried: Mapping[int, Carried]
    prefix_s: FloatArray
    busy_s: FloatArray
    taken_s: FloatArray


class Carried(NamedTuple):
    """What one rank brings of each split: seconds of a layer's X and of its K and V on its copy stream, seconds that
    all layers take from the cores, and chunks that it projects."""

    x_s: FloatArray
    kv_s: FloatArray
    cpu_s: FloatArray
    projected: Ints

    def plus(self, other: Carried) -> Carried:
        return Carried(
            self.x_s + other.x_s, self.kv_s + other.kv_s, self.cpu_s + other.cpu_s, self.projected + other.projected
        )


def _most(each: Sequence[Any], none: Any) -> Any:
    """Elementwise, over the ranks; `none` where nobody brings anything."""
    return reduce(np.maximum, each, none)


def prefill(costs: Costs, start: float, counts: FloatArray, max_batch_tokens: int) -> FloatArray:
    """Seconds of prefilling so many tokens after `start` others in steps of max_batch_tokens, elementwise."""
    steps = counts // max_batch_tokens
    whole = np.arange(int(steps.max(initial=0)), dtype=np.float64)
    full = costs.prefill(start + whole * max_batch_tokens, np.full(len(whole), float(max_batch_tokens)))
    through = np.concatenate([[0.0], np.cumsum(full)])[steps.astype(np.int64)]
    return through + costs.prefill(start + steps * max_batch_tokens, counts - steps * max_batch_tokens)
