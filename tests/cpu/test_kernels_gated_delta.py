"""The C++ gated delta net against that in torch, on every instruction set; segments in order, cuts, wrong tensors."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

from headrace.config import RecurrentSpec
from headrace.kernels import cpu, dispatch
from headrace.kernels.records import DeltaWeights
from tests.support.delta_cases import DeltaCase

pytestmark = [pytest.mark.cpu, pytest.mark.skipif(not cpu.available(), reason="there are no kernels")]

SHAPES = [RecurrentSpec(1, 2, 4, 32, 32, 4), RecurrentSpec(1, 1, 3, 40, 20, 3), RecurrentSpec(1, 1, 2, 7, 5, 2)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("spec", SHAPES)
def test_as_in_torch(spec: RecurrentSpec, dtype: torch.dtype, isa: str) -> None:
    case, segments = DeltaCase(spec, 150, dtype), [[0, 140, 3, 1], [141, 150, -1, 0], [140, 141, 1, 1]]
    out, states = case.run(segments)
    with dispatch.force("torch"):
        wanted, after = case.run(segments)
    close = dict(rtol=1e-4, atol=1e-4) if dtype == torch.float32 else dict(rtol=2e-2, atol=2e-2)
    torch.testing.assert_close(out, wanted, **close)
    torch.testing.assert_close(states.matrices, after.matrices, rtol=1e-4, atol=1e-4)
    assert torch.equal(states.last, after.last)


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("spec", SHAPES)
def test_cuts_change_no_bits(spec: RecurrentSpec, threads: int, isa: str, threads_kept: None) -> None:
    torch.set_num_threads(threads)
    case = DeltaCase(spec, 300, torch.bfloat16)
    whole, after = case.run([[0, 300, 2, 0]])
    cuts = [0, 1, 2, 5, 70, 198, 300]
    pieces = [[begin, end, 0 if begin else 2, 0] for begin, end in pairwise(cuts)]
    for segments in (pieces, [[0, 128, 2, 4], [128, 130, 4, 2], [130, 300, 2, 0]]):
        out, states = case.run(segments)
        assert torch.equal(out, whole)
        assert torch.equal(states.matrices[0], after.matrices[0]) and torch.equal(states.last[0], after.last[0])


def test_segments_take_effect_in_their_order(isa: str) -> None:
    """The second begins with what the first leaves, though its rows come first; then its slot is overwritten."""
    case = DeltaCase(SHAPES[0], 60, torch.bfloat16)
    out, _ = case.run([[20, 60, -1, 1], [0, 10, 1, 2], [10, 20, -1, 1]])
    rows = torch.cat((torch.arange(20, 60), torch.arange(10)))
    alone, _ = case.run([[0, 50, -1, 0]], mixed=case.mixed[rows], gates=case.gates[rows])
    assert torch.equal(out[rows], alone)


@pytest.mark.parametrize(
    "segments", [[[0, 5, 5, 0]], [[0, 5, -2, 0]], [[0, 5, 0, -1]], [[0, 5, 0, 5]], [[-1, 5, 0, 0]], [[0, 7, 0, 0]]]
)
def test_segments_that_do_not_fit_are_refused(segments: list[list[int]]) -> None:
    with pytest.raises(ValueError, match=r"segments\[0\] .* does not fit 5 slots and 6 rows"):
        DeltaCase(SHAPES[0], 6, torch.float32).run(segments)


def test_tensors_that_do_not_fit_are_refused() -> None:
    case = DeltaCase(SHAPES[0], 6, torch.float32)
    for name, wrong in (
        ("mixed", case.mixed[:, 1:]),
        ("gates", case.gates[:5]),
        ("conv", case.weights._replace(conv=case.weights.conv[1:])),
        ("norm", case.weights._replace(norm=case.weights.norm.bfloat16())),
        ("last", case.mixed.bfloat16()),
    ):
        given = {"weights": wrong} if isinstance(wrong, DeltaWeights) else {"mixed" if name == "last" else name: wrong}
        with pytest.raises(ValueError, match=name):
            case.run([[0, 6, -1, 0]], **given)
