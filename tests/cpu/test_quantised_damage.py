"""Quantised checkpoints in safetensors that are damaged, or of another kind: each is refused by its name."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from headrace.models.config import read_config
from headrace.models.decoder import load_decoder
from headrace.types import UnsupportedModel
from tests.support.gguf_files import theirs, tokens_of
from tests.support.naive_attention import prompt_logits
from tests.support.quantised_files import COMPRESSED, MIXED, MODULE, Tensors, weights_of, write

pytestmark = [pytest.mark.cpu, pytest.mark.usefixtures("one_thread")]

STATE = "weight.quant_state.bitsandbytes__nf4"


@pytest.mark.parametrize(
    ("name", "changed", "words"),
    [
        ("NVFP4", {"weight_global_scale": torch.ones(2)}, "multiples of 16 under one scale"),
        ("NVFP4", {"weight_global_scale": torch.zeros(1)}, "NaN or infinity"),
        ("NVFP4", {"weight_scale": torch.ones(512, 16)}, "float8_e4m3fn, they are torch.uint8 and torch.float32"),
        ("NVFP4", {"weight_scale": torch.full((512, 16), float("nan")).to(torch.float8_e4m3fn)}, "a scale is NaN"),
        ("NVFP4", {"weight_scale": torch.ones(512, 8).to(torch.float8_e4m3fn)}, r"scales \[512, 8\] where"),
        ("MXFP4", {"weight_scale": torch.full((512, 8), 255, dtype=torch.uint8)}, "NaN or infinity"),
        ("ModelOpt FP8", {"weight": torch.zeros(512, 256, dtype=torch.uint8)}, "must be float8_e4m3fn, it is uint8"),
        ("bitsandbytes NF4", {"weight.quant_map": torch.linspace(-1, 1, 16)}, "numbers are not those of NF4"),
        ("bitsandbytes NF4", {STATE: torch.tensor(list(b"[1]"), dtype=torch.uint8)}, "does not say its sizes"),
        ("bitsandbytes NF4", {STATE: torch.tensor(list(b'{"shape": [512, -256], "blocksize": 64}'))}, "has sizes"),
        ("bitsandbytes NF4", {"weight.absmax": torch.ones(9)}, "do not fit together"),
        ("FP8", {"weight": torch.ones(512, 256).to(torch.float8_e5m2)}, "must be float8_e4m3fn, it is float8_e5m2"),
        ("FP8", {"weight": torch.ones(512, 256, dtype=torch.int8)}, "must be float8_e4m3fn, it is int8"),
        ("W8", {"weight": torch.ones(512, 256).to(torch.float8_e4m3fn)}, "must be int8, it is float8_e4m3fn"),
        ("W8", {"weight_scale": torch.ones(512, 1, dtype=torch.uint8)}, "weight_scale must be float16 or"),
        ("W8", {"weight_zero_point": torch.ones(512, 1, dtype=torch.int8)}, "int8 with zero points is not read"),
        ("gptq", {"qweight": torch.ones(32, 512, dtype=torch.int16)}, "qweight must be int32, it is int16"),
        ("gptq", {"qzeros": torch.ones(0, 64, dtype=torch.int32)}, r"zero points \[512, 0\]"),
        ("gptq", {"scales": torch.ones(0, 512).half()}, "do not fit together"),
        (
            "awq",
            {"scales": torch.ones(2, 512).half(), "qzeros": torch.ones(2, 64, dtype=torch.int32)},
            "256 inputs under 2 scales, 64 each by config.json",
        ),
        ("gptq act-order", {"g_idx": torch.ones(0, dtype=torch.int32)}, "there is no g_idx"),
        ("gptq act-order", {"g_idx": torch.arange(-1, 255, dtype=torch.int32)}, "does not put 32 inputs into each"),
        ("awq", {"qzeros": torch.ones(4, 64, dtype=torch.int8)}, "qzeros must be int32, it is int8"),
        ("W4A16 with zeros", {"weight_zero_point": torch.ones(64, 0, dtype=torch.int32)}, r"zero points \[512, 0\]"),
        ("W4A16", {"weight_shape": torch.tensor(512)}, "weight_shape|shape"),
        ("bitsandbytes int8", {"weight": torch.ones(512, 256)}, "weight must be int8, it is float32"),
    ],
    ids=str,
)
def test_damaged_matrices_are_named(name: str, changed: Tensors, words: str, tmp_path: Path) -> None:
    folder = write(theirs("qwen2"), tmp_path / "m", name)
    tensors = load_file(folder / "model.safetensors")
    save_file(tensors | {f"{MODULE}.{end}": each for end, each in changed.items()}, folder / "model.safetensors")
    with pytest.raises(ValueError, match=rf"{re.escape(MODULE)}.*{words}"):
        load_decoder(folder, "float32")


@pytest.mark.parametrize(
    ("name", "end", "words"),
    [("W4A16 with zeros", "weight_zero_point", "no zero points"), ("W4A16", "weight_shape", "lacks"),
     ("gptq act-order", "g_idx", "there is no g_idx")],
)  # fmt: skip
def test_missing_tensors_are_named(name: str, end: str, words: str, tmp_path: Path) -> None:
    folder = write(theirs("qwen2"), tmp_path / "m", name)
    tensors = load_file(folder / "model.safetensors")
    del tensors[f"{MODULE}.{end}"]
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(ValueError, match=words) as refused:
        load_decoder(folder, "float32")
    assert MODULE in str(refused.value)


def test_biases_of_zeros_are_left_out(tmp_path: Path) -> None:
    """As tools have written them beside matrices that have none; others are refused."""
    folder = write(theirs("qwen2"), tmp_path / "m", "gptq")
    tensors, tokens = load_file(folder / "model.safetensors"), tokens_of(20)
    want = prompt_logits(load_decoder(folder, "float32"), tokens)
    save_file(tensors | {f"{MODULE}.bias": torch.zeros(512).half()}, folder / "model.safetensors")
    assert torch.equal(prompt_logits(load_decoder(folder, "float32"), tokens), want)
    save_file(tensors | {f"{MODULE}.bias": torch.eye(512)[3]}, folder / "model.safetensors")
    with pytest.raises(ValueError, match=rf"unexpected {MODULE}.bias"):
        load_decoder(folder, "float32")


def test_the_index_says_which_of_two_files_has_a_tensor(tmp_path: Path) -> None:
    folder = write(theirs("qwen2"), tmp_path / "m", "gptq")
    tensors, tokens = load_file(folder / "model.safetensors"), tokens_of(20)
    want = prompt_logits(load_decoder(folder, "float32"), tokens)
    (folder / "model.safetensors").unlink()
    save_file(tensors, folder / "a.safetensors")
    save_file({"model.norm.weight": torch.zeros(256)}, folder / "b.safetensors")
    placed = dict.fromkeys(tensors, "a.safetensors") | {"else": "b.safetensors"}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": placed}))
    assert torch.equal(prompt_logits(load_decoder(folder, "float32"), tokens), want)
    del placed["model.norm.weight"]
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": placed}))
    with pytest.raises(ValueError, match=r"b\.safetensors: model\.norm\.weight is in another file too"):
        load_decoder(folder, "float32")


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"bits": 4}, "quant_method None is not supported; supported: gptq"),
        ({"quant_method": "hqq"}, "'hqq' is not supported"),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "bitsandbytes of 'fp4' is not supported"),
        ({"quant_method": "auto-round", "bits": 4, "packing_format": "auto_round:fp8"}, "auto-round's 'fp8' of 4 bits"),
        ({"quant_method": "auto-round", "bits": 4, "extra_config": {"a": {"bits": 8}}}, "'auto_gptq' of"),
        ({"quant_method": "auto-round", "bits": 2}, "auto-round of 2 bits"),
        ({"quant_method": "gptq", "bits": 3}, "gptq of 3 bits is not supported"),
        ({"quant_method": "gptq", "bits": 4, "checkpoint_format": "marlin"}, "'marlin'"),
        ({"quant_method": "awq", "bits": 4, "version": "gemv"}, "'gemv'"),
        ({"quant_method": "fp8", "weight_block_size": [64, 64]}, r"\[64, 64\]"),
        (COMPRESSED | {"format": "nvfp4-pack-quantized"} | weights_of("float", 8), "of 8 bits"),
        (COMPRESSED | {"format": "pack-quantized", "transform_config": {"a": 1}} | weights_of("int", 4), "transform_c"),
        (COMPRESSED | {"format": "pack-quantized"} | weights_of("int", 4, dynamic=True), "dynamic weights"),
        (COMPRESSED | {"format": "pack-quantized"} | weights_of("int", 4, group_size=0), "group_size 0"),
        (COMPRESSED | {"format": "pack-quantized"} | weights_of("int", [4]), "of \\[4\\] bits"),
        (COMPRESSED | {"format": "nvfp4-pack-quantized"} | weights_of("float", 4, symmetric=False), "'nvfp4-pack"),
        (COMPRESSED | {"format": "mxfp6-pack-quantized"} | weights_of("float", 6), "'mxfp6-pack-quantized'"),
        (
            COMPRESSED
            | MIXED
            | {"format": "mixed-precision"}
            | {
                "config_groups": {
                    "a": weights_of("int", 4)["config_groups"]["group_0"] | {"format": "pack-quantized"},
                    "b": weights_of("int", 8)["config_groups"]["group_0"] | {"format": "pack-quantized"},
                }
            },
            "config_groups of W4A16, W8A16 in one checkpoint",
        ),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4_AWQ"}, "quant_algo 'NVFP4_AWQ' is not supported"),
        ({"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION"}, "quant_algo 'MIXED_PRECISION'"),
        (
            {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION", "quantized_layers": {"a": 3}},
            "quant_algo 'None'",
        ),
        (COMPRESSED | {"format": "pack-quantized", "config_groups": 3}, "config_groups"),
        ([], "must be an object"),
    ],
    ids=str,
)
def test_what_is_not_read_is_named(config: Any, words: str, tmp_path: Path) -> None:
    folder = write(theirs("qwen2"), tmp_path / "m", "awq")
    told = json.loads((folder / "config.json").read_text()) | {"quantization_config": config or [1]}
    (folder / "config.json").write_text(json.dumps(told))
    with pytest.raises(UnsupportedModel, match=words):
        read_config(folder)
