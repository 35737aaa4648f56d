"""Embeddings: transformers' hidden states, pooled as the checkpoint says; the same bits on every schedule."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModel

from headrace import LLM, InvalidRequest, SamplingParams
from headrace.engine.embedding import EMBEDS, EmbeddingAborted
from headrace.engine.pooled import Pooled
from headrace.pooling import PoolingKind
from headrace.types import Request
from tests.support.checkpoints import FolderOf
from tests.support.kind_sizes import VOCAB
from tests.support.likelihoods import with_pooling


def tokens(count: int, seed: int) -> list[int]:
    return torch.randint(3, VOCAB, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


@pytest.fixture(scope="module")
def engines(folder_of: FolderOf, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, LLM]]:
    base = tmp_path_factory.mktemp("embeds")
    made = {
        kind: LLM(str(with_pooling(folder_of("qwen3"), base / kind, kind, kind != "mean")), kv_cache_tokens=4096)
        for kind in ("last", "mean", "cls")
    }  # fmt: skip
    yield made
    for llm in made.values():
        assert not llm.engine.has_work and llm.engine.cache.used == 0
        llm.engine.scheduler.check()


@pytest.mark.parametrize("kind", ["last", "mean", "cls"])
def test_they_are_the_hidden_states_of_transformers(
    kind: PoolingKind, engines: dict[str, LLM], folder_of: FolderOf
) -> None:
    model = AutoModel.from_pretrained(folder_of("qwen3"), dtype=torch.float32).eval()
    texts = [tokens(count, count) for count in (1, 5, 64, 150)]
    found = engines[kind].embed(texts)
    assert found.dtype == np.float32 and found.shape == (4, 128)
    for row, text in zip(found, texts, strict=True):
        with torch.inference_mode():
            states = model(torch.tensor([text])).last_hidden_state[0].double()
        want = {"last": states[-1], "mean": states.mean(0), "cls": states[0]}[kind]
        want = want if kind == "mean" else want / want.norm()
        assert row == pytest.approx(want.numpy(), abs=2e-4)
        assert kind == "mean" or np.linalg.norm(row) == pytest.approx(1, abs=1e-6)


def test_without_a_word_on_pooling_it_is_the_last_token_normalised(
    folder_of: FolderOf, engines: dict[str, LLM]
) -> None:
    plain, text = LLM(str(folder_of("qwen3")), kv_cache_tokens=1024), tokens(70, 1)
    assert plain.embed([text]).tolist() == engines["last"].embed([text]).tolist()
    assert plain.embed(text).tolist() == plain.embed([text]).tolist(), "one list of token ids is one text"


@pytest.mark.parametrize("kind", ["last", "mean", "cls"])
def test_the_same_bits_alone_in_a_batch_and_cached(kind: PoolingKind, engines: dict[str, LLM]) -> None:
    llm = engines[kind]
    base = tokens(150, 7)
    texts = [base, base[:130], base[:64], base[:140] + tokens(30, 8), tokens(3, 9)]
    alone = []
    for text in texts:
        llm.engine.cache.tree.clear()
        alone.append(llm.embed([text])[0].tolist())
    llm.engine.cache.tree.clear()
    assert llm.embed(texts).tolist() == alone
    before = llm.engine.stats().tokens.cached
    assert llm.embed(texts).tolist() == alone, "cached"
    assert (llm.engine.stats().tokens.cached - before > 0) == (kind == "last")
    sliced = LLM(llm.config.model.folder, kv_cache_tokens=1024, max_batch_tokens=64)
    assert sliced.embed(texts).tolist() == alone


def test_beside_answers_and_scores_and_preempted(engines: dict[str, LLM]) -> None:
    """A small cache, in which long answers push out the others while they are read."""
    for llm in (engines["mean"], engines["last"]):
        texts = [tokens(200, seed) for seed in range(3)]
        want = llm.embed(texts)
        small = LLM(llm.config.model.folder, kv_cache_tokens=640, max_batch_tokens=70)
        answers = [Request(f"a{i}", tokens(70, i), SamplingParams(max_tokens=120, temperature=0)) for i in range(4)]
        scored = Request("s", texts[0], SamplingParams(max_tokens=0, prompt_logprobs=0))
        embeds = [Request(f"e{i}", text, EMBEDS, embed=True) for i, text in enumerate(texts)]
        for request in (*answers[:2], *embeds, scored, *answers[2:]):
            small.engine.add(request)
        found = {}
        while small.engine.has_work:
            found |= {delta.request_id: delta for delta in small.engine.step() if delta.finish_reason}
        assert small.engine.stats().scheduler.preemptions
        for i, row in enumerate(want):
            got = np.frombuffer(found[f"e{i}"].embedding or b"", "<f4").astype(np.float64)
            got = got / np.sqrt(np.square(got).sum()) if llm.capacity.pooling.normalize else got
            assert got.astype(np.float32).tolist() == row.tolist()
        assert found["s"].prompt_logprobs and all(found[f"a{i}"].finish_reason == "length" for i in range(4))


def test_a_decoder_without_a_head(folder_of: FolderOf, engines: dict[str, LLM], tmp_path: Path) -> None:
    """Its embeddings are those of the whole model; answers and scores are refused."""
    AutoModel.from_pretrained(folder_of("qwen3")).save_pretrained(tmp_path)
    llm, texts = LLM(str(tmp_path), kv_cache_tokens=1024), [tokens(70, 1), tokens(9, 2)]
    assert llm.capacity.architecture == "Qwen3Model"
    assert llm.embed(texts).tolist() == engines["last"].embed(texts).tolist()
    for refused in (lambda: llm.generate([[5]]), lambda: llm.score([5], [[6]])):
        with pytest.raises(InvalidRequest, match="Qwen3Model, has no head for text"):
            refused()


def test_they_are_cut_where_the_checkpoint_allows_it(folder_of: FolderOf, tmp_path: Path) -> None:
    folder = with_pooling(folder_of("qwen3"), tmp_path / "m", "last", True, matryoshka_dimensions=[16, 32])
    llm, text = LLM(str(folder), kv_cache_tokens=1024), tokens(9, 1)
    whole, cut = llm.embed([text])[0], llm.embed([text], dimensions=16)[0]
    assert cut == pytest.approx(whole[:16] / np.linalg.norm(whole[:16]), abs=1e-6)
    assert llm.embed([text], dimensions=128)[0].tolist() == whole.tolist()
    for wrong in (17, 0, 129):
        with pytest.raises(InvalidRequest) as caught:
            llm.embed([text], dimensions=wrong)
        assert caught.value.param == "dimensions"


def test_refusals(folder_of: FolderOf, tmp_path: Path, engines: dict[str, LLM]) -> None:
    second = r"inputs\[1\]: "
    for wrong, told in (
        ([], "give at least one"),
        ([[5], []], f"{second}the prompt is empty"),
        ([[5], [9999]], f"{second}token id 9999"),
        ([[5], [5] * 513], f"{second}the prompt has 513"),
    ):
        with pytest.raises(InvalidRequest, match=told) as caught:
            engines["last"].embed(wrong)  # type: ignore[arg-type]
        assert caught.value.param == "inputs"
    assert engines["last"].embed([tokens(512, 1)]).shape == (1, 128), "a text may fill the context"
    folder = with_pooling(folder_of("qwen3"), tmp_path / "m", "last", True)
    (folder / "1_Pooling" / "config.json").write_text('{"pooling_mode_max_tokens": true}')
    llm = LLM(str(folder), kv_cache_tokens=1024)
    with pytest.raises(InvalidRequest, match="1_Pooling asks for max"):
        llm.embed([[5]])
    assert llm.generate([[5]], SamplingParams(max_tokens=2))[0].token_ids, "answers are none the worse"


def test_a_broken_state_ends_its_request_alone(engines: dict[str, LLM], monkeypatch: pytest.MonkeyPatch) -> None:
    llm, honest = engines["last"], Pooled.note

    def poisoned(report: Pooled, part: Any, hidden: torch.Tensor) -> None:
        honest(report, part, hidden * float("nan") if part.sequence.prompt_len == 5 else hidden)

    monkeypatch.setattr(Pooled, "note", poisoned)
    with pytest.raises(EmbeddingAborted):
        llm.embed([tokens(5, 1), tokens(6, 1)])
    assert llm.embed([tokens(6, 1)]).shape == (1, 128)
