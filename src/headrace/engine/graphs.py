"""Steps as CUDA graphs that outlive plans: what a step costs is then its kernels, not their launches.

A graph is recorded for a number of rows and of rounds of attention tasks, and reads tokens, places and tasks from
memory of a fixed size (kernels.backend.GraphStep), which is filled anew for each step. A step takes the next larger
graph; the rows that it does not have are padding. Here are steps of decoding; those with prompts in them are in
graph_buckets. T: rows of a graph, V: vocabulary.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from headrace.attention.plan import Plan, PlannedStep
from headrace.attention.recurrence import ReplayedRecurrence
from headrace.device import Graph, GraphPool, current
from headrace.engine.programs import Eager, Launched, Logits, StepRows
from headrace.kernels import ops
from headrace.kernels.backend import Attend, GraphBackend, GraphSizes, GraphStep, LayerStep
from headrace.kernels.records import QKRotary
from headrace.kernels.step_copies import ReadBack
from headrace.kv.storage import KVStorage, StateStorage
from headrace.models.config import ModelConfig
from headrace.models.decoder import Decoder
from headrace.stats import GraphStats
from headrace.types import CHUNK

log = logging.getLogger(__name__)

ROUNDS = (1, 2, 4)
"""Rounds of tasks that graphs are recorded for; a step takes one with at least its own."""
USUAL_ROWS = 16
"""Rows of graphs that are recorded before the first step, with one round; others are when they are first needed. Each
takes tens of milliseconds, but for kernels that have never been compiled on this machine."""


class Key(NamedTuple):
    """Of a recording. drawn: rows that tokens are drawn from; 0: all. adapted: whether rows may have adapters."""

    rows: int
    rounds: int
    drawn: int = 0
    adapted: bool = False


class Recorded(NamedTuple):
    """logits fp32 [T, V], in memory of all recordings, chosen int32 [2, T], of rows that tokens are drawn from: where a
    replay leaves them."""

    graph: Graph
    logits: Tensor
    chosen: Tensor


class GraphAttention(Attend):
    """Attention of a recording."""

    def __init__(self, step: LayerStep, storage: KVStorage, decoder: Decoder) -> None:
        self.step, self.storage = step, storage
        self.windows, self.sinks = decoder.config.attention.windows, decoder.sinks

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor, rows: Tensor | None = None) -> Tensor:
        made = self.step(self.storage.pool(layer), q, k, v, self.windows[layer], self._sinks(layer))
        return made if rows is None else made[rows]

    def projected(self, layer: int, heads: Tensor, rotary: QKRotary, rows: Tensor | None = None) -> Tensor:
        pool, window = self.storage.pool(layer), self.windows[layer]
        made = self.step.projected(pool, heads, rotary, window, self._sinks(layer))
        return made if rows is None else made[rows]

    def _sinks(self, layer: int) -> Tensor | None:
        return None if self.sinks is None else self.sinks[layer]


def obstacle(config: ModelConfig) -> str | None:
    """Why a model's steps are not recorded; None where they can be."""
    if config.rope_depends_on_length:
        return "rotations depend on the lengths of sequences"
    return None if config.head else "the model has no head over the vocabulary"


class Recordings:
    """Recorded steps whose index data lies in the memory of `step` and, of recurrent layers, of `recurrence`. turns:
    rotations by position, on the device. pool: their memory, for all recordings of an engine. logits fp32 [rows, V]: of
    the last replay, whichever recording's. In the pool each would keep its own."""

    def __init__(
        self,
        decoder: Decoder,
        storage: KVStorage,
        eager: Eager,
        step: GraphStep,
        turns: Tensor | None,
        recurrence: ReplayedRecurrence | None,
        pool: GraphPool,
        logits: Tensor,
    ) -> None:
        self.decoder, self.storage, self.eager, self.step, self.turns = decoder, storage, eager, step, turns
        self.recurrence, self.pool, self.logits = recurrence, pool, logits
        self._recorded: dict[Key, Recorded] = {}
        self.stats = GraphStats()

    def _fill(self, plan: Plan) -> int | None:
        """Takes a plan: its rounds. None: there is no room."""
        items = {window: plan.items_within(window) for window in set(self.decoder.config.attention.windows)}
        return self.step.fill(items, plan.positions, plan.row_slots)

    def _takes(self, step: StepRows) -> bool:
        """Whether there is room for the segments of its recurrent layers, which are taken then."""
        if self.recurrence is None:
            return True
        assert step.segments is not None, "a step of recurrent layers names its states"
        return self.recurrence.fill(step.segments, step.planned.first.rows)

    def _replay(self, recorded: Recorded) -> None:
        """Computes the step that was taken and sent."""
        if self.recurrence is not None:
            self.recurrence.memory.send()
        recorded.graph.replay()

    def _spare_states(self) -> None:
        """Before something is computed that is no step: recurrent states stay as they are."""
        if self.recurrence is not None:
            self.recurrence.memory.clear()

    def _record(self, key: Key) -> Recorded:
        self._spare_states()
        self._compute(key)  # compiles what is not compiled yet, and asks for the memory that libraries keep
        return self._capture(key)

    def _capture(self, key: Key) -> Recorded:
        """Records what has been computed once."""
        graph, (logits, chosen) = current().graph(partial(self._compute, key), self.pool)
        self._recorded[key] = found = Recorded(graph, logits, chosen)
        self.stats.recorded += 1
        return found

    def _launched(self, step: StepRows) -> Logits:
        self.stats.eager += 1
        return self.eager.run(step)

    @property
    def _usual(self) -> tuple[bool, ...]:
        """Of keys: whether rows have adapters, in steps that are met often."""
        return (False,) if self.decoder.adapters is None else (False, True)

    def _compute(self, key: Key) -> tuple[Tensor, Tensor]:
        """From the tokens, some of which the step before may have chosen, to the logits, and the greatest of each row,
        where the step behind looks for it."""
        decoder, tokens = self.decoder, self.step.known(key.rows)
        positions = self.step.positions[: key.rows].clamp(min=0)
        attend = GraphAttention(self.step.layers(key.rounds, key.rows), self.storage, decoder)
        turns = None if self.turns is None else self.turns.index_select(0, positions)
        drawn = self.step.drawn[: key.drawn].long() if key.drawn else None
        keep = None if self.storage.x is None else partial(self.step.keep, self.storage.x)
        recur = None if self.recurrence is None else self.recurrence.layers(key.rows)
        adapters = self.step.adapters[: key.rows] if key.adapted else None
        x = decoder.embed(tokens, positions)
        x = decoder.through(tokens, x, turns, attend, drawn, watch=keep, recur=recur, adapters=adapters)
        logits = decoder.logits(decoder.leave(x))
        logits = self.logits[: len(logits)].copy_(logits)
        values, best = ops.greatest(logits)
        chosen = best.int()
        self.step.chosen[: len(chosen)].copy_(chosen)
        return logits, torch.stack((chosen, values.view(torch.int32)))


