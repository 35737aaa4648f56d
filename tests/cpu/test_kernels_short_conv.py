"""The C++ short convolution against that in torch, on every instruction set; segments in order, cuts, wrong tensors."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from headrace.config import RecurrentSpec
from headrace.kernels import cpu, dispatch
from headrace.kernels.records import ConvWeights, LayerStates
from headrace.kernels.recurrent import recur_rows
from headrace.kernels.short_conv import short_conv

pytestmark = [pytest.mark.cpu, pytest.mark.skipif(not cpu.available(), reason="there are no kernels")]

SLOTS = 5
SHAPES = [(64, 3), (200, 4), (23, 2), (2048, 3)]


class ConvCase:
    """A layer with drawn numbers: rows [T, 3 H] of `dtype`, apart from each other, and slots with drawn states."""

    def __init__(self, shape: tuple[int, int], rows: int, dtype: torch.dtype) -> None:
        g = torch.Generator().manual_seed(rows)
        channels, kernel = shape

        def draw(*size: int) -> Tensor:
            return torch.randn(size, generator=g)

        self.spec = RecurrentSpec.short_convolutions(1, channels, kernel)
        self.mixed = draw(rows, 3 * channels + 5).to(dtype)[:, :-5]
        self.weights = ConvWeights(draw(kernel, channels))
        self.last = draw(SLOTS, kernel - 1, channels).to(dtype)

    def run(self, segments: list[list[int]], **other: Any) -> tuple[Tensor, Tensor]:
        """The outputs, and the states afterwards."""
        spec = self.spec
        states = LayerStates(self.last.clone(), torch.empty((SLOTS, 1, 0, spec.channels)))
        given = dict(mixed=self.mixed, weights=self.weights, states=states) | other
        return short_conv(spec, segments=torch.tensor(segments), **given), states.last


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("shape", SHAPES)
def test_as_in_torch(shape: tuple[int, int], dtype: torch.dtype, isa: str) -> None:
    case, segments = ConvCase(shape, 150, dtype), [[0, 140, 3, 1], [141, 150, -1, 0], [140, 141, 1, 1]]
    out, last = case.run(segments)
    with dispatch.force("torch"):
        wanted, after = case.run(segments)
    close = dict(rtol=1e-5, atol=1e-5) if dtype == torch.float32 else dict(rtol=1e-2, atol=1e-2)
    torch.testing.assert_close(out, wanted, **close)
    assert torch.equal(last, after)


def test_as_a_convolution() -> None:
    """torch's own, over a whole sequence and in fp64."""
    case = ConvCase((64, 3), 40, torch.float32)
    before, behind, x = case.mixed.double().split(64, dim=1)
    padded = torch.nn.functional.pad((before * x).t()[None], (2, 0))
    convolved = torch.nn.functional.conv1d(padded, case.weights.conv.double().t()[:, None], groups=64)[0].t()
    out, last = case.run([[0, 40, -1, 0]])
    torch.testing.assert_close(out.double(), behind * convolved, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(last[0].double(), (before * x)[-2:], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("shape", SHAPES)
def test_cuts_change_no_bits(shape: tuple[int, int], threads: int, isa: str, threads_kept: None) -> None:
    torch.set_num_threads(threads)
    case = ConvCase(shape, 300, torch.bfloat16)
    whole, after = case.run([[0, 300, 2, 0]])
    cuts = [0, 1, 2, 5, 70, 198, 300]
    pieces = [[begin, end, 0 if begin else 2, 0] for begin, end in pairwise(cuts)]
    for segments in (pieces, [[0, 128, 2, 4], [128, 130, 4, 2], [130, 300, 2, 0]]):
        out, last = case.run(segments)
        assert torch.equal(out, whole) and torch.equal(last[0], after[0])


def test_segments_take_effect_in_their_order(isa: str) -> None:
    """The second begins with what the first leaves, though its rows come first; then its slot is overwritten."""
    case = ConvCase((200, 4), 60, torch.bfloat16)
    out, _ = case.run([[20, 60, -1, 1], [0, 10, 1, 2], [10, 20, -1, 1]])
    rows = torch.cat((torch.arange(20, 60), torch.arange(10)))
    alone, _ = case.run([[0, 50, -1, 0]], mixed=case.mixed[rows])
    assert torch.equal(out[rows], alone)


@pytest.mark.parametrize(
    "segments", [[[0, 5, 5, 0]], [[0, 5, -2, 0]], [[0, 5, 0, -1]], [[0, 5, 0, 5]], [[-1, 5, 0, 0]], [[0, 7, 0, 0]]]
)
def test_segments_that_do_not_fit_are_refused(segments: list[list[int]]) -> None:
    with pytest.raises(ValueError, match=r"segments\[0\] .* does not fit 5 slots and 6 rows"):
        ConvCase((64, 3), 6, torch.float32).run(segments)


def test_tensors_that_do_not_fit_are_refused() -> None:
    case = ConvCase((64, 3), 6, torch.float32)
    empty = torch.empty((SLOTS, 1, 0, 64))
    for told, given in (
        ("mixed must be", {"mixed": case.mixed[:, 1:]}),
        ("conv", {"weights": ConvWeights(case.weights.conv[1:])}),
        ("last", {"mixed": case.mixed.bfloat16()}),
        ("last", {"states": LayerStates(case.last[:, 1:], empty)}),
    ):
        with pytest.raises(ValueError, match=told):
            case.run([[0, 6, -1, 0]], **given)


def test_more_inputs_than_the_kernel_takes_are_computed_in_torch() -> None:
    case = ConvCase((23, 9), 20, torch.bfloat16)
    whole, _ = case.run([[0, 20, 1, 0]])
    cut, _ = case.run([[0, 3, 1, 0], [3, 20, 0, 0]])
    assert torch.equal(whole, cut)


def test_a_net_needs_gates() -> None:
    case, wide = ConvCase((64, 3), 6, torch.float32), torch.zeros(1)
    net = RecurrentSpec(1, 1, 1, 8, 8, 3)
    states = LayerStates(case.last, wide)
    with pytest.raises(ValueError, match="this is no gated delta net"):
        recur_rows(net, case.mixed, wide, None, states, torch.tensor([[0, 6, -1, 0]]))  # type: ignore[arg-type]
