"""Hybrid models: parity with transformers, and rows whose bits do not depend on how their sequence is cut."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, PreTrainedModel

from headrace.kernels import cpu, dispatch
from headrace.models.config import read_config
from headrace.models.decoder import Decoder, load_decoder
from headrace.models.families.kimi_linear import NEEDED
from headrace.models.latent import LatentLayer
from headrace.models.plain_config import plain_config
from headrace.types import UnsupportedModel
from tests.support.greedy_answers import greedy_behind
from tests.support.hybrid_checkpoints import KINDS, Sequence, build_model, greedy, make_checkpoint, seeds_for_rounding
from tests.support.kind_sizes import VOCAB
from tests.support.truth import as_near, exact_logits

pytestmark = [pytest.mark.cpu, pytest.mark.usefixtures("one_thread")]

LENGTH = 300
all_kinds = pytest.mark.parametrize("kind", KINDS)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    return lru_cache(None)(lambda kind: make_checkpoint(kind, tmp_path_factory.mktemp(kind)))


def prompt(length: int, seed: int = 1) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, VOCAB, (length,), generator=generator).tolist()


def theirs_of(folder: Path, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    kind = (
        AutoModelForImageTextToText if "vision_config" in (folder / "config.json").read_text() else AutoModelForCausalLM
    )
    model: PreTrainedModel = kind.from_pretrained(folder, dtype=dtype)
    return model.eval()


@torch.no_grad()
def their_logits(model: PreTrainedModel, tokens: list[int]) -> Tensor:
    logits: Tensor = model(torch.tensor([tokens])).logits[0]
    return logits.float()


def ours(decoder: Decoder, tokens: list[int]) -> Tensor:
    return Sequence(decoder).logits(tokens)


@all_kinds
def test_fp32_agrees_with_transformers(kind: str, folder: Callable[[str], Path]) -> None:
    """Logits at every position of 300 tokens, and 64 greedy tokens, decoded one by one."""
    decoder, model, tokens = load_decoder(folder(kind), "float32"), theirs_of(folder(kind)), prompt(LENGTH)
    mine, theirs = ours(decoder, tokens), their_logits(model, tokens)
    if kind == "3_5_tied":  # logits reach 26: in fp32 their own are 3.6e-4 from those in fp64
        assert as_near(mine, theirs, exact_logits(model, tokens))
    else:
        assert (mine - theirs).abs().max() <= 1e-4
    answer = greedy(decoder, tokens, 64)
    assert answer == greedy_behind(model, tokens, answer)


@all_kinds
def test_bf16_is_as_near_to_the_truth_as_transformers(kind: str, folder: Callable[[str], Path]) -> None:
    prompts = [prompt(LENGTH, seed + 1) for seed in seeds_for_rounding(kind)]
    exact, rounded = theirs_of(folder(kind)), theirs_of(folder(kind), torch.bfloat16)
    decoder = load_decoder(folder(kind), "bfloat16")
    truth = torch.cat([their_logits(exact, tokens) for tokens in prompts])
    mine = torch.cat([ours(decoder, tokens) for tokens in prompts]) - truth
    theirs = torch.cat([their_logits(rounded, tokens) for tokens in prompts]) - truth
    assert mine.norm() <= 1.5 * theirs.norm(), (mine.norm(), theirs.norm())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@all_kinds
def test_a_row_has_the_same_bits_in_every_cut(kind: str, dtype: str, folder: Callable[[str], Path]) -> None:
    decoder = load_decoder(folder(kind), dtype)  # type: ignore[arg-type]
    check_cuts(decoder)


@pytest.mark.skipif(not cpu.available(), reason="there are no kernels")
@pytest.mark.parametrize("kind", ["3_5_ends_recurrent", "lfm2", "lfm3", "granite_uneven", "kimi"])
def test_on_every_instruction_set(kind: str, isa: str, folder: Callable[[str], Path]) -> None:
    check_cuts(load_decoder(folder(kind), "bfloat16"))


@pytest.mark.parametrize("kind", ["next", "lfm2", pytest.param("lfm3", marks=pytest.mark.matrix), "granite_uneven"])
def test_in_torch(kind: str, folder: Callable[[str], Path]) -> None:
    with dispatch.force("torch"):
        decoder = load_decoder(folder(kind), "float32")
        check_cuts(decoder)
        assert (ours(decoder, prompt(70)) - their_logits(theirs_of(folder(kind)), prompt(70))).abs().max() <= 1e-4


@pytest.mark.parametrize(
    "kind", ["next_experts", "3_5_experts", "3_5_experts_vision", "lfm2_experts", "granite_experts", "nemotron_experts"]
)
def test_experts_in_one_tensor(kind: str, tmp_path: Path, folder: Callable[[str], Path]) -> None:
    """transformers writes them so, too."""
    forms = (tmp_path / "other", folder(kind))
    at_once = "experts.gate_up_proj" in " ".join(load_file(forms[1] / "model.safetensors"))
    build_model(kind).save_pretrained(forms[0], save_original_format=at_once)
    assert {*load_file(forms[0] / "model.safetensors")} != {*load_file(forms[1] / "model.safetensors")}
    logits = [ours(load_decoder(each, "bfloat16"), prompt(70)) for each in forms]
    assert torch.equal(*logits)


KIMI_WORDS = {
    "linear_attn_config": {
        "full_attn_layers": [2], "kda_layers": [1, 3], "head_dim": 32, "num_heads": 4, "short_conv_kernel_size": 4,
    },
    "first_k_dense_replace": 1, "mla_use_nope": True, "moe_router_activation_func": "sigmoid", "moe_layer_freq": 1,
    "head_dim": 72, "rope_theta": 10000.0, "rope_scaling": None,
}  # fmt: skip
"""Those of published files in place of others."""


def test_kimi_linear_as_it_is_published(tmp_path: Path, folder: Callable[[str], Path]) -> None:
    """Its one dense MLP is called so there, and config.json has words of its own."""
    written = folder("kimi")
    raw = json.loads((written / "config.json").read_text())
    gone = ("layer_types", "mlp_layer_types", "linear_head_dim", "linear_num_heads", "linear_conv_kernel_dim")
    (tmp_path / "config.json").write_text(json.dumps({n: v for n, v in raw.items() if n not in gone} | KIMI_WORDS))
    tensors = load_file(written / "model.safetensors")
    dense = "layers.0.block_sparse_moe."
    assert any(dense in name for name in tensors)
    renamed = {name.replace(dense, "layers.0.mlp."): tensor for name, tensor in tensors.items()}
    save_file(renamed, tmp_path / "model.safetensors")
    assert read_config(tmp_path) == read_config(written) == plain_config(tmp_path)
    assert torch.equal(*(ours(load_decoder(each, "bfloat16"), prompt(70)) for each in (tmp_path, written)))


@pytest.mark.parametrize(
    ("field", "value", "told"),
    [
        ("mla_use_nope", False, "mla_use_nope False is not supported; only True is"),
        ("moe_router_activation_func", "softmax", "moe_router_activation_func 'softmax' is not supported"),
        ("linear_conv_kernel_dim", 1, "linear_conv_kernel_dim 1 is not supported; 2 or more is"),
        ("layer_types", ["linear_attention"] * 3, "layer_types without 'full_attention' are not supported"),
        ("layer_types", ["conv"] * 3, "layer_types with 'conv' is not supported"),
        ("layer_types", ["linear_attention", "full_attention"], "names 2 layers, num_hidden_layers is 3"),
    ],
)
def test_what_kimi_linear_has_not(
    field: str, value: Any, told: str, tmp_path: Path, folder: Callable[[str], Path]
) -> None:
    raw = json.loads((folder("kimi") / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(raw | {field: value}))
    with pytest.raises(UnsupportedModel, match=told):
        plain_config(tmp_path)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_keys_without_positions_are_as_they_are_projected(dtype: torch.dtype, folder: Callable[[str], Path]) -> None:
    """Turned by no angle, to the bit."""
    decoder = load_decoder(folder("kimi"), "float32" if dtype == torch.float32 else "bfloat16")
    layer = decoder.layers.layers[1]
    assert isinstance(layer, LatentLayer) and decoder.rope is None
    x = torch.randn(9, 128, generator=torch.Generator().manual_seed(0)).to(dtype)
    projected, keys = layer._linear("latent", x), layer._keys(x, None)
    assert torch.equal(keys[:, 0, : layer.latent.rotated], projected[:, : layer.latent.rotated])


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        (dict(mamba_rms_norm=True), "mamba_norm_before_gate true is not supported with mamba_rms_norm; only false is"),
        (dict(mamba_proj_bias=True), "mamba_proj_bias True is not supported; only False is"),
        (dict(attention_bias=True), "attention_in_multiplier 1.2 is not supported with attention_bias; only 1 is"),
        (dict(ssm_multipliers=[1.0] * 4), "ssm_multipliers are not 5 numbers; download the file again"),
        (dict(mamba_d_head=16), "6 heads of mamba_d_head 16 are not 192 numbers wide"),
        (dict(ssm_out_multiplier=None), "ssm_out_multiplier is null; download the file again"),
        (dict(mamba_d_state=None), "mamba_d_state None is no size; download the file again"),
    ],
)
def test_what_falcon_h1_has_not(
    fields: dict[str, Any], told: str, tmp_path: Path, folder: Callable[[str], Path]
) -> None:
    raw = json.loads((folder("falcon_h1") / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(raw | fields))
    with pytest.raises(UnsupportedModel, match=told):
        plain_config(tmp_path)


@pytest.mark.parametrize("kind", ["next", "3_5", "granite", "kimi", "falcon_h1"])
def test_convolutions_have_silu_alone(kind: str, tmp_path: Path, folder: Callable[[str], Path]) -> None:
    """hidden_act is theirs, too."""
    raw = json.loads((folder(kind) / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(raw | {"hidden_act": "gelu_pytorch_tanh"}))
    for read in (plain_config, read_config):
        with pytest.raises(UnsupportedModel, match="hidden_act 'gelu_pytorch_tanh' is not supported here; silu is"):
            read(tmp_path)


@pytest.mark.parametrize("name", NEEDED)
def test_what_must_not_be_null_in_kimi_linear(name: str, tmp_path: Path, folder: Callable[[str], Path]) -> None:
    raw = json.loads((folder("kimi") / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(raw | {name: None}))
    with pytest.raises(UnsupportedModel, match="is null; download the file again"):
        plain_config(tmp_path)
    with pytest.raises(UnsupportedModel):
        read_config(tmp_path)


def test_lfm3s_gates_by_either_name(tmp_path: Path, folder: Callable[[str], Path]) -> None:
    build_model("lfm3").save_pretrained(tmp_path, save_original_format=False)
    renamed, published = (set(load_file(each / "model.safetensors")) for each in (tmp_path, folder("lfm3")))
    layer = "model.layers.1.self_attn."
    assert layer + "g_proj.weight" in renamed and layer + "gate_proj.weight" in published
    assert torch.equal(*(ours(load_decoder(each, "bfloat16"), prompt(70)) for each in (tmp_path, folder("lfm3"))))


@pytest.mark.parametrize("kinds", [["conv", "full_attention", "conv"], ["conv", "conv", "sliding_attention"], None])
def test_lfm3_with_more_convolutions_than_attention(kinds: list[str] | None, tmp_path: Path) -> None:
    """None: as transformers has it where a file says nothing."""
    layers = 12 if kinds is None else len(kinds)
    decoder = load_decoder(make_checkpoint("lfm3", tmp_path, layer_types=kinds, num_hidden_layers=layers), "float32")
    assert len(decoder.config.recurrent_layers) > decoder.config.attention.layers
    model, tokens = theirs_of(tmp_path), prompt(LENGTH)
    mine, theirs = ours(decoder, tokens), their_logits(model, tokens)
    assert as_near(mine, theirs, exact_logits(model, tokens))
    check_cuts(load_decoder(tmp_path, "bfloat16"))


def check_cuts(decoder: Decoder) -> None:
    tokens, steps = prompt(150), [17, 3, 1, 19, 64, 46]
    whole, one, cut = ours(decoder, tokens), Sequence(decoder), Sequence(decoder)
    assert torch.equal(whole[:40], torch.cat([one.logits([token]) for token in tokens[:40]]))
    parts = [cut.logits(tokens[sum(steps[:i]) :][:count]) for i, count in enumerate(steps)]
    assert torch.equal(whole, torch.cat(parts))
