"""Which ways to multiply on a GPU give the same bits: found on the GPU itself, on random numbers, before one is used.

Which instruction a tile becomes, and how that adds up, is no fact of a language; which algorithm cuBLAS takes, and
whether it cuts K, depends on the shape, the number of rows and the version. T: rows, K: inputs, N: outputs.
"""

from __future__ import annotations

import logging
from functools import cache

import torch
from torch import Tensor
from triton.runtime.errors import OutOfResources

from headrace.kernels.triton import rows
from headrace.kernels.triton.tiles import EXACT, Tile, product

log = logging.getLogger(__name__)

BATCH = 512
SIZES = (128, 256, 384, *range(BATCH, 16 * BATCH + 1, BATCH))
"""Numbers of rows at which cuBLAS is asked."""
LEAST = 1 << 20
"""Elements of a weight for which cuBLAS is asked."""
ALIGNED = 256
"""Bytes: cuBLAS may choose by how its operands are aligned, so all lie like those that were compared."""


@cache
def agrees(tile: Tile, dtype: torch.dtype, device: torch.device, kind: str = "", gated: bool = False) -> bool:
    """Whether tiles of this kind, and with this activation, fit the GPU and give the bits of EXACT and of the
    activation after it. In Triton's interpreter, whose bits are numpy's, they do."""
    if (tile == EXACT and not kind) or device.type != "cuda":
        return True
    x, w = _drawn(300, 2048, dtype, device), _drawn(512, 2048, dtype, device)
    exact = torch.empty(300, 512, dtype=dtype, device=device)
    product(EXACT, x, w, None, exact)
    if kind:
        exact = rows.gated(exact, kind) if gated else rows.activate(exact, kind)
    ours = torch.empty_like(exact)
    try:
        product(tile, x, w, None, ours, kind, gated)
    except OutOfResources as error:
        log.info("%s is too large for this GPU: %s", tile, error)
        return False
    return torch.equal(ours, exact)


def cublas_batches(x: Tensor, weight: Tensor) -> tuple[int, ...]:
    """Numbers of rows, ascending, at which cuBLAS gives these the bits of EXACT."""
    fits = x.dtype == weight.dtype and x.element_size() == 2 and x.is_contiguous() and weight.is_contiguous()
    if not fits or not x.is_cuda or weight.numel() < LEAST or (x.data_ptr() | weight.data_ptr()) % ALIGNED:
        return ()
    matmul = torch.backends.cuda.matmul
    flags = (matmul.allow_bf16_reduced_precision_reduction, matmul.allow_fp16_reduced_precision_reduction)
    return _cublas_batches(weight.shape[0], weight.shape[1], x.dtype, x.device, flags)


@cache
def _cublas_batches(
    outputs: int, inputs: int, dtype: torch.dtype, device: torch.device, flags: tuple[object, object]
) -> tuple[int, ...]:
    """flags: what torch lets cuBLAS do, which it reads at every call."""
    try:
        return _compared(outputs, inputs, dtype, device)
    except torch.OutOfMemoryError:
        log.warning(
            "no memory to compare cuBLAS with our kernels for a weight of %d x %d: ours are used", outputs, inputs
        )
        return ()
    finally:
        torch.cuda.empty_cache()  # the pool is sized by what is free


def _compared(outputs: int, inputs: int, dtype: torch.dtype, device: torch.device) -> tuple[int, ...]:
    x, w = _drawn(SIZES[-1], inputs, dtype, device), _drawn(outputs, inputs, dtype, device)
    exact, theirs = (torch.empty(len(x), outputs, dtype=dtype, device=device) for _ in range(2))
    product(EXACT, x, w, None, exact)

    def same(count: int) -> bool:
        torch.mm(x[:count], w.t(), out=theirs[:count])
        return torch.equal(theirs[:count], exact[:count])

    return tuple(filter(same, SIZES))


def _drawn(rows: int, columns: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    generator = torch.Generator(device).manual_seed(rows + columns)
    return torch.randn(rows, columns, generator=generator, device=device).to(dtype)
