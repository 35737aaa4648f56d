"""GGUF files of the families beside Llama's kin: logits and tokens as transformers has them, and the promise."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import ExpertGatingFuncType, GGUFWriter
from gguf import GGMLQuantizationType as Kind

from headrace import LLM, SamplingParams
from headrace.config import EngineConfig
from headrace.doctor.info import info, parameters
from headrace.models.config import read_config
from headrace.models.gguf.architectures import architecture_of
from headrace.models.gguf.facts import FileFacts
from headrace.models.gguf.header import open_gguf
from headrace.models.gguf.sparse import EVERY_FOURTH, glm_dsa
from headrace.models.plain_config import plain_config
from headrace.types import UnsupportedModel
from tests.support.gguf_families import KINDS, write_family
from tests.support.gguf_files import KindOf, finish, q4_k_m, tokens_of
from tests.support.greedy_answers import greedy_behind
from tests.support.traces import run, same
from tests.support.truth import as_near, exact_logits

pytestmark = [pytest.mark.cpu, pytest.mark.usefixtures("one_thread")]

TOLERANCE = 1e-4
STORED = ("e_score_correction_bias", "expert_bias", "layer_scalar")
"""Buffers that a file has."""
GREEDY = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True)
NEAR = (
    "gemma3_linear", "phi3", "glm", "falcon7", "falcon11", "qwen3_next_old", "qwen3_5_three_each", "qwen2_vl",
    "qwen3_vl", "mistral3", "exaone4_plain", "ernie4_5", "olmo2", "cohere", "dots1",
    "minicpm3", "apertus_plain", "jais2_tied",
)  # fmt: skip
"""Kinds of whose facts others have most."""


def kinds(matrix: tuple[str, ...]) -> list[Any]:
    return [pytest.param(kind, marks=pytest.mark.matrix) if kind in matrix else kind for kind in KINDS]


@torch.no_grad()
def compare(kind: str, path: Path, kind_of: KindOf) -> None:
    """fp32 logits at 150 positions, and 16 greedy tokens."""
    tokens = tokens_of(150)
    model = write_family(kind, path, kind_of)
    assert (config := read_config(path)) == plain_config(path)
    buffers = [each for name, each in model.named_buffers() if name.endswith(STORED)]
    assert parameters(config) == sum(each.numel() for each in (*model.parameters(), *buffers))
    ours = LLM(str(path), dtype="float32", kv_cache_tokens=1024)
    mine, theirs = ours.logits(tokens), model(torch.tensor([tokens])).logits[0]
    if float((mine - theirs).abs().max()) > TOLERANCE:
        assert as_near(mine, theirs, exact_logits(model, tokens))
    answer = ours.generate([tokens], GREEDY)[0].token_ids
    assert answer == greedy_behind(model, tokens, answer)


@pytest.mark.parametrize("kind", kinds(NEAR))
def test_of_mixed_types(kind: str, tmp_path: Path) -> None:
    compare(kind, tmp_path / "m.gguf", q4_k_m)


@pytest.mark.parametrize("kind", kinds(tuple(kind for kind in KINDS if kind != "qwen3_5")))
def test_of_numbers(kind: str, tmp_path: Path) -> None:
    compare(kind, tmp_path / "m.gguf", lambda _: Kind.F16)
    assert read_config(tmp_path / "m.gguf").dtype == "float16"


@pytest.mark.parametrize("kind", kinds(tuple(kind for kind in KINDS if kind not in ("gemma3", "qwen3_5"))))
def test_the_promise_holds(kind: str, tmp_path: Path) -> None:
    """Alone, in a batch, cached, in prefill chunks: the same bits of logits."""
    path = tmp_path / "m.gguf"
    write_family(kind, path, q4_k_m)
    prompts = [tokens_of(100 + 31 * i, seed=i // 2) for i in range(4)]
    sizes = dict(dtype="bfloat16", kv_cache_tokens=4096)
    private = LLM(str(path), enable_prefix_caching=False, **sizes)
    alone = [run(private, [prompt], GREEDY)[0] for prompt in prompts]
    shared = LLM(str(path), max_batch_tokens=96, **sizes)
    same(run(shared, prompts, GREEDY), alone)
    same(run(shared, prompts, GREEDY), alone)
    assert shared.engine.stats().tokens.cached > 64, "nothing was cached"


@pytest.mark.parametrize("kind", ["apertus", "jais2"])
def test_a_folder_of_the_same_weights_is_the_same_model(kind: str, tmp_path: Path) -> None:
    """Facts and fp32 logits, to the bit; the activations of Apertus' layers differ from each other."""
    model = write_family(kind, tmp_path / "m.gguf", lambda _: Kind.F32)
    model.save_pretrained(tmp_path / "folder")
    if kind == "apertus":
        own = [layer.mlp.act_fn for layer in model.model.layers]
        assert len({each.item() for one in own for each in (one.alpha_p, one.alpha_n)}) == 2 * len(own)
    config, expected = read_config(tmp_path / "m.gguf"), read_config(tmp_path / "folder")
    assert config.norm_eps == np.float32(expected.norm_eps)
    assert replace(config, norm_eps=expected.norm_eps) == expected
    tokens = tokens_of(150)
    ours, theirs = (LLM(str(tmp_path / name), dtype="float32", kv_cache_tokens=640) for name in ("m.gguf", "folder"))
    assert torch.equal(ours.logits(tokens), theirs.logits(tokens))


