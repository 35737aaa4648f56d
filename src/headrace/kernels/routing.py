"""Which experts rows go to, by the logits of their router, in torch; and what no router can choose.

T: rows, E: experts, k: those that a row meets. What is computed stands at config.RoutingSpec.
"""

from __future__ import annotations

import torch
from torch import Tensor

from headrace.config import RoutingSpec
from headrace.kernels.gates import whole_vectors

LEAST_SUM = 1e-20
"""DeepSeek-V3's: sigmoids may all be 0."""


def check_routing(routing: RoutingSpec, experts: int, chosen: int, correction: Tensor | None) -> None:
    """Raises ValueError where so many cannot be chosen so."""
    obstacle = routing.obstacle(experts, chosen)
    if obstacle is not None:
        raise ValueError(obstacle)
    given = None if correction is None else (correction.shape, correction.dtype)
    if given != (((experts,), torch.float32) if routing.corrected else None):
        raise ValueError(f"corrections of {experts} experts do not fit {routing}: got {given}")


def plain_route(
    logits: Tensor, chosen: int, normalised: bool, routing: RoutingSpec, correction: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Experts int32 [T, k] and their shares fp32 [T, k] of rows with these logits: see kernels.experts.route."""
    sigmoid = routing.scores == "sigmoid"
    scores = whole_vectors(torch.sigmoid, logits) if sigmoid else logits.softmax(-1)
    worth = scores if correction is None else scores + correction
    if routing.groups > 1:
        worth = _of_the_best_groups(worth, routing)
    expert = _greatest_first(worth)[:, :chosen]
    share = scores.gather(1, expert)
    if normalised:
        total = share[:, 0].clone()
        for j in range(1, chosen):  # one by one: torch's sum may take another order for another number of rows
            total += share[:, j]
        share = share / (total + LEAST_SUM)[:, None]
    return expert.int().contiguous(), (share * routing.scale).contiguous()


def weighted_inputs(x: Tensor, order: Tensor, share: Tensor) -> tuple[Tensor, Tensor]:
    """(a row for each pair: its row of x [T, H] times its share, rounded once; shares of 1) -> [M, H], [T, k]. order,
    share: as in experts.Routes, of a GPU too. Where RoutingSpec.weighs_inputs says so."""
    order = order.long()
    rows = x[order // share.shape[1]].float() * share.flatten()[order][:, None]
    return rows.to(x.dtype), torch.ones_like(share)


def _of_the_best_groups(worth: Tensor, routing: RoutingSpec) -> Tensor:
    """worth [T, E], of experts that are not in the best groups -inf."""
    groups = worth.view(len(worth), routing.groups, worth.shape[1] // routing.groups)
    best = groups.sort(dim=-1, descending=True)[0]
    total = best[..., 0].clone()
    for j in range(1, routing.summed):
        total += best[..., j]
    met = torch.zeros_like(total, dtype=torch.bool).scatter(1, _greatest_first(total)[:, : routing.met_groups], True)
    return groups.masked_fill(~met[..., None], float("-inf")).view(worth.shape)


def _greatest_first(x: Tensor) -> Tensor:
    """Places of x [T, N] by descending value, of equal ones the first before others: topk promises no such order."""
    return x.argsort(dim=-1, descending=True, stable=True)
