"""Who computes an engine's steps: one rank (engine.runner), one whose KV is streamed (engine.streaming), or several
(engine.driver)."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import NamedTuple, Protocol

from torch import Tensor

from headrace.engine.sequence import SequenceState, Slice
from headrace.kernels.model_step import Greatest
from headrace.kv.chunk_table import ChunkTable, Owners
from headrace.offload.restore.transfer import RestoreTransfer
from headrace.stats import EngineStats


class Computed(NamedTuple):
    """Logits of a step, fp32 [R, V], valid until the next one, and which of these rows belong to each slice that asked
    for some. No slice that did: no rows, of any width. greatest: of each row, where it was found with them."""

    logits: Tensor
    parts: list[tuple[Slice, range]]
    greatest: Greatest | None = None

    def pick(self, rows: list[int]) -> tuple[Tensor, Greatest | None]:
        """Logits and greatest ones of some of the rows, ascending, none twice."""
        # To ask a tensor for its length takes 20 us between two steps (see engine.programs).
        count = len(self.greatest.values) if self.greatest else len(self.logits)
        if len(rows) == count:
            return self.logits, self.greatest
        return self.logits[rows], self.greatest and self.greatest.of(rows)


class Executor(Protocol):
    """Computes steps. Subclasses override what they have a say in."""

    def run(self, slices: Seq[Slice], restores: Seq[RestoreTransfer] = ()) -> Computed:
        """Computes the slices. Logits are those of the rows that its sequence reports, and of the last row if it
        samples (wanted_of). restores: whose layers the step waits for; one rank alone has any."""

    def owners(self, sequence: SequenceState, start: int, count: int) -> Owners | None:
        """Who shall own the new chunks of a slice that is about to be taken (Scheduler.owners)."""
        return None

    def expected_s(self, slices: Seq[Slice]) -> float:
        """Seconds that the prompts of this step, which is about to run, should take; 0.0: nobody knows."""
        return 0.0

    def add_stats(self, stats: EngineStats) -> None:
        """Writes its counters into `stats`."""
        return None

    def close(self) -> None:
        """Ends the threads and processes that it started. May be called again."""
        return None


def wanted_rows(slices: list[Slice]) -> tuple[list[int], list[tuple[Slice, range]]]:
    """Rows of the step whose logits are needed, and which of these belong to each slice."""
    rows: list[int] = []
    parts: list[tuple[Slice, range]] = []
    end = 0
    for part in slices:
        end += part.length
        count = wanted_of(part)
        if count:
            parts.append((part, range(len(rows), len(rows) + count)))
            rows.extend(range(end - count, end))
    return rows, parts


def wanted_of(part: Slice) -> int:
    """Last rows of a slice whose logits are needed."""
    first = part.sequence.reusable
    if first is None:
        return int(part.samples)
    return max(part.end - max(part.start, first), int(part.samples))


def table_of(part: Slice) -> ChunkTable:
    table = part.sequence.table
    assert table is not None, "a scheduled sequence has a table"
    return table
