"""Short prefills that all ranks compute at the start: what a layer takes on one rank, and what an exchange adds to it.

Bare products are faster than layers, and an exchange takes more than its bytes: threads are woken, wait for a core, and
take it from those that compute. A prefill of few layers has all of that.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence

import msgspec
import torch
from torch import Tensor

from headrace.device import Device
from headrace.kv.storage import KVStorage, StateStorage
from headrace.kv.table_state import NONE, Segment
from headrace.models.decoder import Decoder
from headrace.parallel.messages import RankStep, StepGroup, StepPart
from headrace.parallel.rank import Rank
from headrace.parallel.states import StateHolders
from headrace.parallel.transport import Apart, Tag
from headrace.planner.choice import predict, shards_for
from headrace.planner.machine import ComputeRates, LayerTimes, Machine, ModelShape
from headrace.planner.partition import causal_pairs
from headrace.planner.shards import Prefill, evenly
from headrace.strategies import FALLBACK, OFFERED, RECURRENT, STRATEGIES
from headrace.types import CHUNK, chunks_for

FLOPS = 100e9
"""Of the products of one such prefill, about: a tenth of a second on a core with AMX."""
MOST_ROWS, LEAST_ROWS, MOST_LAYERS = 1024, 128, 4
SLOW_S = 0.25
"""A prefill that takes longer is measured once instead of three times."""


class Probe:
    """A rank of few layers, with keys and values of its own. Every rank of a group makes one, and all do the same.

    repeats: how often a prefill is measured; None: by the time of the first one.
    """

    def __init__(self, rank: Rank, repeats: int | None = None) -> None:
        self.of, self.size, self.me = rank, rank.transport.size, rank.transport.rank
        whole = shape_of(rank.decoder)
        config = rank.decoder.config
        self.rows, layers = _extent(whole, config.max_model_len)
        layers = max(layers, config.one_of_each_kind)
        self.shape = msgspec.structs.replace(whole, layers=layers)
        decoder = rank.decoder.first(layers)
        recurrent = decoder.config.recurrent
        states = None if recurrent is None else StateStorage(recurrent, 1, decoder.dtype)
        spec, slots = decoder.config.attention, chunks_for(self.rows)
        storage = KVStorage(spec, slots, rank.storage.dtype, device=decoder.device)
        backend = rank.kernels.backend.capabilities.name
        self.rank = Rank(decoder, storage, backend, rank.transport, rank.threads, states)
        self.rank.groups = rank.groups
        self.given, self.repeats = repeats, repeats or 3

    def refined(self, plain: Machine) -> Machine:
        """The profile with the linear layers' rates, and what exchanges take beyond them."""
        everybody = [self._group("single", (0, self.rows), (rank,), rank) for rank in range(self.size)]
        self._warm(everybody)
        busy = self._seconds(everybody)
        alone = min(self._seconds(everybody[:1]), self._seconds(everybody[:1])) if self.size > 1 else busy
        found = msgspec.structs.replace(
            plain,
            linear_flops_s=self._linear(plain, busy),
            one_engine=None if plain.one_engine is None else self._rated(plain, plain.one_engine, alone),
        )
        exchanges = {each.strategy: self._beyond(found, each) for each in self._exchanges(found)}
        if FALLBACK in exchanges:  # a strategy for cached tokens has as many exchanges as the one in its place without
            exchanges |= {name: exchanges[FALLBACK] for name in OFFERED if STRATEGIES[name].needs_cached}
        self.of.groups = self.rank.groups
        return msgspec.structs.replace(found, exchange_s=tuple(sorted(exchanges.items())))

    def _exchanges(self, machine: Machine) -> Iterator[StepGroup]:
        """The prefill by each strategy that several ranks may compute by, cut as that of the whole model: with other
        blocks the ranks of a chain would not wait for each other as they do there."""
        for name in OFFERED if self.size > 1 else ():
            computes = self.rank.states is None or name in RECURRENT
            if name != "single" and computes and not STRATEGIES[name].needs_cached:
                prefill = Prefill(machine, shape_of(self.of.decoder), self.size, self.rows)
                # Tensor ranks compute the same rows together, and each has measured a machine of its own.
                cut = evenly(prefill) if name == "chain" and self.given else shards_for(name, prefill)
                bounds = [int(bound) for bound in self._told(cut.bounds)]
                yield self._group(name, bounds, cut.ranks, cut.ranks[-1] if STRATEGIES[name].keeps_all else 0)

    def _group(self, strategy: str, bounds: Sequence[int], ranks: Sequence[int], owner: int) -> StepGroup:
        """The prefill of all rows, whose keys and values `owner` keeps."""
        slots = [owner * self.rank.storage.slots + chunk for chunk in range(chunks_for(self.rows))]
        tokens = [0] * self.rows
        states = []
        if self.rank.states is not None:
            states = StateHolders(1).route([Segment(self.rows, NONE, 0)], 0, bounds, ranks)
        return StepGroup(strategy, [StepPart(tokens, 0, slots, list(bounds), list(ranks), 1, self.rows, states)])

    def _run(self, groups: list[StepGroup]) -> float:
        meet(self.of)
        began = time.perf_counter()
        self.rank.run(RankStep(0, groups))
        settle(self.of)
        return time.perf_counter() - began

    def _warm(self, groups: list[StepGroup]) -> None:
        """All ranks of the context group go by the first one's time."""
        seconds = self._told([self._run(groups)])[0]
        if self.given is None:
            self.repeats = 1 if seconds > SLOW_S else 3

    def _told(self, figures: Sequence[float]) -> list[float]:
        """The first rank's figures, on all ranks: they go round the ring."""
        told = torch.tensor(figures, dtype=torch.float64)
        for piece in range(self.size - 1):
            came = passed_on(self.of, told, 300 + piece)
            told = came if self.me == piece + 1 else told
        return told.tolist()

    def _seconds(self, groups: list[StepGroup]) -> float:
        """Of a step until the first rank has all that it wants, at its fastest."""
        if self.repeats > 1:
            self._run(groups)
        return min(self._run(groups) for _ in range(self.repeats))

    def _rated(self, plain: Machine, rates: ComputeRates, seconds: float) -> ComputeRates:
        return msgspec.structs.replace(rates, linear_flops_s=self._linear(plain.alone, seconds))

    def _linear(self, machine: Machine, seconds: float) -> float:
        """Rate of the linear layers of a prefill on one rank: its time without the attention's. Of the last layer only
        the projections are computed for all rows."""
        shape, rows = self.shape, self.rows
        more = shape.layers - 1
        attention = more * LayerTimes(machine, shape).attend(rows, causal_pairs((0, rows), (0, rows)), rows)
        flops = 2 * rows * (shape.layers * shape.qkv_weights + more * shape.rest_weights) + 2 * shape.rest_weights
        return flops / max(seconds - attention, seconds / 10)

    def _beyond(self, machine: Machine, group: StepGroup) -> float:
        """Seconds a layer beyond those predicted."""
        seconds = self._seconds([group])
        predicted = predict(group.strategy, machine, self.shape, self.size, group.parts[0].bounds).ttft_s
        return max(0.0, seconds - predicted + LayerTimes(machine, self.shape).head()) / self.shape.layers


