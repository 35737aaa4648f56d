"""Compiled grammars, the latest kept: requests with one shape compile it once."""

from __future__ import annotations

import threading
from collections import OrderedDict

from llguidance import LLMatcher

from headrace.engine.structured.compile import grammar_of, limits
from headrace.engine.structured.vocabulary import Vocabulary
from headrace.types import Structured

MOST_GRAMMARS = 64
MOST_TEXT = 4 << 20
"""Characters of the shapes kept."""


class BadGrammar(ValueError):
    """A grammar that cannot be compiled; the message is llguidance's."""


class Grammars:
    """Matchers at the beginning of their grammar, by shape. `compiled` counts those made. For any thread."""

    def __init__(self) -> None:
        self.compiled = 0
        self._known: OrderedDict[Structured, LLMatcher] = OrderedDict()
        self._text = 0
        self._lock = threading.Lock()

    def known(self, structured: Structured) -> LLMatcher | None:
        """A matcher of one's own if the grammar was compiled before."""
        with self._lock:
            known = self._known.get(structured)
            if known is None:
                return None
            self._known.move_to_end(structured)
            return known.deep_copy()

    def matcher(self, structured: Structured, vocabulary: Vocabulary) -> LLMatcher:
        """A matcher of one's own. Raises BadGrammar or InvalidRequest where the grammar cannot be compiled."""
        known = self.known(structured)
        if known is not None:
            return known
        made = LLMatcher(vocabulary.tokens, grammar_of(structured, vocabulary.added), log_level=0, limits=limits())
        if made.is_error():
            raise BadGrammar(made.get_error().partition("\n")[0])
        with self._lock:
            self.compiled += 1
            self._keep(structured, made)
            return made.deep_copy()

    def _keep(self, structured: Structured, made: LLMatcher) -> None:
        if structured in self._known:
            return
        self._known[structured] = made
        self._text += _length(structured)
        while len(self._known) > MOST_GRAMMARS or (self._text > MOST_TEXT and len(self._known) > 1):
            oldest, _ = self._known.popitem(last=False)
            self._text -= _length(oldest)


def _length(structured: Structured) -> int:
    texts = (structured.json, structured.regex, structured.grammar, *structured.choice)
    return sum(len(text) for text in texts if text)
