"""Covering arrays: few cases in which each two values of two parameters stand together, as far as they may.

The greedy search of Cohen, Dalal, Fredman and Patton ("The AETG System", IEEE TSE 1997): each case begins with a pair
that is missing yet, and takes, parameter by parameter in random order, the value that adds most missing pairs; the best
of a few such cases is kept.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import combinations
from random import Random

Case = Mapping[str, str]
"""Parameter -> value; of a partial case some parameters are missing."""
Pair = frozenset[tuple[str, str]]
TRIED = 4


class Coverage:
    """possible(case): whether a partial case breaks no constraint by what it has. A case is allowed if it is possible
    with all of its parameters."""

    def __init__(self, parameters: Mapping[str, Sequence[str]], possible: Callable[[Case], bool]) -> None:
        self.parameters, self.possible = parameters, possible
        self._known: dict[frozenset[tuple[str, str]], bool] = {}

    def completed(self, case: Case) -> Case | None:
        """The first allowed case that has the given values."""
        if not self.possible(case):
            return None
        name = next((name for name in self.parameters if name not in case), None)
        if name is None:
            return case
        found = (self.completed({**case, name: value}) for value in self.parameters[name])
        return next((each for each in found if each is not None), None)

    def completes(self, case: Case) -> bool:
        key = frozenset(case.items())
        if key not in self._known:
            self._known[key] = self.completed(case) is not None
        return self._known[key]

    def pairs(self) -> list[Pair]:
        """Those of some allowed case."""
        found = []
        for one, other in combinations(self.parameters, 2):
            for x in self.parameters[one]:
                found += [frozenset({(one, x), (other, y)}) for y in self.parameters[other]]
        return [pair for pair in found if self.completes(dict(pair))]

    def cases(self, seed: int = 1) -> list[Case]:
        """The array, the same for the same seed."""
        random, found = Random(seed), []
        missing = dict.fromkeys(self.pairs())
        while missing:
            first = next(iter(missing))
            best = max((self._grown(first, missing, random) for _ in range(TRIED)), key=lambda case: new(case, missing))
            found.append({name: best[name] for name in self.parameters})
            for pair in pairs_of(best):
                missing.pop(pair, None)
        return found

    def _grown(self, first: Pair, missing: Mapping[Pair, None], random: Random) -> Case:
        case = dict(first)
        for name in random.sample(list(self.parameters), len(self.parameters)):
            if name in case:
                continue
            values = random.sample(list(self.parameters[name]), len(self.parameters[name]))
            values.sort(key=lambda value, name=name: -gain(case, name, value, missing))  # type: ignore[misc]
            case[name] = next(value for value in values if self.completes({**case, name: value}))
        return case


def gain(case: Case, name: str, value: str, missing: Mapping[Pair, None]) -> int:
    """Missing pairs that a value would add to a case."""
    return sum(frozenset({(name, value), each}) in missing for each in case.items())


def pairs_of(case: Case) -> list[Pair]:
    return [frozenset(pair) for pair in combinations(case.items(), 2)]


def new(case: Case, missing: Mapping[Pair, None]) -> int:
    return sum(pair in missing for pair in pairs_of(case))


def every_value(cases: Sequence[Case]) -> list[Case]:
    """Few of the cases, in which each value of each parameter is met."""
    left = {item for case in cases for item in case.items()}
    found: list[Case] = []
    while left:
        found.append(max(cases, key=lambda case: len(left & set(case.items()))))
        left -= set(found[-1].items())
    return found