def _extent(shape: ModelShape, longest: int) -> tuple[int, int]:
    """Rows and layers of a prefill of about FLOPS operations."""
    fits = int(FLOPS / (2 * (2 * shape.qkv_weights + shape.rest_weights))) // CHUNK * CHUNK
    rows = max(1, min(max(LEAST_ROWS, min(MOST_ROWS, fits)), longest))
    deep = int(FLOPS / (2 * rows * (shape.qkv_weights + shape.rest_weights)))
    return rows, min(shape.layers, max(2, min(MOST_LAYERS, deep)))


def shape_of(decoder: Decoder) -> ModelShape:
    """The sizes by which the profile's rates are counted."""
    return ModelShape.of(decoder.config, decoder.dtype.itemsize)


Timed = Callable[[Callable[[], object]], float]
"""Seconds of a call."""


def by_clock(clock: Callable[[], float] = time.perf_counter) -> Timed:
    def timed(work: Callable[[], object]) -> float:
        began = clock()
        work()
        return clock() - began

    return timed


def by_events(device: Device) -> Timed:
    """On the device's current stream: kernels, and where these wait for the host, that too."""

    def timed(work: Callable[[], object]) -> float:
        begin, end = (device.event(timing=True) for _ in range(2))
        begin.record(device.current_stream())
        work()
        end.record(device.current_stream())
        end.synchronize()
        return begin.elapsed_time(end) / 1e3

    return timed


def least(work: Callable[[], object], timed: Timed, repeats: int = 4) -> float:
    """The least time of a call, after one that is not counted: what else runs on a machine only ever adds to it."""
    work()
    return max(min(timed(work) for _ in range(repeats)), 1e-9)


def settle(rank: Rank) -> None:
    """Until what the rank was given is computed, and sent."""
    device = rank.device
    if device is not None:
        device.current_stream().synchronize()


def meet(rank: Rank) -> None:
    """Waits for the others: twice round, so that no rank leaves before all have come."""
    if rank.transport.size > 1:
        for piece in range(2 * rank.transport.size):
            passed_on(rank, torch.zeros(8, dtype=torch.uint8), 100 + piece)


def passed_on(rank: Rank, x: Tensor, piece: int) -> Tensor:
    """Sends x to the next rank; what came from the one before."""
    transport, tag, there = rank.transport, Tag(Apart.probe, 0, piece), torch.empty_like(x)
    works = [
        transport.irecv(there, (transport.rank - 1) % transport.size, tag),
        transport.isend(x, (transport.rank + 1) % transport.size, tag),
    ]
    for work in works:
        work.wait()
    return there
