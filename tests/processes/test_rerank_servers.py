"""Servers that rerank, a classifier and a language model: their scores are those of Python, by what both compute."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from shutil import copytree
from typing import Any

import pytest

from headrace import LLM, assets
from headrace.engine.reranking import sigmoid
from tests.support.classifiers import classifier
from tests.support.server_process import PROMPT, ServerProcess, process

TINY = Path(assets.__file__).parent / "tiny"
DOCUMENTS = ["And the Spirit of God moved upon the face of the waters.", "1234", "And God said, Let there be light."]
YES, NO = 2027, 2028
"""Tokens of the last two merges."""
ASKED = {"query": PROMPT * 4, "documents": DOCUMENTS}


@pytest.fixture(scope="module")
def reranker(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return classifier(TINY, tmp_path_factory.mktemp("classifier") / "model", 1)


@pytest.fixture(scope="module")
def writer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The shipped model, with the words yes and no in place of its last two, and a template for reranking."""
    folder = Path(copytree(TINY, tmp_path_factory.mktemp("writer") / "model"))
    told = json.loads((folder / "tokenizer.json").read_text())
    vocab, merges = told["model"]["vocab"], told["model"]["merges"]
    for word in ("no", "yes"):
        last = merges.pop()
        vocab[word] = vocab.pop(last.replace(" ", "") if isinstance(last, str) else "".join(last))
    assert (vocab["yes"], vocab["no"]) == (YES, NO)
    told["model"]["ignore_merges"] = True
    (folder / "tokenizer.json").write_text(json.dumps(told))
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates/rerank.jinja").write_text("{document} <- {query}")
    return folder


@pytest.fixture(scope="module")
def served(reranker: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    with process(tmp_path_factory.mktemp("logs"), model=str(reranker)) as started:
        started.wait_ready()
        yield started


def scores(reply: dict[str, Any]) -> list[float]:
    """By the documents' order."""
    found = sorted(reply["results"], key=lambda each: each["index"])
    assert [each["document"]["text"] for each in found] == DOCUMENTS
    best = [each["relevance_score"] for each in reply["results"]]
    assert best == sorted(best, reverse=True)
    return [each["relevance_score"] for each in found]


def test_a_classifier_says_the_same_in_python(served: ServerProcess, reranker: Path) -> None:
    logits = LLM(str(reranker), kv_cache_tokens=4096).classify([f"{ASKED['query']}\n{each}" for each in DOCUMENTS])
    want = [sigmoid(float(each)) for each in logits[:, 0]]
    reply = served.http.post("/v1/rerank", json=ASKED).json()
    assert scores(reply) == want and len(set(want)) == 3
    again = served.http.post("/v1/rerank", json=ASKED).json()
    assert scores(again) == want and again["headrace"]["cached_tokens"] >= 3 * 64, "the query is shared"
    classes = served.http.post("/v1/classify", json={"input": f"{ASKED['query']}\n1234"}).json()
    assert classes["data"] == [{"index": 0, "label": "LABEL_0", "probs": [want[1]], "num_classes": 1}]


def test_a_language_model_says_yes_or_no(writer: Path, tmp_path: Path) -> None:
    llm = LLM(str(writer), kv_cache_tokens=4096)
    assert llm.tokenizer is not None
    texts = [llm.tokenizer.encode_chat(f"{each} <- {ASKED['query']}") for each in DOCUMENTS]
    judged = [llm.score(text, [[YES], [NO]]) for text in texts]
    want = [math.exp(yes.logprob) / (math.exp(yes.logprob) + math.exp(no.logprob)) for yes, no in judged]
    with process(tmp_path, model=str(writer)) as started:
        started.wait_ready()
        assert scores(started.http.post("/v1/rerank", json=ASKED).json()) == pytest.approx(want, rel=1e-9)
