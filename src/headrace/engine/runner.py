"""One step's arithmetic on one rank: slices in, logits out."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from itertools import accumulate

import torch
from torch import Tensor

from headrace.attention import plan as planning
from headrace.attention.recurrence import segment_rows
from headrace.attention.steps import StepAttention
from headrace.engine import graphs
from headrace.engine.executor import Computed, Executor, table_of, wanted_rows
from headrace.engine.graph_buckets import PromptGraphs
from headrace.engine.programs import Eager, InCpp, Launched, Logits, Program, StepRows
from headrace.engine.row_copies import Copy
from headrace.engine.sequence import SequenceState, Slice
from headrace.kernels.backend import backend_of, recorded
from headrace.kv.storage import KVStorage, StateStorage
from headrace.models.decoder import Decoder
from headrace.parallel.coming import NOTHING, Coming, wait_for_all
from headrace.stats import EngineStats

log = logging.getLogger(__name__)


class Runner(Executor):
    """A model, its KV storage and the attention backend ('reference', 'cpu' or 'triton'). states: of its recurrent
    layers, if it has some. decoding_rows, prompt_rows: on a GPU larger steps, in which all sequences decode or with
    prompts in them, are not recorded.

    coming: chunks on their way into the storage; may be set.
    """

    def __init__(
        self,
        decoder: Decoder,
        storage: KVStorage,
        backend: str,
        states: StateStorage | None = None,
        decoding_rows: int = 64,
        prompt_rows: int = 0,
    ) -> None:
        self.decoder = decoder
        self.storage = storage
        self.states, self.decoding_rows, self.prompt_rows = states, decoding_rows, prompt_rows
        self.backend = backend_of(backend)
        self.coming: Coming = NOTHING
        self._planner = planning.Planner()
        self._given = False
        attention = StepAttention(storage, decoder.config.attention, self.backend, decoder.key_bias, decoder.sinks)
        self.eager = Eager(decoder, storage, attention, states)
        self.decoding = self._decoding(attention)
        self.mixed = self._mixed()

    def _decoding(self, attention: StepAttention) -> Program:
        """The program of steps all of whose logits are wanted, between whose layers nothing else is done."""
        can = self.backend.capabilities
        if can.graphs:
            recorded(self.backend).verify(self.decoder.config.attention, self.decoder.dtype, self.storage.dtype)
            if self.states is not None:
                recorded(self.backend).verify_recurrent(self.states.spec, self.decoder.dtype)
            return self._graphs() or self.eager
        if self.storage.keeps_activations:
            return self.eager
        in_cpp = can.all_layers and self.decoder.runs_whole and self.storage.dtype != torch.int8
        return InCpp(self.decoder, attention, self.states) if in_cpp else self.eager

    def _graphs(self) -> graphs.CudaGraphs | None:
        """Steps as CUDA graphs, where nothing is against it."""
        why = graphs.obstacle(self.decoder.config)
        if self.decoder.outside is not None:
            why = "experts lie in a file, and the host looks which ones rows meet"
        if why is not None:
            log.info("steps are launched one kernel at a time: %s", why)
            return None
        rows = self.decoding_rows, self.prompt_rows
        return graphs.CudaGraphs(self.decoder, self.storage, recorded(self.backend), self.eager, *rows, self.states)

    def _mixed(self) -> Program:
        """The program of steps some rows of which no token is drawn from."""
        if self.prompt_rows and isinstance(self.decoding, graphs.CudaGraphs):
            return PromptGraphs(self.decoding, self.prompt_rows)
        return self.eager

    def record(self) -> None:
        """On a GPU: records the usual steps."""
        if isinstance(self.mixed, PromptGraphs):
            self.mixed.record_usual()
        if isinstance(self.decoding, graphs.CudaGraphs):
            self.decoding.record_usual()

    def add_stats(self, stats: EngineStats) -> None:
        if isinstance(self.decoding, graphs.CudaGraphs):
            stats.graphs = self.decoding.stats

    def _plan(self, slices: Seq[Slice]) -> planning.PlannedStep:
        return self._planner.plan([planning.TableRows(table_of(part), part.start, part.length) for part in slices])

    @property
    def copy(self) -> Copy | None:
        """See Executor.copy. A recurrent state is that behind a whole chunk; and a GPU computes a few rows more in less
        time than copying them would take."""
        return None if self.states is not None or self.backend.capabilities.graphs else self.storage.copy

    @property
    def launches(self) -> bool:
        return isinstance(self.decoding, graphs.CudaGraphs)

    def launch(self, slices: Seq[Slice], before: Mapping[SequenceState, int] | None = None) -> Launched | None:
        """See Executor.launch: as a CUDA graph."""
        if not isinstance(self.decoding, graphs.CudaGraphs) or (self.coming and self._awaited(slices)):
            return None
        planned = self._plan(slices)
        ordered = [slices[i] for i in planned.order]
        every = all(part.samples and (part.length == 1 or part.drafted == part.length - 1) for part in ordered)
        program = self.decoding if every else self.mixed
        if not isinstance(program, graphs.CudaGraphs | PromptGraphs):
            return None
        ends = accumulate(part.length for part in ordered)
        last = None if every else [end - 1 for part, end in zip(ordered, ends, strict=True) if part.samples]
        step = StepRows(planned, ordered, last, before=before)
        if self.states is not None:
            step.segments = self._segments(slices, planned.order)
        launched = program.launch(step)
        if launched is None:
            return None
        given, self._given = self._given, False
        return launched._replace(timed=before is None and not given)

    def run(self, slices: Seq[Slice]) -> Computed:
        """See Executor.run: one pass."""
        planned = self._plan(slices)
        ordered = [slices[i] for i in planned.order]
        wanted = wanted_rows(ordered)
        every = len(wanted.rows) == planned.first.rows
        awaited = self._awaited(slices) if self.coming else ()
        step = StepRows(planned, ordered, None if every else wanted.rows, wanted.drawn, awaited, self.coming)
        if self.states is not None:
            step.segments = self._segments(slices, planned.order)
        if awaited and every and isinstance(self.decoding, graphs.CudaGraphs):
            # Between a replay's layers nothing can wait. It takes less than launching the layers does.
            wait_for_all(self.coming, awaited, self.decoder.config.attention)
            step.awaited = ()
        program = self.decoding if every else self.mixed
        logits = (self.eager if step.awaited or wanted.reported else program).run(step)
        reported = wanted.of(logits.hidden) if logits.hidden is not None else ()
        return Computed(logits.values, wanted.parts, logits.greatest, reported, timed=self._timed(logits))

    def _timed(self, logits: Logits) -> bool:
        """See Computed. What a GPU is given eagerly nobody has waited for yet."""
        before, self._given = self._given, self.backend.capabilities.graphs and logits.greatest is None
        return not (before or self._given)

    def _segments(self, slices: Seq[Slice], order: list[int]) -> Tensor:
        """Which rows go from which recurrent state to which. order: the slices' numbers in the order of their rows."""
        begins, end = [0] * len(slices), 0
        for number in order:
            begins[number], end = end, end + slices[number].length
        parts = zip(begins, slices, strict=True)
        return segment_rows([(begin, part.start, table_of(part).track.segments) for begin, part in parts])

    def _awaited(self, slices: Seq[Slice]) -> list[int]:
        """Slots of the step, if some of its chunks are still on their way."""
        slots = [slot for part in slices for slot in table_of(part).slots.tolist()]
        return slots if self.coming.pending(slots, len(self.storage.pools) - 1) else []
