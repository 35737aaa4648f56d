"""One step's arithmetic: slices in, logits out."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from headrace.attention import plan as planning
from headrace.attention.execute import KeepActivations, PlanAttention
from headrace.engine.cuda_graph import CudaGraphStep
from headrace.engine.decode_fast_path import DecodeFastPath
from headrace.engine.sequence import Slice
from headrace.kernels import registry
from headrace.kernels.model_step import Greatest
from headrace.kv.storage import KVStorage
from headrace.models.config import ModelConfig
from headrace.models.decoder import Decoder, TokenBatch
from headrace.offload.restore.transfer import Restore, Restoring, positions_of
from headrace.types import CHUNK


class Computed(NamedTuple):
    """Logits of a step, fp32 [R, V], valid until the next one, and which of these rows belong to each slice that asked
    for some. No slice that did: no rows, of any width. greatest: of each row, where it was found with them."""

    logits: Tensor
    parts: list[tuple[Slice, range]]
    greatest: Greatest | None = None

    def pick(self, rows: list[int]) -> tuple[Tensor, Greatest | None]:
        """Logits and greatest ones of some of the rows, ascending, none twice."""
        # To ask a tensor for its length takes 20 us between two steps (see engine.decode_fast_path).
        count = len(self.greatest.values) if self.greatest else len(self.logits)
        if len(rows) == count:
            return self.logits, self.greatest
        return self.logits[rows], self.greatest and self.greatest.of(rows)


class Runner:
    """A model, its KV storage and the attention backend ('reference', 'cpu' or 'triton')."""

    def __init__(self, decoder: Decoder, storage: KVStorage, backend: str) -> None:
        self.decoder = decoder
        self.storage = storage
        self.backend = registry.backend(backend)
        self._planner = planning.Planner()
        self._attend: PlanAttention | None = None
        self._replay = CudaGraphStep(decoder) if backend == "triton" else None
        self._going: DecodeFastPath | None = None

    def run(self, slices: Seq[Slice], restores: Seq[Restore] = ()) -> Computed:
        """Computes the slices in one pass. Logits are those of all of a slice's rows if its sequence wants all, of the
        last row if it samples. Each layer's attention waits for that layer of the restores."""
        going, self._going = self._going, None
        tokens = going.tokens(slices) if going is not None and not restores else None
        if going is None or tokens is None:
            del going  # its logits
            return self._run_planned(slices, restores)
        greatest, parts = going.run(tokens, slices)
        self._going = going
        return Computed(going.whole.logits, parts, greatest)

    @torch.inference_mode()
    def _run_planned(self, slices: Seq[Slice], restores: Seq[Restore]) -> Computed:
        order, plan = self._planner.plan([planning.Span(slots_of(each), each.start, each.length) for each in slices])
        ordered = [slices[i] for i in order]
        attend = self._attention(plan)
        keep = KeepActivations(plan, self.storage) if self.storage.keeps_activations else None
        rows, parts = wanted(ordered)
        some = None if len(rows) == plan.rows else torch.tensor(rows, dtype=torch.int64)
        waiting = Restoring(attend, restores, self._project) if restores else attend
        batch = batch_of(self.decoder.config, ordered, plan.positions)
        if not rows:
            return Computed(self.decoder.forward(batch, waiting, some, keep), parts)
        if self._replay is not None and some is None:
            return Computed(self._replay.step(batch, attend).cpu(), parts)  # tokens are chosen on the CPU
        at_once = some is None and keep is None and not restores
        whole = self.decoder.prepare(batch.positions, attend) if at_once else None
        if whole is None:
            return Computed(self.decoder.logits(self.decoder.forward(batch, waiting, some, keep)).cpu(), parts)
        greatest = whole.run(batch.token_ids.tolist())
        if len(parts) == len(slices) == plan.rows:
            self._going = DecodeFastPath(whole, slices, order)
        return Computed(whole.logits, parts, greatest)

    def _attention(self, plan: planning.Plan) -> PlanAttention:
        """Attention by the plan: that of the step before where it can go on."""
        if self._attend is None or not self._attend.go_on(plan):
            spec, bias = self.decoder.config.attention, self.decoder.key_bias
            self._attend = PlanAttention(plan, self.storage, spec, self.backend, bias)
        return self._attend

    def _project(self, layer: int, x: Tensor, chunks: Seq[int], slots: Seq[int], prompt_len: int) -> None:
        """recompute.restore.Project."""
        positions = positions_of(chunks)
        lengths = (positions + 1).clamp(min=prompt_len) if self.decoder.config.rope_depends_on_length else None
        k, v = self.decoder.project(layer, x.flatten(0, 1), positions, lengths)
        where = torch.tensor(slots, dtype=torch.int32).repeat_interleave(CHUNK)
        offsets = torch.arange(CHUNK, dtype=torch.int32).repeat(len(slots))
        self.backend.append(self.storage.pool(layer), k, v, where, offsets)


def batch_of(config: ModelConfig, slices: Seq[Slice], positions: planning.Int64) -> TokenBatch:
    """The rows of the slices as a model takes them."""
    tokens = np.concatenate([part.sequence.tokens[part.start : part.end] for part in slices])
    lengths = None
    if config.rope_depends_on_length:
        lengths = torch.from_numpy(np.maximum(prompts_of(slices), positions + 1))
    return TokenBatch(torch.from_numpy(tokens.astype(np.int64)), torch.from_numpy(positions), lengths)


def prompts_of(slices: Seq[Slice]) -> planning.Int64:
    """Length of each row's prompt."""
    return np.repeat([part.sequence.prompt_len for part in slices], [part.length for part in slices])


def wanted(slices: list[Slice]) -> tuple[list[int], list[tuple[Slice, range]]]:
    """Rows of the step whose logits are needed, and which of these belong to each slice."""
    rows: list[int] = []
    parts: list[tuple[Slice, range]] = []
    end = 0
    for part in slices:
        end += part.length
        wants_all = part.sequence.wants_all_logits and part.start < part.sequence.prompt_len
        if wants_all or part.samples:
            count = part.length if wants_all else 1
            parts.append((part, range(len(rows), len(rows) + count)))
            rows.extend(range(end - count, end))
    return rows, parts


def slots_of(part: Slice) -> planning.Int32:
    table = part.sequence.table
    assert table is not None, "a scheduled sequence has a table"
    return table.slots
