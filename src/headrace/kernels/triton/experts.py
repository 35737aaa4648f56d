"""A mixture of experts on a GPU: which experts a row goes to, products in groups, what comes of them for the row.

T: rows, E: experts, k: those that a row meets, M = T k: pairs of a row and an expert, sorted by expert; H: width, I: an
expert's inner width. See kernels.experts for what is computed. Routes stay on the GPU: nothing here waits for it, but
what brings experts that lie in a file.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from headrace.config import RoutingSpec
from headrace.config.routing import SOFTMAX
from headrace.kernels.routing import check_routing, weighted_inputs
from headrace.kernels.triton import rounded, weight_kernels
from headrace.kernels.triton.launching import direct
from headrace.kernels.triton.weights import MAGIC, GpuQuantized, agreeing, constants, operands, tile_for

Gather = Callable[[Tensor], Tensor]
COUNTED = 4096
"""Pairs at most that are arranged by one launch, each of which is compared with all; more are sorted."""
BLOCK = 64


@dataclass(frozen=True, slots=True)
class Grouped:
    """Rows by what they are multiplied by. order int32 [M]: the pair (row k + place in the row) that is n-th by expert,
    and of one expert by row; place int32 [T, k]: the same the other way round. begin int32 [E + 1]: where each expert's
    pairs begin, and the end of the last."""

    order: Tensor
    place: Tensor
    begin: Tensor


@dataclass(frozen=True, slots=True)
class GpuRoutes(Grouped):
    """Where rows go: expert int32 [T, k], share fp32 [T, k], the greatest first."""

    expert: Tensor
    share: Tensor


def route(
    logits: Tensor,
    chosen: int,
    normalised: bool,
    routing: RoutingSpec = SOFTMAX,
    correction: Tensor | None = None,
) -> GpuRoutes:
    """Routes of rows by the router's logits, fp32 [T, E]: see kernels.experts.route."""
    rows, experts = logits.shape
    check_routing(routing, experts, chosen, correction)
    logits, device = logits.contiguous(), logits.device
    expert = torch.empty((rows, chosen), dtype=torch.int32, device=device)
    share = torch.empty((rows, chosen), device=device)
    if rows:
        direct(weight_kernels.route)[(rows,)](
            logits, logits if correction is None else correction, expert, share, experts, routing.scale, CHOSEN=chosen,
            P=_rounded(experts), C=_rounded(chosen), G=_rounded(routing.groups), SHARED=normalised,
            SIGMOID=routing.scores == "sigmoid", CORRECTED=routing.corrected, GROUPS=routing.groups,
            MET=routing.met_groups, SUMMED=routing.summed, num_warps=1,
        )  # fmt: skip
    by = grouped(expert, experts)
    return GpuRoutes(by.order, by.place, by.begin, expert, share)


