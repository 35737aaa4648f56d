"""Prompts of hybrid models that share prefixes, and what one rank that shares nothing answers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from headrace import LLM, SamplingParams
from tests.support.kind_sizes import VOCAB
from tests.support.traces import Trace, run

SHORT = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
LONG = SamplingParams(temperature=0.0, max_tokens=70, ignore_eos=True)


def words(count: int, seed: int = 0) -> list[int]:
    g = torch.Generator().manual_seed(seed)
    return torch.randint(0, VOCAB, (count,), generator=g).tolist()


def prompts() -> list[list[int]]:
    """Uneven ones; some are alike, some share 130 or 200 tokens, one is a prefix of another."""
    base = words(330)
    mixed = [words(1, 1), words(65, 3), words(200, 4), base, base, base[:256], base + words(70, 5)]
    return mixed + [base[:130] + words(40 + i, 6 + i) for i in range(2)] + [base[:200] + words(90, 9)]


def alone(folder: Path, given: list[list[int]], params: SamplingParams = SHORT, **settings: Any) -> list[Trace]:
    """On one rank, one by one, with nothing shared."""
    private = LLM(str(folder), dtype="bfloat16", kv_cache_tokens=8192, enable_prefix_caching=False, **settings)
    return [run(private, [prompt], params)[0] for prompt in given]
