"""The Triton backend (see kernels.backend). Its kernels are imported when they are first called, since the package
triton is not everywhere."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from headrace.config import AttentionSpec, RecurrentSpec
from headrace.device import current
from headrace.kernels.backend import GraphBackend, GraphSizes, GraphStep, PiecewiseBackend
from headrace.kernels.records import Layout, Mask, Pool, StepInputs
from headrace.kernels.state import AttnState, Partial, RunningState, StateRows, merge_states
from headrace.kernels.triton.limits import capabilities

if TYPE_CHECKING:
    from headrace.kernels.triton.attention import TritonStep

__all__ = [
    "append", "attend", "capabilities", "described", "empty_running", "finish", "graph_step", "layout", "merge_blocks",
    "merge_into", "merge_states", "missing", "partial", "prepare", "states_of", "verify",
    "verify_recurrent",
]  # fmt: skip


def missing() -> str | None:
    """Why there are no Triton kernels here; None where there are."""
    absent = current().lost or current().missing()
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


def verify(spec: AttentionSpec, computed: torch.dtype, stored: torch.dtype) -> None:
    from headrace.kernels.triton import layer_check

    layer_check.verify(spec, computed, stored)


def verify_recurrent(spec: RecurrentSpec, computed: torch.dtype) -> None:
    from headrace.kernels.triton import recurrent_check

    recurrent_check.verify(spec, computed)


def graph_step(kinds: Sequence[GraphSizes], bias: Tensor | None = None) -> GraphStep:
    from headrace.kernels.triton import shaped_steps

    return shaped_steps.step_of(kinds, bias)


def empty_running(rows: int, heads: int, head_dim: int, dtype: torch.dtype) -> RunningState:
    from headrace.kernels.triton import pieces

    return pieces.empty_running(rows, heads, head_dim, dtype)


def partial(q: Tensor, pool: Pool, mask: Mask, state: RunningState | None = None) -> RunningState:
    from headrace.kernels.triton import pieces

    return pieces.partial(q, pool, mask, state)


def finish(state: RunningState, dtype: torch.dtype, sinks: Tensor | None = None) -> Tensor:
    from headrace.kernels.triton import pieces

    return pieces.finish(state, dtype, sinks)


def states_of(state: RunningState) -> AttnState:
    from headrace.kernels.triton import pieces

    return pieces.states_of(state)


def merge_blocks(left: RunningState, right: RunningState) -> RunningState:
    from headrace.kernels.triton import pieces

    return pieces.merge_blocks(left, right)


def merge_into(total: Partial, blocks: Sequence[StateRows], unit: float) -> None:
    from headrace.kernels.triton import pieces

    pieces.merge_into(total, blocks, unit)


if TYPE_CHECKING:  # it keeps the contracts
    from headrace.kernels.triton import backend as this_module

    _: GraphBackend = this_module
    __: PiecewiseBackend = this_module
