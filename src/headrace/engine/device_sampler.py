"""Chooses tokens from logits that lie on a GPU: the tokens that engine.sampler chooses from the same logits.

Letters: R rows of logits, V vocabulary. Random numbers, too, are made on the device (kernels.triton.sampling), by the
sampler's own counters; what comes back is some bytes a row. Rows that the device cannot choose from surely are copied
and chosen from on the host, they alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice, repeat
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from headrace.device import current
from headrace.engine.device_changes import changed, changes
from headrace.engine.logprobs import BadLogits, by_rank
from headrace.engine.sampler import Mask, Sampled, SampleInput, sample
from headrace.kernels.triton.replays import Replays
from headrace.kernels.triton.sampling import (
    ABOVE,
    ASKED,
    CHANGES,
    LOGIT,
    NORM,
    STRAY,
    SURE,
    TOKEN,
    Chooser,
    Needs,
    leaders_of,
)
from headrace.types import Logprob, SamplingParams, TokenLogprobs

FEWEST = 16
"""Rows that memory is taken for at first; twice as many whenever more are chosen from."""


@dataclass(slots=True)
class _Ask:
    """A choice from one row of logits. params: None for the most likely token. mask: of each token, whether it is
    allowed; None for all. watch: of each, whether the filters may keep it; None for all. counters, reports, changes:
    see sample_kernels.SOURCE. listed: tokens whose log probabilities are reported."""

    source: int
    params: SamplingParams | None = None
    mask: Mask | None = None
    watch: Mask | None = None
    counters: tuple[int, int, int, int] = (0, 0, 0, 0)
    reports: int = 0
    changes: int = 0
    listed: Sequence[int] = ()

    def row(self, places: dict[int, int]) -> list[float]:
        """Its row of Chooser.asked. places: of masks, by id."""
        params = self.params
        filters = (0.0, 0.0, 1.0, 0.0)
        if params is not None:
            filters = (params.temperature, max(params.top_k, 0), params.top_p, params.min_p)
        mask, watch = places.get(id(self.mask), -1), places.get(id(self.watch), -1)
        return [self.source, mask, watch, *filters, self.reports, len(self.listed)]


class Found(NamedTuple):
    """Rows of Chooser.found, Chooser.leaders and Chooser.ranked; empty where nothing is reported of them."""

    row: Sequence[float]
    leaders: Sequence[int] = ()
    ranked: Sequence[Sequence[float]] = ()


class DeviceSampler:
    """engine.sampler.sample for logits on a device. `copied` counts the rows that were left to the host."""

    def __init__(self) -> None:
        self.copied = 0
        self._replays: Replays | None = None

    def sample(self, logits: Tensor, rows: Sequence[int], inputs: Sequence[SampleInput | None]) -> list[Sampled]:
        """The next token of each of these rows of logits [R, V] fp32; inputs: of each of `rows`.

        Raises BadLogits naming the place in `rows`, and ValueError for logits that are not fp32.
        """
        wide = _Wide(logits, rows, inputs)
        width = logits.shape[1]
        asks = [asks_of(item, rows[place], width, wide.of(place)) for place, item in enumerate(inputs)]
        found = iter(self._found(logits, [ask for each in asks for ask in each]))
        sampled = [settled(item, list(islice(found, len(each)))) for item, each in zip(inputs, asks, strict=True)]
        left = [place for place, one in enumerate(sampled) if one is None]
        for place, one in zip(left, self._on_host(logits, rows, inputs, left), strict=True):
            sampled[place] = one
        return [one for one in sampled if one is not None]

    def _found(self, logits: Tensor, asks: list[_Ask]) -> list[Found]:
        if not asks:
            return []
        masks = {id(mask): mask for ask in asks for mask in (ask.mask, ask.watch) if mask is not None}
        replays = self.prepared(max(len(asks), len(masks)), logits)
        chooser, needs, room = replays.chooser, needs_of(asks), replays.room(len(asks))
        chooser.request[:room].copy_(requested(asks, {key: place for place, key in enumerate(masks)}, room))
        if masks:
            chooser.masks[: len(masks)].copy_(packed(list(masks.values()), chooser.words))
        if needs.listed:
            chooser.listed[: len(asks) * needs.listed].copy_(listed_by(asks, needs.listed))
        replays.choose(logits, len(asks), needs)
        count, ranked = len(asks), needs.listed * len(asks)
        return told(
            chooser.found[:count].tolist(),
            chooser.leaders[:count].tolist() if needs.leaders else None,
            chooser.ranked[:ranked].view(count, -1, 2).tolist() if ranked else None,
        )

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


class _Wide:
    """Rows of logits that are changed, on their device, as long as this is kept."""

    def __init__(self, logits: Tensor, rows: Sequence[int], inputs: Sequence[SampleInput | None]) -> None:
        others = [(place, item) for place, item in enumerate(inputs) if item is not None and changes(item)]
        self._number = {place: number for number, (place, _) in enumerate(others)}
        if others:
            self._rows = changed(logits, [rows[place] for place, _ in others], [item for _, item in others])

    def of(self, place: int) -> int:
        """The address of the row of a place of inputs; 0: it is not changed."""
        number = self._number.get(place)
        return 0 if number is None else self._rows[number].data_ptr()


def asks_of(item: SampleInput | None, source: int, width: int, changes: int = 0) -> list[_Ask]:
    """The choices that tell an input's token. Two where a mask may change a draw: that without it, which counts if it
    is allowed, and that with it. changes: address of the changed row; 0: there is none."""
    if item is None:
        return [_Ask(source, changes=changes)]
    params, reports = item.params, 0
    listed = params.logprob_token_ids if params.reports_answer else ()
    if params.reports_answer:
        reports = 1 if listed else 1 + (params.logprobs or 0)
    allowed, last = _allowed(item, width), (reports, changes, listed)
    if params.greedy:
        return [_Ask(source, None, allowed if item.mask is None else item.mask, None, (0, 0, 0, 0), *last)]
    seed = (item.seed + 2**63) % 2**64 - 2**63
    counters = (seed, item.index, len(item.output))
    if item.mask is None:
        return [_Ask(source, params, allowed, None, (*counters, 0), *last)]
    watch = item.mask if _filters(params, width) else None
    free = _Ask(source, params, allowed, watch, (*counters, 0), *last)
    return [free, _Ask(source, params, item.mask, None, (*counters, 1), *last)]


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
    reports, listed = max(ask.reports for ask in asks), max(len(ask.listed) for ask in asks)
    return Needs(
        reports=reports > 0,
        leaders=max(reports - 1, 0),
        listed=1 << (listed - 1).bit_length() if listed else 0,
        changed=any(ask.changes for ask in asks),
        draws=bool(draws),
        top_k=any(params.top_k > 0 for params in draws),
        top_p=any(params.top_p < 1 for params in draws),
        watched=any(ask.watch is not None for ask in asks),
    )


def requested(asks: Sequence[_Ask], places: dict[int, int], rows: int) -> Tensor:
    """Chooser.request of these, and rows behind them that take the most likely token of the first row. places: of
    masks, by id."""
    request = np.zeros((rows, CHANGES + 1), np.int64)
    asked = request[:, :ASKED].view(np.float64)
    asked[: len(asks)] = [ask.row(places) for ask in asks]
    asked[len(asks) :] = _Ask(0).row(places)
    request[: len(asks), ASKED:CHANGES] = [ask.counters for ask in asks]
    request[: len(asks), CHANGES] = [ask.changes for ask in asks]
    return torch.from_numpy(request)


def listed_by(asks: Sequence[_Ask], count: int) -> Tensor:
    """Chooser.listed of these: `count` tokens each, of which those behind a row's own are void."""
    listed = np.zeros((len(asks), count), np.int32)
    for row, ask in enumerate(asks):
        listed[row, : len(ask.listed)] = ask.listed
    return torch.from_numpy(listed).view(-1)


