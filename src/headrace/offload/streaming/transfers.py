"""What moves while decoding streams: chunks and weights into fast memory, new rows and hidden states out of it.

T: rows of a batch, H: hidden size, Hkv: KV heads, D: head size.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from headrace.attention.plan import Plan
from headrace.device import Device
from headrace.kernels.backend import Backend
from headrace.offload.copy_streams import CopyStreams, copy_alone
from headrace.offload.streaming.staging import Staging, StagingPiece, gather, gather_rows
from headrace.offload.streaming.store import OutsideStore
from headrace.offload.streaming.throughput import Throughput
from headrace.offload.streaming_totals import StreamingTotals
from headrace.offload.ticket import Ticket
from headrace.offload.weights.streamed import LayerSource, WeightSlice
from headrace.types import CHUNK


@dataclass(slots=True)
class Transfers:
    """Between the store and its staging, by a copy stream each way; and what they tell of the link.

    weight_bytes: of the matrices that a layer loads. x_resident: the store's X lies in fast memory. ValueError if the
    store keeps none. device: whose memory the fast one is; None: the host's. Copies raise nothing: their tickets do.
    """

    store: OutsideStore
    staging: Staging
    layers: LayerSource
    streams: CopyStreams
    kernels: Backend
    weight_bytes: int = 0
    x_resident: bool = False
    device: Device | None = None
    totals: StreamingTotals = field(default_factory=StreamingTotals)
    throughput: Throughput = field(init=False)
    _writes: list[Ticket] = field(default_factory=list)
    _out_of: dict[int, Ticket] = field(default_factory=dict)  # the last copy out of each staging buffer

    def __post_init__(self) -> None:
        if self.x_resident and not self.store.hidden:
            raise ValueError("x_resident: the store keeps no X")
        self.throughput = Throughput(self.store.chunk_bytes, self.store.x_bytes, self.x_resident)

    # -- in

    def load_weights(self, layer: int, index: int, of: int, what: WeightSlice) -> None:
        """LayerSource.load, counted."""
        self.layers.load(layer, index, of, what)
        if what != "rest":
            self.totals.bytes_in += self.weight_bytes // of

    def load_kv(self, buffer: int, layer: int, piece: StagingPiece) -> Ticket | None:
        """K and V of the piece's loaded chunks; None where there are none."""
        if not piece.loaded:
            return None

        def run() -> None:
            self.claim(buffer)
            self.staging.load_kv(buffer, self.store, layer, piece)

        return self._load(run, piece.loaded * self.store.chunk_bytes, "kv")

    def load_x(self, buffer: int, layer: int, piece: StagingPiece) -> Ticket | None:
        """X of the piece's projected chunks; None where there are none, or X is resident (`gather_x`)."""
        if not piece.projected or self.x_resident:
            return None
        run = partial(self.staging.load_x, buffer, self.store, layer, piece)
        return self._load(run, piece.projected * self.store.x_bytes, "x")

    def _load(self, run: Callable[[], None], size: int, stream: str) -> Ticket:
        self.totals.bytes_in += size
        return self.streams.into.submit(run, size, stream)

    def gather_x(self, buffer: int, layer: int, piece: StagingPiece) -> None:
        """Resident X of the piece's projected chunks, now."""
        if self.x_resident:
            gather(self.staging.x[buffer], self.store.x[layer], piece.to_project)

    def load_hidden(self, into: Tensor, outside: Tensor, written: Ticket) -> Ticket:
        """Hidden states that left before, once they have arrived outside."""

        def run() -> None:
            written.wait()
            copy_alone(into, outside)

        return self._load(run, outside.nbytes, "hidden")

    def claim(self, buffer: int) -> None:
        """Whoever writes to the buffer's K and V from now on, a thread or its current stream, does so after what was
        copied out of it."""
        if (out := self._out_of.get(buffer)) is not None:
            out.wait()

    # -- out

    def send_hidden(self, x: Tensor, before: Tensor | None = None) -> tuple[Tensor, Ticket]:
        """A copy outside of hidden states that must wait. before: memory of those that x was computed from, which have
        come. It is used again: to pin some takes longer than the copy, and to give it back waits for the device."""
        if before is not None and before.shape == x.shape:
            outside = before
        else:
            outside = torch.empty_like(x) if self.device is None else self.device.pinned(x.shape, x.dtype)
        return outside, self._send(partial(copy_alone, outside, x), x.nbytes, "hidden")

    def write(self, layer: int, plan: Plan, k: Tensor, v: Tensor, x: Tensor | None) -> None:
        """Sends rows of keys, values [T, Hkv, D] and X [T, H] to the store; they are this call's from now on."""
        slots, offsets = torch.from_numpy(plan.row_slots), torch.from_numpy(plan.row_offsets)
        outside = x is not None and not self.x_resident
        size = 2 * k.numel() * self.store.dtype.itemsize + (x.nbytes if x is not None and outside else 0)

        def run() -> None:
            self.kernels.append(self.store.pools[layer], k, v, slots, offsets)
            if x is not None and outside:
                self._keep(layer, slots, offsets, x)

        if x is not None and not outside:
            self._keep(layer, slots, offsets, x)
        self._send(run, size, "kv")

    def write_back(self, layer: int, buffer: int, piece: StagingPiece, plan: Plan, x: Tensor | None) -> None:
        """As `write`, of a device, where a piece has all rows of its batch: the chunks that these were written to go
        back whole out of the staging buffer, since only a device's kernels know rows from chunks fast."""
        size = len(piece.written) * self.store.chunk_bytes + (0 if x is None or self.x_resident else x.nbytes)
        slots, offsets = torch.from_numpy(plan.row_slots), torch.from_numpy(plan.row_offsets)

        def run() -> None:
            self.staging.store_kv(buffer, self.store, layer, piece)
            if x is not None and not self.x_resident:
                self._keep_outside(layer, slots, offsets, x)

        if x is not None and self.x_resident:
            self._keep(layer, slots.to(x.device), offsets.to(x.device), x)
        self._out_of[buffer] = self._send(run, size, "kv")

    def _keep_outside(self, layer: int, slots: Tensor, offsets: Tensor, x: Tensor) -> None:
        """Copies rows of X to the store's memory; rows that lie behind each other there go in one copy."""
        gather_rows(self.store.x[layer].view(-1, self.store.hidden), x, (slots.long() * CHUNK + offsets).numpy())

    def _keep(self, layer: int, slots: Tensor, offsets: Tensor, x: Tensor) -> None:
        """Writes rows of X to the store's memory."""
        self.store.x[layer].view(-1, self.store.hidden)[slots.long() * CHUNK + offsets] = x

    def _send(self, run: Callable[[], None], size: int, stream: str) -> Ticket:
        ticket = self.streams.out.submit(run, size, stream)
        self._writes.append(ticket)
        self.totals.bytes_out += size
        return ticket

    def settle(self) -> None:
        """Until all that was written is in the store. Raises what a copy raised."""
        for ticket in self._writes:
            ticket.synchronize()
        self._writes.clear()
