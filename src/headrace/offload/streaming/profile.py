"""First rates of link and projection (KVPR's profiler): a few real calls before any step, which later ones correct."""

from __future__ import annotations

from functools import partial

import torch

from headrace.models.decoder import Decoder
from headrace.offload.copy_streams import copy_alone
from headrace.offload.streaming.projection import project
from headrace.offload.streaming.transfers import Transfers
from headrace.types import CHUNK

COPY_ELEMENTS = 1 << 20
PROJECTED = 4
"""Chunks of the projection that is timed, if staging holds so many."""


def measure(decoder: Decoder, transfers: Transfers) -> None:
    """Tells transfers.throughput. The second of two calls counts. Writes to the first staging buffer."""
    pool = transfers.staging.kv[0].k.view(-1)[:COPY_ELEMENTS]
    source = torch.zeros_like(pool)
    for _ in range(2):
        ticket = transfers.streams.into.submit(partial(copy_alone, pool, source), pool.nbytes, "kv")
        ticket.wait()
    transfers.throughput.carried(ticket)
    if not transfers.store.hidden:
        return
    transfers.layers.start()
    transfers.layers.wait(0, "kv", "q")
    count = min(PROJECTED, transfers.staging.capacity)
    positions = torch.arange(count * CHUNK)
    for _ in range(2):
        seconds = project(decoder, transfers, 0, 0, count, positions, positions + 1)
    transfers.throughput.projected(count, seconds)
