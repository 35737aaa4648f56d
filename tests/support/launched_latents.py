"""Launches of every kernel of latent attention, for tests of how they are launched."""

from __future__ import annotations

import torch

from headrace.kernels.records import Mask, Pool
from headrace.kernels.triton import attention, latents
from headrace.kernels.triton.walk_options import heads_of
from headrace.models.layer_parts import LatentSpec

CPU, BF16 = torch.device("cpu"), torch.bfloat16


def launched_latents() -> None:
    """Attention over latents by both ways, and what is around it, for few rows and for many: of a size that has no
    kernel for Hopper GPUs, and of one that has, where there is one."""
    for rank, rotated in ((64, 16), (256, 64)):
        launched(LatentSpec(rank=rank, rotated=rotated, plain=32, value=48))


def launched(spec: LatentSpec) -> None:
    dim, turns = spec.rank + spec.rotated, torch.zeros(20, spec.rotated)
    heads, matrix = heads_of((4, 1, dim), True, CPU), torch.zeros(4 * 80, spec.rank, dtype=BF16)
    pool = Pool.of([torch.zeros(4, 1, 64, dim, dtype=BF16)], once=True)
    items = torch.tensor([[0, 0, 0, 20]], dtype=torch.int32)
    for rows in (20, 3):
        q = latents.queries(torch.zeros(rows, 4, spec.query, dtype=BF16), matrix, spec, turns[:rows])
        norm = torch.zeros(spec.rank, dtype=BF16)
        made = latents.keys(torch.zeros(rows, dim, dtype=BF16), norm, spec, turns[:rows])
        places = torch.arange(rows, dtype=torch.int32)
        attention.append(pool, made, made, torch.zeros_like(places), places)
        items[:, 3] = rows
        mask = Mask(items.clone(), torch.arange(rows), scale=0.125)
        for states in (0, 1 << 20):
            limits = attention.bounds(heads, CPU, BF16, plain=True)._replace(states=states)
            attention.attended(heads, limits, q, pool, mask, None)
        latents.values(q, matrix, spec)
