"""K and V of staged chunks, projected again from X (KVPR, equation (7))."""

from __future__ import annotations

import torch
from torch import Tensor

from headrace.kernels.adapted_rows import AdaptedRows
from headrace.models.decoder import Decoder
from headrace.offload.stopwatch import Stopwatch
from headrace.offload.streaming.transfers import Transfers
from headrace.types import CHUNK

AT_ONCE, ON_DEVICE = 4, 64
"""Chunks that are projected at a time: what is between the products stays in the cache, and does not in a device's."""


def project(
    decoder: Decoder,
    transfers: Transfers,
    layer: int,
    buffer: int,
    count: int,
    positions: Tensor,
    lengths: Tensor | None,
    adapted: AdaptedRows | None = None,
) -> Stopwatch:
    """K and V of the first `count` chunks of a staging buffer from X; the time it takes. adapted: their rows, if some
    have an adapter."""
    watch = Stopwatch(transfers.device)
    one, staging = transfers.layers.layer(layer), transfers.staging
    cos_sin = decoder.rope.at(positions, lengths).to(decoder.device) if decoder.rope else None
    some = AT_ONCE if transfers.device is None else ON_DEVICE
    for low in range(0, count, some):
        high = min(count, low + some)
        rows = slice(low * CHUNK, high * CHUNK)
        x = staging.x[buffer][low:high].view((high - low) * CHUNK, -1)
        own = one.adapted_by(None if adapted is None else AdaptedRows(adapted.numbers[rows]))
        k, v = own.project(x, None if cos_sin is None else cos_sin[rows])
        slots = torch.arange(low, high, dtype=torch.int32).repeat_interleave(CHUNK)
        offsets = torch.arange(CHUNK, dtype=torch.int32).repeat(high - low)
        transfers.kernels.append(staging.kv[buffer], k, v, slots, offsets)
    watch.stop()
    return watch
