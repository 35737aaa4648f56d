"""Where the tokens of a completion begin in its text, and the text of a prompt that came as tokens."""

from __future__ import annotations

import codecs
from collections.abc import Collection, Sequence

from headrace.server.engine import ServedTokenizer

_TAIL = 16
"""Tokens at the end of a prompt that are looked at for a character that is not whole."""

_decoder = codecs.getincrementaldecoder("utf-8")


class TextOffsets:
    """Of one choice, in characters. Tokens that hold parts of one character begin where it does; a token that is left
    out of the text takes no room.

    ids: the prompt's. echoed: its text, where the choice's begins with it; else None. skips: special tokens are left
    out of what the model writes.
    """

    def __init__(self, tokenizer: ServedTokenizer, ids: Sequence[int], echoed: str | None, skips: bool) -> None:
        self._tokenizer, self._echoed, self._skips = tokenizer, echoed or "", skips
        self._special = tokenizer.special_tokens
        self._utf8 = _decoder("replace")
        tail = _tail(tokenizer, ids, self._special if skips else ()) if echoed is None else []
        self._utf8.decode(b"".join(data for _, data in tail))
        self._at, self._at_start = 0, not tail

    def next(self, token: int, of_prompt: bool) -> int:
        """Where the next token begins."""
        at = self._at
        self._at += len(self._utf8.decode(self._bytes(token, of_prompt)))
        return at

    def _bytes(self, token: int, of_prompt: bool) -> bytes:
        text = self._tokenizer.token_text(token)
        if text in self._special and not self._is_shown(text, of_prompt):
            return b""
        data = self._tokenizer.token_bytes(token)
        if self._at_start:
            self._at_start = False  # decoders of the sentencepiece kind take off a text's first space
            alone = self._tokenizer.decode([token], skip_special_tokens=False)
            data = data if "\ufffd" in alone else alone.encode()
        if of_prompt and data.startswith(b" ") and not self._echoed.startswith(" ", self._at):
            return data[1:]  # which the tokenizer put before a word
        return data

    def _is_shown(self, special: str, of_prompt: bool) -> bool:
        """In a prompt: where its text has it, which it may not have of the tokens that a tokenizer puts around it."""
        return self._echoed.startswith(special, self._at) if of_prompt else not self._skips


def whole_text(tokenizer: ServedTokenizer, ids: list[int]) -> str:
    """The text of a prompt, without a character that only begins at its end: what follows may complete it."""
    tail, kept, utf8 = _tail(tokenizer, ids, tokenizer.special_tokens), len(ids), _decoder("replace")
    utf8.decode(b"".join(data for _, data in tail))
    begun = len(utf8.getstate()[0])
    for place, data in reversed(tail):
        if not begun or len(data) > begun:
            break
        begun, kept = begun - len(data), place
    text = tokenizer.decode(ids[:kept])
    return text.removesuffix("\ufffd") if begun else text


def _tail(tokenizer: ServedTokenizer, ids: Sequence[int], special: Collection[str]) -> list[tuple[int, bytes]]:
    """Places and bytes of the last tokens that a text shows."""
    places = range(max(0, len(ids) - _TAIL), len(ids))
    return [(i, tokenizer.token_bytes(ids[i])) for i in places if tokenizer.token_text(ids[i]) not in special]
