"""Suffix automata: of any text seen, the longest end that stood in it before, in constant time for each token.

Source: A. Blumer et al., The smallest automaton recognizing the subwords of a text, Theoretical Computer Science 40
(1985); speculation by them: SuffixDecoding, arXiv 2411.04975.
"""

from __future__ import annotations

from headrace.engine.speculation.ngram import LEAST, following

CATCH_UP = 2048
"""Tokens of a prompt that are taken in between two steps (about 5 ms)."""
REACH = 32_768
"""Tokens of a prompt that are taken in, those at its end: a token takes half a kilobyte."""
REMEMBERED = 32_768
"""Tokens of earlier answers in each of a tenant's two generations."""


class SuffixAutomaton:
    """States are sets of subwords that end at the same places. `append` takes a token or two microseconds."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.next: list[dict[int, int]] = [{}]
        self.link = [-1]
        self.length = [0]
        self.end = [0]
        """Of each state, the number of tokens up to a place where it stood: a late one."""
        self._last = 0

    def append(self, token: int) -> tuple[int, int]:
        """Takes in a token: the length of the longest end of all tokens that stood before, and where that ended."""
        self.tokens.append(token)
        place = len(self.tokens)
        state, at = self._new({}, self.length[self._last] + 1, place), self._last
        while at != -1 and token not in self.next[at]:
            self.next[at][token] = state
            at = self.link[at]
        self.link[state] = 0 if at == -1 else self._reached(at, token)
        self._last = state
        earlier = self.link[state]
        found = self.length[earlier], self.end[earlier]
        self.end[earlier] = place
        return found

    def _reached(self, at: int, token: int) -> int:
        """The state of the subwords of `at` with the token behind them; split off where that state has longer ones."""
        there = self.next[at][token]
        if self.length[there] == self.length[at] + 1:
            return there
        split = self._new(dict(self.next[there]), self.length[at] + 1, self.end[there])
        self.link[split], self.link[there] = self.link[there], split
        while at != -1 and self.next[at].get(token) == there:
            self.next[at][token] = split
            at = self.link[at]
        return split

    def _new(self, following: dict[int, int], length: int, end: int) -> int:
        self.next.append(following)
        self.link.append(-1)
        self.length.append(length)
        self.end.append(end)
        return len(self.next) - 1


class Cursor:
    """How much of the end of another text an automaton, which may go on growing, has seen."""

    def __init__(self, automaton: SuffixAutomaton) -> None:
        self.automaton = automaton
        self.matched = 0
        self._state = 0

    def step(self, token: int) -> None:
        seen = self.automaton
        self._settle()
        while self._state and token not in seen.next[self._state]:
            self._state = seen.link[self._state]
            self.matched = seen.length[self._state]
        if token in seen.next[self._state]:
            self._state = seen.next[self._state][token]
            self.matched += 1

    def _settle(self) -> None:
        """What is matched may have been split off from its state."""
        seen = self.automaton
        while self._state and self.matched <= seen.length[seen.link[self._state]]:
            self._state = seen.link[self._state]

    @property
    def end(self) -> int:
        """The number of the automaton's tokens up to the end of what is matched, where that stood."""
        self._settle()
        return self.automaton.end[self._state]


class Remembered:
    """Earlier answers of one tenant: a young automaton that takes them in, and the one before it."""

    def __init__(self) -> None:
        self.old, self.young = SuffixAutomaton(), SuffixAutomaton()

    def add(self, answer: list[int]) -> None:
        """Takes in an answer, of a long one the end. Between two answers stands a token that is none."""
        for token in (*answer[-REMEMBERED:], -1):
            self.young.append(token)
        if len(self.young.tokens) >= REMEMBERED:
            self.old, self.young = self.young, SuffixAutomaton()


class SuffixMatcher:
    """One sequence: its own automaton, and how its end stands in earlier answers of its tenant."""

    def __init__(self, earlier: Remembered) -> None:
        self._own = SuffixAutomaton()
        self._taken = -1
        self._best = (0, 0)
        self._cursors = [Cursor(earlier.old), Cursor(earlier.young)]

    def propose(self, tokens: list[int], most: int) -> list[int]:
        """At most so many tokens that may follow `tokens`, which have only grown since the last call."""
        if self._taken < 0:
            self._taken = max(0, len(tokens) - REACH)
        part = tokens[self._taken : self._taken + CATCH_UP]
        for token in part:
            self._best = self._own.append(token)
            for cursor in self._cursors:
                cursor.step(token)
        self._taken += len(part)
        if self._taken < len(tokens):
            return []
        seen = [(self._best[0], self._own, self._best[1])]
        seen += [(cursor.matched, cursor.automaton, cursor.end) for cursor in self._cursors]
        length, automaton, end = max(seen, key=lambda each: each[0])
        if length < LEAST:
            return []
        found = following(automaton.tokens, end, most)
        return found[: found.index(-1)] if -1 in found else found
