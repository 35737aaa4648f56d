"""Who computes an engine's steps: one rank (engine.runner), one whose KV is streamed (engine.streaming), or several
(engine.driver)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple, Protocol

from torch import Tensor

from headrace.engine.programs import Launched
from headrace.engine.row_copies import Copy
from headrace.engine.sampler import Sampled, SampleInput, sample
from headrace.engine.sequence import SequenceState, Slice
from headrace.kernels.model_step import Greatest
from headrace.kv.chunk_table import ChunkTable, Owners
from headrace.stats import EngineStats

if TYPE_CHECKING:  # it imports Triton
    from headrace.engine.device_sampler import DeviceSampler


class Computed(NamedTuple):
    """Logits of a step, fp32 [R, V], where they were computed, valid until the next one, and the row of each slice from
    which a token is drawn; below it those of its draft. No such slice: no rows, of any width. greatest: of each row,
    where it was found with them. sampled: the tokens of rows, where they were drawn behind the step. timed: whether the
    time until now is the step's: a GPU may still be at it, or have been at the one before.

    reported: hidden states [n, E] of the last n rows of each slice that reports some, ready for Decoder.logits.
    """

    logits: Tensor
    parts: list[tuple[Slice, int]]
    greatest: Greatest | None = None
    reported: Seq[tuple[Slice, Tensor]] = ()
    sampled: Mapping[int, Sampled] | None = None
    timed: bool = True

    def without(self, void: set[SequenceState]) -> Computed:
        """What is left if the rows of some sequences are void."""
        parts = [each for each in self.parts if each[0].sequence not in void]
        return self._replace(parts=parts, reported=[each for each in self.reported if each[0].sequence not in void])

    def copied(self, row: int) -> Tensor:
        """Logits [1, V] of a row, on the CPU, that outlast the step."""
        return self.logits[row : row + 1].to("cpu", copy=True)

    def pick(self, rows: list[int]) -> Tensor:
        """Logits of some of the rows, ascending, none twice."""
        # To ask a tensor for its length takes 20 us between two steps (see engine.programs).
        count = len(self.greatest.values) if self.greatest else len(self.logits)
        return self.logits if len(rows) == count else self.logits[rows]

    def greatest_of(self, rows: list[int]) -> Greatest | None:
        """The greatest of some of the rows, where they were found."""
        if self.greatest is None or len(rows) == len(self.greatest.values):
            return self.greatest
        return self.greatest.of(rows)

    def sample(self, rows: list[int], inputs: Seq[SampleInput | None], device: DeviceSampler | None) -> Seq[Sampled]:
        """The next token of each of these rows, ascending, none twice. device: of logits that lie on a GPU."""
        # What greedy rows want may have been found already; the logits themselves take 0.2 ms to copy.
        if self.greatest is not None and all(item is None for item in inputs):
            return sample(self.logits, inputs, greatest=self.greatest_of(rows))
        if device is not None:
            return device.sample(self.logits, rows, inputs)
        return sample(self.pick(rows), inputs, greatest=self.greatest_of(rows))


class Executor(Protocol):
    """Computes steps. Subclasses override what they have a say in."""

    def run(self, slices: Seq[Slice]) -> Computed:
        """Computes the slices; waits, layer by layer, for their chunks that are still on their way into the pool."""

    @property
    def launches(self) -> bool:
        """Whether `launch` may give steps to a device."""
        return False

    def launch(self, slices: Seq[Slice], before: Mapping[SequenceState, int] | None = None) -> Launched | None:
        """Gives a step none of whose slices reports to the device, and goes on; None if it has to be `run`. before: see
        StepRows; not None: the step before is under way, and that before it has been waited for."""
        return None

    def confirm(self) -> None:
        """Called when a step's tokens have been drawn: raises RankLost if they may be wrong, as a rank is gone that a
        device had waited for."""
        return None

    def owners(self, sequence: SequenceState, start: int, count: int) -> Owners | None:
        """Who shall own the new chunks of a slice that is about to be taken (Scheduler.owners)."""
        return None

    @property
    def copy(self) -> Copy | None:
        """Copies a chunk to another slot before the coming step writes anywhere; None where that does not pay."""
        return None

    def expected_s(self, slices: Seq[Slice]) -> float:
        """Seconds that the prompts of this step, which is about to run, should take; 0.0: nobody knows."""
        return 0.0

    def add_stats(self, stats: EngineStats) -> None:
        """Writes its counters into `stats`."""
        return None

    @property
    def told_late(self) -> bool:
        """Whether its counters go on after the last step, as other ranks tell theirs."""
        return False

    def close(self) -> None:
        """Ends the threads and processes that it started. May be called again."""
        return None


@dataclass(slots=True)
class Wanted:
    """The rows of a step that are needed behind the layers. rows: their numbers, ascending. count: rows from which
    tokens are drawn, or may be. parts: Computed.parts.
    reported: slices that report, and where their rows are among `rows`. drawn: places in `rows` from which tokens are
    drawn; None: all."""

    rows: list[int] = field(default_factory=list)
    count: int = 0
    parts: list[tuple[Slice, int]] = field(default_factory=list)
    reported: list[tuple[Slice, range]] = field(default_factory=list)
    drawn: list[int] | None = None

    def of(self, hidden: Tensor) -> list[tuple[Slice, Tensor]]:
        """Computed.reported, given the hidden states of `rows`."""
        return [(part, hidden[where.start : where.stop]) for part, where in self.reported]

    def computed(self, hidden: Tensor, logits: Callable[[Tensor], Tensor]) -> Computed:
        """What the hidden states of `rows` come to."""
        drawn = hidden if self.drawn is None else hidden[self.drawn]
        return Computed(logits(drawn) if self.parts else drawn, self.parts, None, self.of(hidden))


def wanted_rows(slices: Seq[Slice]) -> Wanted:
    """Of the slices, in this order."""
    wanted, end = Wanted(), 0
    for part in slices:
        end += part.length
        count = wanted_of(part)
        if not count:
            continue
        first = len(wanted.rows)
        wanted.rows.extend(range(end - count, end))
        draws = part.samples and part.sequence.draws
        drawn = 1 + part.drafted if draws else 0
        if wanted.drawn is None and count > drawn:
            wanted.drawn = list(range(first))
        if draws:
            wanted.parts.append((part, wanted.count))
            wanted.count += drawn
            if wanted.drawn is not None:
                wanted.drawn.extend(range(len(wanted.rows) - drawn, len(wanted.rows)))
        if part.sequence.reusable is not None or not draws:
            wanted.reported.append((part, range(first, first + count)))
    return wanted


def wanted_of(part: Slice) -> int:
    """Last rows of a slice that are needed behind the layers."""
    first = part.sequence.reusable
    if first is None:
        return 1 + part.drafted if part.samples else 0
    return max(part.end - max(part.start, first), int(part.samples))


def table_of(part: Slice) -> ChunkTable:
    table = part.sequence.table
    assert table is not None, "a scheduled sequence has a table"
    return table
