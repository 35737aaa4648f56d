"""Prompts in every form that callers give, and what is refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from headrace.engine.prompts import listed, params_of, token_ids
from headrace.types import InvalidRequest, SamplingParams

FORMS: list[tuple[Any, list[str | list[int]]]] = [
    ("a text", ["a text"]),
    ("", [""]),
    ([], []),
    (["a", "b"], ["a", "b"]),
    (("a", [5, 6]), ["a", [5, 6]]),
    ([5, 6, 7], [[5, 6, 7]]),
    ([[5, 6], [7]], [[5, 6], [7]]),
    ([[]], [[]]),
    (np.array([5, 6]), [[5, 6]]),
    (list(np.array([5, 6])), [[5, 6]]),
    (np.array([[5, 6], [7, 8]]), [[5, 6], [7, 8]]),
    ((each for each in ("a", "b")), ["a", "b"]),
]


@pytest.mark.parametrize(("given", "expected"), FORMS, ids=range(len(FORMS)))
def test_one_prompt_and_several(given: Any, expected: list[str | list[int]]) -> None:
    found = listed(given, "prompts")
    assert found == expected
    assert all(type(token) is int for each in found if isinstance(each, list) for token in each)


NEITHER = [None, 5, b"bytes", bytearray(b"bytes"), [None], [1.0, 2.0], [[1.7]], [[True]], [["5"]], ["a", 5], [[[5]]]]


@pytest.mark.parametrize("given", NEITHER, ids=map(repr, NEITHER))
def test_what_is_neither_text_nor_token_ids_is_refused(given: Any) -> None:
    with pytest.raises(InvalidRequest, match=r"^prompts: ") as refused:
        listed(given, "prompts")
    assert refused.value.param == "prompts"


@pytest.mark.parametrize("given", [{"prompt": "a"}, {"prompt_token_ids": [5]}, [{"prompt": "a"}]])
def test_the_names_in_a_dict_are_no_prompts(given: Any) -> None:
    with pytest.raises(InvalidRequest, match=r"not a dict: .* give what it holds"):
        listed(given, "prompts")


def test_a_text_is_no_token_ids() -> None:
    with pytest.raises(InvalidRequest, match="not 'abc'"):
        token_ids("abc", "options")


@pytest.mark.parametrize("given", [3, {"max_tokens": 3}, [3], "x", [SamplingParams()] * 3], ids=repr)
def test_what_is_no_sampling_params_of_the_prompts_is_refused(given: Any) -> None:
    with pytest.raises(InvalidRequest) as refused:
        params_of(given, ["a", "b"])
    assert refused.value.param == "sampling_params"
    assert params_of(None, ["a", "b"]) == params_of(SamplingParams(), ["a", "b"]) == [SamplingParams()] * 2
