"""Experts row by row: choices as torch makes them, and products whose rows do not depend on their company.

T: rows, E: experts, k: those that a row meets, H: hidden size, I: an expert's width.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from transformers import GptOssConfig
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts, GptOssTopKRouter

from headrace.config import Quantization
from headrace.kernels import cpu, dispatch, experts, ops
from headrace.kernels.extension import require

pytestmark = [pytest.mark.cpu, pytest.mark.skipif(not cpu.available(), reason=str(cpu.unavailable_reason()))]

COUNT, K, H, INNER = 6, 2, 128, 64


def logits_of(rows: int, seed: int = 0, count: int = COUNT) -> Tensor:
    return torch.randn(rows, count, generator=torch.Generator().manual_seed(seed)) * 2


def both(logits: Tensor, chosen: int, normalised: bool) -> list[experts.Routes]:
    with dispatch.force("torch"):
        plain = experts.route(logits, chosen, normalised)
    return [experts.route(logits, chosen, normalised), plain]


@pytest.mark.parametrize("normalised", [True, False])
@pytest.mark.parametrize(("count", "chosen"), [(6, 2), (128, 8), (37, 37), (1, 1)])
def test_choices_and_shares(isa: str, count: int, chosen: int, normalised: bool) -> None:
    logits = logits_of(300, count=count)
    probabilities = logits.double().softmax(-1)
    want, expert = probabilities.topk(chosen)
    want = want / want.sum(-1, keepdim=True) if normalised else want
    for routes in both(logits, chosen, normalised):
        assert torch.equal(routes.expert.long(), expert)
        assert (routes.share - want).abs().max() < 1e-6


def test_of_equal_ones_the_first(isa: str) -> None:
    for routes in both(torch.tensor([[1.0, 2.0, 2.0, 0.0, 2.0], [0.0] * 5]), 2, True):
        assert routes.expert.tolist() == [[1, 2], [0, 1]] and routes.share.tolist() == [[0.5, 0.5]] * 2


def test_no_numbers_choose_experts_all_the_same(isa: str) -> None:
    """Bad activations give bad rows, and no index outside."""
    logits = torch.tensor([[float("nan")] * 4, [float("inf"), 1.0, 2.0, 3.0], [float("-inf")] * 4])
    routes = both(logits, 3, False)[0]
    for row in routes.expert.tolist():
        assert len(set(row)) == 3 and set(row) <= set(range(4))


def test_rows_by_expert() -> None:
    routes = experts.route(logits_of(50), K, True)
    flat = routes.expert.flatten().tolist()
    for e in range(COUNT):
        pairs = routes.order[routes.begin[e] : routes.begin[e + 1]].tolist()
        assert pairs == [n for n, expert in enumerate(flat) if expert == e]
    assert torch.equal(routes.order[routes.place.flatten().long()], torch.arange(50 * K))


def weights(
    dtype: torch.dtype, quantization: Quantization, inner: int = INNER
) -> tuple[list[ops.Weight], list[ops.Weight]]:
    g = torch.Generator().manual_seed(1)

    def draw(outputs: int, inputs: int) -> Tensor:
        return (torch.randn(outputs, inputs, generator=g) / inputs**0.5).to(dtype)

    ups = [ops.pack(draw(2 * inner, H), quantization, gated=True) for _ in range(COUNT)]
    return ups, [ops.pack(draw(H, inner), quantization) for _ in range(COUNT)]


def mlp(
    x: Tensor,
    routes: experts.Routes,
    ups: list[ops.Weight],
    downs: list[ops.Weight],
    gate: str = "silu",
    biases: tuple[list[Tensor], list[Tensor]] | tuple[None, None] = (None, None),
) -> Tensor:
    inner = experts.gated_linear(x[routes.order // routes.share.shape[1]], ups, routes.begin, gate, biases[0])
    return experts.combine(experts.linear(inner, downs, routes.begin, biases=biases[1]), routes)


def gpt_oss_biases(dtype: torch.dtype) -> tuple[list[Tensor], list[Tensor]]:
    g = torch.Generator().manual_seed(7)
    up, down = (torch.randn(COUNT, outputs, generator=g).to(dtype) for outputs in (2 * INNER, H))
    return list(up), list(down)


@pytest.mark.parametrize("quantization", ["none", "int8", "int4"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("forced", [None, "torch"])
def test_a_row_has_the_bits_that_it_has_alone(
    isa: str, dtype: torch.dtype, quantization: Quantization, forced: dispatch.Implementation | None, threads: None
) -> None:
    """Whoever else goes to its experts, and however many: one row or none of an expert, or a hundred."""
    with dispatch.force(forced):
        ups, downs = weights(dtype, quantization)
        x = torch.randn(430, H, generator=torch.Generator().manual_seed(2)).to(dtype)
        logits = logits_of(len(x))
        logits[40:, 3] += 5.0  # more rows than a task or a panel has, and experts with a few
        for more in ((), ("swiglu_oai", gpt_oss_biases(dtype))):
            whole = mlp(x, experts.route(logits, K, True), ups, downs, *more)
            for rows in (slice(0, 1), slice(5, 9), slice(30, 170)):
                own = mlp(x[rows], experts.route(logits[rows], K, True), ups, downs, *more)
                assert torch.equal(own, whole[rows]), rows


@pytest.mark.parametrize("forced", [None, "torch"])
def test_experts_of_gpt_oss(isa: str, forced: dispatch.Implementation | None) -> None:
    """Against transformers' own, with gates and ups beyond the limit of 7, which it has in turn; and its router."""
    config = GptOssConfig(hidden_size=H, intermediate_size=INNER, num_local_experts=COUNT, num_experts_per_tok=K)
    theirs, router = GptOssExperts(config), GptOssTopKRouter(config)
    g = torch.Generator().manual_seed(5)
    x = torch.randn(50, H, generator=g)
    with torch.no_grad():
        for parameter in (*theirs.parameters(), *router.parameters()):
            parameter.copy_(torch.randn(parameter.shape, generator=g) * 0.4)
        _, shares, chosen = router(x)
        want = theirs(x, chosen, shares)
        gates = (x @ theirs.gate_up_proj[0] + theirs.gate_up_proj_bias[0])[:, ::2]
    assert (gates > 7).any() and (gates < 7).any()
    turned = [*range(0, 2 * INNER, 2), *range(1, 2 * INNER, 2)]
    with dispatch.force(forced), torch.no_grad():
        ups = [ops.pack(up.T[turned].contiguous(), gated=True) for up in theirs.gate_up_proj]
        downs = [ops.pack(down.T.contiguous()) for down in theirs.down_proj]
        biases = list(theirs.gate_up_proj_bias[:, turned]), list(theirs.down_proj_bias)
        routes = experts.route(ops.linear(x, router.weight.detach(), router.bias.detach(), wide=True), K, True)
        got = mlp(x, routes, ups, downs, "swiglu_oai", biases)
    assert (got - want).abs().max() < 1e-5 * want.abs().max()


