"""A mixture of experts row by row: which experts a row goes to, products in groups, and what comes of them for the row.

T: rows, E: experts, k: those that a row meets, M = T k: pairs of a row and an expert, sorted by expert; H: width. C++
for CPU tensors where the extension exists, torch otherwise. No row's bits depend on other rows: an expert's product has
one order of sums for every number of rows, and what a row's experts make is added up in the order of their shares.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from functools import partial
from typing import TYPE_CHECKING, Protocol, TypeGuard

import torch
from torch import Tensor

from headrace import memory
from headrace.config import RoutingSpec
from headrace.config.routing import SOFTMAX
from headrace.kernels import cpu, dispatch, ops
from headrace.kernels.extension import address, check, require, type_of
from headrace.kernels.routing import check_routing, plain_route

if TYPE_CHECKING:
    from headrace.kernels import _cpu as native


@dataclass(frozen=True, slots=True)
class Routes:
    """Where rows go: expert int32 [T, k], share fp32 [T, k], the greatest first.

    order int64 [M]: the pair (row k + place in the row) that is n-th by expert, and of one expert by row; place int32
    [T, k]: the same the other way round. begin [E + 1]: where each expert's pairs begin, and the end of the last.
    """

    expert: Tensor
    share: Tensor
    order: Tensor
    place: Tensor
    begin: list[int]


def route(
    logits: Tensor,
    chosen: int,
    normalised: bool,
    routing: RoutingSpec = SOFTMAX,
    correction: Tensor | None = None,
) -> Routes:
    """Routes of rows by the router's logits, fp32 [T, E]: scores of all, then the `chosen` greatest, of equal ones the
    first; their shares divided by their sum if `normalised`. correction: fp32 [E], where `routing` says that there is
    one. Raises ValueError where there are not so many.
    """
    experts = logits.shape[1]
    check_routing(routing, experts, chosen, correction)
    take = _route if dispatch.native(logits) else plain_route
    expert, share = take(logits, chosen, normalised, routing, correction)
    flat = expert.flatten().long()
    order = flat.argsort(stable=True)
    place = torch.empty_like(order)
    place[order] = torch.arange(len(order))
    ends = torch.bincount(flat, minlength=experts).cumsum(0)
    return Routes(expert, share, order, place.int().view(expert.shape), [0, *ends.tolist()])


def _route(
    logits: Tensor, chosen: int, normalised: bool, routing: RoutingSpec, correction: Tensor | None
) -> tuple[Tensor, Tensor]:
    rows, experts = logits.shape
    check("logits", logits, torch.float32, (rows, experts))
    expert, share = torch.empty((rows, chosen), dtype=torch.int32), torch.empty((rows, chosen))
    require().route(
        logits.data_ptr(), expert.data_ptr(), share.data_ptr(), *native_routing(routing, correction, experts),
        rows=rows, experts=experts, chosen=chosen, normalised=normalised, threads=torch.get_num_threads(),
    )  # fmt: skip
    return expert, share


def native_routing(routing: RoutingSpec, correction: Tensor | None, experts: int) -> tuple[native.Routing, int]:
    """What C++ needs to know of it, and the address of the corrections."""
    if correction is not None:
        check("correction", correction, torch.float32, (experts,))
    ours = require().Routing(
        sigmoid=routing.scores == "sigmoid", groups=routing.groups, met_groups=routing.met_groups,
        summed=routing.summed, scale=routing.scale,
    )  # fmt: skip
    return ours, address(correction)


OUTSIDE = "experts.outside"
"""The table of a layer's experts that lie in a mapped file, among the layer's weights: int64 [E, 5]."""


class OutsideColumn(IntEnum):
    """Columns of that table (csrc/model/decoder_layer.h): steps that met an expert, those that found it kept in memory,
    whether it is kept now, and where it lies, in whole pages."""

    met = 0
    hits = 1
    kept = 2
    begin = 3
    size = 4


def fetch(outside: Tensor, begin: Sequence[int]) -> None:
    """Counts the experts that have rows (Routes.begin), and has the system read those that are not in memory."""
    table = outside.numpy()
    for e in range(len(table)):
        if begin[e] == begin[e + 1]:
            continue
        table[e, OutsideColumn.met] += 1
        if table[e, OutsideColumn.kept]:
            table[e, OutsideColumn.hits] += 1
        else:
            memory.read_ahead(int(table[e, OutsideColumn.begin]), int(table[e, OutsideColumn.size]))


def linear(
    x: Tensor,
    weights: Sequence[ops.Weight],
    begin: Sequence[int],
    gate: str = "silu",
    biases: Sequence[Tensor] | None = None,
) -> Tensor:
    """Rows begin[e] to begin[e + 1] of x [M, K] times the e-th weight [N, K] transposed, plus its bias [N] if there are
    any: [M, N]; [M, N / 2] of gated ones (see cpu.linear). Weights may differ in their formats; those without rows are
    not read."""
    met = [e for e in range(len(weights)) if begin[e] < begin[e + 1]]
    packed, added = [weights[e] for e in met], [None if biases is None else biases[e] for e in met]
    if not met or not _all_packed(packed):
        parts = [ops.linear(x[begin[e] : begin[e + 1]], weights[e], bias) for e, bias in zip(met, added, strict=True)]
        return torch.cat(parts) if parts else ops.linear(x, weights[0])
    outputs, inputs = packed[0].shape
    check("x", x, x.dtype, (begin[-1], inputs))
    for bias in added:
        if bias is not None:
            check("bias", bias, x.dtype, (outputs,))
    matrices = [
        weight.matrix(0 if bias is None else bias.data_ptr()) for weight, bias in zip(packed, added, strict=True)
    ]
    out = torch.empty((len(x), outputs // 2 if packed[0].gated else outputs), dtype=x.dtype)
    require().linear_groups(
        type_of(x), x.data_ptr(), matrices, [*(begin[e] for e in met), begin[-1]],
        out.data_ptr(), rows=len(x), x_stride=x.stride(0), gate=getattr(require().Gate, gate),
        threads=torch.get_num_threads(),
    )  # fmt: skip
    return out


def _all_packed(weights: Sequence[ops.Weight]) -> TypeGuard[Sequence[cpu.StoredWeight]]:
    return not any(isinstance(weight, Tensor) for weight in weights)


def gated_linear(
    x: Tensor,
    weights: Sequence[ops.Weight],
    begin: Sequence[int],
    gate: str = "silu",
    biases: Sequence[Tensor] | None = None,
) -> Tensor:
    """f(gate) * up of `linear` with weights [2 I, K] = (gate, up): [M, I]. gate: as in ops.gated_linear."""
    out = linear(x, weights, begin, gate, biases)
    return out if not isinstance(weights[0], Tensor) and weights[0].gated else ops.gated(out, gate)


class Mixture(Protocol):
    """The experts of a layer, in a GPU's memory."""

    def __call__(
        self,
        x: Tensor,
        logits: Tensor,
        scales: Tensor | None = None,
        gather: Callable[[Tensor], Tensor] | None = None,
    ) -> Tensor:
        """What they make of x [T, H] by the router's logits fp32 [T, E]: [T, H]. scales fp32 [E]: shares are multiplied
        by their experts'. A tensor rank has a part of every expert's inner width I, and of H: gather makes [M, I] of
        the parts of all ranks."""


