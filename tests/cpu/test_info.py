"""`headrace info`: what the file says is what is told, and a model that does not fit is told of, too."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from typer.testing import CliRunner

from headrace.cli import main
from headrace.cli.info import short, sized
from headrace.config import EngineConfig
from headrace.doctor import expected
from headrace.doctor.info import info, parameters
from headrace.doctor.model import kv_bytes, room
from headrace.engine.capacity import model_folder
from headrace.engine.footprint import AUTO_SHARE, PROCESS_BYTES
from headrace.models.config import read_config
from headrace.models.files import weight_files
from headrace.models.sizes import weight_bytes
from headrace.types import CHUNK
from tests.support.checkpoints import KINDS, FolderOf
from tests.support.draft_checkpoints import random_draft
from tests.support.gguf_files import q4_k_m, theirs, write_gguf
from tests.support.hybrid_checkpoints import build_model, make_checkpoint

OTHERS = re.compile(r"vision|visual|^vit\.|audio|multi_modal|mm_projector|patch_merge|act_fn\.(beta|eps)")
"""Parts that are not computed."""


def told(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(main.app, ["info", *arguments])
    return result.exit_code, result.output


@pytest.fixture(autouse=True)
def short_timing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(expected, "TOKENS", 64)
    monkeypatch.setattr(expected, "STEPS", 1)


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_parameters_are_those_of_the_file(kind: str, folder_of: FolderOf) -> None:
    folder = folder_of(kind)
    with safe_open(weight_files(folder)[0], framework="pt") as file:
        text = [name for name in file.keys() if not OTHERS.search(name)]  # noqa: SIM118 (no mapping)
        numbers = sum(file.get_tensor(name).numel() for name in text)
    assert parameters(read_config(folder)) == numbers


def test_of_every_part() -> None:
    found = info(EngineConfig(model="tiny"))
    facts, folder = read_config("src/headrace/assets/tiny"), model_folder("tiny")
    stored = found["file"]["stored as"]
    assert found["file"]["path"] == str(folder) and found["file"]["files"] == 1
    assert stored == {"BF16": 2 * parameters(facts)}
    assert found["memory"]["weights bytes"] == weight_bytes(facts, "bfloat16") and found["memory"]["fits"]
    speed = found["expected"]
    assert speed["tokens"] == 64 and speed["prefill tokens/s"] > 0 and speed["decode tokens/s"] > 0
    assert not info(EngineConfig(model="tiny"), free=1 << 20)["memory"]["fits"]


def test_of_a_file_that_is_quantised(tmp_path: Path) -> None:
    path = write_gguf(theirs(), tmp_path / "m.gguf", q4_k_m)
    found = info(EngineConfig(model=str(path)))
    stored = found["file"]["stored as"]
    assert {"Q4_K", "Q6_K", "F32"} <= stored.keys() and sum(stored.values()) < found["file"]["bytes"]
    assert found["expected"]["weights timed"] == "int4"
    with pytest.raises(ValueError, match="quantised already"):
        info(EngineConfig(model=str(path), quantization="int8"))


def test_what_is_timed_stands_for_all_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    facts, config = read_config("src/headrace/assets/tiny"), EngineConfig(model="tiny")
    monkeypatch.setattr(expected, "_seconds", lambda work: 1.0 if isinstance(work, expected._Step) else 0.5)
    whole = expected.expect(facts, config)
    monkeypatch.setattr(expected, "LAYER_BYTES", 1)
    one = expected.expect(facts, config)
    assert (whole.layers, one.layers) == (3, 1)
    assert whole.decode_tokens_s == pytest.approx(1 / 1.5) and one.decode_tokens_s == pytest.approx(1 / 3.5)
    assert one.prefill_tokens_s == pytest.approx(64 / 3.5)


def test_layers_behind_dense_ones_stand_for_all(folder_of: FolderOf, monkeypatch: pytest.MonkeyPatch) -> None:
    """GLM's first layers have no experts; fewer experts than there are do not make its groups."""
    monkeypatch.setattr(expected, "LAYER_BYTES", 1)
    monkeypatch.setattr(expected, "EXPERTS", 1)
    facts = read_config(folder_of("glm4_moe_groups"))
    config = EngineConfig(model="tiny")
    few = expected._few(facts, config)
    assert few.experts is not None and (few.experts.layers, few.experts.count) == ((True,), 3)
    assert expected.expect(facts, config).layers == 1


def test_a_layer_is_told_of_as_it_is_computed() -> None:
    facts = read_config("src/headrace/assets/tiny")
    assert "bfloat16" in expected.expect(facts, EngineConfig(model="tiny", dtype="float32")).obstacle
    weights = expected._random(facts, torch.float32)
    assert weights["final_norm.weight"].eq(1).all() and 0 < weights["layers.0.qkv.weight"].std() < 1


@pytest.mark.parametrize(
    ("kind", "told"),
    [
        ("glm_dsa", "rows choose the keys that they attend to"),
        ("minimax_m3", "rows choose the keys that they attend to"),
        ("mistral4", "queries of latents are multiplied by a factor of their position"),
    ],
)
def test_layers_that_are_never_computed_as_a_whole(kind: str, told: str, folder_of: FolderOf) -> None:
    facts = read_config(folder_of(kind))
    assert expected.expect(facts, EngineConfig(model="tiny")).obstacle == told


