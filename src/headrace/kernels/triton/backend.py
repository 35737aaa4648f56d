"""The Triton backend (see kernels.backend). Its kernels are imported when they are first called, since the package
triton is not everywhere. No attention in pieces."""

from __future__ import annotations

from importlib.util import find_spec
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from headrace.device import current
from headrace.kernels.backend import GraphBackend, GraphSizes
from headrace.kernels.records import Layout, Mask, Pool, StepInputs
from headrace.kernels.triton.limits import capabilities

if TYPE_CHECKING:
    from headrace.kernels.triton.attention import TritonStep
    from headrace.kernels.triton.graph_step import TritonGraphStep

__all__ = ["append", "attend", "capabilities", "described", "graph_step", "layout", "missing", "prepare"]


def missing() -> str | None:
    """Why there are no Triton kernels here; None where there are."""
    absent = current().missing()
    if absent is not None:
        return absent
    return None if find_spec("triton") else "the package triton is missing, which comes with torch's builds for CUDA"


def described(device: torch.device) -> str:
    return f"asked for, on {current().name}"


def layout(dtype: torch.dtype, dim: int) -> Layout:
    return "plain"


def attend(q: Tensor, pool: Pool, mask: Mask) -> Tensor:
    from headrace.kernels.triton import attention

    return attention.attend(q, pool, mask)


def append(pool: Pool, k_new: Tensor, v_new: Tensor, slots: Tensor, offsets: Tensor) -> None:
    from headrace.kernels.triton import attention

    attention.append(pool, k_new, v_new, slots, offsets)


def prepare(step: StepInputs) -> TritonStep:
    from headrace.kernels.triton.attention import TritonStep

    return TritonStep(step)


def graph_step(sizes: GraphSizes, bias: Tensor | None = None) -> TritonGraphStep:
    from headrace.kernels.triton.graph_step import GraphMemory, TritonGraphStep

    return TritonGraphStep(GraphMemory.of(sizes, bias), sizes.rows)


if TYPE_CHECKING:  # it keeps the contract
    from headrace.kernels.triton import backend as this_module

    _: GraphBackend = this_module
