"""What changes a sequence's logits before its tokens are chosen, kept on a GPU from step to step: how often each token
stands in its answer, and what is added to logits.

A step launched ahead counts the token that it chooses itself (kernels.triton.changing), since the host does not know
it. What the device has counted may turn out to be another token, or none: then `forget` has it all sent again.
"""

from __future__ import annotations

import numpy as np
import torch

from headrace.engine.sampler import History
from headrace.engine.sequence import SequenceState
from headrace.engine.stopping import forbidden_tokens
from headrace.kernels.step_copies import Uploads
from headrace.kernels.triton.changing import Changes, counted


class KeptChanges:
    """Of one sequence. history: its tokens, for penalties. width: of its logits. eos: tokens that may end it. Raises
    torch.OutOfMemoryError."""

    def __init__(
        self,
        sequence: SequenceState,
        history: History | None,
        width: int,
        eos: tuple[int, ...],
        device: torch.device,
    ) -> None:
        self.sequence, self.history, self.width, self.eos = sequence, history, width, eos
        self._counted, self._biases_of = -1, dict[int, float]()
        most = len(self._biases(0) | self._biases(sequence.request.params.min_tokens))
        self.memory = Changes(width, history is not None, most, device)

    def prepare(self, row: int, position: int, uploads: Uploads) -> list[int]:
        """Sends what the device lacks to change a row of logits from which the token of this place in the answer is
        chosen, and then counted; the row's request. Of the tokens before it the host knows all that the device has not
        counted."""
        params, biases = self.sequence.request.params, self._biases(position)
        if biases != self._biases_of:
            self._send_biases(biases, uploads)
        if self.memory.counts is not None and not self.follows(position):
            self._send_counts(position, uploads)
        self._counted = position + 1
        return self.memory.request(row, params.repetition_penalty, params.frequency_penalty, params.presence_penalty)

    def follows(self, position: int) -> bool:
        """Whether the device has counted all tokens before this place."""
        return self._counted == position

    def count(self) -> None:
        """The device counts a token more."""
        self._counted += 1

    def forget(self) -> None:
        """What was counted last is not the token."""
        self._counted = -1

    def _send_biases(self, biases: dict[int, float], uploads: Uploads) -> None:
        self._biases_of, self.memory.number = biases, len(biases)
        if biases:
            uploads.send(torch.tensor(list(biases), dtype=torch.int32), self.memory.tokens)
            uploads.send(torch.tensor(list(biases.values()), dtype=torch.float64), self.memory.biases)

    def _biases(self, position: int) -> dict[int, float]:
        """By token. Forbidden ones have no chance left."""
        params = self.sequence.request.params
        forbidden = [token for token in forbidden_tokens(params, position, self.eos) if token < self.width]
        return (params.logit_bias or {}) | dict.fromkeys(forbidden, -np.inf)

    def _send_counts(self, position: int, uploads: Uploads) -> None:
        history, output = self.history, self.sequence.output
        assert history is not None and self.memory.counts is not None
        assert len(output) == position, "the host knows all tokens that the device has not counted"
        history.catch_up(output)
        uploads.send(counted(history.ids, history.counts, self.width), self.memory.counts)