def test_the_command() -> None:
    status, text = told("tiny", "--json", "--kv-cache-dtype", "int8")
    found = json.loads(text[text.index("{") :])
    assert status == 0 and found["name"] == "tiny" and found["model"]["architecture"] == "LlamaForCausalLM"
    status, text = told("tiny", "--quantization", "int8")
    assert status == 0 and "2.8M parameters" in text and "5.3 MiB in BF16" in " ".join(text.split())
    for arguments, reason in (((), "no model"), (("nope",), "no folder"), (("tiny", "--dtype", "x"), "dtype")):
        status, text = told(*arguments)
        assert status == 2 and reason in text


def test_numbers_as_people_read_them() -> None:
    assert [short(n) for n in (12, 4_000, 596_000_000, 1_240_000_000)] == ["12", "4K", "596M", "1.24B"]
    assert [sized(n) for n in (40 << 10, 1 << 20, 3 << 29)] == ["40.0 KiB", "1.0 MiB", "1.50 GiB"]


def test_of_a_hybrid_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both kinds of layers are timed, and states take their part of the memory."""
    folder = make_checkpoint("3_5", tmp_path / "m", torch.bfloat16)
    facts, config = read_config(folder), EngineConfig(model=str(folder), recurrent_states=8)
    assert parameters(facts) == sum(part.numel() for part in build_model("3_5").parameters())
    monkeypatch.setattr(expected, "LAYER_BYTES", 1)
    found = info(config)
    assert found["expected"]["layers timed"] == 4 and found["expected"]["a layer"] == "in C++ as a whole"
    each = facts.recurrent.state_bytes(2) if facts.recurrent else 0
    assert found["memory"]["recurrent states"] == 8 and found["memory"]["bytes of a recurrent state"] == each
    free, weights = 1 << 24, found["memory"]["weights bytes"]
    less = room(facts, config, free, weights)["KV cache tokens"]
    assert less == (free // AUTO_SHARE - 8 * each) // kv_bytes(facts)["bf16"] // CHUNK * CHUNK > 0
    assert "recurrent states" not in info(EngineConfig(model="tiny"))["memory"]


def test_of_experts_in_a_file(folder_of: FolderOf, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is read from the disk comes on top of what is computed, and memory holds what is kept."""
    monkeypatch.setattr(expected, "_seconds", lambda work: 0.5)
    monkeypatch.setattr("headrace.doctor.info.read_rate", lambda folder: 1e6)
    model = str(folder_of("mixtral"))
    whole = info(EngineConfig(model=model))
    found = info(EngineConfig(model=model, expert_offload_path=str(tmp_path), expert_memory_size="64KiB"))
    size = found["memory"]["experts in a file, bytes"]
    assert found["memory"]["of these kept"] == 65536
    assert found["memory"]["weights bytes"] == whole["memory"]["weights bytes"] - size + 65536
    seconds = size / 2 * (1 - 65536 / size) / 1e6  # two of four experts
    speed = 1 / (1 / whole["expected"]["decode tokens/s"] + seconds)
    assert found["expected"]["decode tokens/s"] == pytest.approx(speed, abs=1e-3)
    status, text = told(model, "--expert-offload-path", str(tmp_path), "--expert-memory-size", "64KiB")
    assert status == 0 and "experts in a file" in text


def test_of_a_draft_model(folder_of: FolderOf, tmp_path: Path) -> None:
    """It is named, and its weights and its part of each token leave less memory."""
    draft = random_draft("llama", tmp_path / "d")
    alone, free = info(EngineConfig(model="tiny"), free=1 << 28), 1 << 28
    found = info(EngineConfig(model="tiny", speculative=str(draft)), free=free)
    facts = read_config(draft)
    weights, each = weight_bytes(facts, "bfloat16"), kv_bytes(facts)["bf16"]
    assert found["draft"] == {
        "name": str(draft), "architecture": "LlamaForCausalLM", "parameters": parameters(facts),
        "weights bytes": weights, "KV bytes per token": each,
    }  # fmt: skip
    own = kv_bytes(read_config("src/headrace/assets/tiny"))["bf16"]
    least = free - found["memory"]["weights bytes"]
    assert found["memory"]["KV tokens that fit in the free memory"] == f"{(least - weights) // (own + each):,}"
    assert alone["memory"]["KV tokens that fit in the free memory"] == f"{least // own:,}" and "draft" not in alone
    enough = PROCESS_BYTES + found["memory"]["weights bytes"] + weights
    for memory in (enough, enough - 1):
        told_of = info(EngineConfig(model="tiny", speculative=str(draft)), free=memory)
        assert told_of["memory"]["fits"] == (memory == enough)
    status, text = told("tiny", "--speculative", str(draft))
    said = " ".join(text.split())
    assert status == 0 and "draft model" in said and f"of weights, {each:,} bytes of KV per token" in said
    status, text = told("tiny", "--speculative", str(folder_of("llama")))
    assert status == 2 and "a vocabulary of 320 tokens" in text
