"""One step's arithmetic: slices in, logits out."""

from __future__ import annotations

from collections.abc import Sequence as Seq

import numpy as np
import torch
from torch import Tensor

from headrace.attention import plan as planning
from headrace.attention.execute import PlanAttention
from headrace.engine.sequence import Slice
from headrace.kv.storage import KVStorage
from headrace.models.decoder import Decoder, TokenBatch


class Runner:
    """A model, its KV storage and the attention backend ('reference' or 'cpu')."""

    def __init__(self, decoder: Decoder, storage: KVStorage, backend: str) -> None:
        self.decoder = decoder
        self.storage = storage
        self.backend = backend

    @torch.inference_mode()
    def run(self, slices: Seq[Slice]) -> list[tuple[Slice, Tensor]]:
        """Computes the slices in one pass. Returns, for those that ask for logits, fp32 [rows, V]: all of the slice's
        rows if its sequence wants all, the last row if it samples."""
        tables = [_slots(part) for part in slices]
        order = planning.batch_order(tables)
        ordered = [slices[i] for i in order]
        plan = planning.build([planning.Span(tables[i], slices[i].start, slices[i].length) for i in order])
        attend = PlanAttention(plan, self.storage, self.decoder.config.attention, self.backend, self.decoder.key_bias)
        hidden = self.decoder.forward(self._batch(ordered, plan.positions), attend)
        return self._logits(ordered, hidden)

    def _batch(self, slices: list[Slice], positions: planning.Int64) -> TokenBatch:
        tokens = np.concatenate([part.sequence.tokens[part.start : part.end] for part in slices])
        lengths = None
        if self.decoder.config.rope_depends_on_length:
            prompts = np.repeat([part.sequence.prompt_len for part in slices], [part.length for part in slices])
            lengths = torch.from_numpy(np.maximum(prompts, positions + 1))
        return TokenBatch(torch.from_numpy(tokens.astype(np.int64)), torch.from_numpy(positions), lengths)

    def _logits(self, slices: list[Slice], hidden: Tensor) -> list[tuple[Slice, Tensor]]:
        ends = np.cumsum([part.length for part in slices]).tolist()
        wanted: list[tuple[Slice, range]] = []
        for part, end in zip(slices, ends, strict=True):
            if part.sequence.wants_all_logits and part.start < part.sequence.prompt_len:
                wanted.append((part, range(end - part.length, end)))
            elif part.samples:
                wanted.append((part, range(end - 1, end)))
        if not wanted:
            return []
        rows = [row for _, span in wanted for row in span]
        # All rows, in order, in the usual step of decoding: nothing to pick.
        logits = self.decoder.logits(hidden if len(rows) == len(hidden) else hidden[torch.tensor(rows)])
        return list(zip((part for part, _ in wanted), logits.split([len(span) for _, span in wanted]), strict=True))


def _slots(part: Slice) -> planning.Int32:
    table = part.sequence.table
    assert table is not None, "a scheduled sequence has a table"
    return table.slots
