"""Recurrent layers in C++ against those in torch, on every instruction set: gated delta nets, Mamba-2 layers, short
convolutions. Segments in order, cuts, wrong tensors; the latter two against other forms of theirs."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from headrace.config import RecurrentSpec
from headrace.kernels import cpu, dispatch, mamba2
from headrace.kernels.records import ConvWeights, LayerStates, MambaWeights
from tests.support.recurrent_cases import SLOTS, RecurrentCase

pytestmark = [pytest.mark.cpu, pytest.mark.skipif(not cpu.available(), reason="there are no kernels")]

NET = RecurrentSpec(1, 2, 4, 32, 32, 4)
MAMBA = [
    RecurrentSpec(1, 1, 4, 64, 32, 4, "mamba2"),
    RecurrentSpec(1, 2, 6, 40, 20, 3, "mamba2"),
    RecurrentSpec(1, 1, 2, 7, 5, 2, "mamba2"),
]
KIMI = [
    RecurrentSpec(1, 4, 4, 32, 32, 4, "kda"),
    RecurrentSpec(1, 3, 3, 40, 20, 3, "kda", bound=-5.0),
    RecurrentSpec(1, 2, 2, 7, 5, 2, "kda"),
]
CONVOLUTION = RecurrentSpec.short_convolutions(1, 64, 3)
FIRST = [NET, KIMI[0], MAMBA[0], CONVOLUTION]
SHAPES = [
    *(NET, RecurrentSpec(1, 1, 3, 40, 20, 3), RecurrentSpec(1, 1, 2, 7, 5, 2)),
    *KIMI,
    *MAMBA,
    *(CONVOLUTION, *(RecurrentSpec.short_convolutions(1, *sizes) for sizes in ((200, 4), (23, 2), (2048, 3)))),
]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(
    ("spec", "bias"), [*((spec, True) for spec in SHAPES), *((spec, False) for spec in MAMBA)], ids=str
)
def test_as_in_torch(spec: RecurrentSpec, bias: bool, dtype: torch.dtype, isa: str) -> None:
    case, segments = RecurrentCase(spec, 150, dtype, bias=bias), [[0, 140, 3, 1], [141, 150, -1, 0], [140, 141, 1, 1]]
    out, states = case.run(segments)
    with dispatch.force("torch"):
        wanted, after = case.run(segments)
    bound = (1e-4 if dtype == torch.float32 else 2e-2) if spec.key_dim else (1e-5 if dtype == torch.float32 else 1e-2)
    torch.testing.assert_close(out, wanted, rtol=bound, atol=bound)
    torch.testing.assert_close(states.matrices, after.matrices, rtol=1e-4, atol=1e-4)
    assert torch.equal(states.last, after.last)


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("spec", SHAPES)
def test_cuts_change_no_bits(spec: RecurrentSpec, threads: int, isa: str, threads_kept: None) -> None:
    torch.set_num_threads(threads)
    case = RecurrentCase(spec, 300, torch.bfloat16)
    whole, after = case.run([[0, 300, 2, 0]])
    cuts = [0, 1, 2, 5, 70, 198, 300]
    pieces = [[begin, end, 0 if begin else 2, 0] for begin, end in pairwise(cuts)]
    for segments in (pieces, [[0, 128, 2, 4], [128, 130, 4, 2], [130, 300, 2, 0]]):
        out, states = case.run(segments)
        assert torch.equal(out, whole)
        assert torch.equal(states.matrices[0], after.matrices[0]) and torch.equal(states.last[0], after.last[0])


@pytest.mark.parametrize("spec", FIRST)
def test_segments_take_effect_in_their_order(spec: RecurrentSpec, isa: str) -> None:
    """The second begins with what the first leaves, though its rows come first; then its slot is overwritten."""
    case = RecurrentCase(spec, 60, torch.bfloat16)
    out, _ = case.run([[20, 60, -1, 1], [0, 10, 1, 2], [10, 20, -1, 1]])
    rows = torch.cat((torch.arange(20, 60), torch.arange(10)))
    gates = None if case.gates is None else case.gates[rows]
    alone, _ = case.run([[0, 50, -1, 0]], mixed=case.mixed[rows], gates=gates)
    assert torch.equal(out[rows], alone)


@pytest.mark.parametrize(
    "spec",
    [*(replace(spec, key_dim=300) for spec in (NET, MAMBA[0])), RecurrentSpec.short_convolutions(1, 23, 9)],
)
def test_larger_layers_than_the_kernels_take_are_computed_in_torch(spec: RecurrentSpec) -> None:
    case = RecurrentCase(spec, 20, torch.bfloat16)
    whole, _ = case.run([[0, 20, 1, 0]])
    cut, _ = case.run([[0, 3, 1, 0], [3, 20, 0, 0]])
    assert torch.equal(whole, cut)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("spec", MAMBA)
def test_a_norm_that_follows_later_has_the_same_bits(spec: RecurrentSpec, dtype: torch.dtype, isa: str) -> None:
    """Of heads that tensor ranks make apart, each group among fewer of them."""
    case, segments = RecurrentCase(spec, 70, dtype), [[0, 70, 2, 0]]
    assert isinstance(case.weights, MambaWeights) and case.weights.norm is not None
    whole, _ = case.run(segments)
    norm, case.weights = case.weights.norm, case.weights._replace(norm=None)
    made, _ = case.run(segments)
    assert made.dtype == torch.float32
    normed = mamba2.normed(spec, made.flatten(1), norm, case.weights.eps)
    assert torch.equal(normed.to(dtype).view_as(whole), whole)
    with dispatch.force("torch"):
        plain, _ = case.run(segments)
    torch.testing.assert_close(made, plain, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("implementation", ["cpu", "torch"])
@pytest.mark.parametrize("spec", MAMBA)
def test_mamba_as_attention(spec: RecurrentSpec, implementation: str) -> None:
    """Each token sees the x of all before it, by its query times their keys and by how much has been forgotten since:
    the dual form of the paper (section 5), over a whole sequence and in fp64."""
    case, rows = RecurrentCase(spec, 40, torch.float32), 40
    conv, bias, rate, dt_bias, skip, norm = (each.double() for each in case.weights[:6] if isinstance(each, Tensor))
    assert case.gates is not None
    z, made = case.mixed.double().split((spec.values, spec.channels), dim=1)
    padded = F.pad(made.t()[None], (spec.kernel - 1, 0))
    convolved = F.silu(F.conv1d(padded, conv.t()[:, None], bias, groups=spec.channels)[0].t())
    x, k, q = convolved.split((spec.values, spec.keys, spec.keys), dim=1)
    shared, x = spec.value_heads // spec.key_heads, x.reshape(rows, spec.value_heads, spec.value_dim)
    k, q = (each.reshape(rows, spec.key_heads, -1).repeat_interleave(shared, dim=1) for each in (k, q))
    step = F.softplus(case.gates.double() + dt_bias)
    logs = (-rate * step).cumsum(0)
    kept = (logs[:, None] - logs[None]).exp() * torch.ones(rows, rows).tril()[:, :, None]
    seen = torch.einsum("thd,shd,tsh,sh,shv->thv", q, k, kept, step, x) + skip[:, None] * x
    gated = (seen.flatten(1) * F.silu(z)).view(rows, spec.key_heads, -1)
    wanted = (gated * (gated.pow(2).mean(-1, keepdim=True) + 1e-6).rsqrt()).flatten(1) * norm
    with dispatch.force(implementation):  # type: ignore[arg-type]
        out, _ = case.run([[0, rows, -1, 0]])
    torch.testing.assert_close(out.double().flatten(1), wanted, rtol=1e-4, atol=1e-4)


def test_short_convolutions_as_a_convolution() -> None:
    """torch's own, over a whole sequence and in fp64."""
    case = RecurrentCase(CONVOLUTION, 40, torch.float32)
    before, behind, x = case.mixed.double().split(64, dim=1)
    padded = F.pad((before * x).t()[None], (2, 0))
    convolved = F.conv1d(padded, case.weights.conv.double().t()[:, None], groups=64)[0].t()
    out, states = case.run([[0, 40, -1, 0]])
    torch.testing.assert_close(out.double(), behind * convolved, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(states.last[0].double(), (before * x)[-2:], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    "segments", [[[0, 5, 5, 0]], [[0, 5, -2, 0]], [[0, 5, 0, -1]], [[0, 5, 0, 5]], [[-1, 5, 0, 0]], [[0, 7, 0, 0]]]
)
@pytest.mark.parametrize("spec", FIRST)
def test_segments_that_do_not_fit_are_refused(spec: RecurrentSpec, segments: list[list[int]]) -> None:
    with pytest.raises(ValueError, match=r"segments\[0\] .* does not fit 5 slots and 6 rows"):
        RecurrentCase(spec, 6, torch.float32).run(segments)


def wrong_tensors(case: RecurrentCase) -> list[tuple[str, dict[str, Any]]]:
    """What is told of them."""
    weights: Any = case.weights
    found: list[tuple[str, dict[str, Any]]] = [
        ("mixed must be", {"mixed": case.mixed[:, 1:]}),
        ("last", {"mixed": case.mixed.bfloat16()}),
        ("last", {"states": LayerStates(case.states.last[:, 1:], case.states.matrices)}),
        ("conv", {"weights": weights._replace(conv=weights.conv[1:])}),
    ]
    if case.gates is None:
        return found
    found += [("gates", {"gates": case.gates[:5]}), ("norm", {"weights": weights._replace(norm=weights.norm.half())})]
    if case.spec.kind == "mamba2":
        found.append(("conv_bias", {"weights": weights._replace(conv_bias=torch.zeros(3))}))
        found.append(("skip", {"weights": weights._replace(skip=weights.skip[1:])}))
    return found


@pytest.mark.parametrize("spec", FIRST)
def test_tensors_that_do_not_fit_are_refused(spec: RecurrentSpec) -> None:
    case = RecurrentCase(spec, 6, torch.float32)
    for told, given in wrong_tensors(case):
        with pytest.raises(ValueError, match=told):
            case.run([[0, 6, -1, 0]], **given)


@pytest.mark.parametrize("given", [{"gates": None}, {"weights": ConvWeights(torch.zeros(4, 4))}])
@pytest.mark.parametrize("spec", FIRST[:2])
def test_what_is_of_another_layer_is_refused(spec: RecurrentSpec, given: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"these are not the weights and gates of|mixed must be"):
        RecurrentCase(spec, SLOTS, torch.float32).run([[0, SLOTS, -1, 0]], **given)
