"""Checkpoints in FP8 as Mistral publishes them: a scale for each matrix, experts together, vision beside the text."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from headrace.kernels import cpu
from headrace.kernels.quantized import Quantized
from headrace.models.config import read_config
from headrace.models.decoder import load_decoder
from headrace.models.plain_config import plain_config
from tests.support.checkpoints import build_model
from tests.support.gguf_files import tokens_of
from tests.support.naive_attention import prompt_logits

pytestmark = [pytest.mark.cpu, pytest.mark.usefixtures("one_thread")]

TOLERANCE = 1e-4
BLOCK = 128
MATRIX = re.compile(r"language_model\..*(_proj|_proj_with_mqa)(\.weight)?$")
"""Those in FP8: of attention, of MLPs, and [E, N, K] of all experts."""
IGNORED = ["model.vision_tower", "model.multi_modal_projector", "lm_head"]
MINISTRAL, SMALL_4, QWEN = "mistral3_ministral3", "mistral3_mistral4", "qwen3_vl_moe"


def in_blocks(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Scales [.., blocks of N, blocks of K] of weights [.., N, K], and those scales beside each weight."""
    *_, outputs, inputs = weight.shape
    rows, columns = (torch.arange(size) // BLOCK for size in (outputs, inputs))
    shape = (*weight.shape[:-2], -(-outputs // BLOCK), -(-inputs // BLOCK))
    scale = torch.rand(shape, generator=torch.Generator().manual_seed(outputs)) * weight.std() / 50 + 1e-4
    return scale, scale[..., rows, :][..., columns]


def stored(weight: Tensor, blocks: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Codes of weights [N, K] or [E, N, K]; their scales: in blocks, or a number for each matrix; what they mean."""
    scale = (weight.abs().amax((-2, -1), keepdim=weight.dim() == 3) / 400).bfloat16()
    scale, beside = in_blocks(weight) if blocks else (scale, scale.float())
    codes = (weight / beside).to(torch.float8_e4m3fn)
    return codes, scale, codes.float() * beside


def published(kind: str, folder: Path, blocks: bool, **sizes: Any) -> dict[str, Tensor]:
    """Writes a checkpoint, and gives what its matrices mean by the names that transformers has."""
    build_model(kind, **sizes).save_pretrained(folder, save_original_format=False)
    path, meant = folder / "model.safetensors", {}
    tensors = load_file(path)
    for name in [name for name in tensors if MATRIX.search(name)]:
        codes, scale, meant[name] = stored(tensors.pop(name), blocks)
        if kind == QWEN and codes.dim() == 3:
            codes, scale = (each.transpose(1, 2).contiguous() for each in (codes, scale))
        tensors |= {name: codes, f"{name}_scale_inv": scale}
        tensors[f"{name.removesuffix('.weight')}{'.' if name.endswith('.weight') else '_'}activation_scale"] = (
            torch.full(codes.shape[:-2], 0.5)
        )
    save_file(tensors, path)
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {
        "quant_method": "fp8", "activation_scheme": "static", "modules_to_not_convert": IGNORED,
        "weight_block_size": [BLOCK, BLOCK] if blocks else None,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    return meant


@pytest.mark.parametrize(
    ("kind", "blocks", "matrices"),
    [
        (MINISTRAL, False, 2 * 7),
        (SMALL_4, False, 3 * 5 + 3 + 2 * 5),
        pytest.param(SMALL_4, True, 3 * 5 + 3 + 2 * 5, marks=pytest.mark.matrix),
        pytest.param(QWEN, False, 2 * 4 + 3 + 2, marks=pytest.mark.matrix),
        (QWEN, True, 2 * 4 + 3 + 2),
    ],
)
def test_logits(kind: str, blocks: bool, matrices: int, tmp_path: Path) -> None:
    """One scale for activations is there too, and they are not rounded. Qwen's experts lie by inputs; the 192 inputs of
    Small 4's `out` are a block and a half."""
    sizes = {} if kind == MINISTRAL else dict(moe_intermediate_size=256)
    meant, model, tokens = published(kind, tmp_path, blocks, **sizes), build_model(kind, **sizes), tokens_of(150)
    assert len(meant) == matrices
    given = {re.sub(r"^language_model\.model\.", "model.language_model.", name): each for name, each in meant.items()}
    assert not model.load_state_dict(given, strict=False).unexpected_keys
    with torch.no_grad():
        want = model(torch.tensor([tokens])).logits[0]
    decoder = load_decoder(tmp_path, "float32")
    assert (prompt_logits(decoder, tokens) - want).abs().max() <= TOLERANCE
    assert read_config(tmp_path) == plain_config(tmp_path)
    coded = {name for name, each in decoder.matrices.items() if isinstance(each, Quantized)}
    assert not cpu.available() or {f"layers.1.{name}.weight" for name in CODED[kind]} <= coded


CODED = {
    MINISTRAL: ("qkv", "up", "down"),
    SMALL_4: ("latent", "queries", "out", "experts.0.up", "experts.3.down", "shared.down"),
    QWEN: ("qkv", "out", "experts.0.up", "experts.3.down"),
}
