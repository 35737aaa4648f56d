"""Answers drawn at random from what a grammar allows, token by token, with the shipped model's vocabulary."""

from __future__ import annotations

import random
from functools import cache
from pathlib import Path

import numpy as np
from llguidance import LLMatcher, LLTokenizer
from tokenizers import AddedToken, Tokenizer

import headrace.assets
from headrace.engine.structured.compile import grammar_of
from headrace.structured import Structured

CLOSING = frozenset(b"\"')]}>")


class Vocabulary:
    """The vocabulary of the model tiny, with these tokens added; their ids are `added`."""

    def __init__(self, tokens: tuple[str, ...] = ()) -> None:
        backend = Tokenizer.from_file(str(Path(headrace.assets.__file__).parent / "tiny" / "tokenizer.json"))
        backend.add_tokens([AddedToken(token, special=False) for token in tokens])
        self.added = {token: backend.token_to_id(token) for token in tokens}
        self.end = backend.token_to_id("<|end|>")
        self.tokens = LLTokenizer(backend.to_str(), eos_token=self.end, slices=[])
        words = range(self.tokens.vocab_size)
        self.closes = np.array([not CLOSING.isdisjoint(self.tokens.decode_bytes([token])) for token in words])


@cache
def vocabulary(*tokens: str) -> Vocabulary:
    return Vocabulary(tokens)


class Walk:
    """An answer as it grows. Raises ValueError for a grammar that llguidance cannot take, and for tokens that it
    refuses."""

    def __init__(self, shape: Structured, words: Vocabulary) -> None:
        self._words, self._matcher = words, LLMatcher(words.tokens, grammar_of(shape), log_level=0)
        self.taken: list[int] = []
        self._check()

    def _check(self) -> None:
        if self._matcher.is_error():
            raise ValueError(self._matcher.get_error())

    @property
    def text(self) -> str:
        return str(self._words.tokens.decode_str(self.taken))

    @property
    def whole(self) -> bool:
        """Whether the answer may end here."""
        return bool(self._matcher.is_accepting())

    def allowed(self) -> set[int]:
        if self._matcher.is_stopped():
            return set()
        return set(np.frombuffer(self._matcher.compute_logit_bias(), np.uint8).nonzero()[0].tolist())

    def take(self, *tokens: int) -> Walk:
        for token in tokens:
            self._matcher.consume_token(token)
            self._check()
            self.taken.append(token)
        return self

    def write(self, text: str) -> Walk:
        """Takes a text that may stand here, marks as their tokens."""
        return self.take(*self._words.tokens.tokenize_str(text, parse_special=True)[self._leading :])

    def spell(self, text: str) -> Walk:
        """Takes a text letter by letter, marks too."""
        return self.take(
            *(token for letter in text for token in self._words.tokens.tokenize_str(letter)[self._leading :])
        )

    @property
    def _leading(self) -> int:
        return len(self._words.tokens.tokenize_str("", parse_special=True))

    def go_on(self, seed: int, most: int = 250) -> Walk:
        """Draws tokens until the answer ends, or `most`. Closing brackets and quotes are drawn more often, so that it
        does end."""
        draw = random.Random(seed)
        for _ in range(most):
            tokens = self.allowed()
            if self._words.end in tokens and draw.random() < 0.7:
                break
            listed = sorted(tokens - {self._words.end})
            closing = [token for token in listed if self._words.closes[token]]
            if not listed:
                break
            self.take(draw.choice(closing if closing and draw.random() < 0.5 else listed))
        return self
