"""Reading model folders: every form that is supported, and a refusal by name for whatever is not."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from headrace.models.config import read_config
from headrace.models.decoder import load_decoder
from headrace.models.layers import Weights
from headrace.models.plain_config import plain_config
from headrace.models.weights import load_weights
from headrace.types import UnsupportedModel
from tests.support.checkpoint_files import SINGLE, TOKENS, copy_of, rename, same
from tests.support.checkpoints import LLAMA3_ROPE, FolderOf, OursOf, build_model, edit_json, make_checkpoint
from tests.support.kind_sizes import GQA, WINDOW
from tests.support.naive_attention import prompt_logits

pytestmark = [pytest.mark.cpu, pytest.mark.usefixtures("one_thread")]


REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("llama", dict(architectures=["BloomForCausalLM"]), "architecture BloomForCausalLM"),
    ("llama", dict(architectures=["LlamaForTokenClassification"]), "architecture LlamaForTokenClassification"),
    ("llama", dict(architectures=[]), r"architecture \(none\)"),
    ("llama", dict(model_type="mistral"), "model_type 'mistral'"),
    ("llama", dict(architectures=["OwnForCausalLM"], auto_map={"AutoConfig": "own.Config"}), "remote code"),
    ("llama", dict(auto_map={"AutoModelForCausalLM": "own_llama.LlamaForCausalLM"}), "auto_map"),
    ("llama", dict(quantization_config=dict(quant_method="gptq", bits=3)), "gptq of 3 bits"),
    ("llama", dict(pretraining_tp=2), "pretraining_tp 2"),
    ("llama", dict(hidden_act="gelu"), "hidden_act 'gelu'"),
    ("llama", dict(num_key_value_heads=3), "num_key_value_heads 3"),
    ("llama", dict(hidden_size=130), "hidden size"),
    ("llama", dict(head_dim=33), "head_dim"),
    ("llama", dict(dtype="float8_e4m3fn"), "dtype float8_e4m3fn"),
    ("llama", dict(is_causal=False), "is_causal"),
    ("llama", dict(layer_types=["full_attention", "sliding_attention"]), "layer_types"),
    ("llama", dict(rope_parameters=dict(rope_type="longrope", rope_theta=1e4, factor=2.0)), "rope_type 'longrope'"),
    ("llama", dict(rope_parameters=dict(rope_type="own", rope_theta=1e4, factor=2.0)), "rope_type 'own'"),
    ("llama", dict(rope_parameters=dict(rope_type="linear", rope_theta=1e4)), r"rope_parameters\.factor"),
    ("llama", dict(rope_parameters=dict(rope_type="default", mrope_section=[8, 8])), "mrope_section"),
    ("llama", dict(partial_rotary_factor=0.5), "partial_rotary_factor"),
    ("mistral_window", dict(layer_types=["full_attention", "sliding_attention"]), "layer_types"),
    ("mistral_window", dict(sliding_window=0), "sliding_window 0"),
    ("qwen2_window", dict(layer_types=["full_attention", "chunked_attention", "full_attention"]), "chunked_attention"),
    ("qwen2_window", dict(use_sliding_window=False), "sliding_window"),
    ("qwen3", dict(hidden_act="relu"), "hidden_act 'relu'"),
    ("qwen3_moe", dict(num_experts_per_tok=9), "num_experts_per_tok 9 is not supported with 8 experts"),
    ("mixtral", dict(num_local_experts=65536, num_hidden_layers=4096), "65536 experts in 4096 layers"),
    ("mixtral", dict(sliding_window=0), "sliding_window 0"),
    ("gpt2", dict(scale_attn_by_inverse_layer_idx=True), "scale_attn_by_inverse_layer_idx true is not supported"),
    ("gpt2", dict(scale_attn_weights=False), "scale_attn_weights false is not supported"),
    ("gpt2", dict(n_head=3), "n_embd 128 is not a multiple of n_head 3"),
    ("stablelm", dict(qk_layernorm=True), "qk_layernorm true is not supported"),
    ("phi", dict(qk_layernorm=True), "qk_layernorm true is not supported"),
    ("gpt_neox", dict(hidden_act="silu"), "hidden_act 'silu'"),
    ("llama4", dict(layer_types=["sliding_attention"] * 3), "layer_types with 'sliding_attention' is not supported"),
    ("llama4", dict(layer_types=["full_attention"] * 3), "layer_types must name chunked_attention where"),
    ("llama4", dict(no_rope_layers=[1, 0]), "no_rope_layers names 2 layers, num_hidden_layers is 3"),
    ("llama4", dict(attention_chunk_size=None), "attention_chunk_size null is not supported"),
    ("llama4", dict(rope_scaling=dict(rope_type="dynamic", factor=2.0)), "rope_type 'dynamic' is not supported with"),
    ("granite_moe", dict(num_experts_per_tok=9), "num_experts_per_tok 9 is not supported with 8 experts"),
    ("granite_moe", dict(residual_multiplier=None), "residual_multiplier is null"),
    ("granite4", dict(layer_types=["mamba", "attention"], mamba_proj_bias=True), "mamba_proj_bias true"),
    ("granite4", dict(layer_types=["mamba", "attention"], mamba_n_groups=3), "3 groups of keys do not divide"),
    ("granite4", dict(layer_types=None), "layer_types without 'attention' are not supported"),
    ("granite4", dict(layer_types=["attention", "sliding_attention"]), "layer_types with 'sliding_attention'"),
    ("granite4", dict(shared_intermediate_size=0), "shared_intermediate_size 0 is not supported"),
    ("granite4", dict(position_embedding_type="alibi"), "position_embedding_type 'alibi' is not supported"),
    ("mixtral", dict(num_local_experts=0), "num_experts_per_tok 2 is not supported with 0 experts"),
    ("ministral3", dict(rope_parameters=dict(rope_type="yarn", factor=2.0)), "llama_4_scaling_beta is missing"),
    ("ministral3", dict(rope_parameters=dict(llama_4_scaling_beta=0.1)), "original_max_position_embeddings is missing"),
    ("ministral3", dict(rope_parameters=dict(llama_4_scaling_beta=0.1, own=1)), "own"),
    (
        "mistral3",
        dict(text_config=dict(model_type="llama")),
        "not of model_type 'mistral' or 'ministral3' or 'mistral4'",
    ),
    ("qwen3_vl", dict(text_config=None), "text_config is missing"),
    ("arcee", dict(hidden_act="silu"), "hidden_act 'silu'"),
    ("seed_oss", dict(hidden_act="relu"), "hidden_act 'relu'"),
    ("hunyuan", dict(rope_parameters=dict(rope_type="default", rope_theta=1e4, alpha=2.0)), "rope_parameters.alpha"),
    ("olmo3", dict(sliding_window=None), "sliding_window is missing or unused"),
    ("olmo3", dict(rope_parameters=dict(rope_type="yarn", factor=8.0)), "rope_parameters.factor is not supported here"),
    ("gemma3", dict(rope_parameters=dict(rope_theta=5e5)), "rope_parameters.rope_theta is not supported here"),
    ("exaone4", dict(sliding_window=None), "sliding_window is missing or unused"),
    ("exaone4", dict(layer_types=None, sliding_window_pattern="LLG"), "transformers does not accept it as exaone4"),
    ("cohere", dict(use_qk_norm=True), "use_qk_norm true is not supported for cohere"),
    ("starcoder2", dict(hidden_act="silu"), "hidden_act 'silu'"),
    ("minicpm3", dict(num_key_value_heads=2), "num_key_value_heads 2 is not supported; 4 is"),
    ("mistral4", dict(rope_parameters=dict(rope_type="yarn", factor=2.0)), "llama_4_scaling_beta is missing"),
    ("mistral4", dict(num_key_value_heads=2), "num_key_value_heads 2 is not supported; 4 is"),
    ("mistral4", dict(n_group=3), "n_group 3 with topk_group 2: 8 experts do not make 3 groups"),
    ("dots1", dict(n_shared_experts=None), "n_shared_experts is null"),
    ("solar_open", dict(n_group=3), "n_group 3 with topk_group 1: 8 experts do not make 3 groups"),
    ("qwen2_moe", dict(num_experts_per_tok=9), "num_experts_per_tok 9 is not supported with 8 experts"),
    ("gemma", dict(use_bidirectional_attention=True), "use_bidirectional_attention is not supported"),
    ("cwm", dict(layer_types=["chunked_attention"] * 3), "chunked_attention"),
    ("youtu", dict(num_key_value_heads=2), "num_key_value_heads 2 is not supported; 4 is"),
    ("mellum", dict(mlp_layer_types=["sparse"] * 2), "transformers does not accept it as mellum"),
    ("exaone_moe", dict(n_group=3), "n_group 3 with topk_group 2: 8 experts do not make 3 groups"),
    ("hunyuan_moe", dict(moe_topk=[3, 4]), "moe_topk that differs from layer to layer"),
    ("hy3", dict(num_shared_experts=None), "num_shared_experts is null"),
    ("granite_swa", dict(layer_rope_theta=[1e4] * 3), "layer_rope_theta names 3 layers, num_hidden_layers is 4"),
    ("granite_swa", dict(layer_rope_theta=[1e4, 1e4, 5e4, 1e4]), "layer_rope_theta with 10000.0 and 50000.0"),
    ("afmoe", dict(attention_bias=True), "attention_bias true is not supported"),
    ("afmoe", dict(num_experts=None), "num_experts is null"),
    ("afmoe", dict(num_experts_per_tok=9), "num_experts_per_tok 9 is not supported with 8 experts"),
    ("hyperclovax", dict(residual_multiplier=None), "transformers does not accept it as hyperclovax"),
    ("jais2", dict(hidden_act="silu"), "hidden_act 'silu'"),
    ("apertus", dict(hidden_act="silu"), "hidden_act 'silu'"),
    ("muse_glimmer", dict(tie_word_embeddings=True), "tie_word_embeddings true is not supported"),
    ("kimi_k25", dict(text_config=dict(model_type="llama")), "not of model_type 'deepseek_v3'"),
    ("exaone4_5", dict(text_config=dict(model_type="exaone_moe")), "not of model_type 'exaone4'"),
    ("cohere2_vision", dict(text_config=dict(model_type=None)), "not of model_type 'cohere2'"),
    ("cohere2", dict(hidden_act="relu"), "hidden_act 'relu'"),
    ("cohere2", dict(layer_types=["chunked_attention"] * 3), "chunked_attention"),
    ("olmoe", dict(clip_qkv=8.0), "clip_qkv 8.0"),
    ("olmoe", dict(hidden_act="gelu"), "hidden_act 'gelu'"),
    ("gpt_oss", dict(swiglu_limit=5.0), "swiglu_limit 5.0 is not supported; only 7.0 is"),
    ("gpt_oss", dict(swiglu_alpha=1.0), "swiglu_alpha 1.0"),
    ("glm4_moe", dict(n_group=3), "n_group 3 with topk_group 1: 8 experts do not make 3 groups"),
    ("glm4_moe", dict(n_group=4), "1 groups of 2 experts are too few to choose 3 of"),
    ("minimax_m2", dict(scoring_func="softmax"), "scoring_func 'softmax' is not supported; only 'sigmoid' is"),
    ("minimax_m2", dict(attn_type_list=[1, 0]), "attn_type_list with 0"),
    ("opt", dict(activation_function="silu"), "activation_function 'silu'"),
    ("falcon7", dict(activation="tanh"), "activation 'tanh'"),
    ("falcon7", dict(num_ln_in_parallel_attn=2), "num_ln_in_parallel_attn 2"),
    ("falcon7", dict(apply_residual_connection_post_layernorm=True), "apply_residual_connection_post_layernorm"),
    ("falcon40", dict(parallel_attn=False), "parallel_attn"),
    ("falcon40", dict(num_kv_heads=3), "num_key_value_heads 3"),
    ("falcon_rw", dict(num_kv_heads=2), "num_kv_heads 2"),
]


@pytest.mark.parametrize(("kind", "fields", "name"), REFUSED, ids=[f"{row[0]}-{row[2]}" for row in REFUSED])
def test_refused_by_name(kind: str, fields: dict[str, Any], name: str, folder_of: FolderOf, tmp_path: Path) -> None:
    folder = copy_of(folder_of(kind), tmp_path / "model")
    edit_json(folder / "config.json", **fields)
    with pytest.raises(UnsupportedModel, match=name):
        load_decoder(folder)


def test_falcons_own_auto_map_is_no_remote_code(folder_of: FolderOf, ours_of: OursOf, tmp_path: Path) -> None:
    folder = copy_of(folder_of("falcon7"), tmp_path / "model")
    names = {"AutoConfig": "configuration_falcon.FalconConfig", "AutoModel": "hub--modeling_falcon.FalconModel"}
    edit_json(folder / "config.json", auto_map=names)
    assert same(load_decoder(folder, "float32"), ours_of("falcon7"))


@pytest.mark.parametrize("kind", ["deepseek_v3", "kimi_k25"])
def test_kimi_as_it_is_published(kind: str, folder_of: FolderOf, ours_of: OursOf, tmp_path: Path) -> None:
    """Its config.json calls the model kimi_k2, or its text part, and names code of its own, which is never run."""
    folder = copy_of(folder_of(kind), tmp_path / "model")
    path, code = folder / "config.json", {"AutoConfig": "configuration_deepseek.DeepseekV3Config"}
    own = dict(model_type="kimi_k2", auto_map=code)
    if kind == "kimi_k25":
        text = json.loads(path.read_text())["text_config"] | own
        code = {"AutoConfig": "configuration_kimi_k25.KimiK25Config"}
        own = dict(architectures=["KimiK25ForConditionalGeneration"], text_config=text, auto_map=code)
    edit_json(path, **own)
    assert plain_config(folder) == read_config(folder)
    assert same(load_decoder(folder, "float32"), ours_of(kind))


def test_kimi_as_transformers_writes_it(ours_of: OursOf, tmp_path: Path) -> None:
    """Its layers of text are called blocks there, as those of images are."""
    build_model("kimi_k25").save_pretrained(tmp_path)
    assert "language_model.model.blocks.0.input_layernorm.weight" in load_file(tmp_path / SINGLE)
    assert same(load_decoder(tmp_path, "float32"), ours_of("kimi_k25"))


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "consolidated.00.pth"])
def test_pickled_weights_are_refused_with_the_remedy(name: str, folder_of: FolderOf, tmp_path: Path) -> None:
    folder = copy_of(folder_of("llama"), tmp_path / "model")
    (folder / SINGLE).rename(folder / name)
    with pytest.raises(UnsupportedModel, match=rf"{name}.*safe_serialization=True"):
        load_decoder(folder)


def test_folders_without_a_model(tmp_path: Path, folder_of: FolderOf) -> None:
    with pytest.raises(ValueError, match=r"config\.json does not exist"):
        load_decoder(tmp_path / "absent")
    folder = copy_of(folder_of("llama"), tmp_path / "model")
    (folder / SINGLE).unlink()
    with pytest.raises(ValueError, match="holds no weights"):
        load_decoder(folder)
    (folder / "config.json").write_text("{")
    with pytest.raises(ValueError, match="not valid JSON"):
        load_decoder(folder)


def test_a_file_cut_short_is_named(folder_of: FolderOf, tmp_path: Path) -> None:
    folder = copy_of(folder_of("llama"), tmp_path / "model")
    content = (folder / SINGLE).read_bytes()
    for length in (len(content) // 2, 100, 4):
        (folder / SINGLE).write_bytes(content[:length])
        with pytest.raises(ValueError, match=r"model\.safetensors"):
            load_decoder(folder)


@pytest.mark.parametrize("kind", ["llama_gqa", "opt350", "falcon40"])
def test_sharded_equals_single(kind: str, tmp_path: Path, ours_of: OursOf) -> None:
    folder = make_checkpoint(kind, tmp_path, shard_size="100KB")
    shards = sorted(folder.glob("model-*.safetensors"))
    assert len(shards) > 2
    assert same(load_decoder(folder), ours_of(kind))
    shards[1].unlink()
    with pytest.raises(ValueError, match=shards[1].name):
        load_decoder(folder)


def test_an_index_cannot_leave_the_folder(tmp_path: Path) -> None:
    folder = make_checkpoint("llama", tmp_path, shard_size="100KB")
    edit_json(folder / (SINGLE + ".index.json"), weight_map={"lm_head.weight": "../elsewhere.safetensors"})
    with pytest.raises(ValueError, match="outside the folder"):
        load_decoder(folder)


def test_missing_unexpected_and_misshapen_tensors_are_named(folder_of: FolderOf, tmp_path: Path) -> None:
    folder = copy_of(folder_of("llama"), tmp_path / "model")
    up, extra = "model.layers.1.mlp.up_proj.weight", "model.layers.0.self_attn.q_norm.weight"
    whole = load_file(folder / SINGLE)
    cases = [
        ({name: t for name, t in whole.items() if name != up}, rf"lacks {up}"),
        (whole | {extra: torch.ones(32)}, rf"has unexpected {extra}"),
        (whole | {up: torch.ones(190, 128)}, rf"{up} of shape \[190, 128\] where \[192, 128\]"),
        (whole | {up: torch.ones(192, 128, dtype=torch.int8)}, rf"{up} as I8"),
    ]
    for tensors, message in cases:
        save_file(tensors, folder / SINGLE)
        with pytest.raises(ValueError, match=message):
            load_decoder(folder)


def test_a_config_that_claims_more_than_the_weights_have(folder_of: FolderOf, tmp_path: Path) -> None:
    folder = copy_of(folder_of("llama"), tmp_path / "model")
    edit_json(folder / "config.json", num_hidden_layers=3)
    with pytest.raises(ValueError, match=r"lacks model\.layers\.2.* and 4 more"):
        load_decoder(folder)


def test_harmless_buffers_are_ignored(folder_of: FolderOf, ours_of: OursOf, tmp_path: Path) -> None:
    folder = copy_of(folder_of("llama"), tmp_path / "model")
    buffer = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(16)}
    rename(folder, lambda tensors: tensors | buffer)
    assert same(load_decoder(folder), ours_of("llama"))


def weights_in(folder: Path) -> Weights:
    """All tensors of a model, in fp32, before any is packed."""
    return load_weights(folder, read_config(folder), torch.float32)


def test_tied_embeddings_share_memory(folder_of: FolderOf) -> None:
    for kind, tied in (("llama", False), ("llama_tied", True), ("opt350", True), ("opt_untied", False)):
        weights = weights_in(folder_of(kind))
        assert (weights["head.weight"] is weights["embed.weight"]) == tied


def test_a_stored_head_of_a_tied_model(folder_of: FolderOf, ours_of: OursOf, tmp_path: Path) -> None:
    """Equal to the embedding: shared. Different: kept. Alone: it is the embedding. As transformers has it."""
    folder = copy_of(folder_of("llama_tied"), tmp_path / "model")
    embed = load_file(folder / SINGLE)["model.embed_tokens.weight"]
    rename(folder, lambda tensors: tensors | {"lm_head.weight": embed.clone()})
    weights = weights_in(folder)
    assert weights["head.weight"] is weights["embed.weight"]
    rename(folder, lambda tensors: tensors | {"lm_head.weight": embed + 1})
    assert torch.equal(weights_in(folder)["head.weight"], embed + 1)
    rename(folder, lambda tensors: {n: t for n, t in tensors.items() if "embed" not in n} | {"lm_head.weight": embed})
    assert same(load_decoder(folder), ours_of("llama_tied"))


@pytest.mark.parametrize(
    ("stored", "wanted", "computed"),
    [
        (torch.float32, "auto", torch.float32),
        (torch.float32, "bfloat16", torch.bfloat16),
        (torch.bfloat16, "auto", torch.bfloat16),
        (torch.bfloat16, "float32", torch.float32),
        (torch.float16, "auto", torch.bfloat16),
        (torch.float16, "float32", torch.float32),
    ],
)
def test_compute_type(stored: torch.dtype, wanted: Any, computed: torch.dtype, tmp_path: Path) -> None:
    folder = make_checkpoint("qwen2", tmp_path, dtype=stored)
    decoder = load_decoder(folder, wanted)
    assert decoder.dtype == computed
    assert {weight.dtype for weight in decoder.weights.values()} == {computed}
    assert prompt_logits(decoder, TOKENS).dtype == torch.float32
    edit_json(folder / "config.json", remove=("dtype",))
    assert read_config(folder).dtype == str(stored).removeprefix("torch.")


def test_an_unknown_compute_type_is_refused(folder_of: FolderOf) -> None:
    with pytest.raises(ValueError, match="dtype must be"):
        load_decoder(folder_of("llama"), "float16")  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", ["llama_linear", "llama3", "llama_yarn", "falcon7", "qwen2_window", "mistral_window"])
def test_configurations_of_older_versions(kind: str, folder_of: FolderOf, ours_of: OursOf, tmp_path: Path) -> None:
    """rope_theta and rope_scaling apart, the kind called type, torch_dtype for dtype, no layer_types."""
    folder = copy_of(folder_of(kind), tmp_path / "model")
    content = json.loads((folder / "config.json").read_text())
    rope = dict(content["rope_parameters"])
    theta, name = rope.pop("rope_theta"), rope.pop("rope_type")
    old: dict[str, Any] = dict(rope_theta=theta, rope_scaling=None, torch_dtype=content["dtype"])
    if name != "default":
        old["rope_scaling"] = dict(type=name, **rope)
    if kind == "qwen2_window":  # the old form says from which layer on
        old |= dict(max_window_layers=1)
    edit_json(folder / "config.json", remove=("rope_parameters", "dtype", "layer_types"), **old)
    if kind == "qwen2_window":
        assert read_config(folder).attention.windows == (None, WINDOW, WINDOW)
    else:
        assert read_config(folder) == ours_of(kind).config
        assert same(load_decoder(folder), ours_of(kind))


def test_facts(folder_of: FolderOf, tmp_path: Path) -> None:
    config = read_config(make_checkpoint("llama", tmp_path, **GQA, **LLAMA3_ROPE, eos_token_id=[7, 9], bos_token_id=3))
    assert (config.bos_token_id, config.eos_token_ids) == (3, (7, 9))
    assert (config.attention.heads, config.attention.kv_heads, config.attention.head_dim) == (4, 2, 32)
    assert config.max_model_len == 512
    edit_json(tmp_path / "generation_config.json", eos_token_id=[9, 11])
    assert read_config(tmp_path).eos_token_ids == (7, 9, 11)
    assert read_config(folder_of("llama")).eos_token_ids == ()
    reach = {"llama": 512, "llama_linear": 2048, "llama_dynamic": 512, "llama_yarn": 512, "falcon_rw": 512}
    assert {kind: read_config(folder_of(kind)).max_model_len for kind in reach} == reach
    assert read_config(folder_of("qwen2_window")).attention.windows == (None, WINDOW, None)
    assert read_config(folder_of("mistral_window")).attention.windows == (WINDOW, WINDOW)


@pytest.mark.parametrize("kind", ["cohere2_vision", "aya_vision"])
def test_logits_are_scaled_where_there_are_images(kind: str, tmp_path: Path) -> None:
    """As the text model scales them, and as vLLM does; transformers leaves it out of these classes."""
    config = read_config(make_checkpoint(kind, tmp_path, logit_scale=0.25))
    assert config.logit_scale == 0.25 == plain_config(tmp_path).logit_scale


def test_facts_of_gemma4(folder_of: FolderOf, tmp_path: Path) -> None:
    small, large = (read_config(folder_of(kind)) for kind in ("gemma4_small", "gemma4_experts"))
    layers = ["sliding_attention", "full_attention"] * 3
    long = read_config(make_checkpoint("gemma4_small", tmp_path, num_hidden_layers=6, layer_types=layers))
    assert long.attention.shared == (2, 3)
    assert small.attention.shapes == ((2, 32), (2, 64)) * 2 and small.attention.shared == (0, 1)
    assert [small.inner(layer) for layer in range(4)] == [192, 192, 384, 384]
    assert [small.projected_heads(layer) for layer in (1, 3)] == [(4, 2, 2), (4,)]
    assert [large.projected_heads(layer) for layer in (0, 1)] == [(4, 2, 2), (4, 1)]


def test_what_shared_layers_do_not_read(tmp_path: Path) -> None:
    """Published checkpoints of Gemma 4 hold projections of layers whose keys and values are another layer's."""
    path = make_checkpoint("gemma4_small", tmp_path) / "model.safetensors"
    tensors = load_file(path)
    key = "model.layers.{}.self_attn.k_proj.weight"
    save_file(tensors | {key.format(2): tensors[key.format(0)].clone()}, path, metadata={"format": "pt"})
    load_decoder(tmp_path)
    save_file(tensors | {key.format(7): tensors[key.format(0)].clone()}, path, metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"has unexpected model\.layers\.7"):
        load_decoder(tmp_path)


def test_progress_is_told(folder_of: FolderOf) -> None:
    calls: list[tuple[int, int]] = []
    packed: list[tuple[int, int]] = []
    decoder = load_decoder(
        folder_of("llama"), progress=lambda *at: calls.append(at), packed=lambda *at: packed.append(at)
    )
    size = sum(tensor.nbytes for tensor in load_weights(folder_of("llama"), decoder.config, decoder.dtype).values())
    done = [at for at, _ in calls]
    assert len(done) > 10 and done == sorted(set(done)) and done[-1] == size
    assert {total for _, total in calls} == {size}
    assert len(packed) == len(decoder.matrices) and packed[-1][0] == packed[-1][1] < size


def test_weights_do_not_depend_on_the_file(folder_of: FolderOf, ours_of: OursOf, tmp_path: Path) -> None:
    folder = copy_of(folder_of("llama"), tmp_path / "model")
    decoder = load_decoder(folder)
    size = (folder / SINGLE).stat().st_size
    (folder / SINGLE).write_bytes(bytes(size))
    assert same(decoder, ours_of("llama"))


def test_reading_facts_needs_no_torch() -> None:
    code = "import sys, headrace.models.config; sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
