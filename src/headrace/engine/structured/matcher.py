"""What one sequence may say next: its place in the grammar, the mask of allowed tokens, and the tokens that are forced.

Two threads use a matcher, never at once: the engine's between steps, and the masks' from `asked` until the job is done.
"""

from __future__ import annotations

from concurrent.futures import Future

import numpy as np
import numpy.typing as npt
from llguidance import LLMatcher

from headrace.engine.structured.vocabulary import Vocabulary

Mask = npt.NDArray[np.bool_]
"""Of each token id that the logits have, whether it is allowed."""

MOST_FORCED = 1 << 16
"""Bytes that a grammar may force at once: llguidance looks at all of them for every token."""
MOST_TOLD = 300
"""Characters of an error of llguidance."""


class SequenceMatcher:
    """One sequence's matcher. It is ready once the job that `open`s it is done.

    jumps: tokens that the grammar forces are found (jump-ahead). beginning: those at the beginning of the answer.
    refused: the token pushed last has no place in the grammar, though its mask allowed it.
    """

    def __init__(self, jumps: bool) -> None:
        self.jumps = jumps
        self.beginning: list[int] = []
        self.job: Future[None] | None = None
        self.refused = False
        self._error = ""
        self._mask: Mask | None = None
        self._matcher: LLMatcher | None = None

    def open(self, matcher: LLMatcher, vocabulary: Vocabulary) -> None:
        """Takes a compiled grammar, at its beginning."""
        self._matcher = matcher
        self.jumps = self.jumps and vocabulary.canonical
        self.beginning = self._forced()

    def fail(self, reason: str) -> None:
        """It has failed for this reason, if for none before."""
        self._error = self._error or reason[:MOST_TOLD]

    # ---- for whoever computes masks

    @property
    def native(self) -> LLMatcher | None:
        """llguidance's matcher; None of one that has failed."""
        return None if self._error else self._matcher

    def note(self, mask: Mask) -> None:
        """Takes the mask computed for its place."""
        assert self._matcher is not None
        self._mask = mask
        if self._matcher.is_error():
            self.fail(_told(self._matcher))

    # ---- for the engine

    @property
    def fault(self) -> str:
        """Why it cannot go on, once its job is done; empty where it can."""
        return f"the answer's grammar cannot go on: {self._error}" if self._error else ""

    @property
    def mask(self) -> Mask:
        """Tokens allowed next, once its job is done."""
        assert self._mask is not None, "a mask is asked for after every token"
        return self._mask

    def allowed(self, forbidden: tuple[int, ...], ends: tuple[int, ...]) -> tuple[Mask, tuple[int, ...]]:
        """The mask without the tokens that are forbidden now and those that shall not end the answer (ignore_eos), and
        the forbidden tokens. The grammar wins: where the mask would allow nothing, it stays as it is and nothing is
        forbidden."""
        if not forbidden and not ends:
            return self.mask, ()
        narrow = self.mask.copy()
        narrow[[token for token in (*forbidden, *ends) if token < narrow.size]] = False
        return (narrow, forbidden) if narrow.any() else (self.mask, ())

    @property
    def over(self) -> bool:
        """Whether the answer has its whole shape and no token of the logits can follow, end-of-sequence neither; once
        its job is done."""
        return self._matcher is not None and not self.mask.any() and self._matcher.is_accepting()

    @property
    def complete(self) -> bool:
        """Whether nothing can follow the tokens pushed."""
        matcher = self._matcher
        return matcher is not None and not self._error and matcher.is_stopped() and not matcher.is_error()

    def push(self, token: int) -> list[int]:
        """Goes on by a token of the answer; the tokens that the grammar forces after it, by which it has gone on."""
        assert self._matcher is not None
        if not self._matcher.consume_token(token):
            self.refused = True
            self.fail(_told(self._matcher))
        return self._forced()

    def _forced(self) -> list[int]:
        matcher = self._matcher
        if matcher is None or self._error or not self.jumps or matcher.is_stopped():
            return []
        if len(matcher.compute_ff_bytes()) > MOST_FORCED:
            self.fail(f"it forces more than {MOST_FORCED:,} bytes at once")
            return []
        forced = matcher.compute_ff_tokens()
        if (forced and not matcher.consume_tokens(forced)) or matcher.is_error():
            self.fail(_told(matcher))
            return []
        return forced


def _told(matcher: LLMatcher) -> str:
    return matcher.get_error().partition("\n")[0] or "an unknown fault"
