"""Rows of logits, and the log probabilities in them, in float64 on the host.

T: positions, V: vocabulary. A row's result depends on that row alone, however many are looked at together.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt
import torch

from headrace.kernels import ops
from headrace.types import Logprob, TokenLogprobs

Row = npt.NDArray[np.float64]
"""Logits of one row, [V]."""
Ids = npt.NDArray[np.int64]


class BadLogits(FloatingPointError):
    """A row from which nothing can be chosen, and why. `row` is its number in the batch."""

    def __init__(self, row: int, reason: str) -> None:
        super().__init__(f"logits of row {row}: {reason}")
        self.row, self.reason = row, reason


class TargetRows:
    """Rows of logits [T, V], each with a target: what their log probabilities are made of, found for all rows together.

    Reads `logits` later, too, where more than the targets is asked for. Raises ValueError where the targets are more or
    fewer than the rows.
    """

    def __init__(self, logits: torch.Tensor, targets: Sequence[int]) -> None:
        if len(logits) != len(targets):
            raise ValueError(f"{len(targets)} targets need as many rows of logits, got {len(logits)}")
        self._logits, self._targets = logits, targets
        found = ops.softmax_sums(logits, targets)
        self._greatest, self._sums, self._above = (each.tolist() for each in found)
        places = torch.tensor(targets, dtype=torch.int64, device=logits.device)
        self._values = logits.detach().gather(1, places[:, None])[:, 0].double().tolist()

    def logprobs(self, row: int, number: int, top: int, listed: Sequence[int] = ()) -> TokenLogprobs:
        """log_softmax of a row at its target and at its `top` greatest, most likely first, impossible ones left out.

        listed: tokens to report in place of the greatest, impossible ones too. Raises BadLogits telling `number`.
        """
        greatest, token = self._greatest[row], self._targets[row]
        check_row(number, greatest)
        norm = greatest + math.log(self._sums[row])
        rank = 1 + self._above[row]
        if not top and not listed:
            return {token: Logprob(self._values[row] - norm, rank, "")}
        raw = _wide(self._logits[row])
        if listed:
            return _listed_logprobs(raw, norm, {token, *listed})
        ids = [i for i in descending(raw, top).tolist() if raw[i] > -np.inf]
        greatest_ones = raw[ids]
        # Whatever beats one of the greatest is among them; only the target may come from outside.
        entries = {i: Logprob(float(raw[i] - norm), 1 + int((greatest_ones > raw[i]).sum()), "") for i in ids}
        entries.setdefault(token, Logprob(self._values[row] - norm, rank, ""))
        return entries


def target_logprobs(
    logits: torch.Tensor, targets: Sequence[int], top: int, listed: Sequence[int] = ()
) -> list[TokenLogprobs]:
    """TargetRows.logprobs of all rows."""
    rows = TargetRows(logits, targets)
    return [rows.logprobs(i, i, top, listed) for i in range(len(targets))]


def _wide(logits: torch.Tensor) -> Row:
    row: Row = logits.detach().to(device="cpu", dtype=torch.float64).numpy()
    return row


def to_row(logits: torch.Tensor, number: int) -> Row:
    """A row [V]. Raises BadLogits telling its number."""
    row = _wide(logits)
    check_row(number, float(row.max()))
    return row


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


def _listed_logprobs(raw: Row, norm: float, tokens: set[int]) -> TokenLogprobs:
    ids = list(tokens)
    ranks = 1 + raw.size - np.searchsorted(np.sort(raw), raw[ids], side="right")
    return by_rank({i: (float(raw[i]), int(rank)) for i, rank in zip(ids, ranks, strict=True)}, norm)


def by_rank(found: Mapping[int, tuple[float, int]], norm: float) -> TokenLogprobs:
    """Of tokens with these logits and ranks, most likely first, equals by id."""
    ids = sorted(found, key=lambda i: (-found[i][0], i))
    return {i: Logprob(found[i][0] - norm, found[i][1], "") for i in ids}
