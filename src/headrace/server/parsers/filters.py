"""Parsers around a parser: one leaves out special tokens, one every call but the first."""

from __future__ import annotations

from collections.abc import Collection

from headrace.server.parsers.parts import CallArguments, CallStart, OutputParser, Part
from headrace.server.parsers.scan import Reader, Reading, marks_of


class WithoutTokens:
    """Leaves the texts of special tokens out of what `inner` gets. For formats whose own marks are special tokens: the
    engine then writes all of them into the text."""

    def __init__(self, inner: OutputParser, tokens: Collection[str]) -> None:
        self._inner, self._marks = inner, marks_of(*tokens)
        self._reader = Reader()
        self._out: list[Part] = []
        self._reading = self._read()

    def _read(self) -> Reading[None]:
        while (yield from self._reader.until(self._marks, self._hand)):
            pass

    def _hand(self, text: str) -> None:
        self._out += self._inner.push(text)

    def push(self, text: str) -> list[Part]:
        self._reader.feed(text)
        next(self._reading, None)
        out, self._out = self._out, []
        return out

    def finish(self) -> list[Part]:
        self._reader.close()
        next(self._reading, None)
        out, self._out = self._out, []
        return out + self._inner.finish()


class FirstCall:
    """Leaves out every call but the first, for requests without parallel calls."""

    def __init__(self, inner: OutputParser) -> None:
        self._inner = inner

    def push(self, text: str) -> list[Part]:
        return _first(self._inner.push(text))

    def finish(self) -> list[Part]:
        return _first(self._inner.finish())


def _first(parts: list[Part]) -> list[Part]:
    return [part for part in parts if not isinstance(part, CallStart | CallArguments) or part.number == 0]
