"""By which names the tensors of a checkpoint are found, and in which forms experts lie there."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from headrace.config.routing import CORRECTION
from headrace.models.config import read_config
from headrace.models.decoder import load_decoder
from headrace.models.plain_config import plain_config
from tests.support.checkpoint_files import SINGLE, copy_of, rename, same
from tests.support.checkpoints import (
    MIXED,
    WITH_EXPERTS,
    FolderOf,
    OursOf,
    build_model,
    edit_json,
    make_checkpoint,
)

pytestmark = [pytest.mark.cpu, pytest.mark.usefixtures("one_thread")]

PREFIXES = {
    "llama": "model.", "opt": "model.decoder.", "falcon40": "transformer.", "gpt2": "transformer.",
    "gpt_neox": "gpt_neox.",
}  # fmt: skip


@pytest.mark.parametrize("kind", PREFIXES)
def test_names_without_prefix(kind: str, folder_of: FolderOf, ours_of: OursOf, tmp_path: Path) -> None:
    folder = copy_of(folder_of(kind), tmp_path / "model")
    rename(folder, lambda tensors: {name.removeprefix(PREFIXES[kind]): t for name, t in tensors.items()})
    assert same(load_decoder(folder), ours_of(kind))


def test_opt_names_under_decoder(folder_of: FolderOf, ours_of: OursOf, tmp_path: Path) -> None:
    folder = copy_of(folder_of("opt"), tmp_path / "model")
    rename(folder, lambda tensors: {name.removeprefix("model."): t for name, t in tensors.items()})
    assert same(load_decoder(folder), ours_of("opt"))


def test_masks_of_old_files_are_not_read(folder_of: FolderOf, ours_of: OursOf, tmp_path: Path) -> None:
    """As GPT-2 and Pythia were published: which keys a row sees was a tensor of each layer."""
    for kind, name in (("gpt2", "transformer.h.{}.attn.bias"), ("gpt_neox", "gpt_neox.layers.{}.attention.bias")):
        folder = copy_of(folder_of(kind), tmp_path / kind)
        masks = {name.format(layer): torch.ones(1, 1, 8, 8, dtype=torch.uint8) for layer in range(2)}
        masks |= {f"{each.rpartition('.')[0]}.masked_bias": torch.tensor(-1e4) for each in list(masks)}
        rename(folder, lambda tensors, masks=masks: tensors | masks)  # type: ignore[misc]
        assert same(load_decoder(folder), ours_of(kind))


def test_a_head_beside_and_one_in_memory(folder_of: FolderOf, ours_of: OursOf, tmp_path: Path) -> None:
    """Published files of Pythia call it embed_out, and transformers calls it as it does all others."""
    folder = copy_of(folder_of("gpt_neox"), tmp_path / "model")
    rename(folder, lambda tensors: {name.replace("embed_out", "lm_head"): t for name, t in tensors.items()})
    assert same(load_decoder(folder), ours_of("gpt_neox"))


WITH_VISION = {
    "gemma3_with_vision": "language_model.model.", "mistral3": "language_model.model.",
    "mistral3_ministral3": "language_model.model.", "qwen2_5_vl": "model.", "qwen3_vl": "model.language_model.",
    "exaone4_5": "model.language_model.", "cohere2_vision": "model.language_model.",
    "aya_vision": "language_model.model.", "kimi_k25": "language_model.model.", "muse_glimmer": "model.language_model.",
    "minimax_m3": "language_model.model.", "hy4_vision": "model.",
}  # fmt: skip
"""What names of the text part begin with in published checkpoints."""


@pytest.mark.parametrize("kind", WITH_VISION)
def test_both_forms_of_a_model_with_vision(kind: str, folder_of: FolderOf, ours_of: OursOf, tmp_path: Path) -> None:
    """As it is published, and as transformers calls it in memory: the head stands within the text part, or beside."""
    build_model(kind).save_pretrained(tmp_path, save_original_format=False)
    renamed, published = (set(load_file(folder / SINGLE)) for folder in (tmp_path, folder_of(kind)))
    assert WITH_VISION[kind] + "embed_tokens.weight" in published
    assert "model.language_model.embed_tokens.weight" in renamed
    assert any(name.startswith(("model.vision_tower.", "model.visual.")) for name in renamed)
    assert same(load_decoder(tmp_path), ours_of(kind))


@pytest.mark.parametrize("tied", [False, True])
def test_a_file_of_qwen2_5_vl_without_a_text_part(tied: bool, tmp_path: Path) -> None:
    """As Qwen published them: the fields of the text beside vision_config, the rotation called mrope."""
    folder = make_checkpoint("qwen2_5_vl", tmp_path, tie_word_embeddings=tied)
    whole, path = read_config(folder), folder / "config.json"
    text = json.loads(path.read_text())["text_config"]
    rope = text.pop("rope_parameters")
    flat = text | dict(
        model_type="qwen2_5_vl", rope_theta=rope["rope_theta"],
        rope_scaling=dict(type="mrope", mrope_section=rope["mrope_section"]),
    )  # fmt: skip
    edit_json(path, remove=("text_config", "tie_word_embeddings"), **flat)
    edit_json(path, tie_word_embeddings=tied)
    assert whole.tied == tied and read_config(folder) == plain_config(folder) == whole


ALWAYS_TOGETHER = (
    *MIXED,
    "gpt_oss",
    "qwen3_vl_moe",
    "granite_moe",
    "granite_moe_shared",
    "granite4_experts",
    "granite_moe_swa",
    "mistral4",
    "llama4",
    "hy4",
    "hy4_vision",
)
"""Kinds whose experts lie in one tensor in every file."""


@pytest.mark.parametrize("kind", [kind for kind in WITH_EXPERTS if kind not in ALWAYS_TOGETHER])
def test_experts_in_one_tensor_or_each_in_its_own(
    kind: str, folder_of: FolderOf, ours_of: OursOf, tmp_path: Path
) -> None:
    """transformers writes them either way."""
    build_model(kind).save_pretrained(tmp_path, save_original_format=False)
    fused = [name for name in load_file(tmp_path / SINGLE) if "experts" in name]
    apart = [name for name in load_file(folder_of(kind) / SINGLE) if "experts" in name]
    assert fused and len(apart) > 2 * len(fused)
    assert same(load_decoder(tmp_path), ours_of(kind))


@pytest.mark.parametrize("kind", ["granite_moe", "granite_moe_shared", "granite4_experts"])
def test_granites_experts_by_either_name(kind: str, folder_of: FolderOf, ours_of: OursOf, tmp_path: Path) -> None:
    build_model(kind).save_pretrained(tmp_path, save_original_format=False)
    renamed, published = (set(load_file(folder / SINGLE)) for folder in (tmp_path, folder_of(kind)))
    layer = "model.layers.0.block_sparse_moe."
    assert layer + "input_linear.weight" in published and layer + "experts.gate_up_proj" in renamed
    assert same(load_decoder(tmp_path), ours_of(kind))


def test_layers_behind_the_last_are_left_unread(folder_of: FolderOf, ours_of: OursOf, tmp_path: Path) -> None:
    """The one that guesses further tokens, as published checkpoints of GLM carry it, not two; ERNIE's and EXAONE's."""
    folder = copy_of(folder_of("glm4_moe"), tmp_path / "model")
    last = {name: t for name, t in load_file(folder / SINGLE).items() if ".layers.2." in name}
    further = {name.replace(".2.", ".3.", 1): t for name, t in last.items()}
    further |= {f"model.layers.3.{name}.weight": torch.ones(8) for name in ("enorm", "eh_proj", "shared_head.head")}
    rename(folder, lambda tensors: tensors | further)
    assert same(load_decoder(folder), ours_of("glm4_moe"))
    rename(folder, lambda tensors: tensors | {"model.layers.4.enorm.weight": torch.ones(8)})
    with pytest.raises(ValueError, match=r"has unexpected model\.layers\.4\.enorm"):
        load_decoder(folder)
    folder = copy_of(folder_of("ernie_moe"), tmp_path / "ernie")
    rename(folder, lambda tensors: tensors | {"model.mtp_linear_proj.0.weight": torch.ones(8)})
    assert same(load_decoder(folder), ours_of("ernie_moe"))
    folder = copy_of(folder_of("exaone_moe"), tmp_path / "exaone")
    rename(folder, lambda tensors: tensors | {"mtp.layers.0.self_attn.q_proj.weight": torch.ones(8)})
    assert same(load_decoder(folder), ours_of("exaone_moe"))


@pytest.mark.parametrize(("kind", "quantization"), [("glm4_moe", "none"), ("glm4_moe", "int4"), ("ernie_moe", "none")])
def test_corrections_of_scores_are_never_rounded(
    kind: str, quantization: Any, folder_of: FolderOf, tmp_path: Path
) -> None:
    """Scores of large models are near to each other, and checkpoints in bf16 have the corrections in fp32."""
    folder = copy_of(folder_of(kind), tmp_path / "model")
    fine = 7.0 + torch.arange(8) / 2**20
    (name,) = (each for each in load_file(folder / SINGLE) if ".1." in each and "correction_bias" in each)
    rename(folder, lambda tensors: tensors | {name: fine.view(tensors[name].shape)})
    decoder = load_decoder(folder, "bfloat16", quantization=quantization)
    assert torch.equal(decoder.weights[f"layers.1.{CORRECTION}"], fine)


def test_qwen3_vls_experts_by_inputs_or_by_outputs(folder_of: FolderOf, ours_of: OursOf, tmp_path: Path) -> None:
    """Published files have them as [experts, inputs, outputs], those that transformers writes the other way round;
    others have each expert in its own tensors."""
    folder = copy_of(folder_of("qwen3_vl_moe"), tmp_path / "model")
    turned = {name: t for name, t in load_file(folder / SINGLE).items() if ".mlp.experts." in name}
    assert {tuple(t.shape[1:]) for t in turned.values()} == {(384, 128), (128, 192)}
    rename(folder, lambda tensors: tensors | {name: t.mT.contiguous() for name, t in turned.items()})
    assert same(load_decoder(folder), ours_of("qwen3_vl_moe"))
    apart = {}
    for name, t in turned.items():
        parts = ("gate", "up") if "gate_up" in name else ("down",)
        for e, matrix in enumerate(t):
            for part, own in zip(parts, matrix.chunk(len(parts)), strict=True):
                apart[f"{name.rpartition('.')[0]}.{e}.{part}_proj.weight"] = own.clone()
    rename(folder, lambda tensors: {name: t for name, t in tensors.items() if name not in turned} | apart)
    assert same(load_decoder(folder), ours_of("qwen3_vl_moe"))


def test_another_number_of_experts_than_the_weights_have(folder_of: FolderOf, tmp_path: Path) -> None:
    folder = copy_of(folder_of("mixtral"), tmp_path / "apart")
    edit_json(folder / "config.json", num_local_experts=5)
    with pytest.raises(ValueError, match=r"lacks model\.layers\.0\.block_sparse_moe\.experts\.4\.w1"):
        load_decoder(folder)
    edit_json(folder / "config.json", num_local_experts=3)
    with pytest.raises(ValueError, match=r"has unexpected model\.layers\.0\.block_sparse_moe\.experts\.3\.w1"):
        load_decoder(folder)
    build_model("mixtral").save_pretrained(tmp_path / "fused", save_original_format=False)
    edit_json(tmp_path / "fused" / "config.json", num_local_experts=5)
    with pytest.raises(ValueError, match=r"has unexpected model\.layers\.0\.mlp\.experts\.down_proj"):
        load_decoder(tmp_path / "fused")
