"""Recurrent layers in Triton's interpreter, in fp32 and fp16: near those in torch, and the same bits in every cut."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="Triton is built for Linux only")
if os.environ.get("TRITON_INTERPRET") != "1":  # see tests/conftest.py
    pytest.skip("there is a GPU: tests/gpu has the same kernels, compiled", allow_module_level=True)

from headrace.config import RecurrentSpec
from headrace.kernels import dispatch
from headrace.kernels.records import LayerStates
from headrace.kernels.triton import recurrent_check
from headrace.kernels.triton.recurrent import KINDS, step_alone
from headrace.kernels.triton.recurrent_step import RecurrentStep
from tests.support.recurrent_cases import SLOTS, RecurrentCase

CPU = torch.device("cpu")
SMALL = RecurrentSpec(1, 1, 1, 16, 8, 4)
UNEVEN = RecurrentSpec(1, 1, 2, 12, 10, 3)
KIMI = RecurrentSpec(1, 2, 2, 12, 10, 3, "kda")
MAMBA = RecurrentSpec(1, 1, 1, 16, 8, 4, "mamba2")
UNEVEN_MAMBA = RecurrentSpec(1, 2, 4, 12, 10, 3, "mamba2")
CONVOLUTION = RecurrentSpec.short_convolutions(1, 20, 3)
KINDS_OF_LAYERS = [SMALL, KIMI, MAMBA, CONVOLUTION]
MIXED = [[4, 9, 3, 1], [0, 4, -1, 0], [9, 12, 1, 1], [12, 13, 3, 2], [13, 14, 2, 3]]
"""The third goes on from the first, the fourth begins with the same, the last overwrites what both began with."""


def run(case: RecurrentCase, segments: list[list[int]]) -> tuple[Tensor, LayerStates]:
    states = case.copied()
    step = step_alone(case.spec, torch.tensor(segments), len(case.mixed), SLOTS, CPU)
    return step(case.mixed, case.gates, case.weights, states), states


@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.float16, marks=pytest.mark.matrix)])
@pytest.mark.parametrize(
    ("spec", "bias"),
    [
        (SMALL, True),
        (UNEVEN, True),
        (KIMI, True),
        (MAMBA, True),
        (UNEVEN_MAMBA, True),
        (UNEVEN_MAMBA, False),
        (replace(UNEVEN_MAMBA, normed=False), True),
        (CONVOLUTION, True),
    ],
    ids=str,
)
def test_as_in_torch(spec: RecurrentSpec, bias: bool, dtype: torch.dtype) -> None:
    case = RecurrentCase(spec, 14, dtype, bias=bias)
    out, states = run(case, MIXED)
    with dispatch.force("torch"):
        wanted, after = case.run(MIXED)
    bound = dict(rtol=1e-5, atol=1e-5) if dtype == torch.float32 else dict(rtol=2e-3, atol=2e-3)
    torch.testing.assert_close(out, wanted.to(dtype), **bound)
    torch.testing.assert_close(states.matrices, after.matrices, rtol=1e-5, atol=1e-5)
    assert torch.equal(states.last, after.last)


@pytest.mark.parametrize(
    "spec", [*KINDS_OF_LAYERS, *(pytest.param(spec, marks=pytest.mark.matrix) for spec in (UNEVEN, UNEVEN_MAMBA))]
)
def test_what_a_device_is_asked(spec: RecurrentSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether cuts change bits, and whether it is near torch: each is seen where it is not so."""
    monkeypatch.setattr(recurrent_check, "ROWS", 6)
    monkeypatch.setattr(recurrent_check, "CUTS", (0, 1, 4, 6))
    check = recurrent_check.check.__wrapped__
    check(spec, torch.float32, CPU)
    monkeypatch.setitem(recurrent_check.BOUNDS, torch.float32, -1e-9)
    with pytest.raises(ValueError, match=r"recurrent layers are off by .* on this device"):
        check(spec, torch.float32, CPU)
    kind: type[RecurrentStep] = KINDS[spec.kind]
    right = kind._run

    def by_length(self: RecurrentStep, *given: Any) -> Tensor:
        return right(self, *given) + 1e-7 * self.rows

    monkeypatch.setattr(kind, "_run", by_length)
    with pytest.raises(ValueError, match="bits of recurrent layers depend on how a sequence is cut"):
        check(spec, torch.float32, CPU)


@pytest.mark.parametrize("spec", KINDS_OF_LAYERS)
def test_segments_take_effect_in_their_order(spec: RecurrentSpec) -> None:
    """Rows of two segments, the second of which goes on from the first, have the bits of one."""
    case = RecurrentCase(spec, 14, torch.float32)
    out, _ = run(case, MIXED)
    rows = torch.tensor([4, 5, 6, 7, 8, 9, 10, 11])
    alone = RecurrentCase(spec, 14, torch.float32)
    alone.mixed, alone.gates = case.mixed[rows], None if case.gates is None else case.gates[rows]
    assert torch.equal(run(alone, [[0, 8, 3, 1]])[0], out[rows])


@pytest.mark.parametrize("spec", KINDS_OF_LAYERS)
def test_what_is_no_number_stays_in_its_sequence(spec: RecurrentSpec) -> None:
    """Neither rows beside a sequence nor what its slot held before reach it."""
    segments = [[0, 1, 0, 0], [1, 3, -1, 1]]
    case, other = (RecurrentCase(spec, 3, torch.float32) for _ in range(2))
    for x in (other.mixed[:1], other.gates, other.states.last, other.states.matrices):
        if x is not None:
            x[: 1 if x is other.gates else None].fill_(float("nan"))
    (out, states), (found, after) = run(case, segments), run(other, segments)
    assert torch.equal(found[1:], out[1:]) and found[0].isnan().all()
    assert torch.equal(after.last[1], states.last[1]) and torch.equal(after.matrices[1], states.matrices[1])


@pytest.mark.parametrize(
    "segment", [[0, 5, 5, 0], [0, 5, -2, 0], [0, 5, 0, -1], [0, 5, 0, 5], [-1, 5, 0, 0], [0, 7, 0, 0]]
)
def test_segments_that_do_not_fit_are_refused(segment: list[int]) -> None:
    with pytest.raises(ValueError, match=r"segments\[0\] .* does not fit 5 slots and 6 rows"):
        run(RecurrentCase(SMALL, 6, torch.float32), [segment])


def test_tensors_and_sizes_that_do_not_fit_are_refused() -> None:
    case, segments = RecurrentCase(SMALL, 6, torch.float32), torch.tensor([[0, 6, -1, 0]])
    step = step_alone(SMALL, segments, 6, SLOTS, CPU)
    assert case.gates is not None
    for name, mixed, gates, states in (
        ("mixed", case.mixed[:, 1:], case.gates, case.states),
        ("gates", case.mixed, case.gates[:5], case.states),
        ("gates", case.mixed, None, case.states),
        ("last", case.mixed.half(), case.gates, case.states),
        ("matrices", case.mixed, case.gates, LayerStates(case.states.last, case.states.matrices.half())),
    ):
        with pytest.raises(ValueError, match=name):
            step(mixed, gates, case.weights, states)
    with pytest.raises(ValueError, match="keys of up to 256 in recurrent layers, got 257"):
        recurrent_check.verify(RecurrentSpec(1, 1, 1, 257, 8, 4), torch.float32)
