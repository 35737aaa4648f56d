"""Text of a sequence while it grows: only what is final, cut at the first stop string.

token ids -> _TokenStream (whole characters only) -> StopMatcher (holds back what may begin a stop string) -> pieces
"""

from __future__ import annotations

import codecs
from collections.abc import Collection, Sequence
from typing import NamedTuple, Protocol

from headrace.engine.stopping import StopMatcher, ends_sequence
from headrace.engine.tokenizer import Tokenizer
from headrace.types import SamplingParams

_CONTEXT = 8
"""Prompt tokens that the window decoder keeps before the first output token."""
_WINDOW = 32
"""Tokens after which the window decoder gives up waiting for a character to become whole."""


class TextPiece(NamedTuple):
    """Text that became final. `stop` is the stop string, or the stop or end-of-sequence token, that ended the sequence.

    `tokens`: 1, or 0 for a token that came after the stop.
    """

    text: str
    stop: str | int | None = None
    tokens: int = 1


class Detokenizer:
    """The text of one output sequence.

    The concatenation of all pieces and of flush() is the text that the output adds to the decoded prompt, without an
    incomplete last character, cut at the stop; it does not depend on how the tokens are handed over. O(1) amortised
    per token. The token that ends the sequence contributes no text, a stop string is cut off, unless
    include_stop_str_in_output. Without a tokenizer (None) all text is empty; stop tokens still work.
    """

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        prompt_ids: Sequence[int],
        params: SamplingParams,
        eos_ids: Collection[int],
    ) -> None:
        self._params = params
        self._eos_ids = frozenset(eos_ids)
        self._stream = _open_stream(tokenizer, prompt_ids, params.skip_special_tokens)
        self._matcher = StopMatcher(params.stop)
        self._held = ""
        self._count = 0
        self._stop: str | int | None = None

    def push(self, token: int) -> TextPiece:
        """The text that `token` makes final. After a stop it takes no more tokens (TextPiece("", stop, 0))."""
        if self._stop is not None:
            return TextPiece("", self._stop, 0)
        self._count += 1
        if ends_sequence(self._params, token, self._count, self._eos_ids):
            self._stop = token
            text = self._stream.push(token) if self._params.include_stop_str_in_output else ""
            return TextPiece(self._release() + text, token)
        return TextPiece(self._take(self._stream.push(token)), self._stop)

    def flush(self) -> str:
        """The text still held back, once no more tokens come; an incomplete character is dropped."""
        return self._release()

    def _release(self) -> str:
        held, self._held = self._held, ""
        return held

    def _take(self, new: str) -> str:
        """Adds final text to what is held, and gives what can no longer belong to a stop string."""
        if not self._params.stop:
            return new
        match = self._matcher.feed(new, accept=self._count >= self._params.min_tokens)
        text = self._release() + new
        if match:
            self._stop = match.stop
            end = len(text) - len(new) + match.end
            return text[:end] if self._params.include_stop_str_in_output else text[: end - len(match.stop)]
        keep = 0 if self._params.include_stop_str_in_output else self._matcher.pending
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]


# ---- tokens to whole characters --------------------------------------------------------------------------------------


class _TokenStream(Protocol):
    def push(self, token: int) -> str:
        """The characters that this token completes."""


def _open_stream(tokenizer: Tokenizer | None, prompt_ids: Sequence[int], skip_special: bool) -> _TokenStream:
    if tokenizer is None:
        return _NoStream()
    if tokenizer.has_pieces:
        return _ByteStream(tokenizer, prompt_ids, skip_special)
    return _WindowStream(tokenizer, prompt_ids, skip_special)


class _NoStream:
    def push(self, token: int) -> str:
        return ""


class _ByteStream:
    """For tokenizers with a byte string per token.

    Bytes that are no UTF-8 become U+FFFD as they pass, one for each maximal part of a character. That is what decoding
    the whole sequence gives, but for byte-fallback tokenizers: those spoil the valid characters next to a bad byte too,
    which text that has already been sent cannot follow. (For that reason tokenizers' DecodeStream raises there.)
    """

    def __init__(self, tokenizer: Tokenizer, prompt_ids: Sequence[int], skip_special: bool) -> None:
        self._tokenizer = tokenizer
        self._skip_special = skip_special
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        tail = self._tail(prompt_ids)
        self._utf8.decode(tail)
        self._at_start = not tail

    def push(self, token: int) -> str:
        if not self._visible(token):
            return ""
        data = self._tokenizer.token_bytes(token)
        if self._at_start:
            data = self._first(token, data)
            self._at_start = False
        return self._utf8.decode(data)

    def _visible(self, token: int) -> bool:
        if self._skip_special and self._tokenizer.is_special(token):
            return False
        return bool(self._tokenizer.token_bytes(token))

    def _tail(self, prompt_ids: Sequence[int]) -> bytes:
        """The prompt's last bytes, enough for a character that the prompt begins and the output ends."""
        tail = b""
        for token in reversed(prompt_ids):
            if len(tail) >= 3:
                break
            if self._visible(token):
                tail = self._tokenizer.token_bytes(token) + tail
        return tail

    def _first(self, token: int, data: bytes) -> bytes:
        """Bytes of the first token of a text: decoders of the sentencepiece kind take off its space there."""
        alone = self._tokenizer.decode([token], self._skip_special)
        return data if "\ufffd" in alone else alone.encode()


class _WindowStream:
    """For all other tokenizers: decodes the tokens since the last final text, with and without the new ones.

    U+FFFD at the end is taken for an incomplete character, and waited for at most _WINDOW tokens. A prompt that ends
    inside a character is taken as it is.
    """

    def __init__(self, tokenizer: Tokenizer, prompt_ids: Sequence[int], skip_special: bool) -> None:
        self._tokenizer = tokenizer
        self._skip_special = skip_special
        self._last = self._tail(prompt_ids)
        self._shown = self._last
        self._new: list[int] = []

    def _tail(self, prompt_ids: Sequence[int]) -> list[int]:
        """The prompt's last tokens, a few more where the cut would fall inside a character."""
        seen = [token for token in prompt_ids[-_WINDOW:] if self._visible(token)]
        tails = [seen[-_CONTEXT - more :] for more in range(4)]
        return next((tail for tail in tails if "\ufffd" not in self._decode(tail)), tails[0])

    def push(self, token: int) -> str:
        if not self._visible(token):
            return ""
        self._new.append(token)
        before = self._decode(self._shown)
        after = self._decode(self._shown + self._new)
        if (len(after) <= len(before) or after.endswith("\ufffd")) and len(self._new) < _WINDOW:
            return ""
        # The context is cut where text was final: a cut inside a character would spoil what follows.
        self._shown, self._last, self._new = self._last + self._new, self._new, []
        return after[len(before) :]

    def _visible(self, token: int) -> bool:
        return not (self._skip_special and self._tokenizer.is_special(token))

    def _decode(self, tokens: list[int]) -> str:
        return self._tokenizer.decode(tokens, self._skip_special) if tokens else ""
