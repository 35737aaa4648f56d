"""Log probabilities of a prompt's tokens, put together as slices of the prompt are computed."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from headrace.engine.sampler import target_logprobs
from headrace.engine.sequence import Slice
from headrace.types import Request, TokenLogprobs

Named = Callable[[TokenLogprobs], TokenLogprobs]
"""Adds the texts of the tokens."""


class PromptLogprobs:
    """Of each position of a prompt its token's log probabilities; None for the first, which nothing predicts, and for
    those before `prompt_logprobs_start`.

    Row p predicts position p + 1:

        | 0 | ... | start - 1 | start | ... | last |
          |            |----------->          ^ the last row predicts the answer
          not computed where the cache has it
    """

    def __init__(self, request: Request) -> None:
        prompt, params = request.prompt_token_ids, request.params
        self._prompt, self._top, self._listed = prompt, params.prompt_logprobs or 0, params.logprob_token_ids
        self.rows: list[TokenLogprobs | None] = [None] * min(len(prompt), max(1, params.prompt_logprobs_start))

    def note(self, part: Slice, logits: Tensor, named: Named) -> None:
        """Takes in the last rows of a slice, one for each row of logits [R, V]. Rows that were known already, before a
        preemption, are replaced. Raises BadLogits."""
        first = part.end - len(logits)
        targets = self._prompt[first + 1 : part.end + 1]
        found = target_logprobs(logits[: len(targets)], targets, self._top, self._listed)
        del self.rows[first + 1 :]
        self.rows.extend(named(entry) for entry in found)
