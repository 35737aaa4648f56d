"""First rates of link and projection (KVPR's profiler): a few real calls before any step, which later ones correct."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from headrace.models.decoder import Decoder
from headrace.offload.copy_streams import CopyStream, copy_alone
from headrace.offload.stopwatch import Stopwatch
from headrace.offload.streaming.projection import project
from headrace.offload.streaming.staged_store import StagedStore
from headrace.offload.streaming.staged_x import StagedX
from headrace.offload.streaming.transfers import Transfers
from headrace.offload.ticket import Ticket
from headrace.types import CHUNK

COPY_ELEMENTS = 1 << 20
PROJECTED = 4
"""Chunks of the projection that is timed, if staging holds so many."""


def measure(decoder: Decoder, transfers: Transfers) -> None:
    """Tells transfers.throughput. The second of two calls counts. Writes to the first staging buffer."""
    staged, stored = transfers.staging.kv[0].v, transfers.store.pools[0].v
    transfers.throughput.carried(_copied(staged, stored, transfers.streams.into))
    if not transfers.store.hidden:
        return
    transfers.layers.start()
    transfers.layers.wait(0, "kv", "q")
    count = min(PROJECTED, transfers.staging.capacity)
    positions = torch.arange(count * CHUNK)
    for _ in range(2):
        watch = project(decoder, transfers, 0, 0, count, positions, positions + 1)
    transfers.throughput.projected(count, watch.seconds())


def measure_staged(staged: StagedStore, x: StagedX, projects: bool) -> None:
    """As `measure`, on one rank of several, before its weights leave. What tensor ranks exchange is not timed. Not
    projects: the weights have left, and how long it takes is known after the first step that does it."""
    x.throughput.carried(_copied(staged.buffers[0].v, x.store.pools[0].v, staged.streams.into))
    if not projects:
        return
    positions = torch.arange(PROJECTED * CHUNK)
    rows = torch.zeros(len(positions), x.store.hidden, dtype=x.store.rows, device=x.place)
    decoder = x.decoder.unsent()
    for _ in range(2):
        watch = Stopwatch(staged.device)
        decoder.project(0, rows, positions, positions + 1)
        watch.stop()
    x.throughput.projected(PROJECTED, watch.seconds())


def _copied(into: Tensor, source: Tensor, stream: CopyStream) -> Ticket:
    """The second of two copies of zeros from the beginning of one pool into another's, which holds zeros."""
    size = min(COPY_ELEMENTS, into.numel(), source.numel())
    there, here = into.view(-1)[:size], source.view(-1)[:size]
    for _ in range(2):
        ticket = stream.submit(partial(copy_alone, there, here), there.nbytes, "kv")
        ticket.synchronize()
    return ticket
