"""POST /v1/rerank and /v1/classify over a fake engine: the first logit is the prompt's length, a token is a byte."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest

from headrace.engine.reranking import QWEN3, QWEN3_TOKEN, sigmoid
from tests.support.fake_engine import FakeEngine, FakeTokenizer
from tests.support.fake_server import Running, check_refusal, serving

pytestmark = pytest.mark.unit

CLASSIFY, RERANK = "/v1/classify", "/v1/rerank"
ASKED = {"query": "ab", "documents": ["cd", {"text": "efgh"}, "c"]}


@pytest.fixture(scope="module")
def one() -> Iterator[Running]:
    """A classifier with one label."""
    with serving(labels=("relevance",)) as running:
        yield running


@pytest.fixture(scope="module")
def three() -> Iterator[Running]:
    with serving(labels=("no", "yes", "maybe")) as running:
        yield running


@pytest.fixture(scope="module")
def writer() -> Iterator[Running]:
    """A language model."""
    with serving() as running:
        yield running


def test_results_are_sorted(one: Running) -> None:
    reply = one.http.post(RERANK, json={"model": "fake", **ASKED}).json()
    assert [each["index"] for each in reply["results"]] == [1, 0, 2]
    assert [each["relevance_score"] for each in reply["results"]] == [sigmoid(7), sigmoid(5), sigmoid(4)]
    assert [each["document"]["text"] for each in reply["results"]] == ["efgh", "cd", "c"]
    assert reply["usage"]["prompt_tokens"] == reply["usage"]["total_tokens"] == 16 and reply["model"] == "fake"
    assert reply["id"].startswith("rerank-") and reply["headrace"]["new_tokens"] == 16
    assert {prompt for prompt, _ in one.engine.asked[-3:]} == {"ab\ncd", "ab\nefgh", "ab\nc"}


def test_scores_that_are_rounded_to_one_are_sorted_too(one: Running) -> None:
    reply = one.http.post(RERANK, json={"query": "a", "documents": ["b" * 100, "b" * 300, "b" * 300, "b" * 200]}).json()
    assert [each["index"] for each in reply["results"]] == [1, 2, 3, 0]
    assert {each["relevance_score"] for each in reply["results"]} == {1.0}


@pytest.mark.parametrize("path", ["/rerank", "/v2/rerank"])
@pytest.mark.parametrize(("top_n", "count"), [(1, 1), (2, 2), (9, 3), (None, 3)])
def test_the_best_few(path: str, top_n: int | None, count: int, one: Running) -> None:
    results = one.http.post(path, json={**ASKED, "top_n": top_n, "return_documents": False}).json()["results"]
    assert [each["index"] for each in results] == [1, 0, 2][:count] and "document" not in results[0]


def test_templates(one: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    """The client's, else the checkpoint's, else a line break."""
    with monkeypatch.context() as patch:
        patch.setattr(FakeTokenizer, "rerank_template", "<{document}|{query}>")
        one.http.post(RERANK, json={"query": "{document}", "documents": ["{query}"]})
        one.http.post(RERANK, json={"query": "a", "documents": ["b"], "template": "{query}: {document}!"})
    one.http.post(RERANK, json={"query": "a", "documents": ["b"]})
    assert [prompt for prompt, _ in one.engine.asked[-3:]] == ["<{query}|{document}>", "a: b!", "a\nb"]


@pytest.mark.parametrize(
    ("more", "param"),
    [
        ({"query": None}, "query"),
        ({"query": ""}, "query"),
        ({"query": ["a"]}, "query"),
        ({"query": "q" * 3000, "documents": ["d"] * 2000}, "query"),
        ({"documents": None}, "documents"),
        ({"documents": []}, "documents"),
        ({"documents": "a"}, "documents"),
        ({"documents": ["a", ""]}, "documents"),
        ({"documents": [{"text": ""}]}, "documents"),
        ({"documents": [{"text": "a", "title": "b"}]}, "documents"),
        ({"documents": [{"image": "a"}]}, "documents"),
        ({"documents": [[97]]}, "documents"),
        ({"documents": ["a"] * 2049}, "documents"),
        ({"documents": ["a", "b" * 4000]}, "documents"),
        ({"top_n": 0}, "top_n"),
        ({"top_n": -1}, "top_n"),
        ({"top_n": "1"}, "top_n"),
        ({"template": ""}, "template"),
        ({"template": "{query} {doc}"}, "template"),
        ({"return_documents": 1}, "return_documents"),
        ({"stream": True}, "stream"),
        ({"cache_salt": ""}, "cache_salt"),
        ({"max_tokens_per_doc": 512}, "max_tokens_per_doc"),
        ({"rank_fields": ["text"]}, "rank_fields"),
        ({"overlap": 1}, "overlap"),
    ],
    ids=lambda value: json.dumps(value)[:40],
)
def test_refusals_name_the_field(more: dict[str, Any], param: str, one: Running) -> None:
    check_refusal(one.http.post(RERANK, json={**ASKED, **more}), 400, param)
    assert one.engine.stats.kv.chunks_used == 0


def test_which_document_is_too_long(one: Running) -> None:
    error = one.http.post(RERANK, json={"query": "a", "documents": ["a", "b" * 4000]}).json()["error"]
    assert error["message"].startswith("documents[1]") and error["code"] == "context_length_exceeded"


def test_other_models_are_refused(three: Running, writer: Running) -> None:
    reply = three.http.post(RERANK, json=ASKED)
    check_refusal(reply, 400, "model")
    assert "/v1/classify" in reply.json()["error"]["message"]
    check_refusal(writer.http.post(RERANK, json=ASKED), 400, "model")
    check_refusal(writer.http.post(CLASSIFY, json={"input": "a"}), 400, "model")


class YesNo(FakeTokenizer):
    added_tokens: ClassVar[dict[str, int]] = {QWEN3_TOKEN: 257}

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return {"yes": [7], "no": [5]}.get(text) or super().encode(text)


def says_yes_or_no(number: int, engine: FakeEngine) -> None:
    engine.tokenizer = YesNo()


def test_language_models_say_yes_or_no() -> None:
    """The probability of yes beside that of no; log probabilities of the fake are -0.01 times the token."""
    with serving(prepare=says_yes_or_no) as running:
        reply = running.http.post(RERANK, json={**ASKED, "top_n": 2}).json()
        assert [each["relevance_score"] for each in reply["results"]] == pytest.approx([sigmoid(-0.02)] * 2)
        assert {prompt for prompt, _ in running.engine.asked} == {
            QWEN3.replace("{query}", "ab").replace("{document}", each) for each in ("cd", "efgh", "c")
        }
        assert all(params.max_tokens == 1 for _, params in running.engine.asked)


def test_a_language_model_without_that_prompt_is_given_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(YesNo, "added_tokens", {})
    with serving(prepare=says_yes_or_no) as running:
        check_refusal(running.http.post(RERANK, json=ASKED), 400, "template")
        assert running.http.post(RERANK, json={**ASKED, "template": "{query} {document}"}).status_code == 200
        assert running.engine.asked[0][0] == "ab cd"


def test_an_answer_of_each_document_counts(tmp_path: Path) -> None:
    key = "sk-0123456789abcdef"
    keys = tmp_path / "keys.toml"
    keys.write_text(f'[tenants.acme]\nkeys = ["{key}"]\nmax_output_tokens = 2\n')
    keys.chmod(0o600)
    with serving(prepare=says_yes_or_no, api_keys_file=str(keys)) as running:
        running.http.headers["x-api-key"] = key
        assert running.http.post(RERANK, json={"query": "a", "documents": ["b", "c"]}).status_code == 200
        check_refusal(running.http.post(RERANK, json=ASKED), 400, "documents")


def test_many_documents_do_not_fill_the_queue() -> None:
    with serving(max_queued_requests=4, token_s=0.001, labels=("a",)) as running:
        reply = running.http.post(RERANK, json={"query": "a", "documents": ["b"] * 50})
        assert reply.status_code == 200 and len(reply.json()["results"]) == 50


# ---- classes ---------------------------------------------------------------------------------------------------------


def softmax(*logits: float) -> list[float]:
    powers = [math.exp(each) for each in logits]
    return [power / sum(powers) for power in powers]


def test_several_labels_share_one(three: Running) -> None:
    """Logits of the fake: the prompt's length, its first token, 0."""
    reply = three.http.post(CLASSIFY, json={"model": "fake", "input": [[3, 1, 1, 1], [2, 1], [9]]}).json()
    assert [each["label"] for each in reply["data"]] == ["no", "no", "yes"]
    assert [each["probs"] for each in reply["data"]] == [
        pytest.approx(softmax(*logits, 0)) for logits in ((4, 3), (2, 2), (1, 9))
    ]
    assert [(each["index"], each["num_classes"]) for each in reply["data"]] == [(0, 3), (1, 3), (2, 3)]
    assert reply["object"] == "list" and reply["usage"]["total_tokens"] == 7 and reply["headrace"]["new_tokens"] == 7


def test_one_label_by_itself(one: Running) -> None:
    [told] = one.http.post(CLASSIFY, json={"input": "abc", "use_activation": True}).json()["data"]
    assert told == {"index": 0, "label": "relevance", "probs": [sigmoid(3)], "num_classes": 1}


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "input"),
        ({"input": []}, "input"),
        ({"input": ["a", ""]}, "input"),
        ({"input": [400]}, "input"),
        ({"input": "a" * 5000}, "input"),
        ({"input": ["a"] * 2049}, "input"),
        ({"input": "a", "stream": True}, "stream"),
        ({"input": "a", "use_activation": False}, "use_activation"),
        ({"input": "a", "dimensions": 1}, "dimensions"),
    ],
    ids=lambda value: json.dumps(value)[:40],
)
def test_refused_classes_name_the_field(body: dict[str, Any], param: str, three: Running) -> None:
    check_refusal(three.http.post(CLASSIFY, json=body), 400, param)
