"""Rows for the sampler: logits drawn at random, and the request that each belongs to."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from headrace.engine.output import Active, Output
from headrace.engine.sampler import History, SampleInput, is_plain, needs_history, sample
from headrace.engine.sequence import SequenceState
from headrace.types import Request, SamplingParams


def row_input(
    params: SamplingParams,
    output: Sequence[int] = (),
    prompt: Sequence[int] = (),
    seed: int = 0,
    index: int = 0,
    **more: Any,
) -> SampleInput:
    return SampleInput(params, prompt, output, index, seed, **more)


def output_of(params: SamplingParams, prompt: list[int], index: int = 0, seed: int = 0) -> Output:
    """A sequence as an engine begins it."""
    request = Request(f"r{index}", prompt, params)
    history = History(prompt) if needs_history(params) else None
    return Output(SequenceState(request, index, index), Active(request, seed), None, history, is_plain(params))


def draw(logits: torch.Tensor, params: SamplingParams, **more: Any) -> int:
    return sample(logits[None], [row_input(params, **more)])[0].token


def random_logits(seed: int, rows: int, size: int, scale: float = 3.0) -> torch.Tensor:
    return torch.randn(rows, size, generator=torch.Generator().manual_seed(seed)) * scale
