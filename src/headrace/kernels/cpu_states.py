"""What the C++ kernels do with attention states: finish them, fold blocks computed apart, merge segments.

R: rows, Hq: query heads, D: head size. The meaning is that of kernels.state; states.h and fold.cpp have the kernels.
"""

from __future__ import annotations

import torch
from torch import Tensor

from headrace.kernels import state as algebra
from headrace.kernels.cpu_attention import LOG_2, addresses, fold_unit
from headrace.kernels.extension import PAIRED, check, isa, require, type_of
from headrace.kernels.state import AttnState, FoldState, Partial


def empty_fold(rows: int, heads: int, head_dim: int, dtype: torch.dtype) -> FoldState:
    """The state of rows that have met no chunk, for kernels that compute in `dtype`."""
    return algebra.empty_fold(rows, heads, head_dim, fold_unit(dtype, head_dim))


def finish(state: FoldState, dtype: torch.dtype) -> Tensor:
    """The attention of what was folded: [R, Hq, D] in `dtype`, zeros for rows that saw no key."""
    out = torch.empty(state.shape, dtype=dtype)
    _finish(state, out, None)
    return out


def states_of(state: FoldState) -> AttnState:
    """The same as a value that merges: fp32, natural logarithms."""
    result = AttnState(torch.empty(state.shape), torch.empty(state.shape[:2]))
    _finish(state, result.out, result.lse)
    return result


def _finish(state: FoldState, out: Tensor, lse: Tensor | None) -> None:
    rows, heads, dim = state.shape
    require().finish(
        type_of(out), addresses(state), out.data_ptr(), 0 if lse is None else lse.data_ptr(), rows * heads, dim,
        _base2(state), torch.get_num_threads(),
    )  # fmt: skip


def _base2(state: FoldState) -> bool:
    """Whether the state counts in units of log 2. Raises ValueError where the instruction set in use cannot."""
    if state.unit == LOG_2 and isa() not in PAIRED:
        raise ValueError(
            f"the state was folded in base 2, which {isa()} does not: finish it with {' or '.join(PAIRED)}"
        )
    return state.unit == LOG_2


def fold_blocks(left: FoldState, right: FoldState) -> FoldState:
    """The fold of `left` continued by a block that was folded elsewhere: see kernels.state.fold_blocks."""
    addresses(right)
    ours = addresses(left)
    base2 = _base2(left)

    def folded(total: Partial, block: Partial) -> Partial:
        result = Partial(total.acc.clone(), total.m.clone(), total.l.clone())
        there = (result.acc.data_ptr(), result.m.data_ptr(), result.l.data_ptr(), *ours[3:6])
        rows, heads, dim = left.shape
        require().fold(there, rows * heads, dim, base2, torch.get_num_threads())
        return result

    return algebra.fold_blocks(left, right, folded)


def fold_into(total: Partial, block: Partial, unit: float) -> None:
    """total [R, Hq, D] becomes the fold of itself and then `block`, in place; both count in `unit` (FoldState)."""
    rows, heads, dim = total.acc.shape
    pointers = []
    for part in (total, block):
        check("acc", part.acc, torch.float32, (rows, heads, dim))
        check("m", part.m, torch.float32, (rows, heads))
        check("l", part.l, torch.float32, (rows, heads))
        pointers += [part.acc.data_ptr(), part.m.data_ptr(), part.l.data_ptr()]
    require().fold(tuple(pointers), rows * heads, dim, unit == LOG_2, torch.get_num_threads())


def merge(left: AttnState, right: AttnState) -> AttnState:
    """Attention over the union of two disjoint segments, out [R, Hq, D] and lse [R, Hq]. Two EMPTY give EMPTY."""
    rows, heads, dim = left.out.shape
    for name, state in (("left", left), ("right", right)):
        check(f"{name}.out", state.out, torch.float32, (rows, heads, dim))
        check(f"{name}.lse", state.lse, torch.float32, (rows, heads))
    result = AttnState(torch.empty_like(left.out), torch.empty_like(left.lse))
    tensors = (left.out, left.lse, right.out, right.lse, result.out, result.lse)
    require().merge(*(x.data_ptr() for x in tensors), rows * heads, dim, torch.get_num_threads())
    return result
