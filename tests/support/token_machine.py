"""An executor without a model, on a device that is late: its keys and values are the tokens themselves.

The next token is a function of all tokens before it and of their order, read from the slots that a step was planned
with. So what is computed from a wrong token, slot or step shows in the answer.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch

from headrace import LLM
from headrace.engine.core import EngineCore
from headrace.engine.executor import Computed, Executor, table_of, wanted_rows
from headrace.engine.output import Output
from headrace.engine.programs import Launched
from headrace.engine.sampler import Sampled, SampleInput, sample
from headrace.engine.sequence import SequenceState, Slice
from headrace.engine.stopping import forbidden_tokens
from headrace.kernels.step_copies import ReadBack
from headrace.kernels.triton.arena import Arena, padded
from headrace.kv.cache import KVCache
from headrace.kv.table_state import NONE, Segment
from headrace.kv.tree import chain, token_array
from headrace.types import CHUNK, chunks_for
from tests.support.delayed_device import DelayedDevice

KINDS = 97
"""Rows of logits that there are."""


class Place(NamedTuple):
    """Where tokens start .. end-1 of a sequence go, and behind how many of the last ones the next is drawn. segments:
    of recurrent states, where there are some."""

    slots: np.ndarray[Any, Any]
    start: int
    end: int
    drawn: int
    segments: tuple[Segment, ...] = ()

    @classmethod
    def of(cls, part: Slice, drawn: int) -> Place:
        table = table_of(part)
        return cls(table.slots.copy(), part.start, part.end, drawn, tuple(table.track.segments))

    @property
    def written(self) -> set[int]:
        return {int(self.slots[chunk]) for chunk in range(self.start // CHUNK, chunks_for(self.end))}


def drawn_from(part: Slice) -> int:
    """Rows of a slice that tokens are drawn from, those of its draft among them."""
    return part.samples + len(part.sequence.draft)


class TokenMachine(Executor):
    """memory [slots, 64]: tokens. states: by slot, the tokens that each comes from. logits: of the step that was
    computed last. refuses: whether some steps are, as those for which there is no room. ahead: steps launched behind
    one under way; mixed: of these, those with prompts."""

    launches = True

    def __init__(
        self, late: DelayedDevice, slots: int, width: int, rows: int, tokens: int, refuses: bool = False
    ) -> None:
        self.late, self.refuses = late, random.Random(3) if refuses else None
        self.memory = np.full((slots, CHUNK), -1, np.int64)
        self.states: dict[int, list[int]] = {}
        self.kinds = torch.randn(KINDS, width, generator=torch.Generator().manual_seed(1))
        self.arena = Arena(tokens, {}, late, torch.device("cpu"), pinned=True)
        self.chosen = torch.zeros(rows, dtype=torch.int32)
        self.logits = torch.zeros(rows, width)
        self.best = torch.zeros(2 * rows, dtype=torch.int32)
        self._read_back = ReadBack(2 * rows, torch.int32, late)
        self.ahead = self.mixed = 0
        self.writers: list[dict[int, SequenceState]] = []

    def run(self, slices: Sequence[Slice]) -> Computed:
        self.late.synchronize()
        places = [Place.of(part, 0) for part in slices]
        for part, place in zip(slices, places, strict=True):
            for position, token in enumerate(part.tokens, part.start):
                self.memory[place.slots[position // CHUNK], position % CHUNK] = token
        for place in places:
            self._leave_states(place)
        wanted = wanted_rows(slices)
        ends = {part.sequence: (place.slots, part.end) for part, place in zip(slices, places, strict=True)}
        rows = [self.row(*ends[part.sequence]) for part, _ in wanted.parts]
        return Computed(torch.stack(rows) if rows else torch.empty(0, 0), wanted.parts)

    def launch(self, slices: Sequence[Slice], before: Mapping[SequenceState, int] | None = None) -> Launched | None:
        if self.refuses is not None and self.refuses.random() < 0.2:
            return None
        ordered, unseen = list(reversed(slices)), before or {}
        places = [Place.of(part, drawn_from(part)) for part in ordered]
        known = [
            token
            for part in ordered
            for token in ([-1 - unseen[part.sequence]] if part.sequence in unseen else part.tokens)
        ]
        assert len(known) == sum(each.end - each.start for each in places), "each row has a token"
        self.ahead += before is not None
        self.mixed += before is not None and len(known) > len(unseen)
        self._own([(slot, part.sequence) for part, each in zip(ordered, places, strict=True) for slot in each.written])
        padded(self.arena.tokens.host, np.array(known, np.int32), 0)
        self.arena.send(tasks=False)
        self.late.begin(lambda: self._compute(places))
        drawn, rows = [part for part in ordered if part.samples], sum(each.drawn for each in places)
        reading = self._read_back.begin(self.best[: 2 * rows].view(2, rows))
        return Launched(drawn, rows, self.logits[:rows], self.chosen[:rows], reading)

    def _own(self, written: list[tuple[int, SequenceState]]) -> None:
        """Of the two steps that may be under way none writes where the other one does, but for the same sequence."""
        mine = dict(written)
        assert len(mine) == len(written), "two sequences write into one slot"
        for before in self.writers[-1:] if self.late.steps else []:
            assert all(before.get(slot, sequence) is sequence for slot, sequence in mine.items()), (
                "a slot is taken over"
            )
        self.writers.append(mine)

    def _compute(self, places: list[Place]) -> None:
        sent = self.arena.tokens.there.tolist()
        known = iter([token if token >= 0 else int(self.chosen[-1 - token]) for token in sent])
        for each in places:
            for position in range(each.start, each.end):
                self.memory[each.slots[position // CHUNK], position % CHUNK] = next(known)
        for each in reversed(places):  # in the order of the slices
            self._leave_states(each)
        ends = [(each.slots, end + 1) for each in places for end in range(each.end - each.drawn, each.end)]
        drawn = [self.row(*each) for each in ends]
        for row, logits in enumerate(drawn):
            self.logits[row] = logits
        values, best = self.logits[: len(drawn)].max(1)
        self.chosen[: len(drawn)] = best.int()
        self.best[: 2 * len(drawn)] = torch.cat((best.int(), values.view(torch.int32)))

    def _leave_states(self, place: Place) -> None:
        seen, at = self.memory[place.slots].reshape(-1), place.start
        for end, source, target in place.segments:
            assert (self.states[source] if source != NONE else []) == seen[:at].tolist(), "begins with another state"
            self.states[target], at = seen[:end].tolist(), end
        assert not place.segments or at == place.end, "the segments are not the slice"

    def row(self, slots: np.ndarray[Any, Any], end: int) -> torch.Tensor:
        """Logits behind the first `end` tokens in these slots."""
        seen = self.memory[slots].reshape(-1)[:end]
        assert (seen >= 0).all(), "a token is read that nobody has written"
        return self.kinds[int((seen * np.arange(7, 7 + end)).sum()) % KINDS]

    def check(self, cache: KVCache) -> None:
        """Raises AssertionError unless each chunk that has a name has the tokens that it is named by."""
        self.late.synchronize()
        empty = cache.open([])
        root = empty._root
        cache.close(empty)
        for digest, node in cache.tree.nodes.items():
            assert node.complete, "a chunk is left half written"
            parent = root if node.parent is None else node.parent.digest
            assert parent is not None
            last = self.memory[node.slot].tolist()
            assert chain(parent, token_array(last)) == digest, "a chunk has another's name"
            if node.state != NONE:
                assert self.states[node.state][-CHUNK:] == last, "a chunk has another's state"


class LateDraws:
    """In place of engine.launched_draws: the host's sampler, when the device comes to it, of the tokens that lie in the
    machine's memory then. unsure: whether some rows are left to the host, behind which a step ahead then has a wrong
    token."""

    def __init__(self, machine: TokenMachine, unsure: bool, eos: tuple[int, ...]) -> None:
        self.machine, self.late, self.unsure, self.eos = machine, machine.late, unsure, eos

    def takes(self, output: Output) -> bool:
        return output.matcher is None

    def launch(self, launched: Launched, outputs: list[Output]) -> LateDraws.Found:
        parts = list(launched.slices)
        answers = [part.end - part.sequence.prompt_len for part in parts]
        places = [(table_of(part).slots.copy(), part.end) for part in parts]
        found: dict[int, Sampled] = {}

        def draw() -> None:
            tokens = [self.machine.memory[slots].reshape(-1)[:end].tolist() for slots, end in places]
            inputs = [self._input_of(output, seen) for output, seen in zip(outputs, tokens, strict=True)]
            for row, each in enumerate(sample(launched.logits, inputs)):
                if self.unsure and (each.token + answers[row]) % 5 == 0:
                    launched.chosen[row] = 3
                else:
                    found[row], launched.chosen[row] = each, each.token

        self.late.give(draw)
        event = self.late.event()
        event.record()
        return LateDraws.Found(event, found)

    def _input_of(self, output: Output, seen: list[int]) -> SampleInput:
        sequence = output.sequence
        params, begin = sequence.request.params, sequence.prompt_len
        forbidden = forbidden_tokens(params, len(seen) - begin, self.eos)
        return SampleInput(params, seen[:begin], seen[begin:], sequence.index, output.active.seed, forbidden)

    class Found:
        def __init__(self, event: Any, found: dict[int, Sampled]) -> None:
            self.event, self.found = event, found

        def sampled(self) -> dict[int, Sampled]:
            self.event.synchronize()
            return self.found


def machine_engine(
    llm: LLM,
    late: DelayedDevice,
    chunks: int,
    ahead: bool,
    refuses: bool = False,
    unsure: bool = False,
    states: int | None = None,
    **settings: Any,
) -> EngineCore:
    """An engine with the tokenizer and the sizes of one that is loaded, over a pool of so many chunks. states: how many
    recurrent ones there are, of a model that has them."""
    loaded = llm.engine.loaded
    config = loaded.config.replace(async_scheduling=ahead, **settings)
    cache = KVCache(chunks, b"tokens", states=states)
    sizes = config.scheduler.max_sequences, config.scheduler.max_batch_tokens
    machine = TokenMachine(late, chunks, loaded.capacity.vocab_size, *sizes, refuses)
    core = EngineCore(replace(loaded, config=config, cache=cache, executor=machine))
    core.overlap.draws = LateDraws(machine, unsure, loaded.capacity.eos_token_ids)  # type: ignore[assignment]
    return core
