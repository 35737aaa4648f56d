"""A scheduler without a model, and a memory of tokens that shows whether what it schedules is right."""

from __future__ import annotations

import random

from headrace.attention.plan import Planner, TableRows
from headrace.engine.scheduler import Scheduler
from headrace.engine.sequence import SequenceState, Slice
from headrace.engine.speculation.verify import confirmed, settle
from headrace.kv.cache import KVCache
from headrace.types import CHUNK, Request, SamplingParams


class Harness:
    """A scheduler and a memory of tokens in place of keys and values. The next token is a function of those before it,
    so that a sequence computed wrongly, or twice, shows. forces: some tokens are followed by some that are forced.
    drafts: sequences that decode have drafts, of which some go wrong. copies: a prompt's first rows may be copied."""

    def __init__(
        self, chunks: int, budget: int, sequences: int = 64, shares: bool = True, ranks: int = 1, align: int = 1,
        forces: bool = False, drafts: bool = False, policy: type[Scheduler] = Scheduler, copies: bool = False,
    ) -> None:  # fmt: skip
        self.forces, self.drafts = forces, drafts
        self.random = random.Random(1)
        self.cache = KVCache(chunks, ranks=ranks)
        self.scheduler = policy(
            self.cache,
            lambda s: self.cache.open(
                s.tokens, salt=s.request.cache_salt, public_tokens=s.request.public_prefix_tokens, shares=shares
            ),
            budget,
            sequences,
            align,
            copy=self.copy if copies else None,
        )
        self.memory: dict[int, list[int]] = {}
        self.live: dict[SequenceState, int] = {}
        self.order = 0
        self.prefilled = 0
        self.planner = Planner()
        self.before: list[tuple[object, ...]] = []

    def add(
        self, prompt: list[int], answer: int, salt: str | None = None,
        tenant: str = "", weight: float = 1.0, priority: int = 0, public: int = 0,
    ) -> SequenceState:  # fmt: skip
        request = Request(
            str(self.order), prompt, SamplingParams(), salt, public, tenant=tenant, weight=weight, priority=priority
        )
        sequence = SequenceState(request, 0, self.order)
        self.order += 1
        self.live[sequence] = answer
        self.scheduler.add(sequence)
        return sequence

    def draft(self, sequence: SequenceState) -> None:
        """Up to six tokens, the first ones right."""
        sequence.draft, right = [], self.random.randrange(8)
        known = list(sequence.tokens)
        while self.drafts and sequence.n_output and sequence.remaining == 1 and len(sequence.draft) < right < 7:
            run = self.following(sum(known))
            known += run
            sequence.draft += run
        if sequence.draft and right % 3 == 0:
            sequence.draft[-1] ^= 1

    def following(self, total: int) -> list[int]:
        """The token drawn after tokens of this sum, and those that are forced behind it."""
        drawn = total % 11
        return [drawn, *range(drawn * (drawn % 3) if self.forces else 0)]

    def step(self) -> list[Slice]:
        for sequence in self.scheduler.running:
            self.draft(sequence)
        slices = self.scheduler.schedule()
        self.scheduler.note_computed(slices)
        assert sum(part.length for part in slices) <= self.scheduler.max_batch_tokens
        self.check_plan(slices)
        for part in slices:
            self.check_ends(part)
            self.write(part)
        self.cache.commit()
        for part in slices:
            known = part.sequence.tokens + part.sequence.draft
            assert self.seen(part.sequence) == known[: part.sequence.computed], "reads another's tokens"
            if part.samples:
                self.sample(part.sequence)
        self.scheduler.check()
        return slices

    def check_plan(self, slices: list[Slice]) -> None:
        """Those steps follow that have the sequences of the one before, one token each, and their old chunks."""
        here = [
            (part.sequence, table, part.start, list(table.slots)) for part in slices if (table := part.sequence.table)
        ]
        planned = self.planner.plan(
            [TableRows(table, start, part.length) for part, (_, table, start, _) in zip(slices, here, strict=True)]
        )
        again = [(sequence, table, start - 1, slots) for sequence, table, start, slots in here]
        single = all(part.length == 1 for part in slices)
        assert bool(planned.steps) == (bool(slices) and single and again == self.before)
        self.before = here if single else []

    def check_ends(self, part: Slice) -> None:
        """Slices end at a multiple of `align` or with all that is known; then longer ones begin with a chunk."""
        align = self.scheduler.align
        if part.drafted:
            assert align == 1 or part.start // CHUNK == (part.end - 1) // CHUNK, "a draft leaves its chunk"
            return
        if part.sequence.forced and part.decodes:
            assert align == 1 or part.start // CHUNK == (part.end - 1) // CHUNK, "several tokens leave their chunk"
            return
        assert part.length >= 1 and (part.samples or part.end % align == 0), "ends inside a stretch"
        assert align % CHUNK or part.length == 1 or part.start % CHUNK == 0, "begins inside a chunk"

    def write(self, part: Slice) -> None:
        table = part.sequence.table
        assert table is not None and part.end == table.length
        self.prefilled += part.length
        for position in range(part.start, part.end):
            rows = self.memory.setdefault(int(table.slots[position // CHUNK]), [-1] * CHUNK)
            rows[position % CHUNK] = part.tokens[position - part.start]

    def copy(self, source: int, target: int) -> None:
        self.memory[target] = list(self.memory[source])

    def seen(self, sequence: SequenceState) -> list[int]:
        table = sequence.table
        assert table is not None
        rows = [token for slot in table.slots.tolist() for token in self.memory[slot]]
        return rows[: table.length]

    def sample(self, sequence: SequenceState) -> None:
        while True:
            run = self.following(sum(self.seen(sequence)[: len(sequence.tokens)]))
            sequence.tokens += run[: self.live[sequence] - sequence.n_output]
            sequence.forced = len(run) > 1
            if sequence.n_output == self.live[sequence] or not confirmed(sequence):
                break
        if sequence.draft:
            settle(sequence, self.cache)
        if sequence.n_output == self.live[sequence]:
            del self.live[sequence]
            self.scheduler.remove(sequence)

    def abort(self, sequence: SequenceState) -> None:
        del self.live[sequence]
        self.scheduler.remove(sequence)

    def finish(self, limit: int = 3000) -> None:
        for _ in range(limit):
            if not self.scheduler.has_work:
                break
            assert self.step(), "a step without work although there is some"
        assert not self.live, "requests were starved"
        assert self.cache.used == 0


def prompt(length: int, seed: int = 0) -> list[int]:
    """A longer one begins with a shorter one of the same seed."""
    rng = random.Random(seed)
    return [rng.randrange(11) for _ in range(length)]
