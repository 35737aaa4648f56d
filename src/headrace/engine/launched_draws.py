"""Choices of tokens that are launched behind a step without waiting for it (engine.overlap): those of
engine.device_sampler that need neither log probabilities nor masks, penalties or bias.

R: rows of the step.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch

from headrace.device import current
from headrace.engine.device_sampler import DeviceSampler, asks_of, needs_of, requested
from headrace.engine.output import Output
from headrace.engine.programs import Launched
from headrace.engine.sampler import Sampled, SampleInput
from headrace.kernels import step_copies
from headrace.kernels.step_copies import ReadBack, Reading, Sending
from headrace.kernels.triton.sampling import ASKED, SURE, TOKEN, Chooser, Needs

POSITION = ASKED + 2
"""Column of Chooser.request that counts the tokens of the answer before the one that is chosen."""


class Drawn(NamedTuple):
    """Tokens on their way to the host. found: rows of Chooser.found."""

    found: Reading

    def sampled(self) -> dict[int, Sampled]:
        """Waits for them: by row, those of which the device was sure."""
        rows = self.found.wait().numpy()
        sure = np.flatnonzero(rows[:, SURE])
        return {row: Sampled(int(token), None) for row, token in zip(sure.tolist(), rows[sure, TOKEN], strict=True)}


class LaunchedDraws:
    """sampler: whose memory the choices are made in; it may be used whenever no step is under way."""

    def __init__(self, sampler: DeviceSampler) -> None:
        self.sampler = sampler
        self._chooser: Chooser | None = None
        self._outputs: list[Output] = []
        self._needs = Needs()
        self._request = torch.empty(0, 0, dtype=torch.int64)

    def launch(self, launched: Launched, outputs: list[Output]) -> Drawn:
        """Has the token of each row, of these sequences, chosen where the step behind looks it up. Whoever launches has
        waited for the step before the last."""
        rows = len(outputs)
        replays = self.sampler.prepared(rows, launched.logits)
        chooser, room = replays.chooser, replays.room(rows)
        if chooser is not self._chooser:
            self._take_memory(chooser)
        if outputs != self._outputs or len(self._request) != room:
            self._ask(outputs, room, launched.logits.shape[1])
        positions = [part.end - part.sequence.prompt_len for part in launched.slices]
        self._request.numpy()[:rows, POSITION] = positions
        self._sending.send(self._request, chooser.request)
        replays.choose(launched.logits, rows, self._needs)
        step_copies.copy(launched.chosen, chooser.tokens[:rows])
        return Drawn(self._read_back.begin(chooser.found[:rows]))

    def _take_memory(self, chooser: Chooser) -> None:
        device, self._chooser = current(), chooser
        self._sending = Sending(tuple(chooser.request.shape), chooser.request.dtype, device)
        self._read_back = ReadBack(chooser.found.numel(), chooser.found.dtype, device)

    def _ask(self, outputs: list[Output], room: int, width: int) -> None:
        """What each sequence's tokens are drawn by, but for their positions."""
        asks = [ask for row, output in enumerate(outputs) for ask in asks_of(_input_of(output), row, width)]
        assert len(asks) == len(outputs), "the device chooses all of these tokens by itself"
        self._outputs, self._needs, self._request = outputs, needs_of(asks), requested(asks, {}, room)


def _input_of(output: Output) -> SampleInput | None:
    """For a token about which nothing is forbidden."""
    if output.plain:
        return None
    sequence = output.sequence
    return SampleInput(sequence.request.params, (), (), sequence.index, output.active.seed)
