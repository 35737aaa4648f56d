"""One step's arithmetic on one rank: slices in, logits out."""

from __future__ import annotations

from collections.abc import Sequence as Seq

import torch
from torch import Tensor

from headrace.attention import plan as planning
from headrace.attention.execute import StepAttention
from headrace.engine.executor import Computed, Executor, table_of, wanted_rows
from headrace.engine.programs import CudaGraph, Eager, InCpp, Program, StepRows
from headrace.engine.sequence import Slice
from headrace.kernels.backend import backend_of
from headrace.kv.storage import KVStorage
from headrace.models.decoder import Decoder
from headrace.offload.restore.transfer import RestoreTransfer, positions_of
from headrace.types import CHUNK


class Runner(Executor):
    """A model, its KV storage and the attention backend ('reference', 'cpu' or 'triton')."""

    def __init__(self, decoder: Decoder, storage: KVStorage, backend: str) -> None:
        self.decoder = decoder
        self.storage = storage
        self.backend = backend_of(backend)
        self._planner = planning.Planner()
        attention = StepAttention(storage, decoder.config.attention, self.backend, decoder.key_bias)
        self.eager = Eager(decoder, storage, attention, self._project)
        self.decoding = self._decoding(attention)

    def _decoding(self, attention: StepAttention) -> Program:
        """The program of steps all of whose logits are wanted, between whose layers nothing else is done."""
        if self.storage.keeps_activations:
            return self.eager
        can = self.backend.capabilities
        if can.graphs:
            return CudaGraph(self.decoder, attention)
        in_cpp = can.all_layers and self.decoder.runs_whole and self.storage.dtype != torch.int8
        return InCpp(self.decoder, attention) if in_cpp else self.eager

    def run(self, slices: Seq[Slice], restores: Seq[RestoreTransfer] = ()) -> Computed:
        """See Executor.run: one pass. Each layer's attention waits for that layer of the restores."""
        rows = [planning.TableRows(table_of(part), part.start, part.length) for part in slices]
        planned = self._planner.plan(rows)
        ordered = [slices[i] for i in planned.order]
        wanted = wanted_rows(ordered)
        every = len(wanted.rows) == planned.first.rows
        step = StepRows(planned, ordered, None if every else wanted.rows, wanted.drawn, restores)
        program = self.decoding if every and not restores and not wanted.reported else self.eager
        logits = program.run(step)
        reported = wanted.of(logits.hidden) if logits.hidden is not None else ()
        return Computed(logits.values, wanted.parts, logits.greatest, reported)

    def _project(self, layer: int, x: Tensor, chunks: Seq[int], slots: Seq[int], prompt_len: int) -> None:
        """offload.restore.transfer.Project."""
        positions = positions_of(chunks)
        lengths = (positions + 1).clamp(min=prompt_len) if self.decoder.config.rope_depends_on_length else None
        k, v = self.decoder.project(layer, x.flatten(0, 1), positions, lengths)
        where = torch.tensor(slots, dtype=torch.int32).repeat_interleave(CHUNK)
        offsets = torch.arange(CHUNK, dtype=torch.int32).repeat(len(slots))
        self.backend.append(self.storage.pool(layer), k, v, where, offsets)