Bring = Callable[[Tensor], Tensor]
"""Has the experts that rows meet, by `begin` of GpuRoutes, in a GPU's memory: so many bytes behind where they were made
each one's matrices lie, int64 [E] on the GPU."""


def mixture(
    ups: Sequence[ops.Weight],
    up_biases: Sequence[Tensor] | None,
    downs: Sequence[ops.Weight],
    down_biases: Sequence[Tensor] | None,
    activation: str,
    chosen: int,
    normalised: bool,
    bring: Bring | None = None,
    routing: RoutingSpec = SOFTMAX,
    correction: Tensor | None = None,
    gated: bool = True,
) -> Mixture:
    """All of it at once for experts in a GPU's memory, of which those of one name are in one form: ValueError
    otherwise. activation: of the gates, if `gated`, otherwise of all that `ups` make (ops.gated, ops.activated). bring:
    moves experts; None: all are there. The other arguments are those of `gated_linear` and `route`."""
    from headrace.kernels.triton import experts as gpu

    up, down = (gpu.GpuExperts(*each) for each in ((ups, up_biases), (downs, down_biases)))
    how = partial(gpu.route, chosen=chosen, normalised=normalised, routing=routing, correction=correction)
    activate = partial(ops.gated, gate=activation) if gated else partial(ops.activated, kind=activation)
    return gpu.GpuMixture(up, down, activate, how, bring, routing)


def combine(y: Tensor, routes: Routes) -> Tensor:
    """The sum of each row's y [M, H] (sorted by expert), times its shares, in fp32 and in their order: [T, H] as y."""
    rows, chosen = routes.share.shape
    if not dispatch.native(y):
        total = torch.zeros((rows, y.shape[1]))
        for j in range(chosen):
            total += y[routes.place[:, j].long()].float() * routes.share[:, j, None]
        return total.to(y.dtype)
    check("y", y, y.dtype, (rows * chosen, y.shape[1]))
    out = torch.empty((rows, y.shape[1]), dtype=y.dtype)
    require().combine(
        type_of(y), y.data_ptr(), routes.place.data_ptr(), routes.share.data_ptr(), out.data_ptr(), rows=rows,
        chosen=chosen, width=y.shape[1], threads=torch.get_num_threads(),
    )  # fmt: skip
    return out
