"""Chooses tokens from logits that lie on a GPU: the tokens that engine.sampler chooses from the same logits.

Letters: R rows of logits, V vocabulary. Random numbers, too, are made on the device (kernels.triton.sampling), by the
sampler's own counters; what comes back is some bytes a row. Rows that the device cannot choose from, or not surely, are
copied and chosen from on the host, they alone: log probabilities of listed tokens or together with penalties or bias.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice, zip_longest

import numpy as np
import torch
from torch import Tensor

from headrace.device import current
from headrace.engine.device_changes import changed, changes
from headrace.engine.logprobs import BadLogits
from headrace.engine.sampler import Mask, Sampled, SampleInput, sample
from headrace.kernels.triton.replays import Replays
from headrace.kernels.triton.sampling import ABOVE, ASKED, LOGIT, NORM, STRAY, SURE, TOKEN, Chooser, Needs, leaders_of
from headrace.types import Logprob, SamplingParams, TokenLogprobs

FEWEST = 16
"""Rows that memory is taken for at first; twice as many whenever more are chosen from."""


@dataclass(slots=True)
class _Ask:
    """A choice from one row of logits. params: None for the most likely token. mask: of each token, whether it is
    allowed; None for all. watch: of each, whether the filters may keep it; None for all. counters, reports: see
    sample_kernels.SOURCE."""

    source: int
    params: SamplingParams | None = None
    mask: Mask | None = None
    watch: Mask | None = None
    counters: tuple[int, int, int, int] = (0, 0, 0, 0)
    reports: int = 0

    def row(self, places: dict[int, int]) -> list[float]:
        """Its row of Chooser.asked. places: of masks, by id."""
        params = self.params
        filters = (0.0, 0.0, 1.0, 0.0)
        if params is not None:
            filters = (params.temperature, max(params.top_k, 0), params.top_p, params.min_p)
        mask, watch = places.get(id(self.mask), -1), places.get(id(self.watch), -1)
        return [self.source, mask, watch, *filters, self.reports]


_Found = tuple[Sequence[float], Sequence[int]]
"""Rows of Chooser.found and Chooser.leaders."""


class DeviceSampler:
    """engine.sampler.sample for logits on a device. `copied` counts the rows that were left to the host."""

    def __init__(self) -> None:
        self.copied = 0
        self._replays: Replays | None = None

    def sample(self, logits: Tensor, rows: Sequence[int], inputs: Sequence[SampleInput | None]) -> list[Sampled]:
        """The next token of each of these rows of logits [R, V] fp32; inputs: of each of `rows`.

        Raises BadLogits naming the place in `rows`, and ValueError for logits that are not fp32.
        """
        sampled: list[Sampled | None] = [None] * len(rows)
        plain = [(place, rows[place]) for place, item in enumerate(inputs) if item is None or not changes(item)]
        self._choose(logits, plain, inputs, sampled)
        if others := [(place, item) for place, item in enumerate(inputs) if item is not None and changes(item)]:
            wide = changed(logits, [rows[place] for place, _ in others], [item for _, item in others])
            self._choose(wide, [(place, row) for row, (place, _) in enumerate(others)], inputs, sampled)
        left = [place for place, one in enumerate(sampled) if one is None]
        for place, one in zip(left, self._on_host(logits, rows, inputs, left), strict=True):
            sampled[place] = one
        return [one for one in sampled if one is not None]

    def _choose(
        self,
        logits: Tensor,
        places: Sequence[tuple[int, int]],
        inputs: Sequence[SampleInput | None],
        sampled: list[Sampled | None],
    ) -> None:
        """Fills in `sampled` at places of `inputs`, each given with its row of logits, where the device is sure."""
        asks = [asks_of(inputs[place], row, logits.shape[1]) for place, row in places]
        found = iter(self._found(logits, [ask for each in asks for ask in each]))
        for (place, _), each in zip(places, asks, strict=True):
            sampled[place] = settled(inputs[place], list(islice(found, len(each))))

    def _found(self, logits: Tensor, asks: list[_Ask]) -> list[_Found]:
        if not asks:
            return []
        masks = {id(mask): mask for ask in asks for mask in (ask.mask, ask.watch) if mask is not None}
        replays = self.prepared(max(len(asks), len(masks)), logits)
        chooser, needs, room = replays.chooser, needs_of(asks), replays.room(len(asks))
        chooser.request[:room].copy_(requested(asks, {key: place for place, key in enumerate(masks)}, room))
        if masks:
            chooser.masks[: len(masks)].copy_(packed(list(masks.values()), chooser.words))
        replays.choose(logits, len(asks), needs)
        found, leaders = chooser.found[: len(asks)].tolist(), []
        if needs.leaders:
            leaders = chooser.leaders[: len(asks)].tolist()
        return list(zip_longest(found, leaders, fillvalue=()))

    def prepared(self, rows: int, logits: Tensor) -> Replays:
        """Memory and launches for a choice of so many rows from logits [R, V]."""
        replays, width = self._replays, logits.shape[1]
        if replays is None or replays.chooser.rows < rows or replays.chooser.width != width:
            room = max(FEWEST, 1 << (rows - 1).bit_length())
            recorder = current().graph if logits.device.type == "cuda" else None
            self._replays = replays = Replays(Chooser(room, width, logits.device), recorder)
        return replays

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


def asks_of(item: SampleInput | None, source: int, width: int) -> list[_Ask]:
    """The choices that tell an input's token; none where the host must choose. Two where a mask may change a draw: that
    without it, which counts if it is allowed, and that with it."""
    if item is None:
        return [_Ask(source)]
    params = item.params
    reports = 1 + (params.logprobs or 0) if params.reports_answer else 0
    if reports and (changes(item) or params.logprob_token_ids):
        return []
    allowed = _allowed(item, width)
    if params.greedy:
        return [_Ask(source, None, allowed if item.mask is None else item.mask, reports=reports)]
    seed = (item.seed + 2**63) % 2**64 - 2**63
    counters = (seed, item.index, len(item.output))
    if item.mask is None:
        return [_Ask(source, params, allowed, None, (*counters, 0), reports)]
    watch = item.mask if _filters(params, width) else None
    free = _Ask(source, params, allowed, watch, (*counters, 0), reports)
    return [free, _Ask(source, params, item.mask, None, (*counters, 1), reports)]


def _filters(params: SamplingParams, width: int) -> bool:
    return 0 < params.top_k < width or params.top_p < 1 or params.min_p > 0


def _allowed(item: SampleInput, width: int) -> Mask | None:
    """All tokens but the forbidden ones; None for all."""
    if not item.forbidden:
        return None
    allowed = np.ones(width, np.bool_)
    allowed[[token for token in item.forbidden if token < width]] = False
    return allowed


def needs_of(asks: list[_Ask]) -> Needs:
    """What these choices need together."""
    draws = [ask.params for ask in asks if ask.params is not None]
    reports = max(ask.reports for ask in asks)
    return Needs(
        reports=reports > 0,
        leaders=max(reports - 1, 0),
        draws=bool(draws),
        top_k=any(params.top_k > 0 for params in draws),
        top_p=any(params.top_p < 1 for params in draws),
        watched=any(ask.watch is not None for ask in asks),
    )


def requested(asks: Sequence[_Ask], places: dict[int, int], rows: int) -> Tensor:
    """Chooser.request of these, and rows behind them that take the most likely token of the first row. places: of
    masks, by id."""
    request = np.zeros((rows, ASKED + 4), np.int64)
    asked = request[:, :ASKED].view(np.float64)
    asked[: len(asks)] = [ask.row(places) for ask in asks]
    asked[len(asks) :] = _Ask(0).row(places)
    request[: len(asks), ASKED:] = [ask.counters for ask in asks]
    return torch.from_numpy(request)


def settled(item: SampleInput | None, found: Sequence[_Found]) -> Sampled | None:
    """The token that the choices tell; None where the host must choose."""
    if not found:
        return None
    row, leaders = found[0]
    if len(found) > 1 and item is not None and item.mask is not None and row[SURE]:
        strays = row[STRAY] if _filters(item.params, len(item.mask)) else not item.mask[int(row[TOKEN])]
        if strays:
            row, leaders = found[1]
    if not row[SURE]:
        return None
    token = int(row[TOKEN])
    if item is None or not item.params.reports_answer:
        return Sampled(token, None)
    return Sampled(token, _reported(token, row, leaders_of(leaders, item.params.logprobs or 0)))


def _reported(token: int, row: Sequence[float], leaders: list[tuple[int, float]]) -> TokenLogprobs:
    """As engine.logprobs.TargetRows.logprobs reports them."""
    norm = row[NORM]
    entries = {i: Logprob(x - norm, 1 + sum(other > x for _, other in leaders), "") for i, x in leaders}
    entries.setdefault(token, Logprob(row[LOGIT] - norm, 1 + int(row[ABOVE]), ""))
    return entries


def packed(masks: Sequence[Mask], words: int) -> Tensor:
    """Masks [n, V] as int32 [n, words]: bit i % 32 of word i // 32 says whether token i is allowed."""
    bits = np.zeros((len(masks), 4 * words), np.uint8)
    for row, mask in enumerate(masks):
        part = np.packbits(mask, bitorder="little")
        bits[row, : len(part)] = part
    return torch.from_numpy(bits.view("<i4"))
