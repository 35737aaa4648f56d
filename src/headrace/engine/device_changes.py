"""Penalties and logit_bias on logits that lie on a device, as engine.sampler applies them on the host.

n: rows that are changed, V: vocabulary. Arithmetic is the host's, in fp64, one rounding for each operation.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from headrace.engine.sampler import History, SampleInput, needs_history

Table = npt.NDArray[np.float64]


def changes(item: SampleInput) -> bool:
    """Whether there are any."""
    return needs_history(item.params) or bool(item.params.logit_bias)


def changed(logits: Tensor, rows: Sequence[int], inputs: Sequence[SampleInput]) -> Tensor:
    """These rows of logits [R, V], penalised and biased: fp64 [n, V], on their device."""
    wide = logits.index_select(0, torch.tensor(rows, device=logits.device)).double()
    flat, width = wide.view(-1), wide.shape[1]
    penalties = [_penalties(item, row * width) for row, item in enumerate(inputs) if needs_history(item.params)]
    if penalties:
        places, counts, repetition, frequency, presence = _sent(penalties, logits.device)
        at = places.long()
        values = flat[at]
        values = torch.where(values > 0, values / repetition, values * repetition)
        flat[at] = values - frequency * counts - presence * (counts > 0)
    biases = [_biases(item, row * width) for row, item in enumerate(inputs) if item.params.logit_bias]
    if biases:
        places, more = _sent(biases, logits.device)
        at = places.long()
        flat[at] = flat[at] + more
    return wide


def _penalties(item: SampleInput, begin: int) -> Table:
    """[5, N]: place behind `begin`, count, and the three penalties of each distinct token."""
    params, history = item.params, item.history or History(item.prompt)
    history.catch_up(item.output)
    table = np.empty((5, len(history.ids)), np.float64)
    table[0], table[1] = begin + history.ids, history.counts
    table[2], table[3], table[4] = params.repetition_penalty, params.frequency_penalty, params.presence_penalty
    return table


def _biases(item: SampleInput, begin: int) -> Table:
    """[2, N]: place behind `begin`, and bias."""
    bias = item.params.logit_bias or {}
    return np.array([[begin + token for token in bias], list(bias.values())], np.float64)


def _sent(tables: Sequence[Table], device: torch.device) -> Tensor:
    return torch.from_numpy(np.concatenate(tables, axis=1)).to(device)
