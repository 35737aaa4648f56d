"""Steps of decoding that go on from the one before: no plan, no tensors, one C++ call. Most steps of a batch are such.

Between two steps the weights pass through the caches, and all that Python touches comes back from memory: what a step
costs besides its arithmetic is how many things it looks at, not how often.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

from headrace.engine.sequence import Slice
from headrace.kernels.model_step import Greatest, ModelStep


class DecodeFastPath:
    """The steps after one in which every sequence decoded one token: for as long as the same sequences, in the same
    order, go on by one token each, within the chunk in which they are.

    slices: of that step, in the order of the scheduler; order: their numbers in the order of the rows.
    """

    def __init__(self, whole: ModelStep, slices: Seq[Slice], order: list[int]) -> None:
        self.whole = whole
        self._order = order
        self._spans = [range(row, row + 1) for row in range(len(slices))]
        self._known = []
        for part in slices:
            table = part.sequence.table
            assert table is not None, "a scheduled sequence has a table"
            self._known.append((table, table.changes, part.start))
        self._steps = 0

    def tokens(self, slices: Seq[Slice]) -> list[int] | None:
        """The next step's tokens in the order of its rows; None if it does not go on from the one before."""
        if len(slices) != len(self._known):
            return None
        step = self._steps + 1
        tokens = []
        for (sequence, start, length), (table, changes, first) in zip(slices, self._known, strict=True):
            # A table belongs to one sequence, and changes where a chunk begins.
            if sequence.table is not table or table.changes != changes:
                return None
            if start != first + step or length != 1 or len(sequence.tokens) != start + 1:
                return None
            tokens.append(sequence.tokens[start])
        return [tokens[i] for i in self._order]

    def run(self, tokens: list[int], slices: Seq[Slice]) -> tuple[Greatest, list[tuple[Slice, range]]]:
        """Computes the step of these tokens: what is greatest among its logits, which `whole` has, and whose
        they are."""
        greatest = self.whole.run_next(tokens)
        self._steps += 1
        return greatest, [(slices[i], span) for i, span in zip(self._order, self._spans, strict=True)]
