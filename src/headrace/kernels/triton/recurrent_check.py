"""Recurrent layers on the GPU itself, before an engine relies on them: whether bits depend on how a sequence is cut,
and how far they are from plain torch.

Hv, V: value heads and their size.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from itertools import pairwise

import torch
from torch import Tensor

from headrace.config import RecurrentSpec
from headrace.device import current
from headrace.kernels import dispatch
from headrace.kernels.gated_delta import by_channel
from headrace.kernels.records import ConvWeights, DeltaWeights, LayerStates, MambaWeights, RecurrentWeights
from headrace.kernels.recurrent import recur_rows
from headrace.kernels.triton.recurrent import step_alone
from headrace.kernels.triton.recurrent_step import check_size

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


def draws(seed: int, place: torch.device) -> Callable[..., Tensor]:
    """What draws fp32 numbers of a shape, the same for the same seed wherever they lie."""
    generator = torch.Generator().manual_seed(seed)
    return lambda *shape: torch.randn(shape, generator=generator).to(place)


def drawn_weights(spec: RecurrentSpec, draw: Callable[..., Tensor]) -> RecurrentWeights:
    """Of a layer."""
    conv, heads = 0.4 * draw(spec.kernel, spec.channels), spec.value_heads
    if spec.kind == "conv":
        return ConvWeights(conv)
    rate, dt_bias = draw(heads).exp(), draw(spec.keys if by_channel(spec) else heads)
    if spec.kind in ("delta", "kda"):
        return DeltaWeights(conv, rate, dt_bias, draw(spec.value_dim), 1e-6)
    skip, norm = draw(heads), draw(spec.values) if spec.normed else None
    return MambaWeights(conv, 0.3 * draw(spec.channels), rate, dt_bias, skip, norm, 1e-6)


class DrawnLayer:
    """A layer with random numbers and ROWS rows of one sequence, which begin with the state in slot 0 of two."""

    def __init__(self, spec: RecurrentSpec, computed: torch.dtype, place: torch.device) -> None:
        draw = draws(spec.key_dim, torch.device("cpu"))
        self.spec, self.place = spec, place
        self.mixed = draw(ROWS, spec.width).to(computed)
        self.gates = draw(ROWS, spec.gates) if spec.gates else None
        self.weights, self.there = (drawn_weights(spec, draws(1, where)) for where in (self.mixed.device, place))
        last = draw(2, spec.kernel - 1, spec.channels).to(computed)
        self.states = LayerStates(last, draw(2, spec.value_heads, spec.key_dim, spec.value_dim))

    def run(self, steps: list[list[list[int]]]) -> tuple[Tensor, LayerStates]:
        """The outputs [ROWS, Hv, V] of steps of segments, one step after the other, and the states afterwards; of a
        short convolution [ROWS, V]."""
        mixed, gates = self.mixed.to(self.place), None if self.gates is None else self.gates.to(self.place)
        states = LayerStates(*(each.to(self.place, copy=True) for each in (self.states.last, self.states.matrices)))
        made = []
        for segments in steps:
            first, end = segments[0][0], segments[-1][1]
            of_step = torch.tensor([[a - first, b - first, source, target] for a, b, source, target in segments])
            step = step_alone(self.spec, of_step, end - first, len(states.last), self.place)
            made.append(step(mixed[first:end], None if gates is None else gates[first:end], self.there, states))
        return torch.cat(made), states

    def difference(self, out: Tensor, states: LayerStates) -> float:
        """From plain torch, at most, of outputs and states of the whole sequence."""
        wanted = LayerStates(self.states.last.clone(), self.states.matrices.clone())
        whole = torch.tensor([[0, ROWS, 0, 1]])
        with dispatch.force("torch"):
            truth = recur_rows(self.spec, self.mixed, self.gates, self.weights, wanted, whole)
        if not torch.equal(states.last.cpu(), wanted.last):
            return float("inf")
        pairs = [(out, truth), (states.matrices, wanted.matrices)][: 2 if self.spec.key_dim else 1]
        return max(float((a.cpu().float() - b.float()).abs().max() / b.float().abs().max().clamp(1)) for a, b in pairs)
