"""Gated delta nets on the GPU itself, before an engine relies on them: whether bits depend on how a sequence is cut,
and how far they are from plain torch.

Hv, V: value heads and their size.
"""

from __future__ import annotations

from functools import cache
from itertools import pairwise

import torch
from torch import Tensor

from headrace.config import RecurrentSpec
from headrace.device import current
from headrace.kernels import dispatch
from headrace.kernels.gated_delta import gated_delta
from headrace.kernels.records import DeltaWeights, LayerStates
from headrace.kernels.triton.delta import DeltaStep, check_size

ROWS = 70
CUTS = (0, 1, 2, 5, 40, ROWS)
"""Of one step; the last of them is computed token by token as well."""
BOUNDS = {torch.float32: 1e-4, torch.bfloat16: 2e-2, torch.float16: 2e-3}
"""How far outputs and states may be from plain torch's, of the greatest of these if that is above 1."""


def verify(spec: RecurrentSpec, computed: torch.dtype) -> None:
    """Compares a model's recurrent layers on the current GPU. Raises ValueError where they are wrong there, and for
    sizes that have no kernel. Off a GPU nothing is compared."""
    check_size(spec)
    place = current().place
    if place.type == "cuda":
        check(spec, computed, place)


@cache
def check(spec: RecurrentSpec, computed: torch.dtype, place: torch.device) -> None:
    """Raises ValueError naming what is computed wrongly on the device."""
    layer = DrawnLayer(spec, computed, place)
    whole, states = layer.run([[[0, ROWS, 0, 1]]])
    at_once = [[[begin, end, 0 if begin == 0 else 1, 1] for begin, end in pairwise(CUTS)]]
    one_by_one = [[[0, CUTS[-2], 0, 1]], *([[row, row + 1, 1, 1]] for row in range(CUTS[-2], ROWS))]
    for steps in (at_once, one_by_one):
        out, after = layer.run(steps)
        same = torch.equal(out, whole) and torch.equal(after.last, states.last)
        if not same or not torch.equal(after.matrices, states.matrices):
            raise ValueError(
                f"attention_backend 'triton': bits of recurrent layers depend on how a sequence is cut on this device "
                f"({spec}, {computed}); use 'auto'"
            )
    difference = layer.difference(whole, states)
    if not difference <= BOUNDS[computed]:  # NaN is none
        raise ValueError(
            f"attention_backend 'triton': recurrent layers are off by {difference:.2g} on this device ({spec}, "
            f"{computed}), more than {BOUNDS[computed]:.0e}; use 'auto'"
        )


class DrawnLayer:
    """A layer with random numbers and ROWS rows of one sequence, which begin with the state in slot 0 of two."""

    def __init__(self, spec: RecurrentSpec, computed: torch.dtype, place: torch.device) -> None:
        generator = torch.Generator().manual_seed(spec.key_dim)

        def draw(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator)

        self.spec, self.place, heads = spec, place, spec.value_heads
        self.mixed, self.gates = draw(ROWS, spec.channels + spec.values).to(computed), draw(ROWS, 2 * heads)
        conv = 0.4 * draw(spec.kernel, spec.channels)
        self.weights = DeltaWeights(conv, draw(heads).exp(), draw(heads), draw(spec.value_dim), 1e-6)
        last = draw(2, spec.kernel - 1, spec.channels).to(computed)
        self.states = LayerStates(last, draw(2, heads, spec.key_dim, spec.value_dim))

    def run(self, steps: list[list[list[int]]]) -> tuple[Tensor, LayerStates]:
        """The outputs [ROWS, Hv, V] of steps of segments, one step after the other, and the states afterwards."""
        mixed, gates = self.mixed.to(self.place), self.gates.to(self.place)
        conv, rate, dt_bias, norm = (each.to(self.place) for each in self.weights[:4])
        weights = DeltaWeights(conv, rate, dt_bias, norm, self.weights.eps)
        states = LayerStates(*(each.to(self.place, copy=True) for each in (self.states.last, self.states.matrices)))
        made = []
        for segments in steps:
            first, end = segments[0][0], segments[-1][1]
            of_step = torch.tensor([[a - first, b - first, source, target] for a, b, source, target in segments])
            step = DeltaStep.of(self.spec, of_step, end - first, len(states.last), self.place)
            made.append(step(mixed[first:end], gates[first:end], weights, states))
        return torch.cat(made), states

    def difference(self, out: Tensor, states: LayerStates) -> float:
        """From plain torch, at most, of outputs and states of the whole sequence."""
        wanted = LayerStates(self.states.last.clone(), self.states.matrices.clone())
        whole = torch.tensor([[0, ROWS, 0, 1]])
        with dispatch.force("torch"):
            truth = gated_delta(self.spec, self.mixed, self.gates, self.weights, wanted, whole)
        if not torch.equal(states.last.cpu(), wanted.last):
            return float("inf")
        pairs = ((out, truth), (states.matrices, wanted.matrices))
        return max(float((a.cpu().float() - b.float()).abs().max() / b.float().abs().max().clamp(1)) for a, b in pairs)
