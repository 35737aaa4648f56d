"""What the metadata of a GGUF file say of the model: read, or refused by file and key, and never passed over."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headrace.models.gguf.apertus import vectors
from headrace.models.gguf.architectures import config_fields
from headrace.models.gguf.facts import FileFacts
from headrace.models.gguf.header import open_gguf
from headrace.models.plain_config import plain_config
from headrace.models.pooling import read_pooling
from headrace.types import UnsupportedModel
from tests.support.gguf_metadata import write_metadata

pytestmark = pytest.mark.unit

DIVISORS = {"rope_freqs.weight": np.ones(32, np.float32)}
LONGROPE = {f"rope_factors_{name}.weight": np.ones(32, np.float32) for name in ("long", "short")}


def fields(tmp_path: Path, said: dict[str, Any], **more: Any) -> dict[str, Any]:
    return config_fields(open_gguf(write_metadata(tmp_path / "m.gguf", said, **more)))


@pytest.mark.parametrize(
    ("said", "rope"),
    [
        ({}, ("default", None)),
        ({"rope.scaling.factor": 4.0}, ("linear", 4.0)),
        ({"rope.scale_linear": 4.0}, ("linear", 4.0)),
        ({"rope.scaling.factor": 2.0, "rope.scale_linear": 4.0}, ("linear", 2.0)),
        ({"rope.scaling.factor": 1.0}, ("default", None)),
        ({"rope.scaling.factor": 0.0}, ("default", None)),
        ({"rope.scaling.type": "none", "rope.scaling.factor": 4.0}, ("default", None)),
        ({"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0}, ("yarn", 4.0)),
    ],
)
def test_a_stretched_rotation(said: dict[str, Any], rope: tuple[str, float | None], tmp_path: Path) -> None:
    """A factor without a type is linear, as llama.cpp has it."""
    found = fields(tmp_path, said)["rope_parameters"]
    assert (found["rope_type"], found.get("factor")) == rope


@pytest.mark.parametrize("divisors", [DIVISORS, LONGROPE], ids=["llama3", "longrope"])
@pytest.mark.parametrize(
    "said",
    [
        {"rope.scaling.type": "linear", "rope.scaling.factor": 4.0},
        {"rope.scaling.type": "yarn"},
        {"rope.scaling.factor": 4.0},
        {"rope.scale_linear": 4.0},
        {"rope.scaling.yarn_ext_factor": 4.0},
    ],
)
def test_divisors_and_a_stretch(said: dict[str, Any], divisors: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModel, match=r"m\.gguf: llama\.rope\.scaling\..* is not supported"):
        fields(tmp_path, {"rope.dimension_count": 64, **said}, tensors=divisors)


def test_divisors_as_the_converter_writes_them(tmp_path: Path) -> None:
    said = {"rope.dimension_count": 64, "rope.scaling.type": "longrope", "rope.scaling.attn_factor": 1.2}
    found = fields(tmp_path, said, tensors=LONGROPE)["rope_parameters"]
    assert found["rope_type"] == "longrope" and found["attention_factor"] == pytest.approx(1.2)


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "attention to both sides": ({"attention.causal": False}, "attention.causal false is not supported"),
    "a direction that is a number": ({"attention.causal": 0}, "attention.causal is neither true nor false"),
    "mixtral's shares as they are": (
        {"expert_count": 4, "expert_used_count": 2, "expert_weights_norm": False},
        "expert_weights_norm false is not supported",
    ),
    "numbers of experts": ({"expert_count": [4, 8]}, "expert_count differs from layer to layer"),
    "windows": ({"attention.sliding_window": [64, 0]}, "attention.sliding_window differs from layer to layer"),
    "a stretch by nothing": ({"rope.scaling.type": "yarn"}, "rope.scaling.type is yarn, and there is no rope.scaling"),
    "heads of keys": (
        {"attention.head_count": 4, "attention.head_count_kv": 3},
        r"attention\.head_count 4 is not a multiple of llama\.attention\.head_count_kv 3",
    ),
    "heads of no whole size": (
        {"attention.head_count": 3},
        r"embedding_length 64 is not a multiple of llama\.attention\.head_count 3",
    ),
    "values of another size": (
        {"attention.value_length": 32},
        r"attention\.value_length 32 other than the head size, 64, is not supported",
    ),
    "an odd rotation": ({"rope.dimension_count": 7}, r"rope\.dimension_count 7 is odd"),
    "more experts used than there are": (
        {"expert_count": 4, "expert_used_count": 8},
        r"expert_used_count 8 is more than llama\.expert_count 4",
    ),
    "groups of experts": (
        {"expert_count": 8, "expert_group_count": 3},
        r"expert_count 8 is not a multiple of llama\.expert_group_count 3",
    ),
    "a type of stretch": ({"rope.scaling.type": [1, 2]}, "rope.scaling.type is no text"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused(case: str, tmp_path: Path) -> None:
    said, words = REFUSED[case]
    with pytest.raises((ValueError, UnsupportedModel), match=rf"m\.gguf: llama\.{words}"):
        fields(tmp_path, said)


@pytest.mark.parametrize(
    ("architecture", "said", "words"),
    [
        ("deepseek2", {"expert_count": [8, 4]}, "deepseek2.expert_count differs"),
        ("mistral3", {"attention.temperature_scale": [0.1, 0.2]}, "mistral3.attention.temperature_scale differs"),
        ("falcon", {"tensor_data_layout": [1, 2], "attention.layer_norm_epsilon": 1e-5}, "tensor_data_layout is no"),
        (
            "granitemoe",
            {"expert_shared_feed_forward_length": [1, 2]},
            "granitemoe.expert_shared_feed_forward_length differs",
        ),
    ],
)
def test_arrays_where_one_value_is_read(architecture: str, said: dict[str, Any], words: str, tmp_path: Path) -> None:
    with pytest.raises((ValueError, UnsupportedModel), match=rf"m\.gguf: .*{words}"):
        fields(tmp_path, said, architecture=architecture)


XIELU: dict[str, Any] = {
    ".xielu.alpha_p": [0.25, 0.5], ".xielu.alpha_n": [-1.0, 2.0], ".xielu.beta": [0.5, 0.5],
    ".xielu.eps": [-9.98e-07, -1e-06],
}  # fmt: skip


def test_activations_of_layers(tmp_path: Path) -> None:
    """A number of each layer, or one of all."""
    path = write_metadata(tmp_path / "m.gguf", {**XIELU, ".xielu.alpha_n": 0.75}, architecture="apertus")
    assert config_fields(open_gguf(path))["model_type"] == "apertus"
    found = {name: each.tolist() for name, each in vectors(FileFacts(open_gguf(path))).items()}
    place = "model.layers.{}.mlp.act_fn.alpha_{}"
    assert found == {
        place.format(0, "p"): [0.25], place.format(1, "p"): [0.5],
        place.format(0, "n"): [0.75], place.format(1, "n"): [0.75],
    }  # fmt: skip


@pytest.mark.parametrize(
    ("said", "words"),
    [
        *(({key: None}, f"there is no {key[1:]}; dow") for key in XIELU),
        ({".xielu.alpha_n": [0.5]}, "xielu.alpha_n has 1 numbers for 2 layers; dow"),
        ({".xielu.alpha_p": [0.5] * 3}, "xielu.alpha_p has 3 numbers for 2 layers; dow"),
        ({".xielu.eps": [0.5]}, "xielu.eps has 1 numbers for 2 layers; dow"),
        ({".xielu.alpha_p": [1, 2]}, "xielu.alpha_p holds no fractions; dow"),
        ({".xielu.alpha_p": "abcd"}, "xielu.alpha_p holds no fractions; dow"),
        ({".xielu.alpha_p": ["a", "b"]}, "xielu.alpha_p holds no fractions; dow"),
        ({".xielu.alpha_n": [0.5, float("nan")]}, "xielu.alpha_n holds NaN or infinity; dow"),
        ({".xielu.beta": [0.5, 0.25]}, "xielu.beta 0.25 is not supported; 0.5 is"),
        ({".xielu.eps": 0.5}, "xielu.eps 0.5 is not supported; -1e-06 is"),
        ({"block_count": 1 << 31}, "xielu.alpha_p has 2 numbers for 2147483648 layers; dow"),
    ],
)
def test_activations_that_are_not_of_each_layer(said: dict[str, Any], words: str, tmp_path: Path) -> None:
    given = {key: value for key, value in {**XIELU, **said}.items() if value is not None}
    with pytest.raises((ValueError, UnsupportedModel), match=rf"m\.gguf: {words}"):
        fields(tmp_path, given, architecture="apertus")


def test_an_array_of_equal_numbers_is_one(tmp_path: Path) -> None:
    said = {"expert_count": [4, 4], "expert_used_count": 2, "attention.sliding_window": [64, 64]}
    found = fields(tmp_path, said)
    assert found["model_type"] == "mixtral" and found["num_local_experts"] == 4 and found["sliding_window"] == 64


@pytest.mark.parametrize(
    "value", [[True], [True] * 4, [1.0, 0.0], ["a", "b"], True, "a"], ids=["1", "4", "floats", "texts", "flag", "text"]
)
def test_what_is_not_of_each_layer(value: Any, tmp_path: Path) -> None:
    path = write_metadata(tmp_path / "m.gguf", {"block_count": 3, "nextn_predict_layers": 1, "kinds": value})
    with pytest.raises(ValueError, match=r"m\.gguf: llama\.kinds does not .* each layer \(block_count says 2 or 3\)"):
        FileFacts(open_gguf(path)).each_layer("kinds")


@pytest.mark.parametrize("value", [[True, False], [1, 0, 1]])
def test_of_each_layer(value: list[int], tmp_path: Path) -> None:
    """With further blocks, or without them."""
    path = write_metadata(tmp_path / "m.gguf", {"block_count": 3, "nextn_predict_layers": 1, "kinds": value})
    facts = FileFacts(open_gguf(path))
    assert facts.each_layer("kinds") == [1, 0] and facts.each_layer("others") is None


TOKENS = ".tokenizer.ggml.tokens"


@pytest.mark.parametrize("number", [-1, (1 << 32) - 1])
def test_no_token_that_ends(number: int, tmp_path: Path) -> None:
    """Published files say so that there is none."""
    found = fields(tmp_path, {".tokenizer.ggml.eos_token_id": number, ".tokenizer.ggml.eot_token_id": 3})
    assert found["eos_token_id"] == [3] and found["bos_token_id"] is None


@pytest.mark.parametrize("number", [8, "1", [1], True, 1.0])
@pytest.mark.parametrize("name", ["bos", "eos", "eot", "eom"])
def test_tokens_that_are_none(name: str, number: Any, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=rf"m\.gguf: tokenizer\.ggml\.{name}_token_id is .* below 8 is needed"):
        fields(tmp_path, {f".tokenizer.ggml.{name}_token_id": number})


def test_more_tokens_than_rows(tmp_path: Path) -> None:
    assert fields(tmp_path, {TOKENS: list("abcd")})["vocab_size"] == 8
    with pytest.raises(ValueError, match=r"m\.gguf: tokenizer\.ggml\.tokens has 9 tokens, token_embd\.weight 8 rows"):
        fields(tmp_path, {TOKENS: list("abcdefghi")})


def test_ranges_are_told_as_of_a_gguf_file(tmp_path: Path) -> None:
    """It has no config.json to correct."""
    path = write_metadata(tmp_path / "m.gguf", {"attention.head_count": 1 << 20, "attention.key_length": 64})
    with pytest.raises(
        ValueError, match=r"m\.gguf: its metadata .* num_attention_heads: .*; download it again$"
    ) as told:
        plain_config(path)
    assert "$." not in str(told.value)


@pytest.mark.parametrize(("asked", "kind"), [(None, "last"), (0, "last"), (1, "mean"), (2, "cls"), (3, "last")])
def test_pooling(asked: int | None, kind: str, tmp_path: Path) -> None:
    path = write_metadata(tmp_path / "m.gguf", {} if asked is None else {"pooling_type": asked})
    assert read_pooling(path).kind == kind and not read_pooling(path).obstacle


@pytest.mark.parametrize(("asked", "words"), [(4, "pooling_type 4 is not implemented"), ("mean", "pooling_type is")])
def test_pooling_that_is_not_known(asked: Any, words: str, tmp_path: Path) -> None:
    assert words in read_pooling(write_metadata(tmp_path / "m.gguf", {"pooling_type": asked})).obstacle
