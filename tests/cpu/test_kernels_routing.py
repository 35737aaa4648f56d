"""How a router chooses: as transformers' own routers do, by scores, corrections and groups.

T: rows, E: experts, k: those that a row meets, H: hidden size.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DeepseekV2Config, DeepseekV3Config, Glm4MoeConfig, MiniMaxM2Config
from transformers.models.deepseek_v2.modeling_deepseek_v2 import DeepseekV2TopkRouter
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3TopkRouter
from transformers.models.glm4_moe.modeling_glm4_moe import Glm4MoeTopkRouter
from transformers.models.minimax_m2.modeling_minimax_m2 import MiniMaxM2TopKRouter

from headrace.config import RoutingSpec
from headrace.kernels import cpu, dispatch, experts
from headrace.kernels.extension import require

pytestmark = [pytest.mark.cpu, pytest.mark.skipif(not cpu.available(), reason=str(cpu.unavailable_reason()))]

ROWS, H = 300, 64
V3 = RoutingSpec("sigmoid", corrected=True, groups=4, met_groups=2, summed=2, scale=2.5)
V2 = RoutingSpec(groups=4, met_groups=2, scale=16.0)
PLAIN = RoutingSpec("sigmoid", corrected=True)


@dataclass(frozen=True)
class Case:
    """A router of transformers, and what it is here. biased: whether its call is given the corrections."""

    router: Callable[[Any], torch.nn.Module]
    config: Any
    count: int
    chosen: int
    normalised: bool
    routing: RoutingSpec
    biased: bool = False


def sizes(count: int, chosen: int, **fields: Any) -> dict[str, Any]:
    return dict(hidden_size=H, n_routed_experts=count, num_experts_per_tok=chosen, **fields)


GROUPS = dict(n_group=4, topk_group=2, routed_scaling_factor=2.5)
CASES = {
    "glm4": Case(
        Glm4MoeTopkRouter, Glm4MoeConfig(**sizes(17, 4), routed_scaling_factor=1.5), 17, 4, True,
        replace(PLAIN, scale=1.5),
    ),
    "glm4 with groups": Case(
        Glm4MoeTopkRouter, Glm4MoeConfig(**sizes(24, 5), **GROUPS, norm_topk_prob=False), 24, 5, False, V3
    ),
    "deepseek v3": Case(DeepseekV3TopkRouter, DeepseekV3Config(**sizes(32, 8), **GROUPS), 32, 8, True, V3),
    "deepseek v2": Case(
        DeepseekV2TopkRouter,
        DeepseekV2Config(
            **sizes(32, 6), n_group=4, topk_group=2, routed_scaling_factor=16.0, topk_method="group_limited_greedy"
        ),
        32, 6, False, V2,
    ),
    "deepseek v2 lite": Case(
        DeepseekV2TopkRouter, DeepseekV2Config(**sizes(20, 6), routed_scaling_factor=0.5, topk_method="greedy"), 20, 6,
        False, RoutingSpec(scale=0.5),
    ),
    "minimax m2": Case(
        MiniMaxM2TopKRouter, MiniMaxM2Config(hidden_size=H, num_local_experts=24, num_experts_per_tok=8), 24, 8, True,
        PLAIN, biased=True,
    ),
}  # fmt: skip


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def both(logits: Tensor, chosen: int, normalised: bool, routing: RoutingSpec) -> list[experts.Routes]:
    """In C++ and in torch. Corrections are as wide as the differences of scores."""
    correction = drawn(logits.shape[1], seed=9) * 0.3 if routing.corrected else None
    with dispatch.force("torch"):
        plain = experts.route(logits, chosen, normalised, routing, correction)
    return [experts.route(logits, chosen, normalised, routing, correction), plain]


def spread(expert: Tensor, share: Tensor, count: int) -> Tensor:
    """Shares by expert: [T, E], 0 of those that are not met."""
    return torch.zeros(len(share), count).scatter(1, expert.long(), share)


@pytest.mark.parametrize("name", CASES)
def test_as_transformers_routers(isa: str, name: str) -> None:
    case = CASES[name]
    router, x, correction = case.router(case.config), drawn(ROWS, H), drawn(case.count, seed=9) * 0.3
    with torch.no_grad():
        weight: Any = router.weight
        weight.copy_(drawn(case.count, H, seed=1) * 0.3)
        if hasattr(router, "e_score_correction_bias"):
            router.e_score_correction_bias.copy_(correction)
        logits, share, expert = router(x, correction) if case.biased else router(x)
    want = spread(expert, share, case.count)
    for routes in both(logits, case.chosen, case.normalised, case.routing):
        assert (spread(routes.expert, routes.share, case.count) - want).abs().max() < 2e-6 * case.routing.scale


@pytest.mark.parametrize("routing", [V3, V2, PLAIN], ids=["v3", "v2", "plain"])
def test_a_row_has_the_bits_that_it_has_alone(isa: str, routing: RoutingSpec) -> None:
    logits = drawn(70, 40)
    whole = both(logits, 7, True, routing)
    for rows in (slice(0, 1), slice(5, 9), slice(30, 70)):
        for alone, all_ in zip(both(logits[rows], 7, True, routing), whole, strict=True):
            assert torch.equal(alone.expert, all_.expert[rows]) and torch.equal(alone.share, all_.share[rows])


def test_of_equal_groups_and_experts_the_first(isa: str) -> None:
    """A group is as good as its best ones together: (3, 3) before (4, 1) and before (3, 3) again."""
    logits = torch.tensor([[4.0, 1.0, -9.0, 3.0, 3.0, -9.0, 3.0, 3.0, -9.0], [0.0] * 9])
    two = RoutingSpec("sigmoid", groups=3, met_groups=1, summed=2)
    for routes in both(logits, 2, True, two):
        assert routes.expert.tolist() == [[3, 4], [0, 1]] and routes.share.tolist() == [[0.5, 0.5]] * 2
    for routes in both(logits, 2, False, replace(two, summed=1)):
        assert routes.expert.tolist() == [[0, 1]] * 2
    for routes in both(logits, 4, False, replace(two, met_groups=2)):
        assert routes.expert.tolist() == [[3, 4, 6, 7], [0, 1, 2, 3]]


def test_scores_of_nothing_have_shares_of_nothing(isa: str) -> None:
    """Sigmoids may all be 0; their sum divides nothing by nothing."""
    for routes in both(torch.full((2, 8), -300.0), 2, True, PLAIN):
        assert routes.share.tolist() == [[0.0, 0.0]] * 2


@pytest.mark.parametrize("routing", [V3, V2, PLAIN], ids=["v3", "v2", "plain"])
def test_no_numbers_choose_experts_all_the_same(isa: str, routing: RoutingSpec) -> None:
    nan, inf = float("nan"), float("inf")
    logits = torch.tensor([[nan] * 8, [inf, -inf, nan, 1.0] * 2, [-inf] * 8, [inf] * 8])
    for row in both(logits, 4, True, routing)[0].expert.tolist():
        assert len(set(row)) == 4 and set(row) <= set(range(8))


@pytest.mark.parametrize(
    ("routing", "chosen", "why"),
    [
        (RoutingSpec(groups=5), 2, "8 experts do not make 5 groups"),
        (RoutingSpec(groups=0), 2, "8 experts do not make 0 groups"),
        (RoutingSpec(groups=4, met_groups=5), 2, "5 of 4 groups of experts cannot be chosen"),
        (RoutingSpec(groups=4, met_groups=0), 2, "0 of 4 groups of experts cannot be chosen"),
        (RoutingSpec(groups=4, met_groups=2, summed=3), 2, "groups of 2 experts have no 3 best ones"),
        (RoutingSpec(groups=4, met_groups=2), 5, "2 groups of 2 experts are too few to choose 5 of"),
        (RoutingSpec(), 9, "9 of 8 experts cannot be chosen"),
    ],
)
def test_refusals(routing: RoutingSpec, chosen: int, why: str) -> None:
    logits = torch.zeros(1, 8)
    with pytest.raises(ValueError, match=why):
        experts.route(logits, chosen, True, routing)
    ours = require().Routing(
        sigmoid=False, groups=routing.groups, met_groups=routing.met_groups, summed=routing.summed, scale=1.0
    )
    with pytest.raises(ValueError, match="cannot be chosen"):
        require().route(0, 0, 0, ours, 0, rows=1, experts=8, chosen=chosen, normalised=True, threads=1)


@pytest.mark.parametrize("routing", [V3, V2, PLAIN], ids=["v3", "v2", "plain"])
def test_no_rows(routing: RoutingSpec) -> None:
    for routes in both(torch.empty(0, 8), 2, True, routing):
        assert routes.expert.shape == routes.share.shape == (0, 2) and routes.begin == [0] * 9


@pytest.mark.parametrize("correction", [None, torch.zeros(7), torch.zeros(8).bfloat16()], ids=["none", "few", "bf16"])
def test_corrections_that_do_not_fit_are_refused(correction: Tensor | None) -> None:
    with pytest.raises(ValueError, match="corrections of 8 experts do not fit"):
        experts.route(torch.zeros(1, 8), 2, True, PLAIN, correction)
    with pytest.raises(ValueError, match="corrections of 8 experts do not fit"):
        experts.route(torch.zeros(1, 8), 2, True, RoutingSpec(), torch.zeros(8))
