"""Two ways to compute a step from its tokens to its logits: eagerly, or as one call of C++. The third is engine.graphs.

Between two steps of decoding the weights pass through the caches, and all that Python touches comes back from memory:
what a step costs besides its arithmetic is how many things Python looks at. The second way prepares a run of steps
(attention.plan.PlannedStep) once, and then looks at little but the tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from headrace.attention.execute import KeepActivations
from headrace.attention.plan import Int64, Plan, PlannedStep
from headrace.attention.recurrence import StepRecurrence, prepared_recurrence
from headrace.attention.steps import StepAttention
from headrace.engine.adapters import NO_ADAPTER
from headrace.engine.sequence import SequenceState, Slice
from headrace.kernels.adapted_rows import row_numbers
from headrace.kernels.model_step import Greatest, ModelStep
from headrace.kernels.step_copies import Reading
from headrace.kv.storage import KVStorage, StateStorage
from headrace.models.config import ModelConfig
from headrace.models.decoder import Decoder, TokenBatch
from headrace.parallel.coming import NOTHING, Coming, WaitingAttend


class Logits(NamedTuple):
    """Logits of the rows that tokens are drawn from, fp32 [R, V], where they were computed, valid until the next step;
    none: no rows, of any width. greatest: of each row, where it was found with them. hidden: states of all wanted rows,
    if Eager was used."""

    values: Tensor
    greatest: Greatest | None = None
    hidden: Tensor | None = None


class Launched(NamedTuple):
    """A step that was given to the device, and perhaps not computed yet. slices: those that tokens are drawn from, in
    the order of their R rows. logits fp32 [R, V]: valid until the next step is launched. chosen int32 [R]: the token
    that follows each row, where the step behind looks it up (StepRows.before); another choice may be put in its place.
    reading: of `greatest`, tokens before the values' bits, int32 [2, R or more]. timed: see executor.Computed."""

    slices: list[Slice]
    rows: int
    logits: Tensor
    chosen: Tensor
    reading: Reading
    timed: bool = True

    def greatest(self) -> Greatest:
        """Waits for the step."""
        best, values = self.reading.wait()[:, : self.rows]
        return Greatest(values.view(torch.float32).tolist(), best.tolist())


@dataclass(slots=True)
class StepRows:
    """The rows of a step. slices: in the order of the rows; wanted: rows needed behind the layers, None for all; drawn:
    places among these from which tokens are drawn, None for all. awaited: slots of chunks that may still be on their
    way. segments: of a model with recurrent layers, see attention.recurrence. before: of a step behind one that is
    under way, the row there that chooses the token of a sequence's one row, where the host does not know it yet."""

    planned: PlannedStep
    slices: list[Slice]
    wanted: list[int] | None
    drawn: list[int] | None = None
    awaited: Seq[int] = ()
    coming: Coming = NOTHING
    segments: Tensor | None = None
    before: Mapping[SequenceState, int] | None = None

    def tokens(self) -> list[int]:
        """Tokens of the rows; -1 - n for the one that row n of the step before chooses."""
        before = self.before or {}
        if len(before) == len(self.slices):
            return [-1 - before[part.sequence] for part in self.slices]
        if before:
            return [token for part in self.slices for token in self._tokens_of(part, before)]
        if self.planned.steps:
            return [part.sequence.tokens[part.start] for part in self.slices]
        return [token for part in self.slices for token in part.tokens]

    def adapters(self) -> Int64 | None:
        """Numbers of the rows' adapters, [T], see TokenBatch."""
        numbers = adapters_of(self.slices)
        return None if numbers is None else numbers.numpy()

    @staticmethod
    def _tokens_of(part: Slice, before: Mapping[SequenceState, int]) -> list[int]:
        row = before.get(part.sequence)
        return part.tokens if row is None else [-1 - row]


class Program(Protocol):
    """A way to compute a step. All give the same bits, but for a GPU's, whose canonical order is its own."""

    def run(self, step: StepRows) -> Logits: ...


class Eager:
    """Any step, one layer or operation at a time. Each layer's attention waits for that layer of what is coming."""

    def __init__(
        self, decoder: Decoder, storage: KVStorage, attention: StepAttention, states: StateStorage | None = None
    ) -> None:
        self.decoder, self.storage, self.attention, self.states = decoder, storage, attention, states

    @torch.inference_mode()
    def run(self, step: StepRows) -> Logits:
        attention, plan = self.attention.at(step.planned), step.planned.plan
        spec = self.decoder.config.attention
        attend = WaitingAttend(attention, step.coming, step.awaited, spec) if step.awaited else attention
        keep = None
        if self.storage.keeps_activations:
            keep = KeepActivations(plan.row_slots, plan.row_offsets, self.storage)
        rows = None if step.wanted is None else torch.tensor(step.wanted, dtype=torch.int64)
        batch = batch_of(self.decoder.config, step.slices, plan.positions)
        recur = None
        if self.states is not None and step.segments is not None:
            recur = StepRecurrence(self.states, step.segments)
        hidden = self.decoder.forward(batch, attend, rows, keep, recur)
        drawn = hidden if step.drawn is None else hidden[step.drawn]
        return Logits(self.decoder.logits(drawn) if len(drawn) else drawn, hidden=hidden)


class InCpp:
    """Steps all of whose logits are wanted, by one call of C++ each (kernels.model_step)."""

    def __init__(self, decoder: Decoder, attention: StepAttention, states: StateStorage | None = None) -> None:
        self.decoder, self.attention, self.states = decoder, attention, states
        self._first: Plan | None = None
        self._steps = 0
        self._prepared: ModelStep | None = None

    def run(self, step: StepRows) -> Logits:
        # After an error rows may have gone on: the next step is prepared anew.
        prepared, self._prepared = self._prepared, None
        planned, recurrence = step.planned, None
        if self.states is not None and step.segments is not None:
            recurrence = prepared_recurrence(self.states, step.segments)
        if prepared is not None and planned.first is self._first and planned.steps == self._steps + 1:
            greatest = prepared.run_next(step.tokens(), recurrence)
        else:
            del prepared  # its logits
            prepared = self._prepare(planned, adapters_of(step.slices))
            greatest = prepared.run(step.tokens(), recurrence)
        self._first, self._steps, self._prepared = planned.first, planned.steps, prepared
        return Logits(prepared.logits, greatest)

    @torch.inference_mode()
    def _prepare(self, planned: PlannedStep, adapters: Tensor | None) -> ModelStep:
        """The step, and those in which the same sequences go on: their adapters begin in their prompts."""
        attention = self.attention.at(planned)
        return self.decoder.prepare(attention.positions, attention, adapters)


def batch_of(config: ModelConfig, slices: Seq[Slice], positions: Int64) -> TokenBatch:
    """The rows of the slices as a model takes them."""
    tokens = np.concatenate([part.tokens for part in slices])
    lengths = None
    if config.rope_depends_on_length:
        lengths = torch.from_numpy(np.maximum(prompts_of(slices), positions + 1))
    numbers = adapters_of(slices)
    return TokenBatch(torch.from_numpy(tokens.astype(np.int64)), torch.from_numpy(positions), lengths, numbers)


def adapters_of(slices: Seq[Slice]) -> Tensor | None:
    """Numbers of the rows' adapters, see TokenBatch."""
    if not any(part.sequence.adapter for part in slices):
        return None
    return row_numbers([(part.start, part.end, *(part.sequence.adapter or NO_ADAPTER)) for part in slices])


def prompts_of(slices: Seq[Slice]) -> Int64:
    """Length of each row's prompt."""
    return np.repeat([part.sequence.prompt_len for part in slices], [part.length for part in slices])