@pytest.mark.parametrize("gate", ["silu", "gelu_tanh", "swiglu_oai", "swiglu_clamped"])
@pytest.mark.parametrize("quantization", ["none", "int8", "int4", "w8a8"])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("inner", [INNER, 192])
def test_groups_have_the_bits_of_products_one_by_one(
    isa: str, quantization: Quantization, biased: bool, inner: int, gate: str
) -> None:
    ups, _ = weights(torch.bfloat16, quantization, inner)
    g = torch.Generator().manual_seed(3)
    x, drawn = torch.randn(333, H, generator=g).bfloat16(), torch.randn(COUNT, 2 * inner, generator=g).bfloat16()
    begin, biases = [0, 1, 1, 140, 141, 240, 333], list(drawn) if biased else None
    got = experts.gated_linear(x, ups, begin, gate, biases)
    for e, weight in enumerate(ups):
        rows, bias = slice(begin[e], begin[e + 1]), None if biases is None else biases[e]
        assert torch.equal(got[rows], ops.gated_linear(x[rows], weight, bias, gate)), e


def test_the_sum_goes_by_shares(isa: str) -> None:
    """Against fp64; and in the order of the shares, which another order does not always give."""
    routes = experts.route(logits_of(200, count=9), 5, False)
    y = torch.randn(1000, 70, generator=torch.Generator().manual_seed(4))
    rows = y[routes.place.long()]
    want = (rows.double() * routes.share.double()[..., None]).sum(1)
    assert (experts.combine(y, routes) - want).abs().max() < 1e-6
    with dispatch.force("torch"):
        assert (experts.combine(y, routes) - want).abs().max() < 1e-6


def test_no_rows() -> None:
    ups, downs = weights(torch.bfloat16, "none")
    none = experts.route(torch.empty(0, COUNT), K, True)
    assert mlp(torch.empty(0, H).bfloat16(), none, ups, downs).shape == (0, H)


def test_refusals() -> None:
    ups, _ = weights(torch.bfloat16, "none")
    with pytest.raises(ValueError, match="7 of 6 experts cannot be chosen"):
        experts.route(logits_of(3), 7, True)
    matrices = [weight.matrix(0) for weight in ups if not isinstance(weight, Tensor)]
    for begin in ([0, 1, 2, 3, 4, 5, 5], [1, 1, 2, 3, 4, 5, 6], [0, 2, 1, 3, 4, 5, 6], [0, 6]):
        with pytest.raises(ValueError, match="begin"):
            require().linear_groups(0, 0, matrices, begin, 0, rows=6, x_stride=H, gate=require().Gate.silu, threads=1)
    place = torch.tensor([[4, 0]], dtype=torch.int32)
    with pytest.raises(ValueError, match=r"place\[0\] is 4, of 2 rows"):
        require().combine(0, 0, place.data_ptr(), 0, 0, rows=1, chosen=2, width=8, threads=1)
