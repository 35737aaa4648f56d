"""How the router of a model with experts chooses, for every room."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

CORRECTION = "routing.e_score_correction_bias"
"""The corrections of a layer's router, fp32 [E], among its vectors."""
Scores = Literal["softmax", "sigmoid"]


@dataclass(frozen=True, slots=True)
class RoutingSpec:
    """How a router's logits choose a row's experts, and the share that each has in the row, all in fp32.

    scores: what logits become: a softmax over all experts, or the sigmoid of each. corrected: to the score of an expert
    its correction is added, for the choice alone. groups: experts lie in so many groups of one size, of which those of
    the `met_groups` best can be chosen; a group is as good as the sum of its `summed` best experts. scale: shares are
    multiplied by it, after they have been divided by their sum. weighs_inputs: what enters an expert is multiplied by
    its share, rounded, and what experts make is added up as it is (Llama 4).

    DeepSeek-V3 (arXiv 2412.19437, section 2.1.2) has all of it; DeepSeek-V2 (arXiv 2405.04434, section 2.1.2) softmax
    scores and groups as good as their best expert.
    """

    scores: Scores = "softmax"
    corrected: bool = False
    groups: int = 1
    met_groups: int = 1
    summed: int = 1
    scale: float = 1.0
    weighs_inputs: bool = False

    def obstacle(self, count: int, chosen: int) -> str | None:
        """Why `chosen` of `count` experts cannot be chosen so; None: they can."""
        if not 1 <= chosen <= count:
            return f"{chosen} of {count} experts cannot be chosen"
        if self.groups < 1 or count % self.groups:
            return f"{count} experts do not make {self.groups} groups of one size"
        if not 1 <= self.met_groups <= self.groups:
            return f"{self.met_groups} of {self.groups} groups of experts cannot be chosen"
        size = count // self.groups
        if not 1 <= self.summed <= size:
            return f"groups of {size} experts have no {self.summed} best ones"
        if chosen > self.met_groups * size:
            return f"{self.met_groups} groups of {size} experts are too few to choose {chosen} of"
        return None


SOFTMAX = RoutingSpec()
"""The greatest of a softmax."""
