"""What the Triton kernels take: known without the package triton."""

from __future__ import annotations

import torch

from headrace.kernels.backend import Capabilities
from headrace.kernels.triton.tile_schedule import SPAN_CHUNKS

capabilities = Capabilities(
    name="triton", kernels="the Triton kernels", spoken_of="it", devices=("cuda",), prepared_step=True, graphs=True,
    dtypes=(torch.bfloat16, torch.float16, torch.float32), largest_head=512, int8=True, prepared_int8=True,
    capped=True, pieces=True, block_chunks=SPAN_CHUNKS,
)  # fmt: skip
LARGEST_INT8_HEAD = 256
LARGEST_LATENT = 1024


def check(dtype: torch.dtype, dim: int, once: bool = False) -> None:
    """Raises ValueError for a type or head size that the kernels do not know. once: see records.Pool."""
    if dtype not in capabilities.dtypes:
        raise ValueError(f"the Triton kernels take bfloat16, float16 and float32, got {dtype}")
    largest = LARGEST_LATENT if once else capabilities.largest_head
    if largest is not None and dim > largest:
        raise ValueError(f"the Triton kernels take heads of up to {largest}, got {dim}")


def check_stored(dtype: torch.dtype, dim: int, once: bool = False) -> None:
    """The same of the type of pools, which may be int8."""
    check(torch.float32 if dtype == torch.int8 else dtype, dim, once)
    if dtype == torch.int8 and once:
        raise ValueError("the Triton kernels take no latents as int8")
    if dtype == torch.int8 and dim > LARGEST_INT8_HEAD:
        raise ValueError(f"the Triton kernels take int8 heads of up to {LARGEST_INT8_HEAD}, got {dim}")