def test_layers_that_guess_further_tokens_are_left_out(tmp_path: Path) -> None:
    def add(writer: GGUFWriter) -> None:
        writer.add_uint32("qwen35.block_count", 5)
        writer.add_nextn_predict_layers(1)
        writer.add_tensor("blk.4.nextn.eh_proj.weight", np.zeros((256, 512), np.float32))
        writer.add_tensor("blk.4.attn_norm.weight", np.zeros(256, np.float32))

    write_family("qwen3_5", tmp_path / "m.gguf", lambda _: Kind.F16, add)
    assert read_config(tmp_path / "m.gguf").layers == 4
    assert LLM(str(tmp_path / "m.gguf"), kv_cache_tokens=640).logits(tokens_of(9)).shape == (9, 320)


def test_llama_4_of_128_experts_norms_nothing(tmp_path: Path) -> None:
    """As llama.cpp has it: no key says it."""
    for count in (4, 128):
        change = partial(lambda writer, count: writer.add_expert_count(count), count=count)
        write_family("llama4", tmp_path / f"{count}.gguf", lambda _: Kind.F16, change)
    assert read_config(tmp_path / "4.gguf").qk_norm and not read_config(tmp_path / "128.gguf").qk_norm


def test_windows_and_heads_layer_by_layer(tmp_path: Path) -> None:
    """As newer converters write them: arrays."""

    def change(writer: GGUFWriter) -> None:
        writer.add_sliding_window_pattern([True, False, True, True, False, False, True])
        writer.add_head_count_kv([2] * 7)

    write_family("gemma3", tmp_path / "m.gguf", lambda _: Kind.F16, change)
    config = read_config(tmp_path / "m.gguf")
    assert [window is not None for window in config.attention.windows] == [True, False, True, True, False, False, True]
    assert config.attention.kv_heads == 2


def test_parts_of_which_the_first_has_no_tensor(tmp_path: Path) -> None:
    split = dict(split_max_tensors=9, small_first_shard=True)
    model = write_family("phi4_longrope", tmp_path / "m.gguf", lambda _: Kind.F16, **split)
    first, *others = sorted(tmp_path.iterdir())
    assert not open_gguf(first).tensors and len(others) > 1
    tokens = tokens_of(150)
    ours = LLM(str(first), dtype="float32", kv_cache_tokens=640).logits(tokens)
    with torch.no_grad():
        assert float((ours - model(torch.tensor([tokens])).logits[0]).abs().max()) <= TOLERANCE


def test_a_file_of_glm_flash_need_not_name_its_router(tmp_path: Path) -> None:
    """The first ones did not: they are known by their sizes, as in llama.cpp."""
    for vocabulary, blocks, found in (
        (154_880, 47, "V3"),
        (154_880, 48, "V3"),
        (154_881, 47, "V2"),
        (154_880, 3, "V2"),
    ):
        writer = GGUFWriter(str(tmp_path / "m.gguf"), "deepseek2")
        writer.add_vocab_size(vocabulary)
        writer.add_block_count(blocks)
        writer.add_expert_count(64)
        finish(writer)
        assert architecture_of(open_gguf(tmp_path / "m.gguf")).architecture == f"Deepseek{found}ForCausalLM"


