"""Sparse attention by an indexer: what is stored of a token, what is refused, and whose bits a row has. That its logits
are transformers' and its bits those of every schedule is asked where all kinds of models are."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from headrace import LLM, SamplingParams
from headrace.attention import block_sparse, sparse
from headrace.kernels import ops
from headrace.kv.storage import KVStorage
from headrace.models.config import read_config
from headrace.models.decoder import load_decoder
from tests.support.checkpoints import FolderOf, edit_json, make_checkpoint
from tests.support.thread_group import ranks_as_threads
from tests.support.traces import run, same

pytestmark = pytest.mark.cpu
KINDS = ("deepseek_v32", "glm_dsa", "minimax_m3", "hy4")
GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
PROMPTS = [[(7 * n + seed) % 320 for n in range(length)] for seed, length in enumerate((5, 40, 41, 130, 300))]


def engine(folder: Path, **settings: Any) -> LLM:
    return LLM(str(folder), **{"dtype": "bfloat16", "kv_cache_tokens": 2048, **settings})


@pytest.mark.parametrize("kind", KINDS[:2])
def test_a_token_takes_its_latent_and_an_indexers_key(kind: str, folder_of: FolderOf) -> None:
    config = read_config(folder_of(kind))
    spec, latent = config.attention, config.latent
    assert spec.index is not None and latent is not None
    assert spec.head_dim == spec.index.size + latent.rotated + latent.rank
    assert KVStorage.bytes_per_token(spec, torch.bfloat16) == 2 * spec.head_dim * config.layers


@pytest.mark.parametrize("settings", [{}, {"kv_cache_dtype": "int8"}], ids=str)
def test_a_row_that_may_choose_all_keys_attends_as_others_do(settings: dict[str, Any], tmp_path: Path) -> None:
    """To the bit, as DeepSeek-V3 with the same weights: only a row of more than 40 keys leaves any out."""
    fields = dict(n_group=4, topk_group=2, rope_parameters=None)
    some, every, dense = tmp_path / "some", tmp_path / "every", tmp_path / "dense"
    make_checkpoint("deepseek_v32", some, **fields)
    make_checkpoint("deepseek_v32", every, **fields, index_topk=4096)
    make_checkpoint("deepseek_v3", dense, **fields)
    weights = load_file(every / "model.safetensors")
    save_file({n: w for n, w in weights.items() if ".indexer." not in n}, dense / "model.safetensors", {"format": "pt"})
    if settings:  # of an int8 pool an indexer's key has part in the scale
        chosen, among_all = (run(engine(each, **settings), PROMPTS, GREEDY) for each in (some, every))
        same(chosen[:1], among_all[:1])
        return
    traces = {each: run(engine(each), PROMPTS, GREEDY) for each in (some, every, dense)}
    same(traces[every], traces[dense])
    for one, other in zip(traces[some], traces[dense], strict=True):
        for position in one:
            assert torch.equal(one[position], other[position]) == (position < 40)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_rows_come_in_as_many_turns_as_memory_takes(
    kind: str, dtype: str, folder_of: FolderOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = run(engine(folder_of(kind), dtype=dtype), PROMPTS, GREEDY)
    for module in (sparse, block_sparse):
        monkeypatch.setattr(module, "AT_ONCE", 100)
    same(run(engine(folder_of(kind), dtype=dtype), PROMPTS, GREEDY), whole)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "settings",
    [
        {"kv_cache_tokens": 512},
        {"kv_cache_dtype": "int8"},
        {"quantization": "int4"},
        {"tensor_parallel_size": 2},
    ],
    ids=str,
)
def test_the_same_bits_with(kind: str, settings: dict[str, Any], folder_of: FolderOf) -> None:
    """Preempted, in int8, with weights in int4, on tensor ranks: together as each alone."""
    if kind == "minimax_m3" and "tensor_parallel_size" in settings:
        with pytest.raises(
            ValueError, match="tensor_parallel_size: MiniMaxM3SparseForConditionalGeneration has sparse"
        ):
            engine(folder_of(kind), **settings)
        return
    with ranks_as_threads(), engine(folder_of(kind), **settings, max_batch_tokens=96) as llm:
        together = run(llm, PROMPTS, GREEDY)
        again = run(llm, PROMPTS, GREEDY)
    same(together, again)
    rounded = {name: each for name, each in settings.items() if name in ("kv_cache_dtype", "quantization")}
    with engine(folder_of(kind), **rounded, enable_prefix_caching=False) as llm:
        same([run(llm, [prompt], GREEDY)[0] for prompt in PROMPTS], together)


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        (
            {"offload_schedule": "column", "kv_offloading_size": 0.1},
            "offload_schedule: GlmMoeDsaForCausalLM has sparse attention",
        ),
        ({"attention_backend": "triton"}, "attention_backend triton"),
    ],
    ids=str,
)
def test_what_it_does_not_do_is_refused(settings: dict[str, Any], told: str, folder_of: FolderOf) -> None:
    with pytest.raises(ValueError, match=told):
        engine(folder_of("glm_dsa"), **settings)


@pytest.mark.parametrize(
    ("kind", "fields", "told"),
    [
        ("glm_dsa", dict(indexer_types=["shared", "full", "full"]), "the first must be full"),
        ("glm_dsa", dict(indexer_types=["full", "full"]), "names 2 layers"),
        ("glm_dsa", dict(indexer_types=["full", "some", "full"]), "with 'some' is not supported; full and shared are"),
        ("glm_dsa", dict(indexer_rope_interleave=False), "indexer_rope_interleave false is not supported"),
        ("deepseek_v32", dict(index_head_dim=8), "index_head_dim 8 is less than qk_rope_head_dim 16"),
        ("deepseek_v32", dict(q_lora_rank=None), "q_lora_rank"),
        ("deepseek_v32", dict(qk_rope_head_dim=0), "qk_rope_head_dim 0 is not supported; 2 or more is"),
        ("deepseek_v32", dict(scoring_func="softmax"), "scoring_func 'softmax' is not supported; sigmoid is"),
    ],
)
def test_what_is_not_computed_is_refused(kind: str, fields: dict[str, Any], told: str, tmp_path: Path) -> None:
    folder = make_checkpoint(kind, tmp_path)
    edit_json(folder / "config.json", **fields)
    with pytest.raises(ValueError, match=told):
        read_config(folder)


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        (dict(index_n_heads=4), "index_n_heads 4 of index_head_dim 64 do not fit num_key_value_heads 2"),
        (dict(index_head_dim=16), "index_n_heads 2 of index_head_dim 16 do not fit"),
        (dict(index_block_size=96), "index_block_size 96 with index_local_blocks 1 is not supported"),
        (dict(index_local_blocks=3), "index_block_size 128 with index_local_blocks 3 is not supported"),
        (dict(layer_types=["full_attention"] * 2 + ["sliding_attention"]), "layer_types with 'sliding_attention'"),
        (dict(swiglu_limit=5.0), "swiglu_limit 5.0 is not supported; only 7.0 is"),
        (dict(rotary_dim=64), "rotary_dim 64 does not fit partial_rotary_factor: it makes 32"),
    ],
)
def test_blocks_that_are_not_computed_are_refused(
    fields: dict[str, Any], told: str, folder_of: FolderOf, tmp_path: Path
) -> None:
    file = json.loads((folder_of("minimax_m3") / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(file | dict(text_config=file["text_config"] | fields)))
    with pytest.raises(ValueError, match=told):
        read_config(tmp_path)


V32 = dict(
    architectures=["DeepseekV32ForCausalLM"], model_type="deepseek_v32", num_hidden_layers=61, rope_theta=10000,
    scoring_func="sigmoid", topk_method="noaux_tc", moe_layer_freq=1, num_nextn_predict_layers=1, index_head_dim=128,
    index_n_heads=64, index_topk=2048, max_position_embeddings=163840, torch_dtype="bfloat16",
    rope_scaling=dict(
        type="yarn", factor=40, beta_fast=32, beta_slow=1, mscale=1.0, mscale_all_dim=1.0,
        original_max_position_embeddings=4096,
    ),
)  # fmt: skip
GLM_5 = dict(
    architectures=["GlmMoeDsaForCausalLM"], model_type="glm_moe_dsa", num_hidden_layers=78, topk_method="noaux_tc",
    scoring_func="sigmoid", moe_layer_freq=1, index_head_dim=128, index_n_heads=32, index_topk=2048, head_dim=64,
    qk_head_dim=256, indexer_rope_interleave=True, rope_parameters=dict(rope_theta=1e6, rope_type="default"),
    num_nextn_predict_layers=1, eos_token_id=[154820, 154827, 154829], dtype="bfloat16",
)  # fmt: skip


@pytest.mark.parametrize(
    ("file", "own", "scale"), [(V32, 61, 0.1352), (GLM_5, 78, 0.0625), (GLM_5 | dict(index_topk_freq=4), 21, 0.0625)]
)
def test_published_files_are_read(file: dict[str, Any], own: int, scale: float, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(file))
    config = read_config(tmp_path)
    index = config.attention.index
    assert index is not None and (sum(index.own), index.own[0], index.chosen) == (own, True, 2048)
    assert config.attention.kv_bytes_per_token(1) == 704 * config.layers
    assert config.experts is not None and sum(config.experts.layers) == config.layers - 3
    assert config.attention.scale == pytest.approx(scale, abs=1e-4)


def test_what_an_indexers_heads_count_is_not_rounded(folder_of: FolderOf) -> None:
    plain, rounded = (load_decoder(folder_of("glm_dsa"), "bfloat16", quantization=each) for each in ("none", "int8"))
    for part, alike in (("weights", True), ("queries", False)):
        one, other = (each.matrices[f"layers.0.index_{part}.weight"] for each in (plain, rounded))
        x = torch.randn(3, one.shape[1], dtype=torch.bfloat16)
        assert torch.equal(ops.linear(x, one), ops.linear(x, other)) == alike


def test_indexers_of_layers_that_do_not_choose_are_not_read(tmp_path: Path) -> None:
    folder = make_checkpoint("glm_dsa", tmp_path, indexer_types=["full"] * 3)
    edit_json(folder / "config.json", indexer_types=["full", "shared", "full"])
    decoder = load_decoder(folder, "float32")
    assert [f"layers.{layer}.index_norm.weight" in decoder.weights for layer in range(3)] == [True, False, True]


M3 = dict(
    num_hidden_layers=60, hidden_act="swigluoai", num_attention_heads=64, num_key_value_heads=4, head_dim=128,
    rotary_dim=64, partial_rotary_factor=0.5, rope_theta=5_000_000, moe_layer_freq=[0] * 3 + [1] * 57,
    sparse_attention_config=dict(
        use_sparse_attention=True, sparse_num_index_heads=4, sparse_index_dim=128, sparse_block_size=128,
        sparse_topk_blocks=16, sparse_local_block=1, sparse_init_block=0, sparse_attention_freq=[0] * 3 + [1] * 57,
    ),
)  # fmt: skip


def test_the_published_file_of_minimax_m3_is_read(tmp_path: Path) -> None:
    file = dict(
        architectures=["MiniMaxM3SparseForConditionalGeneration"], model_type="minimax_m3_vl", torch_dtype="bfloat16",
        text_config=M3 | dict(model_type="minimax_m3_vl_text"),
    )  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(file))
    config = read_config(tmp_path)
    spec, index = config.attention, config.attention.index
    assert index is not None and (index.block, index.chosen, index.local, sum(index.own)) == (128, 2048, 1, 57)
    assert (spec.own_dim, spec.head_dim, spec.kv_heads) == (128, 160, 4)
    assert config.experts is not None and sum(config.experts.layers) == 57 and config.experts.shared == 3072
    assert config.intermediate_size == 12288 and config.experts.routing.scale == 2.0
    assert config.rotation(0) == (0, 64) and spec.scale == pytest.approx(128**-0.5)


def test_a_row_of_few_blocks_attends_to_all_keys(tmp_path: Path) -> None:
    """To the bit, as in a model whose rows choose more; others do not."""
    some, every = tmp_path / "some", tmp_path / "every"
    make_checkpoint("minimax_m3", some)
    make_checkpoint("minimax_m3", every, index_topk_blocks=4)
    few, many = (run(engine(each), PROMPTS, GREEDY) for each in (some, every))
    for one, other in zip(few, many, strict=True):
        assert all(torch.equal(one[at], other[at]) == (at < 256) for at in one)


def test_the_first_layers_alone(folder_of: FolderOf) -> None:
    spec = read_config(folder_of("glm_dsa")).attention
    assert spec.index is not None and spec.index.own == (True, False, True)
    shorter = spec.first(2).index
    assert shorter is not None and shorter.own == (True, False)
