"""The scheduler that shares steps, places and chunks between tenants by their weights (docs/fairness.md).

It differs from Scheduler in whose prompt is computed next (engine.turns) and in whose sequence is preempted:

- Prompts: tenants take turns in tokens; what one cannot use is lent to the others in the same step. Within a tenant the
  priority decides, then the order of arrival, but for much shorter prompts, and none is overtaken for long.
- Places and chunks: a tenant's share is its weight's part of them, among the tenants that have sequences. A tenant
  beyond its share begins nothing that leaves no room for one that waits within its share; if there is no room, its
  latest sequences give way. A sequence gives way MOST_YIELDS times in its life; then only the order of arrival counts
  for it, as in Scheduler. So preemptions of this kind come to an end, and the oldest sequence can always go on.

Decoding sequences have a token each at every step, whoever they are of, and are not charged: places bound them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Any

from headrace.engine.scheduler import Scheduler
from headrace.engine.sequence import SequenceState, Slice
from headrace.engine.turns import TenantLine, Turns
from headrace.kv.chunk_table import ChunkTable
from headrace.stats import EngineStats, TenantStats
from headrace.types import chunks_for

PATIENCE = 4
"""A prompt is overtaken by at most so many steps' worth of later prompts: within its tenant, and of others while it
waits for chunks."""
MOST_YIELDS = 2
"""A sequence gives way to another tenant's so often."""
MARGIN = 1 / 8
"""A tenant that holds more than its share of the chunks by this part of it is beyond its share."""
MOST_NAMED = 256
"""Tenants that figures tell apart; those of further ones are counted under OTHERS."""
OTHERS = "(others)"


