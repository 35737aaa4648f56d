"""What requests report of their prompts, put together as slices of these are computed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from headrace.engine.executor import Computed
from headrace.engine.logprobs import BadLogits, TargetRows
from headrace.engine.pooled import Pooled
from headrace.engine.sequence import SequenceState, Slice
from headrace.types import Delta, Logprob, Request, TokenLogprobs

if TYPE_CHECKING:
    from headrace.engine.tokenizer import Tokenizer
    from headrace.models.decoder import Decoder

Observer = Callable[[SequenceState, int, Tensor], None]
"""Called with (sequence, position of the first row, logits fp32 [rows, V]) for all logits computed. For tests."""

LOGITS_BYTES = 16 << 20
"""Of the logits that are held at a time: a prompt's are as many as its tokens times the vocabulary. Of 32 MiB and more
malloc would map new pages for each piece (a tenth of the product's time)."""


class Head:
    """From hidden states to logits, and from tokens to their texts."""

    def __init__(self, decoder: Decoder, tokenizer: Tokenizer | None) -> None:
        self._decoder, self._tokenizer = decoder, tokenizer

    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Tensor:
        """hidden [n, E] -> fp32 [n, V], on the CPU."""
        return self._decoder.logits(hidden).cpu()

    @torch.inference_mode()
    def classify(self, hidden: Tensor) -> Tensor:
        """hidden [n, E] -> fp32 [n, labels], on the CPU."""
        return self._decoder.classify(hidden).cpu()

    @property
    def rows(self) -> int:
        """Rows whose logits are computed at a time."""
        return max(1, LOGITS_BYTES // (4 * self._decoder.config.vocab_size))

    def named(self, entry: TokenLogprobs) -> TokenLogprobs:
        """With the texts of the tokens."""
        tokenizer = self._tokenizer
        if tokenizer is None:
            return entry
        return {token: Logprob(i.logprob, i.rank, tokenizer.token_text(token)) for token, i in entry.items()}


def show(computed: Computed, head: Head, observer: Observer) -> None:
    """All logits of a step to whoever watches."""
    for part, hidden in computed.reported:
        observer(part.sequence, part.end - len(hidden), head.logits(hidden))
    seen = {part.sequence for part, _ in computed.reported}
    for part, row in computed.parts:
        if part.sequence not in seen:
            observer(part.sequence, part.end - 1 - part.drafted, computed.copied(row))


class PromptLogprobs:
    """Of each position of a prompt its token's log probabilities; None for the first, which nothing predicts, and for
    those before `prompt_logprobs_start`.

    Row p predicts position p + 1:

        | 0 | ... | start - 1 | start | ... | last |
          |            |----------->          ^ the last row predicts the answer
          not computed where the cache has it
    """

    def __init__(self, request: Request, head: Head) -> None:
        prompt, params = request.prompt_token_ids, request.params
        self._prompt, self._head = prompt, head
        self._top, self._listed = params.prompt_logprobs or 0, params.logprob_token_ids
        self._start = max(1, params.prompt_logprobs_start)
        self.rows: list[TokenLogprobs | None] = [None] * min(len(prompt), self._start)

    def targets(self, part: Slice, count: int) -> list[int]:
        """What the last `count` rows of a slice predict; fewer where the last row predicts the answer. Rows that were
        known already, before a preemption, are forgotten."""
        first = part.end - count
        if first + 1 < self._start:
            return []  # the last row of a prompt that is only scored, from its end on
        del self.rows[first + 1 :]
        return self._prompt[first + 1 : part.end + 1]

    def note(self, rows: TargetRows, row: int, number: int) -> None:
        """Takes in the next row. Raises BadLogits telling its number."""
        self.rows.append(self._head.named(rows.logprobs(row, number, self._top, self._listed)))

    def hand(self, delta: Delta) -> None:
        """Hands over what was found."""
        delta.prompt_logprobs = self.rows


Report = PromptLogprobs | Pooled


def note_reports(found: Sequence[tuple[Report, Slice, Tensor]], head: Head) -> dict[Report, str]:
    """Takes in the hidden states [n, E] of the last n rows of slices. Returns the reports whose numbers are broken,
    with the reason."""
    broken: dict[Report, str] = {}
    asked: list[tuple[PromptLogprobs, Slice, Tensor]] = []
    for report, part, hidden in found:
        if isinstance(report, PromptLogprobs):
            asked.append((report, part, hidden))
            continue
        report.note(part, hidden)
        if report.broken:
            broken[report] = "a hidden state is no number; the model's output is broken"
    return broken | _note_logprobs(asked, head)


def _note_logprobs(found: Sequence[tuple[PromptLogprobs, Slice, Tensor]], head: Head) -> dict[Report, str]:
    """All rows together."""
    wanted = [(report, hidden, report.targets(part, len(hidden))) for report, part, hidden in found]
    rows = [(report, target) for report, _, targets in wanted for target in targets]
    if not rows:
        return {}
    states = torch.cat([hidden[: len(targets)] for _, hidden, targets in wanted])
    broken: dict[Report, str] = {}
    for at in range(0, len(rows), head.rows):
        together = rows[at : at + head.rows]
        block = TargetRows(head.logits(states[at : at + head.rows]), [target for _, target in together])
        for row, (report, _) in enumerate(together):
            if report in broken:
                continue
            try:
                report.note(block, row, at + row)
            except BadLogits as error:
                broken[report] = str(error)
    return broken
