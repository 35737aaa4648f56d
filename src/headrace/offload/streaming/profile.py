"""First rates of link and projection (KVPR's profiler): a few real calls before any step, which later ones correct."""

from __future__ import annotations

import time
from functools import partial

import torch
from torch import Tensor

from headrace.models.decoder import Decoder
from headrace.offload.copy_streams import CopyStream, CopyStreams, copy_alone
from headrace.offload.streaming.projection import project
from headrace.offload.streaming.staged_x import StagedX
from headrace.offload.streaming.transfers import Transfers
from headrace.offload.ticket import Ticket
from headrace.types import CHUNK

COPY_ELEMENTS = 1 << 20
PROJECTED = 4
"""Chunks of the projection that is timed, if staging holds so many."""


def measure(decoder: Decoder, transfers: Transfers) -> None:
    """Tells transfers.throughput. The second of two calls counts. Writes to the first staging buffer."""
    transfers.throughput.carried(_copied(transfers.staging.kv[0].k, transfers.streams.into))
    if not transfers.store.hidden:
        return
    transfers.layers.start()
    transfers.layers.wait(0, "kv", "q")
    count = min(PROJECTED, transfers.staging.capacity)
    positions = torch.arange(count * CHUNK)
    for _ in range(2):
        seconds = project(decoder, transfers, 0, 0, count, positions, positions + 1)
    transfers.throughput.projected(count, seconds)


def measure_staged(x: StagedX, streams: CopyStreams) -> None:
    """As `measure`, on one rank of several, before its weights leave. What tensor ranks exchange is not timed."""
    x.throughput.carried(_copied(x.store.pools[0].k, streams.into))
    positions = torch.arange(PROJECTED * CHUNK)
    rows = torch.zeros(len(positions), x.store.hidden, dtype=x.store.rows)
    decoder = x.decoder.unsent()
    for _ in range(2):
        began = time.perf_counter()
        decoder.project(0, rows, positions, positions + 1)
        seconds = time.perf_counter() - began
    x.throughput.projected(PROJECTED, seconds)


def _copied(pool: Tensor, stream: CopyStream) -> Ticket:
    """The second of two copies into the beginning of a pool that holds zeros."""
    into = pool.view(-1)[:COPY_ELEMENTS]
    source = torch.zeros_like(into)
    for _ in range(2):
        ticket = stream.submit(partial(copy_alone, into, source), into.nbytes, "kv")
        ticket.wait()
    return ticket