@pytest.mark.parametrize("heads", [[2, 1, 2], [2.0, 1.0, 2.0, 1.0]], ids=["three", "fractions"])
def test_numbers_for_each_layer_are_checked(heads: list[float], tmp_path: Path) -> None:
    write_family(
        "gemma4",
        tmp_path / "m.gguf",
        lambda _: Kind.F16,
        lambda w: w.add_array("gemma4.attention.head_count_kv", heads),
    )
    with pytest.raises(ValueError, match="does not have a number for each layer"):
        read_config(tmp_path / "m.gguf")


@pytest.mark.parametrize("kind", ["qwen3_next_experts", "gemma4_small"])
def test_speed_is_told_of_widths_that_int4_does_not_take(kind: str, tmp_path: Path) -> None:
    """Of random weights in the format that is nearest and fits."""
    write_family(kind, tmp_path / "m.gguf", q4_k_m)
    assert info(EngineConfig(model=str(tmp_path / "m.gguf")), free=1 << 34)["memory"]["fits"]


def test_a_file_without_layers(tmp_path: Path) -> None:
    def change(writer: GGUFWriter) -> None:
        writer.add_uint32("gemma4.block_count", 0)
        writer.add_sliding_window_pattern(6)

    write_family("gemma4", tmp_path / "m.gguf", lambda _: Kind.F16, change)
    with pytest.raises(ValueError, match="there is no layer"):
        read_config(tmp_path / "m.gguf")


@pytest.mark.parametrize("lost", ["attn_k_b", "attn_v_b", "heads"])
def test_half_of_what_heads_make_of_latents(lost: str, tmp_path: Path) -> None:
    """It is named: a tensor that is not there, and two that do not fit together."""

    def lose(writer: GGUFWriter) -> None:
        for tensors in writer.tensors:
            if lost == "heads":
                tensors["blk.1.attn_v_b.weight"].shape = (8, 32, 64)
            else:
                del tensors[f"blk.1.{lost}.weight"]

    write_family("deepseek_v2", tmp_path / "m.gguf", lambda _: Kind.F16, lose)
    with pytest.raises(ValueError, match=r"model.layers.1.self_attn.kv_b_proj.weight|do not match its metadata"):
        LLM(str(tmp_path / "m.gguf"), kv_cache_tokens=640)


