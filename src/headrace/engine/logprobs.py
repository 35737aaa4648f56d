"""Rows of logits, and the log probabilities in them: float64 on the host, row by row.

T: positions, V: vocabulary. A row's result depends on that row alone.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from headrace.types import Logprob, TokenLogprobs

Row = npt.NDArray[np.float64]
"""Logits of one row, [V]."""
Ids = npt.NDArray[np.int64]


class BadLogits(FloatingPointError):
    """A row from which nothing can be chosen. `row` is its number in the batch."""

    def __init__(self, row: int, reason: str) -> None:
        super().__init__(f"logits of row {row}: {reason}")
        self.row = row


def target_logprobs(
    logits: torch.Tensor, targets: Sequence[int], top: int, listed: Sequence[int] = ()
) -> list[TokenLogprobs]:
    """Log probability of targets[i] under row i of `logits` [T, V], with alternatives: `top` most likely tokens or, if
    there are any, the `listed` ones. For a prefill chunk."""
    if len(logits) != len(targets):
        raise ValueError(f"{len(targets)} targets need as many rows of logits, got {len(logits)}")
    scratch = np.empty(logits.shape[1])
    return [row_logprobs(logits[i], i, token, top, listed, scratch) for i, token in enumerate(targets)]


def row_logprobs(
    logits: torch.Tensor, number: int, target: int, top: int, listed: Sequence[int], scratch: Row
) -> TokenLogprobs:
    """`target_logprobs` of one row [V], whose number is told if it is broken. scratch [V]: overwritten."""
    return logprobs_of(*to_row(logits, number), target, top, listed, scratch)


def to_row(logits: torch.Tensor, number: int) -> tuple[Row, float]:
    """The row and its greatest logit."""
    row = logits.detach().to(device="cpu", dtype=torch.float64).numpy()
    peak = float(row.max())
    check_row(number, peak)
    return row, peak


def check_row(number: int, greatest: float) -> None:
    """Raises BadLogits unless the greatest logit of a row is finite; a NaN anywhere in the row makes it NaN."""
    if not math.isfinite(greatest):
        reason = {np.inf: "infinity", -np.inf: "no finite value"}.get(greatest, "NaN")
        raise BadLogits(number, f"{reason}; the model's output is broken")


def descending(row: Row, count: int) -> Ids:
    """Ids of the `count` greatest values, greatest first, equals by id: a prefix of the row's stable sorting."""
    if count >= row.size:
        return _sorted(row)
    edge = np.partition(row, row.size - count)[row.size - count]
    ids = np.flatnonzero(row >= edge)
    return ids[_sorted(row[ids])][:count]


def _sorted(values: Row) -> Ids:
    """Places by descending value, equals in their order. Two unstable sorts are several times faster than a stable one.

    The second sorts (number of the run of equals, place) as one integer.
    """
    order = np.argsort(-values)
    ordered = values[order]
    run = np.zeros(len(order), np.int64)
    np.cumsum(ordered[1:] != ordered[:-1], out=run[1:])
    run *= len(order)
    run += order
    run.sort()
    return run % len(order)


def logprobs_of(
    raw: Row, peak: float, token: int, top: int, listed: Sequence[int] = (), scratch: Row | None = None
) -> TokenLogprobs:
    """log_softmax of the raw row, whose greatest is `peak`, at `token` and at its `top` greatest, most likely first;
    impossible ones left out. listed: tokens to report in place of the greatest, impossible ones too. scratch:
    overwritten; saves an array."""
    weights = np.subtract(raw, peak, out=scratch)
    norm = peak + np.log(np.exp(weights, out=weights).sum())
    if listed:
        return _listed_logprobs(raw, norm, {token, *listed})
    ids = [i for i in descending(raw, top).tolist() if raw[i] > -np.inf] if top else []
    if token not in ids:
        ids.append(token)
    greatest = raw[ids]
    entries: TokenLogprobs = {}
    for place, i in enumerate(ids):
        # Whatever beats one of the greatest is among them; only the last one may be the token from outside.
        rank = 1 + int(np.count_nonzero((raw if place == top else greatest) > raw[i]))
        entries[i] = Logprob(float(raw[i] - norm), rank, "")
    return entries


def _listed_logprobs(raw: Row, norm: float, tokens: set[int]) -> TokenLogprobs:
    """Of these tokens, most likely first, equals by id."""
    ids = sorted(tokens, key=lambda i: (-raw[i], i))
    ranks = 1 + raw.size - np.searchsorted(np.sort(raw), raw[ids], side="right")
    return {i: Logprob(float(raw[i] - norm), int(rank), "") for i, rank in zip(ids, ranks, strict=True)}
