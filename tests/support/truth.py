"""How far logits in fp32 are from those in fp64, ours beside those of transformers.

Where logits are large, fp32 itself is more than 1e-4 from the truth, and so may two ways of rounding differ by more.
Which ones are, depends on the instruction set by which torch draws the weights and computes.
"""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel


@torch.no_grad()
def exact_logits(model: PreTrainedModel, tokens: list[int]) -> Tensor:
    """Logits [T, V] of transformers in fp64, which its grouped products of experts do not have; the recurrence of gated
    delta nets is fp32 there, too."""
    exact: Any = deepcopy(model).double()
    for module in exact.modules():
        if hasattr(module, "config"):
            module.config._experts_implementation = "eager"
    logits: Tensor = exact(torch.tensor([tokens])).logits[0]
    return logits.float()


def as_near(ours: Tensor, theirs: Tensor, exact: Tensor) -> bool:
    """Whether our logits are as near to the truth as theirs."""
    return bool((ours - exact).norm() <= 1.25 * (theirs - exact).norm())
