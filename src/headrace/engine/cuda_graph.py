"""Steps of decoding on a GPU, recorded once and replayed: what a step costs is then its kernels, not their launches.

T: rows. As long as every sequence goes on within its chunk the plan stays the same but for its positions, which lie in
memory that the recording reads (PlanAttention.go_on): up to 63 steps of 64.
"""

from __future__ import annotations

import torch
from torch import Tensor

from headrace.attention.execute import PlanAttention
from headrace.models.decoder import Decoder, TokenBatch


class CudaGraphStep:
    """`Decoder.forward` and `logits` for one step after another on a CUDA device."""

    def __init__(self, decoder: Decoder) -> None:
        self.decoder = decoder
        self.replayed = 0
        self._attend: PlanAttention | None = None
        self._steps = 0
        self._graph: torch.cuda.CUDAGraph | None = None
        self._x, self._turns, self._logits = torch.empty(0), torch.empty(0), torch.empty(0)

    def step(self, batch: TokenBatch, attend: PlanAttention) -> Tensor:
        """Logits fp32 [T, V] of all rows, valid until the next call. The first step with an `attend` is computed as it
        is, and compiles what is not compiled yet; the second is recorded."""
        if attend is not self._attend:
            self._attend, self._steps, self._graph = attend, 0, None
        self._steps += 1
        x, turns = self.decoder.enter(batch)
        if self._steps == 1:
            return self._rest(x, turns)
        if self._graph is None:
            self._record(x, turns)
        self._x.copy_(x)
        if turns is not None:
            self._turns.copy_(turns)
        assert self._graph is not None
        self._graph.replay()
        self.replayed += 1
        return self._logits

    def _rest(self, x: Tensor, turns: Tensor | None) -> Tensor:
        """All that comes behind the embeddings."""
        assert self._attend is not None
        return self.decoder.logits(self.decoder.leave(self.decoder.layers(x, turns, self._attend)))

    def _record(self, x: Tensor, turns: Tensor | None) -> None:
        self._x, graph = x.clone(), torch.cuda.CUDAGraph()
        self._turns = self._turns if turns is None else turns.clone()
        with torch.cuda.graph(graph):
            self._logits = self._rest(self._x, None if turns is None else self._turns)
        self._graph = graph
