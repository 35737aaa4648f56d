"""A model's vocabulary as llguidance reads it: the bytes of each token, and which ones end a text."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from weakref import WeakKeyDictionary

import numpy as np
import numpy.typing as npt
from llguidance import LLTokenizer

from headrace.engine.structured.by_bytes import by_bytes
from headrace.engine.structured.hidden import apart, hidden_name, without_added
from headrace.engine.tokenizer import Tokenizer
from headrace.logs import shown
from headrace.types import InvalidRequest


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """tokens: llguidance's view. width: token ids that the logits have. canonical: whether forced text
    has one right tokenization, so that its tokens can be appended without sampling. added: ids of the tokens that a
    grammar may name."""

    tokens: LLTokenizer
    width: int
    canonical: bool
    added: Mapping[str, int] = field(default_factory=dict)

    @property
    def words(self) -> int:
        """32-bit words of a mask."""
        return (self.tokens.vocab_size + 31) // 32

    def masks(self, words: npt.NDArray[np.int32]) -> npt.NDArray[np.bool_]:
        """Masks [R, width] of llguidance's bits [R, words]."""
        bits = np.unpackbits(words.view(np.uint8), axis=1, count=self.width, bitorder="little")
        return bits.view(np.bool_)


_Key = tuple[int, tuple[int, ...]]
_made: WeakKeyDictionary[Tokenizer, dict[_Key, Vocabulary]] = WeakKeyDictionary()
_making = threading.Lock()


def vocabulary_of(tokenizer: Tokenizer | None, width: int, ends: Sequence[int]) -> Vocabulary:
    """The vocabulary of a model with logits of this width and these end-of-sequence tokens; made once, which takes up
    to some seconds for a large one. For any thread. Raises InvalidRequest for a tokenizer that cannot be used."""
    tokenizer = usable(tokenizer)
    with _making:
        known = _made.setdefault(tokenizer, {})
        key = width, tuple(ends)
        if key not in known:
            known[key] = _make(tokenizer, width, tuple(ends))
        return known[key]


def usable(tokenizer: Tokenizer | None) -> Tokenizer:
    """Raises InvalidRequest for one that cannot be used, and for none."""
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
    return tokenizer


def _make(tokenizer: Tokenizer, width: int, ends: tuple[int, ...]) -> Vocabulary:
    within = [token for token in ends if token < tokenizer.vocab_size]
    found = _from_library(tokenizer, width, within) if within else None
    added = tokenizer.added_tokens
    if found is not None:
        return Vocabulary(found, width, bool(found.is_canonical), added)
    try:
        return Vocabulary(_from_bytes(tokenizer, width, within), width, False, added)
    except ValueError as error:
        raise InvalidRequest(f"this model's tokenizer cannot be used: {shown(error)}", "structured") from None


def _from_library(tokenizer: Tokenizer, width: int, ends: list[int]) -> LLTokenizer | None:
    """As llguidance reads tokenizer.json, added tokens hidden from text; None where it cannot, or takes a token for
    other bytes than we do."""
    names = apart(tokenizer.added_tokens, tokenizer.special_tokens)
    try:
        copy = without_added(tokenizer.as_json(), names)
        made = LLTokenizer(copy, n_vocab=max(width, tokenizer.vocab_size), eos_token=ends)
    except ValueError:
        return None
    hidden = {token: hidden_name(token).encode() for token in names.values()}
    for token in range(tokenizer.vocab_size):
        if token % 256 == 0:
            time.sleep(0)  # lets the engine's thread go on with its steps
        expected = hidden.get(token) or tokenizer.token_bytes(token)
        differs = made.decode_bytes([token]) != expected or (token in hidden and not made.is_special_token(token))
        if differs and expected != b"\xff":  # by which llguidance marks special tokens, and which no text has
            return None
    return made


def _from_bytes(tokenizer: Tokenizer, width: int, ends: list[int]) -> LLTokenizer:
    """By the bytes of each token. A model without end-of-sequence gets one beyond its logits, which is never drawn."""
    return by_bytes(*tokens_of(tokenizer, width), ends)


def tokens_of(tokenizer: Tokenizer, width: int) -> tuple[list[bytes], list[int]]:
    """The bytes of each token of a model with logits of this width, and the special ones."""
    size = max(width, tokenizer.vocab_size)
    special = [token for token in range(size) if tokenizer.is_special(token)]
    return [tokenizer.token_bytes(token) for token in range(size)], special
