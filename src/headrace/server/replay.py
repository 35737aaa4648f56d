"""Earlier answers by their own tokens: where they stand in a rendered conversation, and the prompt that holds them.

An answer's text that is tokenized again may become other tokens than the model wrote, and the cached prefix ends there.

    rendered   <user>Hi<end><assistant>Hello you<end><user>More<end><assistant>
    tokens     [encode_chat:           ][own tokens ][encode, behind other tokens]

Text before the first answer is tokenized alone, as it was for that answer; so is the text between two answers. A prompt
therefore begins with the tokens of the earlier prompt and its answer wherever its text does.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from headrace.server.engine import ServedTokenizer

BROKEN = "\ufffd"
"""Stands for bytes that are no whole character: an answer that was cut within one."""


class Known(NamedTuple):
    """An answer that begins at this character of the rendered conversation, and its tokens."""

    start: int
    tokens: Sequence[int]


class Span(NamedTuple):
    """Characters of a rendered conversation, and the tokens that stand for them."""

    start: int
    end: int
    tokens: Sequence[int]


class Replay(NamedTuple):
    """A prompt's tokens. replayed: earlier answers in it by their own tokens; rewritten: known ones that the
    chat template writes in other words."""

    ids: list[int]
    replayed: int = 0
    rewritten: int = 0


class TokenTexts:
    """What tokens say within a conversation, and its text in tokens. Like the tokenizer not for several threads."""

    def __init__(self, tokenizer: ServedTokenizer) -> None:
        self._tokenizer = tokenizer
        self.added = {token: text for text, token in tokenizer.added_tokens.items()}
        ends = tokenizer.named_tokens.get("eos_token")
        self._end = tokenizer.added_tokens.get(ends) if ends else None
        self._before = [] if self._end is None else [self._end]
        self._skipped = len(self.decode(self._before)) if self._before else 0

    def text(self, tokens: Sequence[int]) -> str:
        """Of tokens behind others, special ones included: tokenizers of the sentencepiece kind take off a space at the
        beginning of a text."""
        return self.decode([*self._before, *tokens])[self._skipped :]

    def knows(self, token: int) -> bool:
        return bool(self._tokenizer.token_bytes(token))

    def whole(self, text: str) -> list[int]:
        return list(self._tokenizer.encode_chat(text))

    def decode(self, tokens: Sequence[int]) -> str:
        return self._tokenizer.decode(list(tokens), skip_special_tokens=False)

    def behind(self, text: str, last: int) -> list[int]:
        """Tokens of a text that follows the token `last`, without the space that such tokenizers put first."""
        if not text:
            return []
        mark = last if last in self.added else self._end
        if mark is None:
            return self.whole(text)
        ids = self.whole(self.added[mark] + text)
        return ids[1:] if ids[:1] == [mark] else self.whole(text)


def fit(texts: TokenTexts, rendered: str, start: int, tokens: Sequence[int]) -> Span | None:
    """The answer as it stands from `start` on, None if the text goes on in other words. A last token that ends the turn
    may be missing, as templates write the end themselves, and so may white space before it, which many leave out."""
    said = texts.text(tokens)
    if tokens and rendered.startswith(said, start):
        return Span(start, start + len(said), tokens)
    kept = list(tokens[:-1] if tokens and tokens[-1] in texts.added else tokens)
    said = texts.text(kept).rstrip(BROKEN).rstrip()
    if not said or not rendered.startswith(said, start):
        return None
    fits, most = 0, len(kept)
    if rendered.startswith(texts.text(kept), start):
        fits = most
    while fits < most:  # the longest beginning that stands there
        tried = (fits + most + 1) // 2
        if rendered.startswith(texts.text(kept[:tried]), start):
            fits = tried
        else:
            most = tried - 1
    return Span(start, start + len(texts.text(kept[:fits])), kept[:fits]) if fits else None


def replay(texts: TokenTexts, rendered: str, known: Iterable[Known]) -> Replay:
    """The tokens of a rendered conversation. known: answers by their places; of several at one place the first that
    fits counts. Raises what encode_chat raises."""
    spans: list[Span] = []
    places: dict[int, bool] = {}
    for start, tokens in sorted(known, key=lambda each: each.start):
        if places.get(start) or (spans and start < spans[-1].end):
            continue
        span = fit(texts, rendered, start, tokens)
        places[start] = span is not None
        if span is not None:
            spans.append(span)
    rewritten = len(places) - len(spans)
    whole = texts.whole(rendered) if not spans else []
    ids = whole or _spliced(texts, rendered, spans)
    if spans and (said := texts.decode(ids)) != rendered:
        whole = texts.whole(rendered)
        if said != texts.decode(whole):  # the tokenizer cannot take a text in pieces
            return Replay(whole, 0, len(places))
    return Replay(ids, len(spans), rewritten)


def _spliced(texts: TokenTexts, rendered: str, spans: Sequence[Span]) -> list[int]:
    ids: list[int] = []
    at = 0
    for span in spans:
        ids += _between(texts, rendered[at : span.start], ids)
        ids += span.tokens
        at = span.end
    return ids + _between(texts, rendered[at:], ids)


def _between(texts: TokenTexts, text: str, before: Sequence[int]) -> list[int]:
    return texts.behind(text, before[-1]) if before else texts.whole(text)
