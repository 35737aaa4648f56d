"""Choices of tokens that are launched behind a step without waiting for it (engine.overlap): all those of
engine.device_sampler but for masks, which the host makes of the tokens before.

R: rows of the step.
"""

from __future__ import annotations

import logging
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from headrace.device import current
from headrace.engine.device_sampler import DeviceSampler, asks_of, listed_by, needs_of, requested, settled, told
from headrace.engine.kept_changes import KeptChanges
from headrace.engine.output import Output
from headrace.engine.programs import Launched
from headrace.engine.sampler import Sampled, SampleInput
from headrace.kernels import step_copies
from headrace.kernels.step_copies import ReadBack, Reading, Sending, Uploads
from headrace.kernels.triton import changing
from headrace.kernels.triton.sampling import ASKED, SURE, TOKEN, Chooser, Needs

log = logging.getLogger(__name__)

POSITION = ASKED + 2
"""Column of Chooser.request that counts the tokens of the answer before the one that is chosen."""


class Drawn(NamedTuple):
    """Tokens on their way to the host. found, leaders, ranked: rows of the chooser's, the last two where some are
    reported; items: by what those rows were chosen whose log probabilities are. kept: of the rows that are changed."""

    found: Reading
    leaders: Reading | None
    ranked: Reading | None
    items: dict[int, SampleInput]
    kept: dict[int, KeptChanges]

    def sampled(self) -> dict[int, Sampled]:
        """Waits for them: by row, those of which the device was sure."""
        rows = self.found.wait().numpy()
        sure = np.flatnonzero(rows[:, SURE])
        chosen = {row: Sampled(int(token), None) for row, token in zip(sure.tolist(), rows[sure, TOKEN], strict=True)}
        leaders, ranked = (each and each.wait() for each in (self.leaders, self.ranked))
        for row, item in self.items.items():
            more = (None if each is None else each[row : row + 1].tolist() for each in (leaders, ranked))
            found = settled(item, told([rows[row].tolist()], *more))
            if found is not None:
                chosen[row] = found
        for row, kept in self.kept.items():
            if row not in chosen:
                kept.forget()
        return chosen


class LaunchedDraws:
    """sampler: whose memory the choices are made in; it may be used whenever no step is under way. width: of logits.
    eos: tokens that may end an answer."""

    def __init__(self, sampler: DeviceSampler, width: int, eos: tuple[int, ...]) -> None:
        self.sampler, self.width, self.eos = sampler, width, eos
        self._chooser: Chooser | None = None
        self._uploads: Uploads | None = None
        self._outputs: list[Output] = []
        self._forbids: list[bool] = []
        self._kept: dict[int, KeptChanges] = {}
        self._items: dict[int, SampleInput] = {}
        self._needs, self._sent, self._short = Needs(), 0, False
        self._request = self._listed = torch.empty(0, 0, dtype=torch.int64)

    def takes(self, output: Output) -> bool:
        """Whether `launch` may choose the sequence's tokens: the device has memory for what changes its logits."""
        if output.kept is None and output.changes(output.sequence.n_output):
            try:
                place, sequence = current().place, output.sequence
                output.kept = KeptChanges(sequence, output.history, self.width, self.eos, place)
            except torch.OutOfMemoryError:
                if not self._short:
                    log.warning("steps wait for the host: the device has no memory for penalties or biases")
                self._short = True
                return False
        return True

    def launch(self, launched: Launched, outputs: list[Output]) -> Drawn:
        """Has the token of each row, of these sequences, chosen where the step behind looks it up. Whoever launches has
        waited for the step before the last, and asked `takes` of each."""
        rows, logits = len(outputs), launched.logits
        replays = self.sampler.prepared(rows, logits)
        chooser, room = replays.chooser, replays.room(rows)
        if chooser is not self._chooser:
            self._take_memory(chooser)
        positions = [part.end - part.sequence.prompt_len for part in launched.slices]
        forbids = [output.forbids(position) for output, position in zip(outputs, positions, strict=True)]
        if outputs != self._outputs or forbids != self._forbids or len(self._request) != room:
            self._outputs, self._forbids = outputs, forbids
            self._ask([output.changes(position) for output, position in zip(outputs, positions, strict=True)], room)
        self._request.numpy()[:rows, POSITION] = positions
        self._sending.send(self._request, chooser.request)
        if listed := self._needs.listed:
            self._sending_listed.send(self._listed, chooser.listed)
        request = self._change(logits, positions) if self._kept else None
        replays.choose(logits, rows, self._needs)
        if request is not None:
            changing.count(request, chooser.tokens)
        step_copies.copy(launched.chosen, chooser.tokens[:rows])
        leaders = self._leaders.begin(chooser.leaders[:rows]) if self._needs.leaders else None
        ranked = self._ranked.begin(chooser.ranked[: rows * listed].view(rows, listed, 2)) if listed else None
        return Drawn(self._read_back.begin(chooser.found[:rows]), leaders, ranked, self._items, self._kept)

    def _take_memory(self, chooser: Chooser) -> None:
        device, self._chooser, self._sent = current(), chooser, 0
        self._sending = Sending(tuple(chooser.request.shape), chooser.request.dtype, device)
        self._sending_listed = Sending(tuple(chooser.listed.shape), chooser.listed.dtype, device)
        self._read_back = ReadBack(chooser.found.numel(), chooser.found.dtype, device)
        self._leaders = ReadBack(chooser.leaders.numel(), chooser.leaders.dtype, device)
        self._ranked = ReadBack(chooser.ranked.numel(), chooser.ranked.dtype, device)
        self._changes = torch.empty(chooser.rows, changing.REQUEST, dtype=torch.int64, device=chooser.device)
        self._sending_changes = Sending(tuple(self._changes.shape), self._changes.dtype, device)

    def _ask(self, changed: list[bool], room: int) -> None:
        """What each sequence's tokens are drawn by, but for their positions. changed: whose logits are."""
        outputs = self._outputs
        items = [_input_of(output) for output in outputs]
        kept = {row: output.kept for row, output in enumerate(outputs) if changed[row] and output.kept is not None}
        assert len(kept) == sum(changed), "it has been asked whether there is memory"
        into = {row: each.memory.into.data_ptr() for row, each in kept.items()}
        asks = [ask for row, item in enumerate(items) for ask in asks_of(item, row, self.width, into.get(row, 0))]
        assert len(asks) == len(outputs), "the device chooses all of these tokens by itself"
        self._kept, self._needs, self._sent = kept, needs_of(asks), 0
        self._request, self._listed = requested(asks, {}, room), listed_by(asks, self._needs.listed)
        self._items = {row: item for row, item in enumerate(items) if item and item.params.reports_answer}

    def _change(self, logits: Tensor, positions: list[int]) -> Tensor:
        """Launches the changes of rows; their request on the device."""
        if self._sent and all([kept.follows(positions[row]) for row, kept in self._kept.items()]):
            for kept in self._kept.values():
                kept.count()
        else:
            if self._uploads is None:
                self._uploads = Uploads(8 * self.width, current())
            uploads = self._uploads
            rows = [kept.prepare(row, positions[row], uploads) for row, kept in self._kept.items()]
            self._sending_changes.send(torch.tensor(rows, dtype=torch.int64), self._changes)
            self._sent = len(rows)
        request = self._changes[: self._sent]
        changing.change(logits, request)
        return request


def _input_of(output: Output) -> SampleInput | None:
    """For a token about which nothing is forbidden."""
    if output.plain:
        return None
    sequence = output.sequence
    return SampleInput(sequence.request.params, (), (), sequence.index, output.active.seed)
