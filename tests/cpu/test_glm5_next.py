"""GLM-5.3-Flash's own: pools of keys, decays with a bound, names of its tensors in files. Its logits over whole
sequences and its bits in every cut are asked for where all hybrid models are (test_hybrid_models)."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Glm5NextForConditionalGeneration

from headrace import LLM, SamplingParams
from headrace.attention import sparse
from headrace.models.config import read_config
from headrace.models.plain_config import plain_config
from headrace.parallel.fetched_keys import FetchedKeys
from headrace.types import UnsupportedModel
from tests.support.hybrid_checkpoints import build_model, make_checkpoint
from tests.support.thread_group import ranks_as_threads
from tests.support.traces import run, same

pytestmark = pytest.mark.cpu
FolderOf = Callable[..., Path]
GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
PROMPTS = [[(7 * n + seed) % 320 for n in range(length)] for seed, length in enumerate((5, 47, 48, 130, 300))]


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory: pytest.TempPathFactory) -> FolderOf:
    return lru_cache(None)(lambda **fields: make_checkpoint("glm5", tmp_path_factory.mktemp("glm5"), **fields))


def engine(folder: Path, **settings: Any) -> LLM:
    return LLM(str(folder), **{"dtype": "float32", "kv_cache_tokens": 2048, **settings})


def differences(folder: Path, length: int) -> torch.Tensor:
    """Of each row's logits from transformers', beside their norm."""
    tokens = [(11 * n * n + 5 * n) % 320 for n in range(length)]
    model = Glm5NextForConditionalGeneration.from_pretrained(folder).eval()
    with torch.no_grad():
        theirs = model(torch.tensor([tokens])).logits[0]
    with engine(folder) as llm:
        return (llm.logits(tokens) - theirs).norm(dim=1) / theirs.norm(dim=1)


def test_rows_choose_the_pools_that_transformers_chooses(folder_of: FolderOf) -> None:
    """And see the keys behind the last whole one: 47 at most, of 400."""
    assert differences(folder_of(), 400).max() < 1e-4


@pytest.mark.parametrize("fields", [dict(linear_lower_bound=None), dict(linear_lower_bound=-0.5), dict(index_kpool=2)])
def test_other_bounds_and_pools(fields: dict[str, Any], folder_of: FolderOf) -> None:
    assert differences(folder_of(**fields), 90).max() < 1e-4


@pytest.mark.parametrize(
    "settings",
    [
        {"kv_cache_tokens": 512},
        {"kv_cache_dtype": "int8"},
        {"quantization": "int8"},
        {"tensor_parallel_size": 2},
    ],
    ids=str,
)
def test_the_same_bits_with(settings: dict[str, Any], folder_of: FolderOf) -> None:
    """Preempted, in int8, with weights in int8, on tensor ranks: together as each alone."""
    usual: dict[str, Any] = {"dtype": "bfloat16"}
    with ranks_as_threads(), engine(folder_of(), **usual | settings, max_batch_tokens=96) as llm:
        together = run(llm, PROMPTS, GREEDY)
        again = run(llm, PROMPTS, GREEDY)
    same(together, again)
    rounded = {name: each for name, each in settings.items() if name in ("kv_cache_dtype", "quantization")}
    with engine(folder_of(), **usual, **rounded, enable_prefix_caching=False) as llm:
        same([run(llm, [prompt], GREEDY)[0] for prompt in PROMPTS], together)


def test_rows_come_in_as_many_turns_as_memory_takes(folder_of: FolderOf, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = run(engine(folder_of()), PROMPTS, GREEDY)
    monkeypatch.setattr(sparse, "AT_ONCE", 100)
    same(run(engine(folder_of()), PROMPTS, GREEDY), whole)


def test_a_row_without_pools_left_out_attends_to_all_keys(folder_of: FolderOf) -> None:
    """To the bit, whether more pools may be chosen or not: 47 keys are two pools and the 15 behind them."""
    some, every = (run(engine(folder_of(**fields)), PROMPTS, GREEDY) for fields in ({}, {"index_topk": 512}))
    for one, other in zip(some, every, strict=True):
        for position in one:
            assert torch.equal(one[position], other[position]) or position >= 47
    assert any(not torch.equal(some[-1][position], every[-1][position]) for position in some[-1])


def test_tensors_are_found_by_their_names_in_memory_too(folder_of: FolderOf, tmp_path: Path) -> None:
    """transformers writes both: convolutions, forget gates, streams and experts have other names there."""
    build_model("glm5").save_pretrained(tmp_path, save_original_format=False)
    same(run(engine(tmp_path), PROMPTS, GREEDY), run(engine(folder_of()), PROMPTS, GREEDY))


def test_words_of_published_files(folder_of: FolderOf, tmp_path: Path) -> None:
    raw = json.loads((folder_of() / "config.json").read_text())
    text = raw["text_config"]
    gone = ("linear_head_dim", "linear_num_heads", "linear_conv_kernel_dim", "linear_lower_bound", "indexer_types")
    sizes = dict(head_dim=16, num_heads=4, short_conv_kernel_size=4, gate_lower_bound=None)
    layers = [kind.replace("indexed", "full") for kind in text["layer_types"]]
    text = {name: value for name, value in text.items() if name not in gone} | dict(layer_types=layers)
    for more in (dict(index_topk_freq=1), dict(index_topk_pattern="FFFF")):
        told = text | more | dict(linear_attn_config=sizes)
        (tmp_path / "config.json").write_text(json.dumps(raw | dict(text_config=told)))
        assert read_config(tmp_path) == plain_config(tmp_path) == read_config(folder_of())
    free = dict(linear_attn_config=sizes | dict(safe_gate=False))
    (tmp_path / "config.json").write_text(json.dumps(raw | dict(text_config=text | free)))
    assert read_config(tmp_path) == plain_config(tmp_path)
    recurrent = plain_config(tmp_path).recurrent
    assert recurrent is not None and recurrent.bound == 0.0


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        (dict(swiglu_limit=7.0), "swiglu_limit 7.0 is not supported; only 10.0 is"),
        (dict(hc_mult=9), "hc_mult 9 is not supported; 1 to 8 are"),
        (dict(hc_sinkhorn_iters=1001), "hc_sinkhorn_iters 1001 is not supported; 1 to 1000 are"),
        (dict(layer_types=["linear_attention"] * 4), "4 layers of 1 kinds"),
        (dict(layer_types=["linear_attention", "conv"] * 2), "layer_types with 'conv' is not supported"),
        (dict(indexer_types=["full", "full", "full", "shared"]), "'shared' of layer 3 is not supported; full is"),
        (dict(indexer_types=["full"]), "indexer_types names 1 layers, num_hidden_layers 4"),
        (dict(index_kpool=3, index_topk=33), "index_kpool 3 with index_topk 33 is not supported"),
        (dict(index_kpool=1), "index_kpool 1 with index_topk 32 is not supported"),
        (dict(index_kpool_always_select_tail=False), "index_kpool_always_select_tail false, is not supported"),
        (dict(linear_lower_bound=0.5), "linear_lower_bound 0.5 is not supported; null, or a number below 0, is"),
        (dict(linear_conv_kernel_dim=1), "linear_conv_kernel_dim 1 is not supported; 2 or more is"),
        (dict(hidden_act="gelu"), "hidden_act 'gelu' is not supported"),
        (dict(index_kpool=None), "index_kpool is null"),
        (dict(hc_mult=None), "hc_mult is null"),
    ],
)
def test_what_is_not_computed_is_refused(
    fields: dict[str, Any], told: str, folder_of: FolderOf, tmp_path: Path
) -> None:
    raw = json.loads((folder_of() / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(raw | dict(text_config=raw["text_config"] | fields)))
    with pytest.raises(UnsupportedModel, match=told):
        plain_config(tmp_path)
    with pytest.raises(UnsupportedModel):
        read_config(tmp_path)


ENGINES: list[dict[str, Any]] = [
    {"context_parallel_size": 2, "prefill_strategy": "chain", "speculative": "ngram"},
    {"context_parallel_size": 3, "kv_cache_tokens": 256},
]
MATRIX: list[dict[str, Any]] = [
    {"context_parallel_size": 2, "tensor_parallel_size": 2},
    {"context_parallel_size": 2, "kv_cache_dtype": "int8"},
]


@pytest.mark.parametrize(
    "settings", [*ENGINES, *(pytest.param(each, marks=pytest.mark.matrix) for each in MATRIX)], ids=str
)
def test_engines_of_several_ranks(
    settings: dict[str, Any], folder_of: FolderOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Cached, preempted, drafted: the bits of one rank without any of it. Where no rank has room for a prompt, decoded
    rows choose among pools of several ranks."""
    choose, chosen = FetchedKeys.choose, []
    monkeypatch.setattr(FetchedKeys, "choose", lambda self, found: chosen.append(1) or choose(self, found))
    usual: dict[str, Any] = {"dtype": "bfloat16"}
    prompts = [*PROMPTS, [*PROMPTS[4], *range(70)]]
    with ranks_as_threads(), engine(folder_of(), **usual | {"kv_cache_tokens": 1024} | settings) as llm:
        together = run(llm, prompts, GREEDY)
        again = run(llm, prompts, GREEDY)
    assert chosen or "kv_cache_tokens" not in settings
    same(together, again)
    rounded = {name: each for name, each in settings.items() if name == "kv_cache_dtype"}
    with engine(folder_of(), **usual, enable_prefix_caching=False, **rounded) as llm:
        same([run(llm, [prompt], GREEDY)[0] for prompt in prompts], together)
