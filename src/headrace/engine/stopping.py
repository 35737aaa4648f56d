"""When a sequence ends: end-of-sequence, stop token ids, stop strings, length. Pure functions and one small automaton.

Imports no torch and no tokenizer. The rules: nothing but the length ends a sequence before `min_tokens` tokens; a
token that ends it is counted; a token is tried as end-of-sequence first, then as a stop token, then for the length.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import NamedTuple

from headrace.types import FinishReason, SamplingParams


class Finish(NamedTuple):
    """Why a sequence ended. `stop_reason` is the stop token or stop string; None for end-of-sequence and length."""

    reason: FinishReason
    stop_reason: int | str | None = None


def forbidden_tokens(params: SamplingParams, n_output: int, eos_ids: Collection[int]) -> tuple[int, ...]:
    """Token ids that must not be drawn after `n_output` tokens: all that could end the sequence below min_tokens.

    End-of-sequence is among them under ignore_eos as well: min_tokens forbids it, ignore_eos only does not heed it.
    """
    if n_output >= params.min_tokens:
        return ()
    return tuple(sorted({*eos_ids, *params.stop_token_ids}))


def ends_sequence(params: SamplingParams, token: int, n_output: int, eos_ids: Collection[int]) -> bool:
    """Whether `token`, the `n_output`-th of its sequence (counted from 1), is one that ends it."""
    if n_output < params.min_tokens:
        return False
    return token in params.stop_token_ids or (token in eos_ids and not params.ignore_eos)


def token_finish(params: SamplingParams, token: int, n_output: int, eos_ids: Collection[int]) -> Finish | None:
    """The Finish that `token` (the `n_output`-th) brings, None where it ends nothing."""
    if not ends_sequence(params, token, n_output, eos_ids):
        return None
    return Finish("stop", None if token in eos_ids and not params.ignore_eos else token)


def finish_reason(
    params: SamplingParams, token: int, n_output: int, eos_ids: Collection[int], room: int | None = None
) -> Finish | None:
    """Whether a sequence is finished by `token`, its `n_output`-th, or by length; None: it goes on.

    `room` is the number of output tokens that the context allows after the prompt (None: no limit). Stop strings are
    the detokenizer's matter: it looks at text. A stop on the last possible token counts as a stop, not as a length.
    """
    if finish := token_finish(params, token, n_output, eos_ids):
        return finish
    if (params.max_tokens is not None and n_output >= params.max_tokens) or (room is not None and n_output >= room):
        return Finish("length")
    return None


class Match(NamedTuple):
    """A stop string that has just been completed; `end` is the offset after it in the text fed last."""

    stop: str
    end: int


class StopMatcher:
    """Finds the stop string that is completed first in a text that arrives in pieces.

    Of several completed by the same character the longest wins, so the cut lies furthest left. What it finds depends
    on the text alone, not on how it is cut into pieces. One Knuth-Morris-Pratt automaton per stop string: the cost is
    O(1) amortised per character and string, however long and repetitive the strings are.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._automata = [_Automaton(stop) for stop in dict.fromkeys(stops)]

    def feed(self, text: str, accept: bool = True) -> Match | None:
        """Reads `text`. With accept=False completed stop strings are passed over (those below min_tokens).

        After a match the matcher is spent: feed it no more.
        """
        best: Match | None = None
        for automaton in self._automata:
            end = automaton.feed(text if best is None else text[: best.end], accept)
            if end is None:
                continue
            match = Match(automaton.stop, end)
            if best is None or (match.end, -len(match.stop)) < (best.end, -len(best.stop)):
                best = match
        return best

    @property
    def pending(self) -> int:
        """Number of characters at the end of the text so far that may be the beginning of a stop string."""
        return max((automaton.state for automaton in self._automata), default=0)


class _Automaton:
    """Knuth-Morris-Pratt for one string; `state` characters of it match the end of the text read so far."""

    def __init__(self, stop: str) -> None:
        self.stop = stop
        self.state = 0
        self._border = _borders(stop)

    def feed(self, text: str, accept: bool) -> int | None:
        """Offset after the first occurrence completed in `text`, else None; accept=False reads over occurrences."""
        stop, at = self.stop, 0
        while at < len(text):
            if self.state == 0:
                at = text.find(stop[0], at)
                if at < 0:
                    return None
            while self.state and stop[self.state] != text[at]:
                self.state = self._border[self.state - 1]
            self.state += stop[self.state] == text[at]
            at += 1
            if self.state == len(stop):
                self.state = self._border[-1]
                if accept:
                    return at
        return None


def _borders(pattern: str) -> list[int]:
    """For each prefix of `pattern`: the length of its longest proper prefix that is also its suffix."""
    border = [0] * len(pattern)
    length = 0
    for i in range(1, len(pattern)):
        while length and pattern[i] != pattern[length]:
            length = border[length - 1]
        length += pattern[i] == pattern[length]
        border[i] = length
    return border