class CudaGraphs(Recordings):
    """Steps all of whose logits are wanted, of up to `rows` rows. What does not fit is computed eagerly. prompt_rows:
    of the largest step with prompts in it for which PromptGraphs shall find memory beside. states: of recurrent layers.
    """

    def __init__(
        self,
        decoder: Decoder,
        storage: KVStorage,
        backend: GraphBackend,
        eager: Eager,
        rows: int,
        prompt_rows: int = 0,
        states: StateStorage | None = None,
    ) -> None:
        config, spec = decoder.config, decoder.config.attention
        self.sizes = [1 << power for power in range((rows - 1).bit_length() + 1)]
        length = min(config.max_model_len, storage.slots * CHUNK)
        kinds = [
            GraphSizes(
                self.sizes[-1], prompt_rows, length, spec.windows_of(shape), spec.heads, (storage.slots, *shape),
                storage.dtype, decoder.dtype, spec.scale, spec.score_cap, spec.once,
            )
            for shape in spec.every_shape
        ]  # fmt: skip
        turns = None if decoder.rope is None else decoder.rope.table(torch.arange(length)).to(decoder.device)
        self.states, most = states, self.sizes[-1]
        recurrence = None if states is None else ReplayedRecurrence(states, most, most)
        step = backend.graph_step(kinds, decoder.key_bias)
        logits = torch.empty(most, config.vocab_size, device=decoder.device)
        super().__init__(decoder, storage, eager, step, turns, recurrence, GraphPool(), logits)
        self.otherwise: Callable[[StepRows], Logits] = self._launched
        """Computes what does not fit, as a draft that makes a long run (kernels.triton.tile_schedule). May be set."""
        self._first: Plan | None = None
        self._rounds = 0
        self._refused: set[Key] = set()
        self._read_back = ReadBack(2 * self.sizes[-1], torch.int32, current())

    @torch.inference_mode()
    def record_usual(self) -> None:
        """Records what most steps of decoding will need, so that none of them waits for it."""
        for rows in (size for size in self.sizes if size <= USUAL_ROWS):
            if all([self._recording(Key(rows, ROUNDS[0], 0, adapted)) is not None for adapted in self._usual]):
                log.info("recorded steps of up to %d rows", rows)
        current().synchronize()

    def run(self, step: StepRows) -> Logits:
        launched = self.launch(step)
        if launched is None:
            return self.otherwise(step)
        return Logits(launched.logits, launched.greatest())

    @torch.inference_mode()
    def launch(self, step: StepRows) -> Launched | None:
        """Gives the step to the device, and goes on. None: there is no room for it, it cannot be recorded, or it is not
        yet and tokens are not known, since a recording computes the step and so changes what it looks up. Whoever
        launches has waited for the step before the last."""
        planned = step.planned
        plan, rows = planned.plan, planned.first.rows
        if not self._takes(step) or not self._holds(planned, plan):
            return None
        adapters = step.adapters()
        key = Key(next(size for size in self.sizes if size >= rows), self._rounds, 0, adapters is not None)
        if key in self._refused or (step.before is not None and key not in self._recorded):
            return None
        self.step.send(step.tokens(), plan.positions, plan.row_offsets, adapters=adapters)
        recorded = self._recording(key)
        if recorded is None:
            return None
        self._replay(recorded)
        self.stats.replayed += 1
        self.stats.ahead += step.before is not None
        reading = self._read_back.begin(recorded.chosen)
        return Launched(step.slices, rows, recorded.logits[:rows], self.step.chosen[:rows], reading)

    def _recording(self, key: Key) -> Recorded | None:
        """None, with a line in the log: it cannot be recorded. Such steps are launched from then on."""
        if key not in self._recorded:
            try:
                self._record(key)
            except RuntimeError as error:  # no memory, for one
                log.warning("steps of %d rows are launched, not recorded: %s", key.rows, error)
                self._refused.add(key)
        return self._recorded.get(key)

    def _holds(self, planned: PlannedStep, plan: Plan) -> bool:
        """Whether the step's tasks lie, or now lie, in the fixed memory."""
        first, grown = planned.first, planned.grown
        before, self._first = self._first, None
        if before is first and planned.steps:
            self._first = first
            return True
        if grown is not None and grown.before is before and not planned.steps:
            rows = grown.rows
            if self.step.grow(rows, plan.row_slots[rows], plan.positions[rows]):
                self._first = first
                return True
        rounds = self._fill(plan)
        if rounds is None:
            return False
        self._first, self._rounds = first, next(each for each in ROUNDS if each >= rounds)
        return True
