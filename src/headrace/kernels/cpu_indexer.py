"""What an indexer makes of keys, by the C++ kernels: kernels.indexer says what each call does.

bf16 and fp32, CPU tensors only: ValueError for any others.
"""

from __future__ import annotations

import torch
from torch import Tensor

from headrace.kernels.cpu_attention import pool_at
from headrace.kernels.extension import address, check, require, type_of
from headrace.kernels.indexer import IndexQueries, chunks_of, room
from headrace.kernels.records import Pool
from headrace.types import CHUNK


def index_scores(index: IndexQueries, pool: Pool, items: Tensor, positions: Tensor, keys: int) -> Tensor:
    """fp32 [R, keys], or of pools. pool: as the kernels read it (cpu_attention.arrange)."""
    assert index.weights is not None, "heads count together"
    rows, heads, size = index.q.shape
    _, kv_heads, dim = pool.shape
    if kv_heads != 1 or size * (1 + (index.pool > 1)) > dim:
        raise ValueError(f"an indexer's keys of {size} numbers lie in no pool of {kv_heads} heads of {dim}")
    check("q", index.q, index.q.dtype, (rows, heads, size))
    check("weights", index.weights, torch.float32, (rows, heads))
    check("items", items, torch.int32, (items.shape[0], 4))
    check("positions", positions, torch.int64, (rows,))
    _check_room(items, keys)
    if index.places is not None:
        check("places", index.places, torch.float32, (index.pool, size))
    scores = torch.full((rows, keys // index.pool), -torch.inf)
    require().index_scores(
        type_of(index.q), pool_at(pool, index.q.dtype, pool.shape), index.q.data_ptr(), index.weights.data_ptr(),
        items.data_ptr(), positions.data_ptr(), scores.data_ptr(), rows=rows, count=items.shape[0], heads=heads,
        size=size, keys=keys, threads=torch.get_num_threads(), pooled=index.pool, places=address(index.places),
    )  # fmt: skip
    return scores


def block_scores(q: Tensor, pool: Pool, items: Tensor, positions: Tensor, chunks: int) -> Tensor:
    """fp32 [R, N, chunks]. pool: as the kernels read it."""
    rows, heads, size = q.shape
    _, kv_heads, dim = pool.shape
    if kv_heads != heads or size % heads or size // heads > dim:
        raise ValueError(f"an indexer's {heads} heads of {size} numbers fit no pool of {kv_heads} heads of {dim}")
    check("q", q, q.dtype, (rows, heads, size))
    check("items", items, torch.int32, (items.shape[0], 4))
    check("positions", positions, torch.int64, (rows,))
    _check_room(items, CHUNK * chunks)
    found = torch.full((rows, heads, chunks), -torch.inf)
    require().block_scores(
        type_of(q), pool_at(pool, q.dtype, pool.shape), q.data_ptr(), items.data_ptr(), positions.data_ptr(),
        found.data_ptr(), rows=rows, count=items.shape[0], size=size, chunks=chunks, threads=torch.get_num_threads(),
    )  # fmt: skip
    return found


def _check_room(items: Tensor, keys: int) -> None:
    offered = int(items[:, 1].max()) + CHUNK if len(items) else 0
    if offered > keys:
        raise ValueError(f"items offer {offered} keys, and there is room for {keys}")


def gather(pool: Pool, tables: Tensor, chosen: Tensor, first: int, dtype: torch.dtype) -> Pool:
    """What rows of this type have chosen, for rows of this type to attend to."""
    rows, count = chosen.shape
    check("tables", tables, torch.int32, (rows, tables.shape[1]))
    check("chosen", chosen, torch.int32, (rows, count))
    made = room(pool, rows, count, first)
    require().gather(
        type_of(torch.empty(0, dtype=dtype)), pool_at(pool, dtype, pool.shape), pool_at(made, dtype, made.shape),
        tables.data_ptr(), chosen.data_ptr(), rows=rows, count=count, table=tables.shape[1], chunks=chunks_of(count),
        threads=torch.get_num_threads(),
    )  # fmt: skip
    return made
