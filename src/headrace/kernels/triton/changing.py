"""Rows of logits that are penalised and biased on a GPU before a token is chosen from them, without waiting.

N: rows that are changed, V: vocabulary. What a row is changed by lies in memory of its sequence's own (Changes), which
the requests of a step name by address: rows may be in any order, and sequences come and go. So whoever launches holds
the Changes of a step until it has ended.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from headrace.kernels.triton import change_kernels as kernels
from headrace.kernels.triton.launching import direct
from headrace.kernels.triton.sampling import WARPS

BLOCK = 2048
"""Logits of a row that one program takes."""
EXACT = {"enable_fp_fusion": False, "num_warps": WARPS}


class Changes:
    """A sequence's memory on the device. penalised: by the tokens so far; most: tokens that may be biased.

    into fp64 [V]: a row's changed logits. counts int32 [V] (change_kernels.COUNTS), tokens int32 and biases fp64
    [most]: to be filled by copies in the order of the stream. number: of biases that are in use.
    """

    def __init__(self, width: int, penalised: bool, most: int, device: torch.device) -> None:
        self.into = torch.empty(width, dtype=torch.float64, device=device)
        self.counts = torch.empty(width, dtype=torch.int32, device=device) if penalised else None
        self.tokens = torch.empty(most, dtype=torch.int32, device=device)
        self.biases = torch.empty(most, dtype=torch.float64, device=device)
        self.number = 0

    def request(self, row: int, repetition: float, frequency: float, presence: float) -> list[int]:
        """Its row of `change`'s request, for a row of logits."""
        addresses = [0 if each is None else each.data_ptr() for each in (self.counts, self.tokens, self.biases)]
        penalties = np.array([repetition, frequency, presence], np.float64).view(np.int64).tolist()
        return [row, self.into.data_ptr(), *addresses, self.number, *penalties]


REQUEST = kernels.REQUEST.value


def change(logits: Tensor, request: Tensor) -> None:
    """Launches the changes of rows of logits [R, V] fp32; request: int64 [N, 9], see change_kernels.ROW."""
    width = logits.shape[1]
    direct(kernels.change)[-(-width // BLOCK), len(request)](
        logits, logits.stride(0), request, width, BLOCK=BLOCK, **EXACT
    )


def count(request: Tensor, tokens: Tensor) -> None:
    """Launches the counting of the tokens int32 [R] that have been chosen from these rows."""
    direct(kernels.count)[len(request),](request, tokens, num_warps=1)


def counted(ids: Sequence[int] | np.ndarray, counts: Sequence[int] | np.ndarray, width: int) -> Tensor:
    """Changes.counts on the host, of distinct tokens and how often each stands in the answer."""
    found = np.full(width, -1, np.int32)
    found[ids] = counts
    return torch.from_numpy(found)
