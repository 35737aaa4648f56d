"""Hostile model folders: each ends with ValueError or UnsupportedModel that names the file and, where there is one, the
field; none takes memory or time by a number that stands in it."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM

from headrace.engine.tokenizer import Tokenizer
from headrace.models.config import read_config
from headrace.models.weights import load_weights
from headrace.types import UnsupportedModel
from tests.support.kind_sizes import GQA, LLAMA_SIZES

pytestmark = pytest.mark.cpu

REFUSED = (ValueError, UnsupportedModel)


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sound")
    LlamaForCausalLM(LlamaConfig(**LLAMA_SIZES | GQA)).save_pretrained(folder)
    return folder


@pytest.fixture
def folder(sound: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(sound, tmp_path / "model"))


def edit(folder: Path, name: str = "config.json", **fields: Any) -> None:
    path = folder / name
    value = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps(value | fields))


NAN, INFINITE = float("nan"), float("inf")
ROPE = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0}

FIELDS: list[tuple[str, Any]] = [
    ("num_hidden_layers", 10**9),
    ("num_hidden_layers", 0),
    ("num_hidden_layers", "2"),
    ("num_hidden_layers", 2**64),
    ("hidden_size", 10**12),
    ("hidden_size", -128),
    ("hidden_size", [128]),
    ("intermediate_size", 10**30),
    ("vocab_size", 0),
    ("vocab_size", True),
    ("num_attention_heads", 0),
    ("num_attention_heads", 10**6),
    ("num_key_value_heads", 0),
    ("num_key_value_heads", 3),
    ("head_dim", 0),
    ("head_dim", 33),
    ("max_position_embeddings", 0),
    ("max_position_embeddings", 2**63),
    ("rms_norm_eps", NAN),
    ("rms_norm_eps", -1e-6),
    ("rms_norm_eps", 0.0),
    ("rms_norm_eps", INFINITE),
    ("rms_norm_eps", "1e-6"),
    ("hidden_act", {"a": 1}),
    ("hidden_act", "x" * 10_000),
    ("architectures", {"a": 1}),
    ("architectures", [{}]),
    ("architectures", "LlamaForCausalLM"),
    ("model_type", ["llama"]),
    ("dtype", 16),
    ("tie_word_embeddings", "no"),
    ("attention_bias", []),
    ("auto_map", [1]),
    ("layer_types", ["full_attention"]),
    ("layer_types", "full_attention"),
    ("eos_token_id", "</s>"),
    ("eos_token_id", [10**30]),
    ("eos_token_id", list(range(2000))),
    ("pretraining_tp", 2.5),
    ("rope_parameters", [1]),
    ("rope_parameters", "linear"),
    ("rope_theta", "1e4"),
]
ROPE_FIELDS: list[tuple[str, Any]] = [
    ("rope_theta", 0),
    ("rope_theta", NAN),
    ("rope_theta", -1.0),
    ("rope_theta", "10000"),
    ("rope_type", 3),
    ("rope_type", {}),
    ("factor", 0),
    ("factor", NAN),
    ("factor", INFINITE),
    ("factor", 10**30),
    ("factor", "2"),
]


@pytest.mark.parametrize(("field", "value"), FIELDS, ids=lambda value: str(value)[:30])
def test_a_field_of_config_json(field: str, value: Any, folder: Path) -> None:
    edit(folder, **{field: value})
    with pytest.raises(REFUSED, match=field) as refused:
        read_config(folder)
    assert "config.json" in str(refused.value) and len(str(refused.value)) < 1500


@pytest.mark.parametrize(("field", "value"), ROPE_FIELDS, ids=lambda value: str(value)[:30])
def test_a_field_of_rope_parameters(field: str, value: Any, folder: Path) -> None:
    edit(folder, rope_parameters=ROPE | {field: value})
    with pytest.raises(REFUSED, match=field) as refused:
        read_config(folder)
    assert "config.json" in str(refused.value)


def test_a_stretch_beyond_every_length(folder: Path) -> None:
    edit(folder, rope_parameters=ROPE | {"factor": 1e6}, max_position_embeddings=2**20)
    with pytest.raises(UnsupportedModel, match="positions"):
        read_config(folder)


def test_fields_that_nobody_reads_do_nothing(folder: Path) -> None:
    before = read_config(folder)
    edit(folder, num_beams=10**9, label2id={"0": []}, use_cache="x", unknown=[[]])
    assert read_config(folder) == before


def test_generation_config(folder: Path) -> None:
    edit(folder, "generation_config.json", eos_token_id={"a": 1})
    with pytest.raises(ValueError, match=r"generation_config.json.*eos_token_id"):
        read_config(folder)


@pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
@pytest.mark.parametrize(
    "content",
    ["[" * 100_000, '{"a":' * 100_000, "", "[]", "null", '{"a": ' + "9" * 5000 + "}", "\xff", '{"a": "\\ud800"}'],
)
def test_what_is_no_object(name: str, content: str, folder: Path) -> None:
    (folder / name).write_bytes(content.encode("latin-1"))
    with pytest.raises(ValueError, match=name):
        read_config(folder)


@pytest.mark.parametrize("name", ["config.json", "generation_config.json", "model.safetensors"])
def test_a_pipe_does_not_hold_up_the_start(name: str, folder: Path) -> None:
    (folder / name).unlink(missing_ok=True)
    os.mkfifo(folder / name)
    if name == "generation_config.json":
        assert read_config(folder)  # not a file, so as if it were not there
        return
    with pytest.raises(ValueError, match=name):
        load_weights(folder, read_config(folder), torch.float32)


def test_a_pipe_beside_the_tokenizer(folder: Path) -> None:
    (folder / "tokenizer.json").write_text("{}")
    os.mkfifo(folder / "tokenizer_config.json")
    with pytest.raises(ValueError, match=r"tokenizer_config.json is not a regular file"):
        Tokenizer.load(folder)


@pytest.mark.parametrize("placed", [[], ["a"], {"a": 1}, {"a": ["b"]}, {"a": "../x"}, {"a": "/etc/passwd"}, {}, 3, "x"])
def test_weight_map(placed: Any, folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": placed}))
    with pytest.raises(ValueError, match=r"model.safetensors.index.json"):
        load_weights(folder, read_config(folder), torch.float32)


def damaged_header(change: Callable[[dict[str, Any]], None], path: Path) -> None:
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    change(header)
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data[8 + length :])


NAME = "model.layers.0.mlp.down_proj.weight"
HEADERS: dict[str, Callable[[dict[str, Any]], Any]] = {
    "shape of 2^60": lambda h: h[NAME].update(shape=[2**60, 8]),
    "negative shape": lambda h: h[NAME].update(shape=[-1]),
    "offsets past the end": lambda h: h[NAME].update(data_offsets=[0, 2**50]),
    "offsets backwards": lambda h: h[NAME].update(data_offsets=[64, 0]),
    "shape not of the offsets": lambda h: h[NAME].update(shape=[1, 1]),
    "unknown dtype": lambda h: h[NAME].update(dtype="F99"),
    "no dtype": lambda h: h[NAME].pop("dtype"),
    "a list": lambda h: h.update({NAME: []}),
    "overlapping": lambda h: h.update(other=h[NAME]),
    "missing": lambda h: h.pop(NAME),
}


@pytest.mark.parametrize("change", HEADERS.values(), ids=HEADERS)
def test_header_of_safetensors(change: Callable[[dict[str, Any]], Any], folder: Path) -> None:
    damaged_header(change, folder / "model.safetensors")
    with pytest.raises(ValueError, match="model"):
        load_weights(folder, read_config(folder), torch.float32)


@pytest.mark.parametrize("length", [2**63, 2**40, 10**8, 3])
@pytest.mark.parametrize("named", [True, False])
def test_length_of_a_header(length: int, named: bool, folder: Path) -> None:
    """Also where the type of the weights is to be found there."""
    path = folder / "model.safetensors"
    path.write_bytes(length.to_bytes(8, "little") + path.read_bytes()[8:])
    edit(folder, dtype="float32" if named else None)
    with pytest.raises(ValueError, match=r"model.safetensors"):
        load_weights(folder, read_config(folder), torch.float32)


@pytest.mark.parametrize("value", [NAN, INFINITE, -INFINITE])
@pytest.mark.parametrize("name", [NAME, "model.embed_tokens.weight", "model.norm.weight"])
def test_weights_that_are_not_finite(name: str, value: float, folder: Path) -> None:
    path = folder / "model.safetensors"
    tensors = load_file(path)
    tensors[name].flatten()[-1] = value
    save_file(tensors, path, {"format": "pt"})
    with pytest.raises(ValueError, match=rf"{name}.*NaN"):
        load_weights(folder, read_config(folder), torch.float32)


def test_weights_that_a_narrower_type_cannot_hold(folder: Path) -> None:
    path = folder / "model.safetensors"
    tensors = load_file(path)
    tensors[NAME][0, 0] = 1e30
    save_file(tensors, path, {"format": "pt"})
    assert load_weights(folder, read_config(folder), torch.bfloat16)
    with pytest.raises(ValueError, match="float16"):
        load_weights(folder, read_config(folder), torch.float16)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=9),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=9), inner, max_size=3),
    max_leaves=6,
)
READ = sorted(
    set(json.loads(json.dumps(LLAMA_SIZES))) | {"architectures", "model_type", "rope_parameters", "rope_scaling"}
)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.dictionaries(st.sampled_from(READ), JSON, min_size=1, max_size=3))
def test_any_value_in_any_field(sound: Path, tmp_path: Path, fields: dict[str, Any]) -> None:
    raw = json.loads((sound / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(raw | fields))
    try:
        read_config(tmp_path)
    except REFUSED as error:
        assert "config.json" in str(error)