class FairScheduler(Scheduler):
    """served, yielded: prompt tokens computed, and sequences that gave way, by tenant. See Scheduler for the rest."""

    def __init__(self, *args: Any, **named: Any) -> None:
        super().__init__(*args, **named)
        self.turns = Turns(self.align)
        self.lines: dict[str, TenantLine] = {}
        self.served: Counter[str] = Counter()
        self.yielded: Counter[str] = Counter()
        self._patience = PATIENCE * self.max_batch_tokens
        self._beyond: frozenset[str] | None = None
        self._short: SequenceState | None = None
        self._passed = 0
        self._weights = 0.0

    # -- who is here

    def add(self, sequence: SequenceState) -> None:
        super().add(sequence)
        name = sequence.request.tenant
        if name not in self.lines:
            self.lines[name] = TenantLine(self._patience)
        self.lines[name].add(sequence)

    def remove(self, sequence: SequenceState) -> None:
        line = self._line(sequence)
        line.running -= sequence.table is not None
        super().remove(sequence)
        line.end(sequence)
        if line.empty:
            del self.lines[sequence.request.tenant]
        if sequence is self._short:
            self._short = None

    def _leave_queue(self, sequence: SequenceState) -> None:
        super()._leave_queue(sequence)
        self._line(sequence).leave(sequence)

    def _begin(self, sequence: SequenceState) -> bool:
        if not super()._begin(sequence):
            return False
        self._line(sequence).running += 1
        if sequence is self._short:
            self._short = None
        return True

    def _preempt(self, sequence: SequenceState) -> None:
        self._line(sequence).running -= 1
        super()._preempt(sequence)
        self._beyond = None

    def _line(self, sequence: SequenceState) -> TenantLine:
        return self.lines[sequence.request.tenant]

    # -- whose prompts are computed

    def _prompts(self, prefilling: list[SequenceState]) -> None:
        if not prefilling and not self.waiting:
            self.turns.pause()
            return
        started: dict[str, list[SequenceState]] = {}
        for sequence in prefilling:
            if sequence.table is not None:  # else preempted in this very step
                started.setdefault(sequence.request.tenant, []).append(sequence)
        weights = {name: line.weight for name, line in self.lines.items() if line.waiting or name in started}
        self.turns.begin(weights)
        for name in weights:
            self.lines[name].look(started.get(name, ()))
        if len(weights) > 1:
            self._take_turns(started)
        elif weights:
            self._serve(next(iter(weights)), started)

    def _take_turns(self, started: dict[str, list[SequenceState]]) -> None:
        """Each tenant may use what it is granted, and what those before it have left. Those go first whose prompts may
        turn out to be cached or to have no room, so that what they leave is lent in this very step."""
        known = {name: sum(map(self._left, started.get(name, ()))) for name in self.turns.order()}
        grants = self.turns.grants(self._budget, {name: known[name] + self._could_begin(name) for name in known})
        self._kept = sum(grants.values())
        for name in sorted(grants, key=known.__getitem__):
            self._kept -= grants[name]
            self._serve(name, started)
        for name in known:
            if name not in grants and self._budget >= self.align:
                self._serve(name, started)

    def _left(self, sequence: SequenceState) -> int:
        """Tokens of a half computed prompt that can be computed now."""
        table = sequence.table
        if table is None or self._reuse(sequence, table):
            return 0
        return max(0, self._until(sequence) - table.length)

    def _could_begin(self, name: str) -> int:
        """Tokens of a tenant's waiting prompts that could be computed in this step, at most about its budget."""
        line, tokens = self.lines[name], 0
        if not self._may_begin(name):
            return 0
        for sequence in line.waiting:
            tokens += sequence.remaining
            if tokens >= self._budget:
                break
        return tokens

    def _serve(self, name: str, started: dict[str, list[SequenceState]]) -> None:
        """Computes prompts of one tenant with what is left of the budget and not kept for others."""
        line = self.lines[name]
        for sequence in line.in_order(started.get(name, ())):
            while (new := line.first) is not None and line.overtakes(new, sequence) and self._start(name, new):
                pass
            before = self._budget
            self._prefill(sequence)
            self._charge(name, sequence, before)
        while (new := line.first) is not None and self._start(name, new):
            pass

    def _start(self, name: str, sequence: SequenceState) -> bool:
        """Starts a waiting sequence, if it may; whether it has started."""
        before, short = self._budget, self._short
        if before - self._kept < self.align or not self._may_begin(name):
            return False
        if self._begin(sequence):
            self._charge(name, sequence, before)
            self._passed += len(sequence.tokens) if short is not None and short.request.tenant != name else 0
            return True
        if len(self.lines) > 1 and self._short is None and name not in self.beyond_share:
            self._short, self._passed = sequence, 0
        return False

    def _charge(self, name: str, sequence: SequenceState, before: int) -> None:
        if tokens := before - self._budget:
            self.turns.charge(name, tokens)
            self.lines[name].note(sequence, tokens)

    def note_computed(self, slices: Sequence[Slice]) -> int:
        prefilled = [part for part in slices if not part.decodes]
        for part in prefilled:
            self._count(self.served, part.sequence.request.tenant, part.length)
        return sum(part.length for part in prefilled)

    @staticmethod
    def _count(counts: Counter[str], name: str, by: int) -> None:
        counts[name if name in counts or len(counts) < MOST_NAMED else OTHERS] += by

    # -- who has places and chunks

    def _share(self, line: TenantLine, total: int) -> float:
        if not self._weights:
            self._weights = sum(each.weight for each in self.lines.values())
        return total * line.weight / self._weights

    def _has_place(self, line: TenantLine) -> bool:
        """Whether one more sequence is within the tenant's share of the places."""
        return line.running + 1 <= max(1.0, self._share(line, self.max_sequences))

    def _crowds(self, line: TenantLine) -> bool:
        """Whether the tenant has more places than its share."""
        return line.running > max(1.0, self._share(line, self.max_sequences))

    def _may_begin(self, name: str) -> bool:
        """Whether a tenant may begin a sequence, now that others wait for places or chunks."""
        free, line = self.max_sequences - len(self.running), self.lines[name]
        if len(self.lines) == 1 or free < 1:
            return free > 0
        if not self._has_place(line):
            free -= sum(
                each is not line and bool(each.waiting) and self._has_place(each) for each in self.lines.values()
            )
        if free < 1 or self._short is None:
            return free > 0
        waits = self._short.request.tenant
        held_back = name in self.beyond_share or (self._passed >= self._patience and waits not in self.beyond_share)
        return name == waits or not held_back

    def _held(self) -> Counter[str]:
        """Chunks held by each tenant; one that several sequences hold counts in equal parts."""
        held: Counter[str] = Counter()
        for sequence in self.running:
            if (table := sequence.table) is not None and not sequence.ended:
                held[sequence.request.tenant] += table.coming + sum(1 / node.refs for node in table.nodes)  # type: ignore[assignment]
        return held

    @property
    def beyond_share(self) -> frozenset[str]:
        """Tenants that hold more than their share of the chunks."""
        if self._beyond is None:
            held, total = self._held(), self.cache.pool.total
            most = {name: (1 + MARGIN) * self._share(line, total) for name, line in self.lines.items()}
            self._beyond = frozenset(name for name in held if held[name] > most[name] and len(most) > 1)
        return self._beyond

    @property
    def makes_way(self) -> bool:
        return len(self.lines) > 1

    def _make_way(self) -> None:
        """For the tenant that has the fewest places for its weight, of those that wait."""
        self._beyond, self._weights = None, 0.0
        if self.ahead or not self.waiting or len(self.lines) < 2:
            return
        name = min((line.running / line.weight, name) for name, line in self.lines.items() if line.waiting)[1]
        line = self.lines[name]
        first = line.first
        if first is None or not self._has_place(line):
            return
        if len(self.running) >= self.max_sequences:
            victim = next(self._juniors([each for each, its in self.lines.items() if self._crowds(its)]), None)
            if victim is None:
                return
            self._give_way(victim)
        self._clear_chunks(name, first)

    def _clear_chunks(self, name: str, first: SequenceState) -> None:
        """Frees the chunks that a waiting sequence lacks, if those beyond their share can give so many."""
        promised = sum(self.cache.cost(s.table) for s in self.running if s.table and s.remaining > 1)
        most = promised + chunks_for(len(first.tokens))
        if not self.running or (self.cache.tree.accounts is None and most < self.cache.available):
            return
        table = self.open_table(first)
        cost = self.cache.cost(table)
        self.cache.close(table)
        if self._affordable(table, cost + promised):
            return
        if self._held()[name] + cost > self._share(self.lines[name], self.cache.pool.total):
            return
        missing, victims = cost + promised - self.cache.available_for(table.account) + 1, []
        for victim in self._juniors(self.beyond_share, table):
            victims.append(victim)
            missing -= self._gain(victim)
            if missing <= 0:
                break
        else:
            return
        for victim in victims:
            self._give_way(victim)
        self._short, self._passed = first, self._patience

    def _gain(self, sequence: SequenceState) -> int:
        """Chunks that are free, and promised to nobody, once a sequence is preempted."""
        table = sequence.table
        assert table is not None, "a running sequence has a table"
        own = sum(node.refs == 1 for node in table.nodes)
        return own + (self.cache.cost(table) if sequence.remaining > 1 else 0)

    def _juniors(self, names: Iterable[str], taker: ChunkTable | None = None) -> Iterator[SequenceState]:
        """Sequences of these tenants that may give way, the latest first. taker: to which they may leave chunks."""
        for sequence in reversed(self.running):
            if taker is not None and (sequence.table is None or not self.cache.yields(sequence.table, taker)):
                continue
            if sequence.request.tenant in names and sequence.yields < MOST_YIELDS and sequence not in self._slices:
                yield sequence

    def _give_way(self, sequence: SequenceState) -> None:
        sequence.yields += 1
        self._count(self.yielded, sequence.request.tenant, 1)
        self._preempt(sequence)

    def _preempt_for(self, sequence: SequenceState, itself: bool = False) -> bool:
        """As in Scheduler, but a tenant beyond its share gives way to the others first, and takes from none of them."""
        if len(self.lines) < 2:
            return super()._preempt_for(sequence, itself)
        own, beyond = sequence.request.tenant, self.beyond_share
        weak = own in beyond and sequence.yields < MOST_YIELDS
        if not weak and (victim := next(self._juniors(beyond - {own}, sequence.table), None)) is not None:
            self._give_way(victim)
            return True
        barred = False
        for other in reversed(self.running):
            if other.order <= sequence.order - itself:
                break
            if not self._yields(other, sequence):
                continue
            if weak and other.request.tenant not in (own, *beyond):
                barred = True
                continue
            (self._give_way if barred and other is sequence else self._preempt)(other)
            return True
        if barred and not itself:
            self._give_way(sequence)
        return False

    def add_stats(self, stats: EngineStats) -> None:
        """Tenants are told apart as soon as there is one with a name."""
        super().add_stats(stats)
        known = self.served.keys() | self.yielded.keys()
        if not any(known):
            return
        for told in stats.tenants.values():
            told.waiting = told.waiting_tokens = 0
        for name, line in self.lines.items():
            told = stats.tenants.setdefault(name if name in known else OTHERS, TenantStats())
            told.waiting += len(line.waiting)
            told.waiting_tokens += line.tokens
        for name in known:
            told = stats.tenants.setdefault(name, TenantStats())
            told.prefilled, told.preemptions = self.served[name], self.yielded[name]

    def check(self, under_way: Collection[SequenceState] = ()) -> None:
        super().check(under_way)
        for name, line in self.lines.items():
            here = [each for each in self.waiting if each.request.tenant == name]
            line.check(here)
            assert line.running == sum(each.request.tenant == name for each in self.running), "places are miscounted"
            assert not line.empty, "a tenant without sequences is kept"
        assert all(each.yields <= MOST_YIELDS for each in (*self.waiting, *self.running)), "gave way too often"


SCHEDULERS: dict[str, type[Scheduler]] = {"fair": FairScheduler, "fcfs": Scheduler}
"""By scheduling_policy."""
