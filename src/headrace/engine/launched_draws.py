"""Choices of tokens that are launched behind a step without waiting for it (engine.overlap): those of
engine.device_sampler that need neither masks, penalties nor bias. Of what is reported there are the chosen token and
the most likely ones.

R: rows of the step.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch

from headrace.device import current
from headrace.engine.device_sampler import DeviceSampler, asks_of, needs_of, requested, settled
from headrace.engine.output import Output
from headrace.engine.programs import Launched
from headrace.engine.sampler import Sampled, SampleInput
from headrace.kernels import step_copies
from headrace.kernels.step_copies import ReadBack, Reading, Sending
from headrace.kernels.triton.sampling import ASKED, SURE, TOKEN, Chooser, Needs

POSITION = ASKED + 2
"""Column of Chooser.request that counts the tokens of the answer before the one that is chosen."""


class Drawn(NamedTuple):
    """Tokens on their way to the host. found, leaders: rows of the chooser's, leaders where some are reported; items:
    by what those rows were chosen whose log probabilities are."""

    found: Reading
    leaders: Reading | None
    items: dict[int, SampleInput]

    def sampled(self) -> dict[int, Sampled]:
        """Waits for them: by row, those of which the device was sure."""
        rows = self.found.wait().numpy()
        sure = np.flatnonzero(rows[:, SURE])
        chosen = {row: Sampled(int(token), None) for row, token in zip(sure.tolist(), rows[sure, TOKEN], strict=True)}
        leaders = None if self.leaders is None else self.leaders.wait()
        for row, item in self.items.items():
            found = settled(item, [(rows[row].tolist(), () if leaders is None else leaders[row].tolist())])
            if found is not None:
                chosen[row] = found
        return chosen


class LaunchedDraws:
    """sampler: whose memory the choices are made in; it may be used whenever no step is under way."""

    def __init__(self, sampler: DeviceSampler) -> None:
        self.sampler = sampler
        self._chooser: Chooser | None = None
        self._outputs: list[Output] = []
        self._items: dict[int, SampleInput] = {}
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
        leaders = self._leaders.begin(chooser.leaders[:rows]) if self._needs.leaders else None
        return Drawn(self._read_back.begin(chooser.found[:rows]), leaders, self._items)

    def _take_memory(self, chooser: Chooser) -> None:
        device, self._chooser = current(), chooser
        self._sending = Sending(tuple(chooser.request.shape), chooser.request.dtype, device)
        self._read_back = ReadBack(chooser.found.numel(), chooser.found.dtype, device)
        self._leaders = ReadBack(chooser.leaders.numel(), chooser.leaders.dtype, device)

    def _ask(self, outputs: list[Output], room: int, width: int) -> None:
        """What each sequence's tokens are drawn by, but for their positions."""
        items = [_input_of(output) for output in outputs]
        asks = [ask for row, item in enumerate(items) for ask in asks_of(item, row, width)]
        assert len(asks) == len(outputs), "the device chooses all of these tokens by itself"
        self._outputs, self._needs, self._request = outputs, needs_of(asks), requested(asks, {}, room)
        self._items = {row: item for row, item in enumerate(items) if item and item.params.reports_answer}


def _input_of(output: Output) -> SampleInput | None:
    """For a token about which nothing is forbidden."""
    if output.plain:
        return None
    sequence = output.sequence
    return SampleInput(sequence.request.params, (), (), sequence.index, output.active.seed)
