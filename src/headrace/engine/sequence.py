"""A sequence: one of the n answers of a request, from waiting to finished. A small record without tensors."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from headrace.kv.chunk_table import ChunkTable
from headrace.types import Request


@dataclass(slots=True, eq=False)
class SequenceState:
    """tokens: prompt and answer so far, the list its table refers to. order: rank of arrival; lower goes first.

    held: the grammar of its answer is still being compiled, so its last token must not be computed yet. forced: its
    newest tokens were appended without sampling while it decoded; they are computed together.

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
    wants_all_logits: bool = False
    restored_tokens: int = 0
    restore_reason: str = ""
    strategy: str = ""
    strategy_reason: str = ""
    held: bool = False
    forced: bool = False

    def __post_init__(self) -> None:
        self.tokens = list(self.request.prompt_token_ids)
        self.prompt_len = len(self.tokens)

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
        return len(self.tokens) - self.prompt_len

    @property
    def remaining(self) -> int:
        """Known tokens that are not in the cache yet; 1 while decoding."""
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
    def samples(self) -> bool:
        """Whether the slice ends at the newest token, so that the step yields the next one."""
        return self.end == len(self.sequence.tokens)

    @property
    def decodes(self) -> bool:
        """Whether the slice is one answer token met for the first time or again, and not part of a longer stretch; or
        tokens forced while it decoded."""
        return self.start >= self.sequence.prompt_len and (self.length == 1 or self.sequence.forced)
