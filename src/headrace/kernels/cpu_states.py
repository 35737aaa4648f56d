"""What the C++ kernels do with attention states: finish them, merge blocks computed apart, merge segments.

R: rows, Hq: query heads, D: head size. The meaning is that of kernels.state; states.h and fold.cpp have the kernels.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from headrace.kernels import state as algebra
from headrace.kernels.cpu_attention import LOG_2, addresses, partial_at, unit_of
from headrace.kernels.extension import VNNI_ISAS, address, check, isa, require, type_of
from headrace.kernels.state import AttnState, Partial, RunningState, StateRows, part_of


def empty_running(rows: int, heads: int, head_dim: int, dtype: torch.dtype) -> RunningState:
    """The state of rows that have met no chunk, for kernels that compute in `dtype`."""
    return algebra.empty_running(rows, heads, head_dim, unit_of(dtype, head_dim))


def finish(state: RunningState, dtype: torch.dtype, sinks: Tensor | None = None) -> Tensor:
    """The attention of what was merged: [R, Hq, D] in `dtype`, zeros for rows that saw no key. sinks [Hq]: see Mask."""
    if sinks is not None:
        check("sinks", sinks, torch.float32, state.shape[1:2])
    out = torch.empty(state.shape, dtype=dtype)
    _finish(state, out, None, sinks)
    return out


def states_of(state: RunningState) -> AttnState:
    """The same as a value that merges: fp32, natural logarithms."""
    result = AttnState(torch.empty(state.shape), torch.empty(state.shape[:2]))
    _finish(state, result.out, result.lse)
    return result


def _finish(state: RunningState, out: Tensor, lse: Tensor | None, sinks: Tensor | None = None) -> None:
    rows, heads, dim = state.shape
    require().finish(
        type_of(out), addresses(state), out.data_ptr(), address(lse), address(sinks), lanes=rows * heads, heads=heads,
        dim=dim, base2=_base2(state), threads=torch.get_num_threads(),
    )  # fmt: skip


def _base2(state: RunningState) -> bool:
    """Whether the state counts in units of log 2. Raises ValueError where the instruction set in use cannot."""
    if state.unit == LOG_2 and isa() not in VNNI_ISAS:
        raise ValueError(
            f"the state was merged in base 2, which {isa()} does not: finish it with {' or '.join(VNNI_ISAS)}"
        )
    return state.unit == LOG_2


def merge_blocks(left: RunningState, right: RunningState) -> RunningState:
    """The merge of `left` continued by a block that was merged elsewhere: see kernels.state.merge_blocks."""
    addresses(right)
    addresses(left)
    base2 = _base2(left)

    def merged(total: Partial, block: Partial) -> Partial:
        result = Partial(total.acc.clone(), total.m.clone(), total.l.clone())
        _merge(result, block, base2)
        return result

    return algebra.merge_blocks(left, right, merged)


def merge_into(total: Partial, blocks: Sequence[StateRows], unit: float) -> None:
    """Rows of total [R, Hq, D] become the merge of themselves and then each block, in place; all count in `unit`."""
    for begin, end, block in blocks:
        _merge(part_of(total, begin, end), block, unit == LOG_2)


def _merge(total: Partial, block: Partial, base2: bool) -> None:
    rows, heads, dim = total.acc.shape
    shape = (rows, heads, dim)
    require().merge_partials(
        partial_at(total, shape), partial_at(block, shape), lanes=rows * heads, dim=dim, base2=base2,
        threads=torch.get_num_threads(),
    )  # fmt: skip


def merge_states(left: AttnState, right: AttnState) -> AttnState:
    """Attention over the union of two disjoint segments, out [R, Hq, D] and lse [R, Hq]. Two EMPTY give EMPTY."""
    rows, heads, dim = left.out.shape
    for name, state in (("left", left), ("right", right)):
        check(f"{name}.out", state.out, torch.float32, (rows, heads, dim))
        check(f"{name}.lse", state.lse, torch.float32, (rows, heads))
    result = AttnState(torch.empty_like(left.out), torch.empty_like(left.lse))
    places = ((each.out.data_ptr(), each.lse.data_ptr()) for each in (left, right, result))
    require().merge_states(*places, lanes=rows * heads, dim=dim, threads=torch.get_num_threads())
    return result
