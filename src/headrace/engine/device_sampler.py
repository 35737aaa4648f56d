"""Chooses tokens from logits that lie on a GPU: the tokens that engine.sampler chooses from the same logits.

Letters: R rows of logits, V vocabulary. Random numbers are made on the host, one of 8 bytes for each draw, by the
sampler's own counter; the choice is made on the device (kernels.triton.sampling), and what comes back is some bytes a
row. Rows that the device cannot choose from, or not surely, are copied and chosen from on the host, they alone:
penalties, logit_bias, alternatives beside the chosen token, a grammar's mask together with filters.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from headrace.engine.logprobs import BadLogits
from headrace.engine.sampler import Mask, Sampled, SampleInput, needs_history, sample, uniform
from headrace.kernels.triton.sampling import Chooser, Needs
from headrace.types import Logprob, SamplingParams

FEWEST = 16
"""Rows that memory is taken for at first; twice as many whenever more are chosen from."""


@dataclass(slots=True)
class _Ask:
    """A choice from one row of logits. params: None for the most likely token. mask: of each token, whether it is
    allowed; None for all."""

    source: int
    params: SamplingParams | None = None
    mask: Mask | None = None
    uniform: float = 0.0
    reports: bool = False

    def row(self, mask_row: int) -> list[float]:
        """Of Chooser.asked."""
        params = self.params
        if params is None:
            return [self.source, mask_row, 0.0, 0.0, 1.0, 0.0, 0.0, self.reports]
        filters = (params.temperature, max(params.top_k, 0), params.top_p, params.min_p)
        return [self.source, mask_row, *filters, self.uniform, self.reports]


class DeviceSampler:
    """engine.sampler.sample for logits on a device. `copied` counts the rows that were left to the host."""

    def __init__(self) -> None:
        self.copied = 0
        self._chooser: Chooser | None = None

    def sample(self, logits: Tensor, rows: Sequence[int], inputs: Sequence[SampleInput | None]) -> list[Sampled]:
        """The next token of each of these rows of logits [R, V] fp32; inputs: of each of `rows`.

        Raises BadLogits naming the place in `rows`, and ValueError for logits that are not fp32.
        """
        width = logits.shape[1]
        asks = [_asks(item, row, width) for row, item in zip(rows, inputs, strict=True)]
        found = self._found(logits, [ask for each in asks for ask in each])
        sampled: list[Sampled | None] = []
        for item, each in zip(inputs, asks, strict=True):
            sampled.append(_settled(item, [found.pop(0) for _ in each]))
        left = [place for place, one in enumerate(sampled) if one is None]
        for place, one in zip(left, self._on_host(logits, rows, inputs, left), strict=True):
            sampled[place] = one
        return [one for one in sampled if one is not None]

    def _found(self, logits: Tensor, asks: list[_Ask]) -> list[list[float]]:
        """Rows of Chooser.found."""
        if not asks:
            return []
        chooser, masks = self._prepared(len(asks), logits), [ask.mask for ask in asks if ask.mask is not None]
        places = iter(range(len(masks)))
        asked = [ask.row(-1 if ask.mask is None else next(places)) for ask in asks]
        chooser.asked[: len(asks)].copy_(torch.tensor(asked, dtype=torch.float64))
        if masks:
            chooser.masks[: len(masks)].copy_(packed(masks, chooser.words))
        chooser.choose(logits, len(asks), _needs(asks))
        found: list[list[float]] = chooser.found[: len(asks)].tolist()
        return found

    def _prepared(self, rows: int, logits: Tensor) -> Chooser:
        chooser = self._chooser
        if chooser is None or chooser.rows < rows or chooser.width != logits.shape[1]:
            room = max(FEWEST, 1 << (rows - 1).bit_length())
            self._chooser = chooser = Chooser(room, logits.shape[1], logits.device)
        return chooser

    def _on_host(
        self, logits: Tensor, rows: Sequence[int], inputs: Sequence[SampleInput | None], left: list[int]
    ) -> list[Sampled]:
        if not left:
            return []
        self.copied += len(left)
        numbers = torch.tensor([rows[place] for place in left], device=logits.device)
        try:
            return sample(logits.index_select(0, numbers).cpu(), [inputs[place] for place in left])
        except BadLogits as error:
            raise BadLogits(left[error.row], error.reason) from None


def _asks(item: SampleInput | None, source: int, width: int) -> list[_Ask]:
    """The choices that tell an input's token; none where the host must choose. Two where a mask may change a draw: that
    without it, which counts if it is allowed, and that with it."""
    if item is None:
        return [_Ask(source)]
    params, reports = item.params, item.params.reports_answer
    if needs_history(params) or params.logit_bias or params.logprobs or (reports and params.logprob_token_ids):
        return []
    allowed = _allowed(item, width)
    if params.greedy:
        return [_Ask(source, None, allowed if item.mask is None else item.mask, reports=reports)]
    position = len(item.output)
    free = _Ask(source, params, allowed, uniform(item.seed, item.index, position), reports)
    if item.mask is None:
        return [free]
    if 0 < params.top_k < width or params.top_p < 1 or params.min_p > 0:
        return []  # whether the filters keep a forbidden token is for the host to see
    return [free, _Ask(source, params, item.mask, uniform(item.seed, item.index, position, again=True), reports)]


def _allowed(item: SampleInput, width: int) -> Mask | None:
    """All tokens but the forbidden ones; None for all."""
    if not item.forbidden:
        return None
    allowed = np.ones(width, np.bool_)
    allowed[[token for token in item.forbidden if token < width]] = False
    return allowed


def _needs(asks: list[_Ask]) -> Needs:
    draws = [ask.params for ask in asks if ask.params is not None]
    return Needs(
        reports=any(ask.reports for ask in asks),
        draws=bool(draws),
        top_k=any(params.top_k > 0 for params in draws),
        top_p=any(params.top_p < 1 for params in draws),
    )


def _settled(item: SampleInput | None, found: list[list[float]]) -> Sampled | None:
    """The token that the choices tell; None where the host must choose."""
    if not found:
        return None
    row = found[0]
    token, sure, _, norm, logit, above, *_ = row
    if sure and item is not None and item.mask is not None and not item.mask[int(token)]:
        token, sure, _, norm, logit, above, *_ = found[-1]
    if not sure:
        return None
    if item is None or not item.params.reports_answer:
        return Sampled(int(token), None)
    return Sampled(int(token), {int(token): Logprob(logit - norm, 1 + int(above), "")})


def packed(masks: Sequence[Mask], words: int) -> Tensor:
    """Masks [n, V] as int32 [n, words]: bit i % 32 of word i // 32 says whether token i is allowed."""
    bits = np.zeros((len(masks), 4 * words), np.uint8)
    for row, mask in enumerate(masks):
        part = np.packbits(mask, bitorder="little")
        bits[row, : len(part)] = part
    return torch.from_numpy(bits.view("<i4"))
