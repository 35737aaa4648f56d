"""The mutants of `make mutants` are what they say, without running them: each still fits the code, in every room."""

from __future__ import annotations

from collections import Counter

import pytest

from tools.mutants import ROOT, Mutant, mutants, rooms
from tools.mutants.run import verdict

pytestmark = pytest.mark.unit

ALL = mutants()


@pytest.mark.parametrize("mutant", ALL, ids=lambda mutant: mutant.name)
def test_it_fits_the_code(mutant: Mutant) -> None:
    text = (ROOT / mutant.file).read_text()
    assert mutant.applied(text) != text and mutant.breaks
    assert mutant.tests
    for test in mutant.tests:
        path, *names = test.split("::")
        source = (ROOT / path).read_text()
        assert path.startswith("tests/") and all(name.partition("[")[0] in source for name in names[:1])


def test_there_are_enough_for_each_room() -> None:
    assert len({mutant.name for mutant in ALL}) == len(ALL) >= 40
    counts = Counter(mutant.room for mutant in ALL)
    assert {room: counts[room] for room in rooms() if counts[room] < 2} == {}
    assert set(counts) <= rooms()


def test_a_mutant_that_does_not_fit_is_a_fault() -> None:
    mutant = Mutant("twice", "", "src/headrace/files.py", "a", "b", ())
    assert mutant.applied("cat") == "cbt"
    for text in ("", "aa"):
        with pytest.raises(ValueError, match="twice"):
            mutant.applied(text)


@pytest.mark.parametrize(
    ("status", "output", "outcome"),
    [
        (0, "1 passed", "SURVIVED"),
        (1, "FAILED tests/unit/test_x.py::test_y[a b] - assert 0", "killed"),
        (1, "ERROR    asyncio:base_events.py:1 a line of a log", "FAULT"),
        (2, "ERROR tests/unit/test_x.py", "FAULT"),  # the mutant is no valid Python, say
        (4, "", "FAULT"),
        (5, "no tests ran", "FAULT"),
        (70, "", "FAULT"),
        (None, "", "killed"),
    ],
)
def test_verdicts(status: int | None, output: str, outcome: str) -> None:
    found = verdict(status, output)
    assert found.outcome == outcome and found.good == (outcome == "killed")
    assert "[a b]" not in output or found.told == "tests/unit/test_x.py::test_y[a b]"
