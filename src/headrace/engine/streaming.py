"""One step's arithmetic where KV, and maybe the weights, stay outside the fast memory: slices in, logits out."""

from __future__ import annotations

from collections.abc import Sequence as Seq

import numpy as np
import torch
from numpy.typing import NDArray

from headrace.attention import plan as planning
from headrace.engine.adapters import NO_ADAPTER
from headrace.engine.executor import Computed, Executor, table_of, wanted_rows
from headrace.engine.programs import batch_of, prompts_of
from headrace.engine.sequence import Slice
from headrace.offload.streaming.step import StreamBatch
from headrace.offload.streaming.streamer import Streamer
from headrace.stats import EngineStats
from headrace.types import CHUNK, chunks_for


class StreamRunner(Executor):
    """Computes steps over a streamer. batches: into how many the column schedule divides a step."""

    def __init__(self, streamer: Streamer, batches: int) -> None:
        self.streamer, self.batches = streamer, batches
        self.decoder = streamer.decoder

    @torch.inference_mode()
    def run(self, slices: Seq[Slice]) -> Computed:
        """See Executor.run: each slice in one batch."""
        tables = [table_of(part).slots for part in slices]
        order = planning.batch_order(tables)
        spans = [planning.Span(tables[i], slices[i].start, slices[i].length) for i in order]
        ordered = [slices[i] for i in order]
        count = self.batches if self.streamer.options.schedule == "column" else 1
        batches = [self._batch([ordered[i] for i in group], [spans[i] for i in group]) for group in cuts(spans, count)]
        hidden = torch.cat(self.streamer.run(batches))
        return wanted_rows(ordered).computed(hidden, self.decoder.logits)

    def _batch(self, slices: list[Slice], spans: list[planning.Span]) -> StreamBatch:
        plan = planning.build(spans)
        rows = wanted_rows(slices).rows
        prompts = prompts_of(slices) if self.decoder.config.rope_depends_on_length else None
        some = None if len(rows) == plan.rows else torch.tensor(rows, dtype=torch.int64)
        tokens, adapters = batch_of(self.decoder.config, slices, plan.positions), None
        if any(part.sequence.adapter for part in slices):
            each = [part.sequence.adapter or NO_ADAPTER for part in slices]
            adapters = np.repeat(np.array(each, dtype=np.int64), [part.length for part in slices], axis=0)
        return StreamBatch(tokens, plan, some, prompts, adapters)

    def add_stats(self, stats: EngineStats) -> None:
        totals, layers = self.streamer.transfers.totals, self.decoder.config.attention.layers
        stats.stream = {"0": totals.told(self.streamer.options.schedule, layers)}

    def close(self) -> None:
        """Ends the copy streams. May be called again."""
        self.streamer.close()


def cuts(spans: Seq[planning.Span], count: int) -> list[range]:
    """At most `count` runs of the spans (in batch order) with about equally many chunks.

    A chunk that one sequence writes in this step and another attends keeps both in one run: batches read of the store
    only what was there before the step, or what is their own.
    """
    free = _free(spans)
    ends = np.cumsum([len(span.slots) for span in spans])
    marks: list[int] = []
    for part in range(1, count):
        goal = ends[-1] * part / count
        later = [at for at in free if at > (marks[-1] if marks else 0)]
        if later:
            marks.append(min(later, key=lambda at: abs(float(ends[at - 1]) - goal)))
    return [range(low, high) for low, high in zip([0, *marks], [*marks, len(spans)], strict=True)]


def _free(spans: Seq[planning.Span]) -> list[int]:
    """Where a batch may begin: no chunk written in this step is attended on both sides."""
    written = np.unique(np.concatenate([_written(span) for span in spans]))
    first: dict[int, int] = {}
    last: dict[int, int] = {}
    for index, span in enumerate(spans):
        for slot in span.slots[np.isin(span.slots, written)].tolist():
            first.setdefault(slot, index)
            last[slot] = index
    held = {at for slot in first for at in range(first[slot] + 1, last[slot] + 1)}
    return [at for at in range(1, len(spans)) if at not in held]


def _written(span: planning.Span) -> NDArray[np.int32]:
    return span.slots[span.start // CHUNK : chunks_for(span.start + span.rows)]
