"""Recurrent states under a host that is a step ahead, without a model: a state is the tokens that it comes from.

The device computes a step when it is launched, which is as good as later: it computes them in order, and whoever reads
a state waits for all that was launched before.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from hypothesis.stateful import RuleBasedStateMachine, invariant

from headrace.engine.executor import Computed, Executor, table_of
from headrace.engine.overlap import Overlap
from headrace.engine.programs import Launched
from headrace.engine.scheduler import Scheduler
from headrace.engine.sequence import SequenceState, Slice
from headrace.kv.cache import KVCache
from headrace.kv.table_state import NONE
from headrace.kv.tree import Node, chain, token_array
from headrace.types import CHUNK, Request, SamplingParams

RIGHT, WRONG = 3, 4
"""Tokens: each answer is made of the first."""


def blocks(*names: int, tail: int = 5) -> list[int]:
    return [name for name in names for _ in range(CHUNK)] + [9] * tail


class StepsMachine(RuleBasedStateMachine):
    """Of a machine that makes `steps`: all agrees at any time, and they come to their end."""

    steps: Any

    @invariant()
    def agrees(self) -> None:
        if hasattr(self, "steps"):
            self.steps.check()

    def teardown(self) -> None:
        if hasattr(self, "steps"):
            self.steps.finish()


def name_of(cache: KVCache, tokens: list[int]) -> bytes:
    """Of the last chunk of these tokens."""
    name = KVCache(1, cache.identity).open([])._root
    for start in range(0, len(tokens), CHUNK):
        name = chain(name, token_array(tokens[start : start + CHUNK]))
    return name


class StateDevice(Executor):
    """memory: the tokens behind which each slot's state is. refuses: no step is launched, but run when the one before
    has ended. unsure: the row whose token is left to the host; the step behind looks up a wrong one. ahead: steps
    launched behind another."""

    launches = True

    def __init__(self) -> None:
        self.memory: dict[int, list[int]] = {}
        self.refuses, self.unsure = False, -1
        self.ahead = 0
        self.chosen: dict[int, int] = {}

    def run(self, slices: Sequence[Slice]) -> Computed:
        self._compute(slices, {})
        parts = [part for part in slices if part.samples]
        return Computed(torch.empty(0), list(zip(parts, range(len(parts)), strict=True)))

    def launch(self, slices: Sequence[Slice], before: Mapping[SequenceState, int] | None = None) -> Launched | None:
        if self.refuses:
            return None
        self.ahead += before is not None
        self._compute(slices, {sequence: self.chosen[row] for sequence, row in (before or {}).items()})
        parts = [part for part in reversed(slices) if part.samples]
        self.chosen = {row: WRONG if row == self.unsure else RIGHT for row in range(len(parts))}
        nothing = torch.zeros(2, len(parts), dtype=torch.int32)
        reading: Any = SimpleNamespace(wait=lambda: nothing)
        return Launched(parts, len(parts), torch.empty(0), torch.empty(0), reading)

    def _compute(self, slices: Sequence[Slice], unseen: Mapping[SequenceState, int]) -> None:
        """In the order of the slices."""
        for part in slices:
            sequence, at = part.sequence, part.start
            known = [*sequence.tokens, unseen[sequence]] if sequence in unseen else sequence.tokens
            for end, source, target in table_of(part).track.segments:
                assert (self.memory[source] if source != NONE else []) == known[:at], "begins with another state"
                self.memory[target], at = known[:end], end
            assert at == part.end, "the segments are not the slice"

    # -- engine.launched_draws

    def takes(self, output: object) -> bool:
        return True

    def draw(self, launched: Launched, outputs: object) -> Any:
        sure = {row: RIGHT for row, token in self.chosen.items() if token == RIGHT}
        return SimpleNamespace(sampled=lambda: sure)


class StepsAhead:
    """What an engine does with a scheduler and engine.overlap. left: tokens that each answer may still have."""

    def __init__(self, chunks: int, budget: int, states: int, ahead: bool = True) -> None:
        self.cache = KVCache(chunks, states=states)
        assert self.cache.states is not None
        self.states, self.device = self.cache.states, StateDevice()
        self.scheduler = Scheduler(self.cache, lambda s: self.cache.open(s.tokens), budget, 8)
        self.left: dict[SequenceState, int] = {}
        self.states.leaving = self.check_state
        config = SimpleNamespace(
            scheduler=SimpleNamespace(async_scheduling=ahead), speculation=SimpleNamespace(on=False)
        )
        loaded: Any = SimpleNamespace(
            executor=self.device, cache=self.cache, capacity=SimpleNamespace(max_model_len=9999), config=config
        )
        draws: Any = SimpleNamespace(takes=self.device.takes, launch=self.device.draw)
        self.outputs: dict[SequenceState, Any] = {}
        self.overlap = Overlap(loaded, self.scheduler, self.outputs, draws)
        self._added = 0

    def add(self, prompt: list[int], answer: int) -> SequenceState:
        self._added += 1
        params = SamplingParams(max_tokens=answer)
        sequence = SequenceState(Request(str(self._added), prompt, params), 0, self._added)
        self.left[sequence], self.outputs[sequence] = answer, SimpleNamespace(plain=False, matcher=None)
        self.scheduler.add(sequence)
        return sequence

    def step(self, stops: int = -1) -> None:
        """stops: the row whose token is taken for the end of its answer."""
        slices = self.overlap.begun()
        if slices is None:
            slices = self.scheduler.schedule()
        if slices:
            computed = self.overlap.run(slices, watched=False)
            self.cache.commit()
            for part, row in computed.parts:
                self._draw(part.sequence, row == stops)

    def _draw(self, sequence: SequenceState, stops: bool) -> None:
        sequence.tokens.append(RIGHT)
        self.left[sequence] -= 1
        if stops or not self.left[sequence]:
            self._end(sequence)

    def _end(self, sequence: SequenceState) -> None:
        del self.left[sequence], self.outputs[sequence]
        self.overlap.remove(sequence)

    def abort(self, sequence: SequenceState) -> None:
        self._end(sequence)
        if not self.left:
            self.overlap.land()

    def finish(self) -> None:
        """Steps until nothing is left, and none is under way."""
        while self.scheduler.has_work:
            self.check()
            for _ in range(7):
                self.step()
        self.overlap.land()
        self.check()
        assert not self.states._planned.waiting and not self.states._under_way.waiting
        assert len(self.states.idle) == len(self.states.nodes()) == self.states.kept, "a state is nobody's"

    def check(self) -> None:
        """Whatever is planned, a state that can be found is that of the tokens that it is found by."""
        self.overlap.check()
        assert not self.states._under_way.waiting and not self.states._under_way.outdated, "a step was not settled"
        for table, chunk in self.states._planned.waiting.values():
            assert chunk >= len(table.nodes) or table.nodes[chunk].digest is None, "a state waits for a name it has"
        for node in self.cache.tree.nodes.values():
            if node.complete and node.state != NONE:
                self.check_state(node)
        for node in self.states.nodes():
            self.check_state(node)

    def check_state(self, node: Node) -> None:
        """Whoever reads it at this moment, to store it, finds what it should."""
        tokens = self.device.memory[node.state]
        assert len(tokens) % CHUNK == 0 and name_of(self.cache, tokens) == node.digest, "the state of other tokens"

    def ends(self) -> list[int]:
        """Behind how many tokens states are kept."""
        return sorted(len(self.device.memory[slot]) for slot in self.states.idle)
