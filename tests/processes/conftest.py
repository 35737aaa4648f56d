"""What ranks as processes need, and the answers that their servers are compared with."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from headrace import LLM, SamplingParams
from tests.support.rank_answers import QUESTIONS
from tests.support.rank_groups import ROOT


@pytest.fixture(scope="module")
def importable() -> Iterator[None]:
    """Workers find the fake rank."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(ROOT), prepend=os.pathsep)
        patch.setenv("OMP_NUM_THREADS", "1")
        yield


@pytest.fixture(scope="module")
def right() -> list[list[int]]:
    """The answers of one rank."""
    llm = LLM("tiny", kv_cache_tokens=32768)
    params = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)
    return [llm.generate([q] if isinstance(q, list) else q, params)[0].outputs[0].token_ids for q in QUESTIONS]
