"""What an engine reports of prompts, by which two are compared to the bit: scores, log probabilities, embeddings."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from headrace import LLM, SamplingParams
from headrace.engine.folders import model_folder
from headrace.engine.sampler import target_logprobs
from headrace.pooling import PoolingKind
from headrace.types import TokenLogprobs
from tests.support.traces import words

LENGTHS = (1, 63, 200, 430)
OPTIONS = (1, 1, 4, 70)
NAMED = (7, 300, 5)
NORMALIZE = {"idx": 2, "name": "2", "path": "2_Normalize", "type": "sentence_transformers.models.Normalize"}


def with_pooling(folder: Path, target: Path, kind: PoolingKind | None, normalize: bool, **config: Any) -> Path:
    """The checkpoint with what sentence-transformers writes beside it; None: nothing."""
    target.mkdir()
    for path in folder.iterdir():
        (target / path.name).symlink_to(path)
    if config:
        (target / "config.json").unlink()
        (target / "config.json").write_text(json.dumps(json.loads((folder / "config.json").read_text()) | config))
    if kind is not None:
        told = {"last": "pooling_mode_lasttoken", "mean": "pooling_mode_mean_tokens", "cls": "pooling_mode_cls_token"}
        (target / "1_Pooling").mkdir()
        (target / "1_Pooling" / "config.json").write_text(
            json.dumps({each: each == told[kind] for each in told.values()})
        )
        modules = [{"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Transformer"}]
        modules += [{"idx": 1, "name": "1", "path": "1_Pooling", "type": "sentence_transformers.models.Pooling"}]
        (target / "modules.json").write_text(json.dumps(modules + [NORMALIZE] * normalize))
    return target


def check_ranks(pooling: PoolingKind, settings: dict[str, Any], folder: Path) -> None:
    """Several ranks with these settings report, to the bit, what one computes by definition."""
    model = with_pooling(Path(model_folder("tiny")), folder / "model", pooling, normalize=False)
    form = {name: settings[name] for name in ("quantization", "kv_cache_dtype") if name in settings}
    truth = defined(LLM(model, kv_cache_tokens=8192, enable_prefix_caching=False, **form))
    ranks = LLM(model, kv_cache_tokens=8192, **settings)
    try:
        assert reported(ranks) == truth
        assert reported(ranks) == truth, "cached"
        assert ranks.engine.cache.used == 0
    finally:
        ranks.close()


def defined(llm: LLM) -> dict[str, Any]:
    """By definition: of the logits of whole prompts, each computed alone and without a cache."""
    found: dict[str, Any] = {}
    for length in LENGTHS:
        text = words(llm, length, length)
        found[f"score {length}"] = [rows(llm, text + option)[length - 1 :] for option in options_of(llm, length)]
        found[f"from the middle {length}"] = rows(llm, text)[max(0, length // 2 - 1) :]
        found[f"named {length}"] = rows(llm, text, NAMED)
        llm.engine.cache.tree.clear()
        found[f"embedding {length}"] = llm.embed([text])[0].tolist()
    return found


def rows(llm: LLM, tokens: list[int], named: tuple[int, ...] = ()) -> list[dict[int, float]]:
    return told(target_logprobs(llm.logits(tokens)[:-1], tokens[1:], 0, named)) if tokens[1:] else []


def told(found: list[TokenLogprobs]) -> list[dict[int, float]]:
    return [{token: info.logprob for token, info in row.items()} for row in found]


def options_of(llm: LLM, length: int) -> list[list[int]]:
    return [words(llm, count, 1000 * index + length) for index, count in enumerate(OPTIONS)]


def reported(llm: LLM) -> dict[str, Any]:
    """By score, prompt_logprobs_start, logprob_token_ids and embed: embeddings all together, then the rest, on what is
    cached by then."""
    texts = [words(llm, length, length) for length in LENGTHS]
    vectors = [each.tolist() for each in llm.embed(texts)]
    found: dict[str, Any] = {}
    for length, text, vector in zip(LENGTHS, texts, vectors, strict=True):
        options = options_of(llm, length)
        scores = llm.score(text, options)
        found[f"score {length}"] = [
            [{token: each} for token, each in zip(score.token_ids, score.token_logprobs, strict=True)]
            for score in scores
        ]
        found[f"from the middle {length}"] = prompt_rows(llm, text, prompt_logprobs_start=length // 2)
        found[f"named {length}"] = prompt_rows(llm, text, logprob_token_ids=NAMED)
        found[f"embedding {length}"] = vector
    return found


def prompt_rows(llm: LLM, tokens: list[int], **params: Any) -> list[dict[int, float]]:
    (output,) = llm.generate([tokens], SamplingParams(max_tokens=0, prompt_logprobs=0, **params))
    return told([row for row in output.prompt_logprobs or [] if row is not None])
