"""A sequence: one of the n answers of a request, from waiting to finished. A small record without tensors."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from headrace.engine.adapters import Applied
from headrace.kv.chunk_table import ChunkTable
from headrace.offload.restore.ranked_plan import PlannedPrefill
from headrace.types import Request


@dataclass(slots=True, eq=False)
class SequenceState:
    """tokens: prompt and answer so far, the list its table refers to. order: rank of arrival; lower goes first.

    reports_from: while the prompt is computed, its rows from this one on are wanted; None: the last one alone. Of a
    prompt that is only scored the last token is left out of `tokens`, since its row predicts nothing.

    held: the grammar of its answer is still being compiled, so its last token must not be computed yet. forced: it
    decodes, and several of its tokens are to be computed together: they were appended without sampling, or their rows
    went with a wrong draft. draft: tokens that may follow the newest one, computed with it in the coming step and no
    longer. planned: strategies that belong to a restore under way. yields: how often it was preempted for another
    tenant's sake (engine.fairness). ended: nothing is computed for it any more; its table is closed when the step that
    is under way has ended (engine.overlap). adapter: which one its rows have, and from where on.

    |<------ prompt_len ------>|<-- answer -->|
    |<--- table.length: in the cache --->|<-1->|   while decoding, all but the newest token is cached
    """

    request: Request
    index: int
    order: int
    tokens: list[int] = field(init=False)
    prompt_len: int = field(init=False)
    table: ChunkTable | None = None
    cached_tokens: int = 0
    preemptions: int = 0
    yields: int = 0
    reports_from: int | None = None
    restored_tokens: int = 0
    restore_reason: str = ""
    strategy: str = ""
    strategy_reason: str = ""
    held: bool = False
    forced: bool = False
    draft: list[int] = field(default_factory=list)
    planned: PlannedPrefill | None = None
    ended: bool = False
    adapter: Applied | None = None
    waited: bool = False

    def __post_init__(self) -> None:
        prompt, params = self.request.prompt_token_ids, self.request.params
        scored = params.max_tokens == 0 and not self.request.embed
        self.tokens = prompt[: max(1, len(prompt) - 1)] if scored else list(prompt)
        self.prompt_len = len(prompt)
        if params.prompt_logprobs is not None and self.index == 0 and not self.request.embed:
            self.reports_from = max(0, params.prompt_logprobs_start - 1)

    @property
    def draws(self) -> bool:
        """Whether its prompt is answered; what it reports of the prompt is all otherwise."""
        return not self.request.embed and self.request.params.max_tokens != 0

    @property
    def reusable(self) -> int | None:
        """Tokens from the beginning that may be taken from elsewhere, since no row of them is wanted; None: all."""
        return None if self.n_output > 0 else self.reports_from

    @property
    def computed(self) -> int:
        """Tokens whose keys and values are in the cache."""
        return self.table.length if self.table else 0

    @property
    def output(self) -> list[int]:
        return self.tokens[self.prompt_len :]

    @property
    def n_output(self) -> int:
        """Tokens of the answer so far."""
        return max(0, len(self.tokens) - self.prompt_len)

    @property
    def remaining(self) -> int:
        """Known tokens that are not in the cache yet; 1 while decoding, 0 while a step under way chooses the next."""
        return len(self.tokens) - self.computed


class Slice(NamedTuple):
    """Tokens start .. start+length-1 of a sequence, to be computed in a step."""

    sequence: SequenceState
    start: int
    length: int

    @property
    def end(self) -> int:
        return self.start + self.length

    @property
    def tokens(self) -> list[int]:
        """Of these rows; drafted ones come last."""
        sequence, drafted = self.sequence, self.drafted
        known = sequence.tokens[self.start : self.end]
        return known + sequence.draft[:drafted] if drafted else known

    @property
    def drafted(self) -> int:
        """Rows of tokens that are only drafted."""
        return max(0, self.end - len(self.sequence.tokens))

    @property
    def samples(self) -> bool:
        """Whether the slice reaches the newest token, so that the step yields the next one."""
        return self.end >= len(self.sequence.tokens)

    @property
    def decodes(self) -> bool:
        """Whether the slice is one answer token met for the first time or again, and not part of a longer stretch; or
        several while it decodes (`forced`); or one with its draft."""
        sequence = self.sequence
        return self.start >= sequence.prompt_len and (self.length == 1 or sequence.forced or bool(sequence.draft))
