"""Chooses the next token of each sequence, and reports log probabilities.

Letters: R rows (sequences), T positions, V vocabulary. Logits are [R, V] or [T, V], any float type, any device.

A row's result depends on its own logits, parameters, history, seed, index and length, and on nothing else: whatever
rounds is done row by row in float64 on the host. Only the plain greedy rows share one argmax, which does not round.

Order: repetition penalty, frequency and presence penalties, logit_bias, forbidden tokens, mask, temperature, top_k,
top_p, min_p. The filters each keep a prefix of the tokens sorted by descending probability (equals: lower id first), so
one sorted head of the row serves all of them, and only as much of it is sorted as the draw needs.

A mask (of a structured answer) changes a draw only where it has to. The row is drawn from without it first. Without
filters that token counts if it is allowed; with filters, if all tokens that they keep are. Else the row is drawn from
again, masked, by another random number. So a token has the probability that it has in the masked row, and the token
without the mask is the token with it, wherever the mask forbids nothing in its place. (top_p alone sees a difference:
its share is that of the unmasked row where nothing it keeps is forbidden.)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from headrace.engine.logprobs import BadLogits, Ids, Row, check_row, descending, target_logprobs, to_row
from headrace.engine.stopping import forbidden_tokens
from headrace.kernels import ops
from headrace.kernels.model_step import Greatest
from headrace.types import SamplingParams, TokenLogprobs

__all__ = [
    "BadLogits",
    "History",
    "SampleInput",
    "Sampled",
    "forbidden_tokens",
    "is_plain",
    "needs_history",
    "sample",
    "target_logprobs",
    "uniform",
]

Mask = npt.NDArray[np.bool_]

_HEADS = (64, 2048, 16384)
"""Sizes of the sorted head that are tried before the whole row is sorted."""
_EMPTY = np.empty(0, np.int64)
_NONE_LEFT = "no token is left after logit_bias, forbidden tokens and the mask"
_AGAIN = 1 << 128
"""What the counter of a second random number has more than that of the first."""


class History:
    """Token counts of one sequence for the penalties. Owned by the sequence, used by the sampler.

    `ids` are the distinct tokens of prompt and output, `counts` how often each stands in the output (0: prompt only).
    The prompt is looked at when the first token is drawn: what waits costs nothing, and of many answers to a long
    prompt each then costs 16 bytes for each distinct token.
    """

    def __init__(self, prompt: Sequence[int]) -> None:
        self._prompt = prompt
        self._ids: Ids = _EMPTY
        self._counts: Ids = _EMPTY
        self._given = self._number = 0  # distinct tokens of the prompt, and of all
        self._slots: dict[int, int] = {}  # of tokens of the output
        self._seen = -1

    def _begin(self) -> None:
        prompt = self._prompt
        self._ids = np.unique(np.asarray(prompt, np.int64)) if len(prompt) else _EMPTY
        self._counts = np.zeros(len(self._ids), np.int64)
        self._given = self._number = len(self._ids)
        self._slots = {}
        self._seen = 0

    def catch_up(self, output: Sequence[int]) -> None:
        """Counts the tokens of `output` that it has not yet seen; a shorter output than before is counted afresh.

        Tokens once counted must not change.
        """
        if self._seen < 0 or len(output) < self._seen:
            self._begin()
        for at in range(self._seen, len(output)):
            self._add(output[at])
        self._seen = len(output)

    def _add(self, token: int) -> None:
        slot = self._slots.get(token)
        if slot is None:
            slot = self._slots[token] = self._slot_of(token)
            self._number = max(self._number, slot + 1)
        if slot == len(self._ids):
            more = len(self._slots) + 16
            self._ids = np.concatenate([self._ids, np.full(more, -1, np.int64)])
            self._counts = np.concatenate([self._counts, np.zeros(more, np.int64)])
        self._ids[slot] = token
        self._counts[slot] += 1

    def _slot_of(self, token: int) -> int:
        """Of a token of the prompt where it lies; else the next one."""
        slot = int(np.searchsorted(self._ids[: self._given], token))
        return slot if slot < self._given and self._ids[slot] == token else self._number

    @property
    def ids(self) -> Ids:
        return self._ids[: self._number]

    @property
    def counts(self) -> Ids:
        return self._counts[: self._number]


@dataclass(slots=True)
class SampleInput:
    """One row of a batch. `index` is the sequence's number among the request's n; `seed` is resolved by the engine.

    `forbidden`: token ids not allowed now (see forbidden_tokens). `mask`: of each token id, whether it is allowed; some
    token is, and none of `forbidden`. `history` saves recounting when a penalty is on
    (`needs_history`); without one the counts are made afresh from `prompt` and `output`.
    """

    params: SamplingParams
    prompt: Sequence[int]
    output: Sequence[int]
    index: int
    seed: int
    forbidden: tuple[int, ...] = ()
    mask: Mask | None = None
    history: History | None = None


class Sampled(NamedTuple):
    """The chosen token, and its log probabilities where asked for."""

    token: int
    logprobs: TokenLogprobs | None


def needs_history(params: SamplingParams) -> bool:
    """Whether a penalty is on, so that the sequence should own a History."""
    return params.repetition_penalty != 1 or params.presence_penalty != 0 or params.frequency_penalty != 0


def is_plain(params: SamplingParams) -> bool:
    """Greedy, and nothing that changes or reports the logits: the argmax says it all, where no token is forbidden."""
    if not params.greedy or params.logit_bias or params.reports_answer:
        return False
    return not needs_history(params)


def sample(
    logits: torch.Tensor,
    inputs: Sequence[SampleInput | None],
    greatest: Greatest | None = None,
) -> list[Sampled]:
    """The next token of each row of `logits` [R, V]. Log probabilities come without text.

    None for an input: `is_plain`, no token is forbidden and there is no mask. greatest: of each row, if it is known.

    Raises BadLogits (a FloatingPointError naming the row) for NaN, infinity, or nothing left to choose.
    """
    if (greatest is None and logits.ndim != 2) or len(greatest.values if greatest else logits) != len(inputs):
        raise ValueError(f"{len(inputs)} inputs need logits [{len(inputs)}, V], got {list(logits.shape)}")
    plain = [item is None or (is_plain(item.params) and not item.forbidden) for item in inputs]
    values, best = greatest or (_greatest(logits) if any(plain) else ([], []))
    results = []
    for row, item in enumerate(inputs):
        if plain[row] or item is None:
            check_row(row, values[row])
            mask = None if item is None else item.mask
            allowed = mask is None or mask[best[row]]
            results.append(Sampled(best[row] if allowed else _greatest_allowed(logits[row], row, mask), None))
        else:
            results.append(_sample_row(logits[row : row + 1], row, item))
    return results


def uniform(seed: int, index: int, position: int, again: bool = False) -> float:
    """The random number in [0, 1) of (seed, sequence index, number of tokens before): no state, so nothing to restore.
    again: a second one.

    Philox 4x64, whose stream numpy guarantees not to change; the key is (seed, index), the counter the position.
    """
    key, counter = np.array([seed % 2**64, index], np.uint64), position + (_AGAIN if again else 0)
    return (int(np.random.Philox(key=key, counter=counter).random_raw()) >> 11) * 2.0**-53


# ---- one row ---------------------------------------------------------------------------------------------------------


def _greatest(logits: torch.Tensor) -> Greatest:
    values, best = ops.greatest(logits.detach())
    return Greatest(values.tolist(), best.tolist())


def _sample_row(logits: torch.Tensor, number: int, item: SampleInput) -> Sampled:
    """The draw of one row [1, V]; log probabilities are those of the raw logits."""
    raw, params = to_row(logits[0], number), item.params
    row = _adjusted(raw, item)
    token = _choose(row, number, item, masked=False)
    if item.mask is not None and token is None:
        token = _choose(np.where(item.mask, row, -np.inf), number, item, masked=True)
    assert token is not None
    if not params.reports_answer:
        return Sampled(token, None)
    (entries,) = target_logprobs(logits, [token], params.logprobs or 0, params.logprob_token_ids)
    return Sampled(token, entries)


def _choose(row: Row, number: int, item: SampleInput, *, masked: bool) -> int | None:
    """The token of an adjusted row, which the item's mask was applied to or not; None where the mask has a say in it
    and was not applied."""
    params, mask = item.params, None if masked else item.mask
    token = int(row.argmax())
    if row[token] == -np.inf:
        raise BadLogits(number, _NONE_LEFT)
    kept: Ids | None = None
    if not params.greedy:
        token, kept = _draw(row, params, uniform(item.seed, item.index, len(item.output), again=masked))
    if mask is not None and not (mask[token] if kept is None else mask[kept].all()):
        return None
    return token


def _greatest_allowed(logits: torch.Tensor, number: int, mask: Mask | None) -> int:
    """The most likely token that the mask allows, of a row without NaN; equals: the lowest id."""
    assert mask is not None
    row = np.where(mask, logits.detach().to(device="cpu", dtype=torch.float32).numpy(), np.float32(-np.inf))
    token = int(row.argmax())
    if row[token] == -np.inf:
        raise BadLogits(number, _NONE_LEFT)
    return token


def _adjusted(raw: Row, item: SampleInput) -> Row:
    """The row after penalties, bias and forbidden tokens; `raw` itself where there are none (never changed)."""
    params = item.params
    row = raw
    if needs_history(params):
        row = _penalised(row, item)
    if params.logit_bias:
        row = row.copy() if row is raw else row
        row[list(params.logit_bias)] += np.array(list(params.logit_bias.values()), np.float64)
    if item.forbidden:
        row = row.copy() if row is raw else row
        row[[token for token in item.forbidden if token < row.size]] = -np.inf
    return row


def _penalised(raw: Row, item: SampleInput) -> Row:
    """A copy of the row: repetition over prompt and output, then frequency and presence over the output only."""
    params, row = item.params, raw.copy()
    history = item.history or History(item.prompt)
    history.catch_up(item.output)
    ids, counts = history.ids, history.counts
    values = row[ids]
    penalty = params.repetition_penalty
    values = np.where(values > 0, values / penalty, values * penalty)
    row[ids] = values - params.frequency_penalty * counts - params.presence_penalty * (counts > 0)
    return row


# ---- the draw --------------------------------------------------------------------------------------------------------


def _draw(row: Row, params: SamplingParams, u: float) -> tuple[int, Ids | None]:
    """Inverse of the cumulative distribution at `u`, over the filtered tokens in descending order; and the tokens that
    the filters keep, None without filters."""
    if 0 < params.top_k < row.size:
        best = descending(row, params.top_k)
        place, kept = _place(row[best], params, u)
        return int(best[place]), best if kept is None else best[kept]
    return _place(row, params, u)


def _place(row: Row, params: SamplingParams, u: float) -> tuple[int, Ids | None]:
    """_draw after top_k. A head of the sorted row is enough as soon as the cut and the draw both fall inside it."""
    weights = np.exp((row - row.max()) / params.temperature)
    total = float(weights.sum())
    for count in (*_HEADS, row.size):
        head = descending(row, count)
        picked = _pick(weights[head], total, params, u, complete=len(head) == row.size)
        if picked is not None:
            place, kept = picked
            return int(head[place]), head[:kept] if params.top_p < 1 or params.min_p > 0 else None
    raise AssertionError("the whole row always decides")


def _pick(weights: Row, total: float, params: SamplingParams, u: float, complete: bool) -> tuple[int, int] | None:
    """Place drawn by `u` in the descending `weights`, whose whole row sums to `total`; and how many of them are kept.

    None where this head is too short to tell; never where `complete` says that it is the whole row.
    """
    mass = np.cumsum(weights)
    filtered = params.top_p < 1 or params.min_p > 0
    kept = _kept(weights, mass, total, params) if filtered else None
    if kept is None and filtered and not complete:
        return None
    whole = float(mass[(kept or len(mass)) - 1]) if filtered else total
    place = int(np.searchsorted(mass, u * whole, side="right"))
    if kept is None and not complete:
        return (place, len(mass)) if place < len(mass) else None
    # Tokens without weight come last and are never drawn, not even where u * whole was rounded up to the end.
    last = min(kept or len(mass), int(np.count_nonzero(weights)))
    return min(place, last - 1), last


def _kept(weights: Row, mass: Row, total: float, params: SamplingParams) -> int | None:
    """Number of tokens that top_p and min_p keep, at least 1; None: all of this head, and perhaps more."""
    size = len(weights)
    kept = size + 1
    if params.top_p < 1:
        kept = int(np.searchsorted(mass, params.top_p * total, side="left")) + 1
    if params.min_p > 0:
        above = int(np.count_nonzero(weights >= params.min_p))
        kept = min(kept, above if above < size else size + 1)
    return kept if kept <= size else None
