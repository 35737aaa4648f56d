"""The C++ Mamba-2 layer against that in torch, on every instruction set, and both against its form as attention;
segments in order, cuts, wrong tensors."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from headrace.config import RecurrentSpec
from headrace.kernels import cpu, dispatch
from headrace.kernels.mamba2 import mamba2
from headrace.kernels.records import LayerStates, MambaWeights
from headrace.kernels.recurrent import recur_rows

pytestmark = [pytest.mark.cpu, pytest.mark.skipif(not cpu.available(), reason="there are no kernels")]

SLOTS = 5
SHAPES = [
    RecurrentSpec(1, 1, 4, 64, 32, 4, "mamba2"),
    RecurrentSpec(1, 2, 6, 40, 20, 3, "mamba2"),
    RecurrentSpec(1, 1, 2, 7, 5, 2, "mamba2"),
]


class MambaCase:
    """A layer with drawn numbers: rows [T, Hv V + C] of `dtype`, apart from each other, and slots with drawn states."""

    def __init__(self, spec: RecurrentSpec, rows: int, dtype: torch.dtype, seed: int = 0, bias: bool = True) -> None:
        g = torch.Generator().manual_seed(seed)

        def draw(*shape: int) -> Tensor:
            return torch.randn(shape, generator=g)

        self.spec, heads = spec, spec.value_heads
        self.mixed = draw(rows, spec.values + spec.channels + 3).to(dtype)[:, :-3]
        self.gates = draw(rows, heads)
        self.weights = MambaWeights(
            0.4 * draw(spec.kernel, spec.channels), 0.3 * draw(spec.channels) if bias else None, draw(heads).exp(),
            draw(heads), draw(heads), draw(spec.values), 1e-6,
        )  # fmt: skip
        last = draw(SLOTS, spec.kernel - 1, spec.channels).to(dtype)
        self.states = LayerStates(last, draw(SLOTS, heads, spec.key_dim, spec.value_dim))

    def run(self, segments: list[list[int]], **other: Any) -> tuple[Tensor, LayerStates]:
        """The outputs, and the states afterwards."""
        states = LayerStates(self.states.last.clone(), self.states.matrices.clone())
        given = dict(mixed=self.mixed, gates=self.gates, weights=self.weights) | other
        return mamba2(self.spec, states=states, segments=torch.tensor(segments), **given), states


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("spec", SHAPES)
def test_as_in_torch(spec: RecurrentSpec, dtype: torch.dtype, bias: bool, isa: str) -> None:
    case = MambaCase(spec, 150, dtype, bias=bias)
    segments = [[0, 140, 3, 1], [141, 150, -1, 0], [140, 141, 1, 1]]
    out, states = case.run(segments)
    with dispatch.force("torch"):
        wanted, after = case.run(segments)
    close = dict(rtol=1e-4, atol=1e-4) if dtype == torch.float32 else dict(rtol=2e-2, atol=2e-2)
    torch.testing.assert_close(out, wanted, **close)
    torch.testing.assert_close(states.matrices, after.matrices, rtol=1e-4, atol=1e-4)
    assert torch.equal(states.last, after.last)


@pytest.mark.parametrize("implementation", ["cpu", "torch"])
@pytest.mark.parametrize("spec", SHAPES)
def test_as_attention(spec: RecurrentSpec, implementation: str) -> None:
    """Each token sees the x of all before it, by its query times their keys and by how much has been forgotten since:
    the dual form of the paper (section 5), over a whole sequence and in fp64."""
    case, rows = MambaCase(spec, 40, torch.float32), 40
    conv, bias, rate, dt_bias, skip, norm = (each.double() for each in case.weights[:6] if isinstance(each, Tensor))
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


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("spec", SHAPES)
def test_cuts_change_no_bits(spec: RecurrentSpec, threads: int, isa: str, threads_kept: None) -> None:
    torch.set_num_threads(threads)
    case = MambaCase(spec, 300, torch.bfloat16)
    whole, after = case.run([[0, 300, 2, 0]])
    cuts = [0, 1, 2, 5, 70, 198, 300]
    pieces = [[begin, end, 0 if begin else 2, 0] for begin, end in pairwise(cuts)]
    for segments in (pieces, [[0, 128, 2, 4], [128, 130, 4, 2], [130, 300, 2, 0]]):
        out, states = case.run(segments)
        assert torch.equal(out, whole)
        assert torch.equal(states.matrices[0], after.matrices[0]) and torch.equal(states.last[0], after.last[0])


def test_segments_take_effect_in_their_order(isa: str) -> None:
    """The second begins with what the first leaves, though its rows come first; then its slot is overwritten."""
    case = MambaCase(SHAPES[0], 60, torch.bfloat16)
    out, _ = case.run([[20, 60, -1, 1], [0, 10, 1, 2], [10, 20, -1, 1]])
    rows = torch.cat((torch.arange(20, 60), torch.arange(10)))
    alone, _ = case.run([[0, 50, -1, 0]], mixed=case.mixed[rows], gates=case.gates[rows])
    assert torch.equal(out[rows], alone)


def test_larger_states_than_the_kernel_takes_are_computed_in_torch() -> None:
    case = MambaCase(replace(SHAPES[0], key_dim=300), 20, torch.bfloat16)
    whole, _ = case.run([[0, 20, 1, 0]])
    cut, _ = case.run([[0, 3, 1, 0], [3, 20, 0, 0]])
    assert torch.equal(whole, cut)


@pytest.mark.parametrize(
    "segments", [[[0, 5, 5, 0]], [[0, 5, -2, 0]], [[0, 5, 0, -1]], [[0, 5, 0, 5]], [[-1, 5, 0, 0]], [[0, 7, 0, 0]]]
)
def test_segments_that_do_not_fit_are_refused(segments: list[list[int]]) -> None:
    with pytest.raises(ValueError, match=r"segments\[0\] .* does not fit 5 slots and 6 rows"):
        MambaCase(SHAPES[0], 6, torch.float32).run(segments)


def test_tensors_that_do_not_fit_are_refused() -> None:
    case = MambaCase(SHAPES[0], 6, torch.float32)
    for name, wrong in (
        ("mixed", case.mixed[:, 1:]),
        ("gates", case.gates[:5]),
        ("conv", case.weights._replace(conv=case.weights.conv[1:])),
        ("conv_bias", case.weights._replace(conv_bias=torch.zeros(3))),
        ("skip", case.weights._replace(skip=case.weights.skip[1:])),
        ("norm", case.weights._replace(norm=case.weights.norm.bfloat16())),
        ("last", case.mixed.bfloat16()),
    ):
        given = {"weights": wrong} if isinstance(wrong, MambaWeights) else {"mixed" if name == "last" else name: wrong}
        with pytest.raises(ValueError, match=name):
            case.run([[0, 6, -1, 0]], **given)


def test_a_layer_without_gates_is_refused() -> None:
    case = MambaCase(SHAPES[0], 6, torch.float32)
    with pytest.raises(ValueError, match="it has no gates"):
        recur_rows(case.spec, case.mixed, None, case.weights, case.states, torch.tensor([[0, 6, -1, 0]]))
