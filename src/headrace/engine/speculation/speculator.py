"""Speculation without a second model: drafts for the decoding sequences of a step, and what became of them.

A draft is verified as a slice of the sequence with all logits wanted (engine.core). A row's logits do not depend on its
companions, and the sampler draws from (logits, parameters, history, seed, position) and nothing else: so tokens and log
probabilities are those of no speculation, to the bit, and only the number of steps differs.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

from headrace.engine.sequence import SequenceState, Slice
from headrace.engine.speculation.lengths import Acceptance, Credit, StepCost, allot
from headrace.engine.speculation.ngram import NgramMatcher
from headrace.engine.speculation.suffix import Remembered, SuffixMatcher
from headrace.stats import SpeculationStats

TENANTS = 64
"""Tenants whose answers are remembered, those that came last."""


class Matcher(Protocol):
    """Finds drafts for one sequence."""

    def propose(self, tokens: list[int], most: int) -> list[int]:
        """At most so many tokens that may follow `tokens`, which have only grown since the last call."""


@dataclass(slots=True)
class Drafting:
    """One sequence."""

    matcher: Matcher
    acceptance: Acceptance


class Speculator:
    """method: ngram or suffix. most: drafted tokens of a sequence in a step. longest: tokens of a sequence. again: see
    `allot`."""

    def __init__(self, method: str, most: int, longest: int, again: bool = False) -> None:
        self.method, self.most, self.longest, self.again = method, most, longest, again
        self.cost, self.credit = StepCost(), Credit()
        self.overall = Acceptance()
        """Of all sequences of late."""
        self.stats = SpeculationStats()
        self._decoding = 1
        self._of: dict[SequenceState, Drafting] = {}
        self._remembered: OrderedDict[str | None, Remembered] = OrderedDict()

    def propose(self, running: Iterable[SequenceState]) -> None:
        """Gives the sequences that decode their drafts for the coming step."""
        decoding = [each for each in running if (each.remaining == 1 or each.forced) and not each.held]
        drafting = [(sequence, self._drafting(sequence)) for sequence in decoding if sequence.n_output]
        if decoding:
            self.credit.lend()
            self._decoding = len(decoding)
        for sequence, mine in drafting:
            most = 0 if self.cost.stale else min(self.most, self._left(sequence))
            sequence.draft = mine.matcher.propose(sequence.tokens, most) if most > 0 else []
        shares = [mine.acceptance.share for _, mine in drafting]
        drafts = [len(sequence.draft) for sequence, _ in drafting]
        counts = allot(len(decoding), shares, drafts, self.cost.row_of(len(decoding)), self.again, self.credit.steps)
        for (sequence, mine), count in zip(drafting, counts, strict=True):
            del sequence.draft[count:]
            if not count:
                mine.acceptance.rest()
        if not any(counts):
            self.overall.rest()

    def complete(self, slices: Iterable[Slice]) -> None:
        """Before a step is computed: puts tokens where `propose` has only said how many. Here it has given them."""

    def _left(self, sequence: SequenceState) -> int:
        """Tokens that may come beyond the one that is drawn in any case."""
        most, left = sequence.request.params.max_tokens, self.longest - len(sequence.tokens) - 1
        return left if most is None else min(left, most - sequence.n_output - 1)

    def _drafting(self, sequence: SequenceState) -> Drafting:
        if sequence not in self._of:
            self._of[sequence] = Drafting(self.matcher_of(sequence), Acceptance(self.overall))
        return self._of[sequence]

    def matcher_of(self, sequence: SequenceState) -> Matcher:
        """A new one."""
        return NgramMatcher() if self.method == "ngram" else SuffixMatcher(self._tenant(sequence.request.cache_salt))

    def _tenant(self, salt: str | None) -> Remembered:
        earlier = self._remembered.setdefault(salt, Remembered())
        self._remembered.move_to_end(salt)
        if len(self._remembered) > TENANTS:
            self._remembered.popitem(last=False)
        return earlier

    def note(self, sequence: SequenceState, drafted: int, accepted: int) -> None:
        """A draft was verified."""
        self.stats.drafts += 1
        self.stats.drafted += drafted
        self.stats.accepted += accepted
        self.overall.note(drafted, accepted)
        rows = drafted + (accepted if self.again and accepted < drafted else 0)
        self.credit.note(accepted / self._decoding, self.cost.row_of(self._decoding) * rows)
        if sequence in self._of:
            self._of[sequence].acceptance.note(drafted, accepted)

    def end(self, sequence: SequenceState) -> None:
        """A sequence has ended; its tenant's later ones may repeat its answer."""
        if self._of.pop(sequence, None) is not None and self.method == "suffix":
            self._tenant(sequence.request.cache_salt).add(sequence.output)
