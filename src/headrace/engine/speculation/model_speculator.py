"""Speculation by a draft model: says before a step is scheduled how many tokens to draft, and drafts them once the
step's chunks are taken."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass

from headrace.engine.sequence import SequenceState, Slice
from headrace.engine.speculation.draft_costs import TRIAL, AnswerLengths, DraftCost, places
from headrace.engine.speculation.draft_model import AT_ONCE, UNKNOWN, DraftedSequence, DraftModel
from headrace.engine.speculation.lengths import Acceptance
from headrace.engine.speculation.speculator import Speculator


@dataclass(slots=True, eq=False)
class Tried:
    """One sequence. most: tokens that a draft of it may have now."""

    drafted: DraftedSequence
    acceptance: Acceptance
    most: int = 0

    @property
    def sequence(self) -> SequenceState:
        return self.drafted.sequence


@dataclass(slots=True)
class LastStep:
    """The step under way. repeated: rows that the model computes again after it. seconds: of the draft model."""

    decoding: int = 0
    drafted: int = 0
    accepted: int = 0
    repeated: int = 0
    seconds: float = 0.0


class ModelSpeculator(Speculator):
    """most and longest: as Speculator has them."""

    cost: DraftCost

    def __init__(self, model: DraftModel, most: int, longest: int) -> None:
        super().__init__("model", most, min(longest, model.longest), model.again)
        self.model = model
        self.cost = DraftCost(model.cost)
        if model.seconds is not None:
            one, token = model.seconds
            self.cost.passes.note(1, one)
            self.cost.token.note(0, token)
        self.answers = AnswerLengths()
        self._tried: dict[SequenceState, Tried] = {}
        self._first: set[SequenceState] = set()
        """Those of the first trial, for which no account has to pay."""
        self._step = LastStep()
        self.freely = False
        """Whether all is drafted that may be, whatever it costs: to verify that answers are the same. May be set."""

    def propose(self, running: Iterable[SequenceState]) -> None:
        """Gives the sequences that decode as many unknown tokens as are to be drafted (see `complete`)."""
        self._settle_account()
        decoding = [each for each in running if (each.remaining == 1 or each.forced) and not each.held]
        self._step = LastStep(len(decoding))
        tried = self._in_reach(decoding)
        late = [each for each in tried if each.drafted.lacking > AT_ONCE]
        ready = [each for each in tried if each.drafted.lacking <= AT_ONCE]
        if late:
            self._catch_up(late, ready, len(decoding))
        if not self._propose(ready, len(decoding)):
            self.overall.rest()
            self.cost.rest()

    def _in_reach(self, decoding: list[SequenceState]) -> list[Tried]:
        """Sequences that may be drafted for, with what the draft model has of each."""
        found = []
        for sequence in decoding:
            most = min(self.most, self._left(sequence)) if sequence.n_output else 0
            if most > 0:
                if sequence not in self._tried:
                    self._tried[sequence] = Tried(DraftedSequence(sequence), Acceptance(self.overall))
                found.append(self._tried[sequence])
                found[-1].most = most
                found[-1].drafted.follow()
        return found

    def _propose(self, ready: list[Tried], decoding: int) -> bool:
        """Whether there is a draft."""
        counts = [0] * len(ready)
        if not self.cost.stale and (self.on_trial or self.cost.account.may_draft):
            shares, most = [each.acceptance.share for each in ready], [each.most for each in ready]
            cost = self.cost.of_pass(decoding)
            counts, _ = places(max(1, decoding), shares, most, self.cost.row, cost, self.again)
        if self.on_trial and not self.cost.stale:
            counts = [max(1, count) for count in counts]
        if self.freely:
            counts = [each.most for each in ready]
        for each, count in zip(ready, counts, strict=True):
            each.sequence.draft = [UNKNOWN] * count
            if not count:
                each.acceptance.rest()
        return any(counts)

    @property
    def on_trial(self) -> bool:
        """Whether too little was drafted to judge: so long one token at least is drafted for each sequence."""
        return self.stats.drafted < TRIAL

    def _catch_up(self, late: list[Tried], ready: list[Tried], decoding: int) -> None:
        """Has the draft model compute what it lacks of sequences, if that should pay."""
        spent, worth = 0.0, self._worth([*ready, *late], decoding) - self._worth(ready, decoding)
        if not self.cost.account.spent:
            self._first.update(each.sequence for each in late)
        paying: list[DraftedSequence] = []
        for each in late:
            spent += each.drafted.lacking * self.cost.of_token(decoding)
            if self.freely or (spent <= worth and (each.sequence in self._first or self.cost.account.affords(spent))):
                paying.append(each.drafted)
        if paying:
            began = time.perf_counter()
            count = self.model.catch_up(paying)
            took = time.perf_counter() - began
            self.cost.account.spent += took
            self.cost.token.note(0, took / count)

    def _worth(self, tried: list[Tried], decoding: int) -> float:
        """Seconds that drafts for these should save in the rest of their answers."""
        shares, most = [each.acceptance.share for each in tried], [each.most for each in tried]
        _, faster = places(decoding, shares, most, self.cost.row, self.cost.of_pass(decoding), self.again)
        left = [self.answers.left(each.sequence.n_output, self._left(each.sequence)) for each in tried]
        steps = sum(left) / max(1, len(left))
        return steps * (self.cost.steps.of(decoding) or 0.0) * (1 - 1 / faster)

    def complete(self, slices: Iterable[Slice]) -> None:
        """Has the draft model say the unknown tokens of the step's drafts."""
        drafting = [self._tried[part.sequence].drafted for part in slices if part.sequence.draft]
        if not drafting:
            return
        began = time.perf_counter()
        for each in drafting:
            each.follow()
        self.model.draft(drafting, self.cost.note_pass)
        self._step.seconds = time.perf_counter() - began

    def note(self, sequence: SequenceState, drafted: int, accepted: int) -> None:
        """A draft was verified."""
        super().note(sequence, drafted, accepted)
        self._step.drafted += drafted
        self._step.accepted += accepted
        if self.again and accepted < drafted:
            self._step.repeated += accepted
        self._tried[sequence].acceptance.note(drafted, accepted)
        self._tried[sequence].drafted.follow()

    def _settle_account(self) -> None:
        """Notes what the drafts of the step before have brought and taken."""
        step, plain = self._step, self.cost.steps.of(self._step.decoding)
        if step.drafted and plain is not None:
            brought = step.accepted / step.decoding - self.cost.row * (step.drafted + step.repeated)
            self.cost.account.saved += plain * brought - step.seconds

    def end(self, sequence: SequenceState) -> None:
        """A sequence has ended."""
        self._first.discard(sequence)
        if self._tried.pop(sequence, None) is not None:
            self.answers.note(sequence.n_output)
