"""Classifiers: the logits of transformers' own classes, and the same bits on every schedule."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForSequenceClassification

from headrace import LLM, InvalidRequest
from headrace.models.config import read_config
from headrace.types import UnsupportedModel
from tests.support.checkpoints import FolderOf, edit_json
from tests.support.classifiers import classifier
from tests.support.kind_sizes import VOCAB
from tests.support.ranked_offloading import close, over_ranks

HEADS = [("llama_gqa", 1), ("mistral_window", 2), ("qwen2", 1), ("qwen3", 3)]


def texts() -> list[list[int]]:
    drawn = torch.randint(3, VOCAB, (300,), generator=torch.Generator().manual_seed(1)).tolist()
    return [drawn[:150], drawn[:130] + drawn[200:240], drawn[7:8], drawn[10:74]]


@pytest.fixture(scope="module")
def three(folder_of: FolderOf, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return classifier(folder_of("qwen3"), tmp_path_factory.mktemp("three"), 3, torch.bfloat16)


@pytest.mark.parametrize(("kind", "labels"), HEADS)
def test_they_are_the_logits_of_transformers(kind: str, labels: int, folder_of: FolderOf, tmp_path: Path) -> None:
    folder = classifier(folder_of(kind), tmp_path, labels)
    llm, model = LLM(str(folder), kv_cache_tokens=4096), AutoModelForSequenceClassification.from_pretrained(folder)
    found = llm.classify(texts())
    assert found.dtype == np.float32 and found.shape == (4, labels) and len(llm.capacity.pooling.labels) == labels
    with torch.inference_mode():
        want = torch.cat([model.eval()(torch.tensor([text])).logits for text in texts()])
    assert found == pytest.approx(want.numpy(), abs=1e-4) and np.abs(found).max() > 0.1


def test_every_schedule_gives_the_same_bits(three: Path) -> None:
    """bf16: alone, in a batch, cached, in slices, with rounded weights."""
    for settings in ({}, {"quantization": "int8"}):
        alone = LLM(str(three), kv_cache_tokens=4096, enable_prefix_caching=False, **settings)
        want = np.concatenate([alone.classify([text]) for text in texts()])
        llm = LLM(str(three), kv_cache_tokens=4096, max_batch_tokens=96, **settings)
        for _ in range(2):
            assert llm.classify(texts()).tolist() == want.tolist()
        assert llm.engine.stats().tokens.cached > 128


@pytest.mark.parametrize("tensor", [1, 2])
@pytest.mark.parametrize("strategy", ["chain", "ring-kv"])
def test_ranks_give_the_bits_of_one(strategy: str, tensor: int, three: Path) -> None:
    want = LLM(str(three), kv_cache_tokens=4096).classify(texts())
    llm = over_ranks(2, (strategy,), 4096, three, tensor=tensor, max_model_len=None)
    assert llm.classify(texts()).tolist() == want.tolist()
    close(llm)


def test_what_is_refused(three: Path, folder_of: FolderOf, tmp_path: Path) -> None:
    llm = LLM(str(three), kv_cache_tokens=1024)
    for refused in (lambda: llm.generate([[5]]), lambda: llm.embed([[5]]), lambda: llm.score([5], [[6]])):
        with pytest.raises(InvalidRequest, match="classif"):
            refused()
    with pytest.raises(InvalidRequest, match="no classifier's head"):
        LLM(str(folder_of("qwen3")), kv_cache_tokens=1024).classify([[5]])
    folder = classifier(folder_of("qwen3"), tmp_path, 3)
    edit_json(folder / "config.json", id2label={"0": "no", "2": "yes"})
    with pytest.raises(UnsupportedModel, match="id2label"):
        read_config(folder)
    edit_json(folder / "config.json", id2label={"0": "no", "1": "yes"})
    with pytest.raises(ValueError, match=r"score.weight of shape \[3, 128\] where \[2, 128\]"):
        LLM(str(folder), kv_cache_tokens=1024)