def grouped(expert: Tensor, experts: int) -> Grouped:
    """Pairs by their experts, int32 [T, k]; those of number E, which is none, are behind all."""
    pairs, device = expert.numel(), expert.device
    if pairs <= COUNTED:
        order, place = torch.empty(pairs, dtype=torch.int32, device=device), torch.empty_like(expert)
        begin = torch.empty(experts + 1, dtype=torch.int32, device=device)
        direct(weight_kernels.arrange)[(-(-pairs // BLOCK) + 1,)](
            expert, order, place, begin, pairs, experts, BLOCK=BLOCK, EXPERTS=_rounded(experts + 1), num_warps=4
        )
        return Grouped(order, place, begin)
    by_expert, order = expert.flatten().sort(stable=True)
    place = torch.empty(pairs, dtype=torch.int32, device=device)
    place[order] = torch.arange(pairs, dtype=torch.int32, device=device)
    edges = torch.arange(experts + 1, dtype=torch.int32, device=device)
    return Grouped(order.int(), place.view(expert.shape), torch.searchsorted(by_expert, edges, out_int32=True))


class GpuExperts:
    """One matrix [N, K] of every expert of a layer, and their biases [N] if they have any, all in one form.

    Raises ValueError for matrices that differ in their form.
    """

    def __init__(self, weights: Sequence[object], biases: Sequence[Tensor] | None) -> None:
        each = [weight for weight in weights if isinstance(weight, GpuQuantized | rounded.GpuRounded | Tensor)]
        if len(each) < len(weights) or len({_form(weight) for weight in each}) > 1:
            raise ValueError("the experts of a layer differ in their formats, and a GPU multiplies them together")
        self.first, self.count, self.biased = each[0], len(each), biases is not None
        self.plain = isinstance(self.first, Tensor)
        self.operands = [operands(weight, None if biases is None else biases[e]) for e, weight in enumerate(each)]
        rows = [[tensor.data_ptr() for tensor in each] for each in self.operands]
        if any(address % 16 for row in rows for address in row):
            raise ValueError("the matrices of experts lie at multiples of 16 bytes on a GPU")
        self.table = torch.tensor(rows, dtype=torch.int64, device=self.operands[0][0].device)
        self._made, self._moving = self.table, torch.tensor([1, 1, 1, 0]).to(self.table.device)
        if not isinstance(self.first, rounded.GpuRounded):
            agreeing(self.table.device, self.plain)

    def move(self, by: Tensor) -> None:
        """Matrices lie so many bytes, int64 [E], behind where they were made; biases stay."""
        self.table = self._made + by[:, None] * self._moving

    def __call__(self, x: Tensor, routes: Grouped, sent: bool) -> Tensor:
        """Of each pair the product of its row with its expert's matrix: [M, N]. x [M, K], a row for each pair, or, if
        `sent`, [T, K], whose rows go to their experts."""
        outputs, inputs = self.first.shape
        (pairs, experts), chosen = (routes.order.numel(), self.count), routes.place.shape[1]
        out = torch.empty(pairs, outputs, dtype=x.dtype, device=x.device)
        if not pairs:
            return out
        x = x if x.stride(1) == 1 else x.contiguous()
        if isinstance(self.first, rounded.GpuRounded):
            bias = self.operands[0][3] if self.biased else None
            grouping = rounded.Grouping(self.table, routes.begin, routes.order, chosen, experts, sent)
            rounded.product_of_experts(x, self.first, bias, out, grouping)
            return out
        tile = tile_for(-(-pairs // experts), x.dtype, x.device, self.plain)
        weight, scales, offsets, bias = self.operands[0]
        grid = (pairs // tile.rows + min(experts, pairs), -(-outputs // tile.columns))
        direct(weight_kernels.product)[grid](
            x, weight, scales, offsets, bias, out, self.table, routes.begin, routes.order, pairs, inputs, outputs,
            x.stride(0), weight.stride(0), outputs, inputs, experts, chosen, MAGIC,
            **constants(self.first, tile), BIAS=self.biased, SEGMENTS=1, APART=False, EXPERTS=_rounded(experts),
            SENT=sent,
        )  # fmt: skip
        return out


class GpuMixture:
    """The experts of a layer: what they make of rows together."""

    def __init__(
        self,
        ups: GpuExperts,
        downs: GpuExperts,
        activate: Callable[[Tensor], Tensor],
        routes: Callable[[Tensor], GpuRoutes],
        bring: Callable[[Tensor], Tensor] | None = None,
        routing: RoutingSpec = SOFTMAX,
    ) -> None:
        self.ups, self.downs, self.activate, self.routes, self.bring = ups, downs, activate, routes, bring
        self.routing = routing

    def __call__(self, x: Tensor, logits: Tensor, scales: Tensor | None = None, gather: Gather | None = None) -> Tensor:
        """See kernels.experts.Mixture."""
        routes = self.routes(logits)
        if scales is not None:
            routes = replace(routes, share=routes.share * scales[routes.expert.long()])
        if self.bring is not None:
            by = self.bring(routes.begin)
            self.ups.move(by)
            self.downs.move(by)
        if self.routing.weighs_inputs:
            x, ones = weighted_inputs(x, routes.order, routes.share)
            routes = replace(routes, share=ones)
        inner = self.activate(self.ups(x, routes, sent=not self.routing.weighs_inputs))
        inner = inner if gather is None else gather(inner)
        return combine(self.downs(inner, routes, sent=False), routes)


def combine(y: Tensor, routes: GpuRoutes) -> Tensor:
    """The sum of each row's y [M, H] (sorted by expert), times its shares, in fp32 and in their order: [T, H] as y."""
    (rows, chosen), width = routes.share.shape, y.shape[1]
    out = torch.empty(rows, width, dtype=y.dtype, device=y.device)
    if rows:
        columns = min(1024, _rounded(width))
        direct(weight_kernels.combine)[(rows, -(-width // columns))](
            y, routes.place, routes.share, out, width, CHOSEN=chosen, COLUMNS=columns
        )
    return out


def _rounded(count: int) -> int:
    """The power of 2 at or above it."""
    return 1 << (count - 1).bit_length()


def _form(weight: GpuQuantized | rounded.GpuRounded | Tensor) -> tuple[object, ...]:
    if isinstance(weight, Tensor):
        return (weight.shape, weight.dtype)
    if isinstance(weight, rounded.GpuRounded):
        return (weight.shape, weight.kind)
    if weight.order is not None:
        return (id(weight),)
    return (weight.shape, weight.kind, weight.group, weight.offsets is None)
