"""A draft model's passes on a device that is late (tests.support.delayed_device): each is given to it while the one
before is under way, and takes the token that this one chooses there."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="Triton is built for Linux only")

from headrace import LLM, SamplingParams
from headrace.engine.executor import Computed, table_of, wanted_rows
from headrace.engine.sequence import Slice
from headrace.engine.speculation.draft_model import DraftModel
from tests.support.delayed_device import DelayedDevice, delayed_device
from tests.support.drafting import free_model
from tests.support.token_machine import TokenMachine, machine_engine

CHUNKS = 12


class Drafter(TokenMachine):
    """Logits of drafted rows as well."""

    def run(self, slices: Sequence[Slice]) -> Computed:
        super().run(slices)
        parts = wanted_rows(slices).parts
        ends = [(part, end) for part, _ in parts for end in range(part.end - part.drafted, part.end + 1)]
        rows = [self.row(table_of(part).slots, end) for part, end in ends]
        return Computed(torch.stack(rows) if rows else torch.empty(0, 0), parts)


def drafting(late: DelayedDevice, refuses: bool) -> LLM:
    """An engine without a model whose draft model says what it does. refuses: some passes ahead are."""
    llm = LLM("tiny", kv_cache_tokens=1024)
    width, longest = llm.capacity.vocab_size, llm.capacity.max_model_len
    draft: Any = Drafter(late, CHUNKS, width, 32, 32, refuses)
    llm.engine.loaded = replace(llm.engine.loaded, draft=DraftModel(draft, longest, 0.1))
    llm.engine = core = machine_engine(llm, late, CHUNKS, ahead=False, speculative="ngram")
    core.loaded.executor = core.overlap.executor = Drafter(late, CHUNKS, width, 64, 64)
    free_model(llm)
    return llm


@pytest.mark.parametrize("refuses", [False, True], ids=["ahead", "some-waited-for"])
def test_every_token_is_the_one_that_the_model_draws(refuses: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of three sequences that enter chunks: a pass that took one token for another would say a wrong one."""
    prompts = [[random.Random(count).randrange(10, 2000) for _ in range(count)] for count in (61, 9, 100)]
    with delayed_device(monkeypatch) as late:
        llm = drafting(late, refuses)
        llm.generate(prompts, SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True))
        told, draft, model = llm.engine.stats().speculation, llm.engine.loaded.draft, llm.engine.loaded.executor
        assert told.accepted == told.drafted > 60
        assert draft is not None and isinstance(draft.runner, TokenMachine) and isinstance(model, TokenMachine)
        assert draft.runner.ahead > 20 and late.most_ahead == 2
        model.check(llm.engine.cache)
