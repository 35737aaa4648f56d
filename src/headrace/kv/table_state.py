"""What the table of a sequence has of recurrent states (kv.states)."""

from __future__ import annotations

from typing import NamedTuple

from headrace.types import CHUNK

NONE = -1
"""The slot of the state of no tokens."""


class Segment(NamedTuple):
    """Tokens of a slice up to `end`, computed from the state in slot `source` (NONE) into slot `target`."""

    end: int
    source: int
    target: int


class Ahead(NamedTuple):
    """Of a step with drafted tokens: the state behind all of them, in slot `slot`; `known` tokens are before them."""

    slot: int
    known: int


class TableState:
    """What a table has of states. slot: of the state behind its `length` tokens, without drafted ones; owns: nobody
    else knows that slot. ahead: of the drafted ones, until they are settled.

    segments: of the coming step. marks: numbers of tokens behind which a state shall be kept. known: its tokens when it
    was opened. answer: the slot that was kept last of what came after them, and the number of its chunk.
    """

    __slots__ = ("ahead", "answer", "known", "marks", "owns", "segments", "slot")

    def __init__(self, known: int) -> None:
        self.slot = NONE
        self.owns = False
        self.ahead: Ahead | None = None
        self.segments: list[Segment] = []
        self.marks = {(known - 1) // CHUNK * CHUNK} - {0}
        self.known = known
        self.answer = (NONE, 0)
