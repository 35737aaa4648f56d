"""Decoding on KV that stays outside the fast memory: each layer's chunks pass through staging, some as X.

T: rows of a batch, n: rows whose states are wanted, H: hidden size, Hq, Hkv: query and KV heads, D: head size.

KVPR's pipeline with double buffering: while one operation (a layer over a batch) computes, X, K and V of the next are
on their way over the lane in; new K, V and X, and hidden states that must wait, leave over the lane out. The chunks
that are projected from X need neither K nor V from outside. What is computed from them is what was stored, to the bit.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from headrace.attention.plan import Plan
from headrace.kernels.backend import PiecewiseBackend
from headrace.models.decoder import Decoder, TokenBatch
from headrace.offload.copy_streams import CopyStreams, Ticket, copy_alone
from headrace.offload.streaming.schedule import Schedule
from headrace.offload.streaming.staging import Staging
from headrace.offload.streaming.step import Step
from headrace.offload.streaming.store import OutsideStore
from headrace.offload.streaming.throughput import Pace
from headrace.offload.weights.streamed import LayerSource
from headrace.types import CHUNK

AT_ONCE = 4
"""Chunks that are projected at a time: what is between the products stays in the cache."""


@dataclass(slots=True)
class Batch:
    """Sequences of a step that are computed together. plan: over slots of the store.

    rows int64 [n]: those whose states are wanted, None for all. prompts int64 [T]: length of each row's prompt, for
    models whose rotation depends on it.
    """

    tokens: TokenBatch
    plan: Plan
    rows: Tensor | None = None
    prompts: NDArray[np.int64] | None = None


@dataclass(slots=True)
class Options:
    """How to stream. share: which part of the whole chunks is projected; None: as the pace of link and arithmetic says.

    x_resident: the store's X lies in fast memory. fine: order of streamed weights, see schedule.Form.
    """

    schedule: Schedule = "row"
    weights: bool = False
    fine: bool = True
    x_resident: bool = False
    share: float | None = None

    def with_changes(self, **changes: Any) -> Options:
        return replace(self, **changes)


@dataclass(slots=True)
class Totals:
    """Of the steps so far: chunks of all layers loaded and projected, bytes in and out, seconds predicted by the pace,
    spent, and spent waiting for the lane in."""

    steps: int = 0
    loaded: int = 0
    projected: int = 0
    bytes_in: int = 0
    bytes_out: int = 0
    predicted_s: float = 0.0
    seconds: float = 0.0
    waited_s: float = 0.0

    def copy(self) -> Totals:
        return replace(self)


@dataclass(slots=True)
class Streamer:
    """A decoder over a store, with staging between them and a lane each way. One step at a time."""

    decoder: Decoder
    store: OutsideStore
    staging: Staging
    layers: LayerSource
    lanes: CopyStreams
    kernels: PiecewiseBackend
    options: Options
    weight_bytes: int = 0
    totals: Totals = field(default_factory=Totals)
    writes: list[Ticket] = field(default_factory=list)
    failed: BaseException | None = None
    pace: Pace = field(init=False)

    def __post_init__(self) -> None:
        if self.options.x_resident and not self.store.hidden:
            raise ValueError("x_resident: the store keeps no X")
        self.pace = Pace(self.store.chunk_bytes, self.store.x_bytes, self.options.x_resident)
        self._profile()

    def run(self, batches: Sequence[Batch]) -> list[Tensor]:
        """Hidden states [n, E] of each batch, as Decoder.forward gives them. What a batch reads of the store was
        written in an earlier step, or is written by the batch itself. Raises what a lane raised. The store then lacks
        what the step was to write, of which the prefix tree knows nothing: RuntimeError from then on."""
        if self.failed is not None:
            raise RuntimeError(f"an earlier step failed ({self.failed}); load the model again")
        self.settle()
        began = time.perf_counter()
        try:
            states = [self.decoder.leave(x) for x in Step(self, batches).run()]
        except BaseException as error:
            self.failed = error
            raise
        self.totals.steps += 1
        self.totals.seconds += time.perf_counter() - began
        return states

    def settle(self) -> None:
        """Until all that was written is in the store."""
        for ticket in self.writes:
            ticket.wait()
        self.writes.clear()

    def close(self) -> None:
        """Ends the lanes after what is on its way. May be called again."""
        self.lanes.close()
        if self.failed is None:
            self.settle()

    def _profile(self) -> None:
        """First rates of link and projection (the paper's profiler); later steps correct them."""
        keys = self.staging.kv[0].k.view(-1)
        into, source = keys[: 1 << 20], torch.zeros_like(keys[: 1 << 20])
        for _ in range(2):
            ticket = self.lanes.into.submit(partial(copy_alone, into, source), into.nbytes, "kv")
            ticket.wait()
        self.pace.carried(ticket)
        if self.store.hidden:
            self.layers.start()
            self.layers.wait(0, "kv", "q")
            count = min(4, self.staging.capacity)
            positions = torch.arange(count * CHUNK)
            for _ in range(2):
                seconds = self.project(0, 0, count, positions, positions + 1)
            self.pace.projected(count, seconds)

    def project(self, layer: int, buffer: int, count: int, positions: Tensor, lengths: Tensor | None) -> float:
        """K and V of the first `count` chunks of a buffer from X; the seconds it took."""
        began = time.perf_counter()
        rope, project = self.decoder.rope, self.layers.layer(layer).project
        cos_sin = rope.at(positions, lengths) if rope else None
        for low in range(0, count, AT_ONCE):
            high = min(count, low + AT_ONCE)
            rows = slice(low * CHUNK, high * CHUNK)
            x = self.staging.x[buffer][low:high].view((high - low) * CHUNK, -1)
            k, v = project(x, None if cos_sin is None else cos_sin[rows])
            slots = torch.arange(low, high, dtype=torch.int32).repeat_interleave(CHUNK)
            offsets = torch.arange(CHUNK, dtype=torch.int32).repeat(high - low)
            self.kernels.append(self.staging.kv[buffer], k, v, slots, offsets)
        return time.perf_counter() - began

    def write(self, layer: int, plan: Plan, k: Tensor, v: Tensor, x: Tensor | None) -> None:
        """Sends rows of keys, values [T, Hkv, D] and X [T, H] to the store; they are this call's from now on."""
        slots, offsets = torch.from_numpy(plan.row_slots), torch.from_numpy(plan.row_offsets)
        outside = x is not None and not self.options.x_resident
        size = 2 * k.numel() * self.store.dtype.itemsize + (x.nbytes if x is not None and outside else 0)

        def run() -> None:
            self.kernels.append(self.store.pools[layer], k, v, slots, offsets)
            if x is not None and outside:
                self.keep(layer, slots, offsets, x)

        if x is not None and not outside:
            self.keep(layer, slots, offsets, x)
        self.send(run, size, "kv")

    def keep(self, layer: int, slots: Tensor, offsets: Tensor, x: Tensor) -> None:
        """Writes rows of X to the store's memory."""
        self.store.x[layer].view(-1, self.store.hidden)[slots.long() * CHUNK + offsets] = x

    def send(self, run: Any, size: int, stream: str) -> Ticket:
        ticket = self.lanes.out.submit(run, size, stream)
        self.writes.append(ticket)
        self.totals.bytes_out += size
        return ticket
