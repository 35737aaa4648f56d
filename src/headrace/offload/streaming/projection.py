"""K and V of staged chunks, projected again from X (KVPR, equation (7))."""

from __future__ import annotations

import time

import torch
from torch import Tensor

from headrace.models.decoder import Decoder
from headrace.offload.streaming.transfers import Transfers
from headrace.types import CHUNK

AT_ONCE = 4
"""Chunks that are projected at a time: what is between the products stays in the cache."""


def project(
    decoder: Decoder,
    transfers: Transfers,
    layer: int,
    buffer: int,
    count: int,
    positions: Tensor,
    lengths: Tensor | None,
) -> float:
    """K and V of the first `count` chunks of a staging buffer from X; the seconds it took."""
    began = time.perf_counter()
    compute, staging = transfers.layers.layer(layer).project, transfers.staging
    cos_sin = decoder.rope.at(positions, lengths) if decoder.rope else None
    for low in range(0, count, AT_ONCE):
        high = min(count, low + AT_ONCE)
        rows = slice(low * CHUNK, high * CHUNK)
        x = staging.x[buffer][low:high].view((high - low) * CHUNK, -1)
        k, v = compute(x, None if cos_sin is None else cos_sin[rows])
        slots = torch.arange(low, high, dtype=torch.int32).repeat_interleave(CHUNK)
        offsets = torch.arange(CHUNK, dtype=torch.int32).repeat(high - low)
        transfers.kernels.append(staging.kv[buffer], k, v, slots, offsets)
    return time.perf_counter() - began