def told(found: Sequence[Sequence[float]], leaders: Sequence[Any] | None, ranked: Sequence[Any] | None) -> list[Found]:
    """Of each row. None: no row reports such."""
    none = repeat(())
    return [Found(*each) for each in zip(found, leaders or none, ranked or none, strict=False)]


def settled(item: SampleInput | None, found: Sequence[Found]) -> Sampled | None:
    """The token that the choices tell; None where the host must choose."""
    row, leaders, ranked = found[0]
    if len(found) > 1 and item is not None and item.mask is not None and row[SURE]:
        strays = row[STRAY] if _filters(item.params, len(item.mask)) else not item.mask[int(row[TOKEN])]
        if strays:
            row, leaders, ranked = found[1]
    if not row[SURE]:
        return None
    token = int(row[TOKEN])
    if item is None or not item.params.reports_answer:
        return Sampled(token, None)
    if listed := item.params.logprob_token_ids:
        return Sampled(token, _listed(token, row, listed, ranked))
    return Sampled(token, _reported(token, row, leaders_of(leaders, item.params.logprobs or 0)))


def _listed(
    token: int, row: Sequence[float], listed: Sequence[int], ranked: Sequence[Sequence[float]]
) -> TokenLogprobs:
    """As engine.logprobs.TargetRows.logprobs reports listed tokens."""
    found = {token: (row[LOGIT], row[ABOVE])} | {i: (one[0], one[1]) for i, one in zip(listed, ranked, strict=False)}
    return by_rank({i: (logit, 1 + int(above)) for i, (logit, above) in found.items()}, row[NORM])


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
