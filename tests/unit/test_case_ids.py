"""Ids of parametrised cases (tests/support/case_ids.py)."""

from __future__ import annotations

from typing import Any

import pytest

from headrace.types import SamplingParams
from tests.support.case_ids import LONGEST, case_id

pytestmark = pytest.mark.unit


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (True, "x=True"),
        (None, "x=None"),
        ("", "empty"),
        ("text", None),
        (8, None),
        ({"a": 1, "b": [None, "c"]}, "a=1, b=(None, 'c')"),
        ({}, "defaults"),
        ([(1, 2), ()], "(1, 2), (none)"),
        ({"b", "a"}, "'a', 'b'"),
        (ValueError("why"), "ValueError: why"),
        (SamplingParams(temperature=0.0, top_k=3), "temperature=0.0, top_k=3"),
        (lambda: 1, "x"),
        ([object()], None),
        ("\xe9" * 100, "\\xe9" * 17 + "\\x" + "..."),
    ],
)
def test_an_id_says_the_case(value: Any, expected: str | None) -> None:
    told = case_id(value, "x")
    assert told == expected and len(told or "") <= LONGEST + 3