REFUSED: dict[str, tuple[str, Callable[[GGUFWriter], object], str]] = {
    "falcon in another layout": (
        "falcon7",
        lambda w: w.add_tensor_data_layout("other"),
        r"falcon\.tensor_data_layout other is not supported",
    ),
    "granite without positions": (
        "granite",
        lambda w: w.add_rope_scaling_finetuned(False),
        r"granite\.rope\.scaling\.finetuned false",
    ),
    "glm with vision": ("glm4", lambda w: w.add_rope_dimension_sections([8, 8, 0, 0]), "models with vision"),
    "glm4_moe with vision": ("glm4_moe", lambda w: w.add_rope_dimension_sections([8, 8, 0, 0]), "models with vision"),
    "one set of factors": (
        "phi3",
        lambda w: w.add_tensor("rope_factors_long.weight", np.ones(32, np.float32)),
        "rope_factors_short",
    ),
    "yarn of its own": (
        "ministral3",
        lambda w: w.add_rope_scaling_yarn_ext_factor(0.5),
        "yarn_ext_factor is not supported",
    ),
    "heads that differ": ("granite", lambda w: w.add_head_count_kv([2, 4]), "differs from layer to layer"),
    "a part of a head": (
        "smollm3",
        lambda w: w.add_rope_dimension_count(32),
        r"smollm3\.rope\.dimension_count 32 other than",
    ),
    "indexers of a softmax": (
        "deepseek_v32",
        lambda w: w.add_uint32("deepseek32.expert_gating_func", 1),
        "expert_gating_func other than 2 is not",
    ),
    "another router": (
        "deepseek_v3",
        lambda w: w.add_uint32("deepseek2.expert_gating_func", 3),
        "gating_func 3 is not",
    ),
    "routers in an array": (
        "deepseek_v3",
        lambda w: w.add_array("deepseek2.expert_gating_func", [2, 2]),
        "gating_func .2 2. is not",
    ),
    "mistral's sigmoids": (
        "mistral_large3",
        lambda w: w.add_uint32("deepseek2.expert_gating_func", 2),
        "expert_gating_func other than 1 is not",
    ),
    "a temperature of another length": (
        "mistral4",
        lambda w: w.add_uint32("mistral4.attention.temperature_length", 100),
        "temperature_length other than yarn's original length, 128, is not",
    ),
    "shares of softmaxes": ("deepseek_v2", lambda w: w.add_expert_weights_norm(True), "expert_weights_norm with"),
    "groups of experts of their own": ("deepseek_v3", lambda w: w.add_expert_group_scale(0.5), "expert_group_scale is"),
    "values in some global layers": (
        "gemma4",
        lambda w: w.add_tensor("blk.1.attn_v.weight", np.zeros((128, 256), np.float32)),
        "values in some of the global layers",
    ),
    "MLPs of three widths": (
        "gemma4_small",
        lambda w: w.add_array("gemma4.feed_forward_length", [512, 256, 1024, 1024]),
        r"gemma4\.feed_forward_length with widths",
    ),
    "heads of one kind of layers": (
        "gemma4",
        lambda w: w.add_array("gemma4.attention.head_count_kv", [2, 1, 1, 1]),
        "differ in their heads",
    ),
    "global heads with values": (
        "gemma4_small",
        lambda w: w.add_array("gemma4.attention.head_count_kv", [2, 1, 2, 1]),
        "KV heads of their own",
    ),
    "local heads rotated in part": (
        "gemma4",
        lambda w: w.add_uint32("gemma4.rope.dimension_count_swa", 32),
        "count_swa",
    ),
    "divisors of another rotation": (
        "gemma4",
        lambda w: np.copyto(w.tensors[0]["rope_freqs.weight"].tensor, np.linspace(1, 2, 64)),
        "Gemma 4's rotation",
    ),
    "experts' other facts": (
        "gemma4_experts",
        lambda w: w.add_uint32("gemma4.expert_shared_count", 2),
        "count 2 is not",
    ),
    "shares as they are": (
        "qwen3_5_experts",
        lambda w: w.add_bool("qwen35moe.expert_weights_norm", False),
        "norm false",
    ),
    "ernie's shares as they are": (
        "ernie_moe",
        lambda w: w.add_expert_weights_norm(False),
        "weights_norm false is not",
    ),
    "kimi's softmax": (
        "kimi_linear",
        lambda w: w.add_expert_gating_func(ExpertGatingFuncType.SOFTMAX),
        "expert_gating_func other than 2 is not",
    ),
    "kimi's layers untold": (
        "kimi_linear",
        lambda w: w.add_head_count_kv(1),
        "head_count_kv does not give one number, or 0, to each layer",
    ),
    "kimi's groups of a width": (
        "kimi_linear",
        lambda w: w.add_expert_shared_feed_forward_length(64),
        "expert_shared_feed_forward_length 64 is not",
    ),
    "llama 4 without blocks": (
        "llama4",
        lambda w: w.add_sliding_window(0),
        r"llama4\.attention\.sliding_window 0 is not",
    ),
    "blocks of other layers": (
        "llama4",
        lambda w: w.add_sliding_window_pattern(3),
        "sliding_window_pattern 3 is not",
    ),
    "sigmoids of a softmax": (
        "minimax_m2",
        lambda w: w.add_uint32("minimax-m2.expert_gating_func", 1),
        "expert_gating_func 1 is not",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_not_read_is_named(case: str, tmp_path: Path) -> None:
    kind, change, words = REFUSED[case]
    write_family(kind, tmp_path / "m.gguf", lambda _: Kind.F16, change)
    with pytest.raises(UnsupportedModel, match=words) as raised:
        read_config(tmp_path / "m.gguf")
    assert str(tmp_path) in str(raised.value)


@pytest.mark.parametrize(("length", "told"), [((1 << 20) - 1, {}), (1 << 20, EVERY_FOURTH)])
def test_which_layers_have_indexers_follows_from_the_length_where_nothing_tells(
    length: int, told: dict[str, int], tmp_path: Path
) -> None:
    """All of GLM-5's, of GLM-5.2's every fourth behind the third."""

    write_family("glm_dsa", tmp_path / "m.gguf", lambda _: Kind.F16, lambda w: w.add_context_length(length))
    file = open_gguf(tmp_path / "m.gguf")
    del file._metadata["glm-dsa.attention.indexer.types"]
    fields = glm_dsa(FileFacts(file), {"rope_type": "default"})
    assert {name: each for name, each in fields.items() if name in (*EVERY_FOURTH, "indexer_types")} == told
