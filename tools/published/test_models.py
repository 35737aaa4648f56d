"""Published models: log probabilities and answers of transformers' classes, and the promise in every schedule."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from headrace import LLM, SamplingParams
from headrace.config import config_from_env
from headrace.doctor.verify import verify
from headrace.models.published import Published
from tools.published.files import MODELS, model, with_accelerate

TEXT = (Path(__file__).parents[2] / "docs" / "attention.md").read_text()[:3000]
NEW = 32


@pytest.fixture(scope="module", params=MODELS, ids=lambda each: each.name)
def published(request: pytest.FixtureRequest) -> Iterator[tuple[Path, Any]]:
    """The file, and transformers' model of it in fp32. (Its tokenizer of a GGUF file does not cut digits apart.)"""
    with_accelerate()
    from transformers import AutoModelForCausalLM

    each: Published = request.param
    path = model(each)
    yield path, AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32).eval()


def test_as_transformers(published: tuple[Path, Any]) -> None:
    path, theirs = published
    with LLM(str(path), dtype="float32", kv_cache_tokens=4096) as llm:
        asked = SamplingParams(temperature=0, max_tokens=NEW, ignore_eos=True, prompt_logprobs=0)
        [answer] = llm.generate(TEXT, asked)
    tokens = list(answer.prompt_token_ids)
    assert answer.prompt_logprobs is not None
    ours = torch.tensor(
        [each[token].logprob for token, each in zip(tokens[1:], answer.prompt_logprobs[1:], strict=True)]
    )
    with torch.no_grad():
        logits = theirs(torch.tensor([tokens])).logits[0, :-1]
        made = theirs.generate(torch.tensor([tokens]), max_new_tokens=NEW, min_new_tokens=NEW, do_sample=False)
    truth = logits.log_softmax(-1).gather(1, torch.tensor(tokens[1:])[:, None])[:, 0]
    torch.testing.assert_close(ours, truth, rtol=0, atol=2e-4)
    assert list(answer.token_ids) == made[0, len(tokens) :].tolist()


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_every_schedule_the_same_bits(dtype: str, published: tuple[Path, Any]) -> None:
    path = published[0]
    report = verify(config_from_env(model=str(path), dtype=dtype, kv_cache_tokens=16384), seconds=30)
    assert report.equal, report
    assert all(each.equal for each in report.verdicts), report


def test_a_small_model_that_answers() -> None:
    with LLM(str(model(MODELS[0])), kv_cache_tokens=4096) as llm:
        greedy = SamplingParams(temperature=0, max_tokens=16)
        [answer] = llm.chat([{"role": "user", "content": "What is the capital of France?"}], greedy)
    assert "Paris" in answer.text and answer.finish_reason == "stop"
