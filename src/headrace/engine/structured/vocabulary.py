"""A model's vocabulary as llguidance reads it: the bytes of each token, and which ones end a text."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from weakref import WeakKeyDictionary

from llguidance import LLTokenizer, TokenizerWrapper

from headrace.engine.tokenizer import Tokenizer
from headrace.logs import shown
from headrace.types import InvalidRequest


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """tokens: llguidance's view. width: token ids that the logits have. ends: tokens that end an answer.
    canonical: whether forced text has one right tokenization, so that its tokens can be appended without sampling."""

    tokens: LLTokenizer
    width: int
    ends: frozenset[int]
    canonical: bool

    @property
    def words(self) -> int:
        """32-bit words of a mask."""
        return (self.tokens.vocab_size + 31) // 32


_Key = tuple[int, tuple[int, ...]]
_made: WeakKeyDictionary[Tokenizer, dict[_Key, Vocabulary]] = WeakKeyDictionary()
_making = threading.Lock()


def vocabulary_of(tokenizer: Tokenizer | None, width: int, ends: Sequence[int]) -> Vocabulary:
    """The vocabulary of a model with logits of this width and these end-of-sequence tokens; made once, which takes up
    to some seconds for a large one. For any thread. Raises InvalidRequest for a tokenizer that cannot be used."""
    if tokenizer is None:
        raise InvalidRequest(
            "the model folder has no tokenizer, so answers cannot be given a shape; add its files", "structured"
        )
    if not tokenizer.has_pieces:
        raise InvalidRequest(
            "structured answers need a tokenizer whose tokens stand for fixed bytes; this model's does not decode "
            "token by token",
            "structured",
        )
    with _making:
        known = _made.setdefault(tokenizer, {})
        key = width, tuple(ends)
        if key not in known:
            known[key] = _make(tokenizer, width, tuple(ends))
        return known[key]


def _make(tokenizer: Tokenizer, width: int, ends: tuple[int, ...]) -> Vocabulary:
    within = [token for token in ends if token < tokenizer.vocab_size]
    found = _from_library(tokenizer, width, within) if within else None
    if found is not None:
        return Vocabulary(found, width, frozenset(ends), bool(found.is_canonical))
    try:
        return Vocabulary(_from_bytes(tokenizer, width, within), width, frozenset(ends), canonical=False)
    except ValueError as error:
        raise InvalidRequest(f"this model's tokenizer cannot be used: {shown(error)}", "structured") from None


def _from_library(tokenizer: Tokenizer, width: int, ends: list[int]) -> LLTokenizer | None:
    """As llguidance reads tokenizer.json; None where it cannot, or takes a token for other bytes than we do."""
    try:
        made = LLTokenizer(tokenizer.as_json(), n_vocab=max(width, tokenizer.vocab_size), eos_token=ends)
    except ValueError:
        return None
    same = all(
        made.decode_bytes([token]) == expected
        for token in range(tokenizer.vocab_size)
        if not tokenizer.is_special(token) and (expected := tokenizer.token_bytes(token)) != b"\xff"
    )  # llguidance marks special tokens by this byte, which no text has
    return made if same else None


def _from_bytes(tokenizer: Tokenizer, width: int, ends: list[int]) -> LLTokenizer:
    """By the bytes of each token. A model without end-of-sequence gets one beyond its logits, which is never drawn."""
    size = max(width, tokenizer.vocab_size)
    made = LLTokenizer(TokenizerWrapper(_ByBytes(tokenizer, size, ends)))
    return LLTokenizer(TokenizerWrapper(_ByBytes(tokenizer, size, ends)), eos_token=ends) if ends[1:] else made


class _ByBytes:
    """What TokenizerWrapper asks of a tokenizer."""

    bos_token_id = None

    def __init__(self, tokenizer: Tokenizer, size: int, ends: list[int]) -> None:
        self._tokenizer = tokenizer
        self.tokens = [tokenizer.token_bytes(token) for token in range(size)]
        self.special_token_ids = [token for token in range(size) if tokenizer.is_special(token)]
        if not ends:
            self.tokens.append(b"<end of text>")
            self.special_token_ids.append(size)
        self.eos_token_id = ends[0] if ends else size

    def __call__(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False)
