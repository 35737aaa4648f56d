"""What is read of an adapter's folder, and what is refused, with the remedy."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from headrace.config import EngineConfig
from headrace.engine.adapters import adapter_bytes, adapter_folder, last_place, read_adapters, served
from headrace.kernels import dispatch
from headrace.models.adapter_files import read_adapter
from headrace.models.adapters import load_adapters
from headrace.models.config import read_config
from headrace.types import UnsupportedModel
from tests.support.adapters import write_adapter
from tests.support.checkpoints import FolderOf, TheirsOf, edit_json
from tests.support.hybrid_checkpoints import make_checkpoint as make_hybrid

pytestmark = pytest.mark.cpu

Q = "base_model.model.model.layers.0.self_attn.q_proj.lora_"
Tensors = dict[str, torch.Tensor]


@pytest.fixture
def folder(tmp_path: Path, theirs_of: TheirsOf) -> Path:
    return write_adapter(tmp_path / "a", theirs_of("llama_gqa"))


def load(folder: Path, model: Path) -> Any:
    return load_adapters([read_adapter("a", folder)], read_config(model), torch.float32)


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        (dict(peft_type="LOHA"), "peft_type 'LOHA' is not supported; LORA is"),
        (dict(use_dora=True), "use_dora True is not supported; merge it into its model"),
        (dict(bias="lora_only"), "bias 'lora_only' is not supported"),
        (dict(modules_to_save=["lm_head"]), "modules_to_save ['lm_head'] is not supported"),
        (dict(target_parameters=["mlp.experts.down_proj"]), "target_parameters ['mlp.experts.down_proj']"),
        (dict(init_lora_weights="pissa_niter_4"), "init_lora_weights 'pissa_niter_4': the adapter belongs to weights"),
        (dict(lora_alpha="16"), "lora_alpha must be a number, got '16'"),
        (dict(lora_alpha=float("nan")), "lora_alpha must be a number"),
        (dict(lora_alpha=10**400), "lora_alpha must be a number, got 1000"),
        (dict(alpha_pattern={"q_proj": -(10**400)}), "alpha_pattern.q_proj must be a number"),
        (dict(alpha_pattern={"q_proj\\": 4}), "alpha_pattern 'q_proj\\\\' is not supported; name modules"),
        (dict(alpha_pattern={"\\g": 4}), "is not supported; name modules"),
        (dict(use_rslora="false"), "use_rslora must be true or false, got 'false'"),
        (dict(use_rslora=1), "use_rslora must be true or false, got 1"),
        (dict(alpha_pattern=[1]), "alpha_pattern must map modules to numbers"),
        (dict(alpha_pattern={"(a+)+$": 2}), "alpha_pattern '(a+)+$' is not supported; name modules"),
        (dict(alora_invocation_tokens=["Now"]), "alora_invocation_tokens must be a list of token ids"),
        (dict(alora_invocation_tokens=[-1]), "alora_invocation_tokens must be a list of token ids"),
    ],
)  # fmt: skip
def test_fields_that_are_refused(fields: dict[str, Any], told: str, folder: Path) -> None:
    edit_json(folder / "adapter_config.json", **fields)
    with pytest.raises(ValueError) as refused:
        read_adapter("mine", folder)
    assert str(refused.value).startswith("adapter 'mine': ") and told in str(refused.value)


@pytest.mark.parametrize(
    "fields",
    [
        dict(use_dora=False, use_qalora=None, modules_to_save=[], init_lora_weights="gaussian", loftq_config={}),
        dict(init_lora_weights=True, trainable_token_indices=None, base_model_name_or_path="other", r=99),
    ],
)
def test_fields_without_a_say(fields: dict[str, Any], folder: Path, folder_of: FolderOf) -> None:
    edit_json(folder / "adapter_config.json", **fields)
    assert load(folder, folder_of("llama_gqa")).pairs


def test_an_invocation_beyond_the_vocabulary_is_refused(folder: Path, folder_of: FolderOf) -> None:
    edit_json(folder / "adapter_config.json", alora_invocation_tokens=[5, 320])
    with pytest.raises(ValueError, match=r"adapter 'a': .* names 320, and the model has 320 tokens"):
        load(folder, folder_of("llama_gqa"))


@pytest.mark.parametrize(
    ("pattern", "matches"),
    [
        ("q_proj", True), ("^q_proj", False), ("^model.layers.0.self_attn.q_proj", True), ("q_proj$", True),
        ("layers.0.self_attn.q_proj", True), ("^layers.0.self_attn.q_proj", False), ("k_proj|q_proj", True),
    ],
)  # fmt: skip
def test_patterns_match_as_peft_matches_them(pattern: str, matches: bool, folder: Path) -> None:
    """peft.utils.other.get_pattern_key: re.match(rf"(.*\\.)?({key})$", name)."""
    edit_json(folder / "adapter_config.json", lora_alpha=2, alpha_pattern={pattern: 6})
    assert read_adapter("a", folder).scale("model.layers.0.self_attn.q_proj", 1) == (6 if matches else 2)


def renamed(tensors: Tensors, old: str, new: str) -> Tensors:
    return {name.replace(old, new): tensor for name, tensor in tensors.items()}


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda t: t | {Q + "A.weight": t[Q + "A.weight"][:, :-1]}, "the adapter is of another one"),
        (lambda t: t | {Q + "B.weight": t[Q + "B.weight"][:-1]}, "the adapter is of another one"),
        (lambda t: t | {Q + "A.weight": t[Q + "A.weight"].int()}, "q_proj is stored as float32 and int32; numbers of"),
        (lambda t: t | {Q + "B.weight": t[Q + "B.weight"].bool()}, "q_proj is stored as bool and float32; numbers of"),
        (lambda t: t | {Q + "B.weight": t[Q + "B.weight"] * torch.inf}, "holds NaN or infinity in"),
        (lambda t: {n: v for n, v in t.items() if n != Q + "B.weight"}, "lacks lora_A or lora_B of model.layers.0"),
        (lambda t: renamed(t, "layers.1.", "layers.9."), "is of another model: it changes layer 9, and this one has 2"),
        (lambda t: renamed(t, "self_attn.q_proj", "self_attn.rotary"), "changes model.layers.0.self_attn.rotary"),
        (lambda t: renamed(t, "model.layers.0.mlp.up_proj", "lm_head"), "changes lm_head: projections of attention"),
        (lambda t: renamed(t, ".lora_A.weight", ".lora_embedding_A"), "is no matrix of LoRA"),
        (lambda t: {"base_model.model.model.vision_tower.x.lora_A.weight": torch.ones(1)}, "lacks lora_A or lora_B"),
    ],
)  # fmt: skip
def test_tensors_that_are_refused(
    change: Callable[[Tensors], Tensors], told: str, folder: Path, folder_of: FolderOf
) -> None:
    path = folder / "adapter_model.safetensors"
    save_file({name: each.contiguous() for name, each in change(load_file(path)).items()}, path)
    with pytest.raises(ValueError) as refused:
        load(folder, folder_of("llama_gqa"))
    assert str(refused.value).startswith("adapter 'a': ") and told in str(refused.value)


def test_files_that_are_refused(folder: Path, folder_of: FolderOf) -> None:
    weights = folder / "adapter_model.safetensors"
    content = weights.read_bytes()
    weights.write_bytes(content[:-100])
    with pytest.raises(ValueError, match="is cut short: 100 bytes are missing"):
        read_adapter("a", folder)
    weights.unlink()
    with pytest.raises(ValueError, match=r"holds no adapter_model\.safetensors; download it too"):
        read_adapter("a", folder)
    (folder / "adapter_model.bin").write_bytes(b"")
    with pytest.raises(ValueError, match="pickled weights, which can run code when read"):
        read_adapter("a", folder)


def test_modules_that_are_not_adapted(tmp_path: Path) -> None:
    """Convolutions of gated delta nets."""
    model = make_hybrid("next", tmp_path / "m")
    folder = tmp_path / "a"
    folder.mkdir()
    name, weights = "base_model.model.model.layers.0.linear_attn.conv1d.lora_", folder / "adapter_model.safetensors"
    save_file({f"{name}A.weight": torch.ones(2, 64), f"{name}B.weight": torch.ones(64, 2)}, weights)
    (folder / "adapter_config.json").write_text(json.dumps(dict(peft_type="LORA")))
    with pytest.raises(UnsupportedModel, match=r"changes model\.layers\.0\.linear_attn"):
        load(folder, model)


def test_layers_that_differ_are_not_adapted_on_a_gpu(monkeypatch: pytest.MonkeyPatch, folder_of: FolderOf) -> None:
    facts = read_config(folder_of("gemma4"))
    monkeypatch.setattr(dispatch, "on_gpu", lambda _: True)
    with pytest.raises(UnsupportedModel, match="Gemma4ForCausalLM is not adapted on a GPU yet; merge the adapter"):
        load_adapters([], facts, torch.bfloat16)


def test_scales(folder: Path) -> None:
    """Of a module by its own alpha, if a pattern names it, over its own rank."""
    patterns = {"q_proj": 6, "layers.1.mlp.down_proj": 4, "^model.layers.0.mlp.up_proj": 2}
    edit_json(folder / "adapter_config.json", lora_alpha=16, alpha_pattern=patterns)
    facts = read_adapter("a", folder)
    wanted = {
        "self_attn.q_proj": 6,
        "self_attn.xq_proj": 16,
        "self_attn.v_proj": 16,
        "mlp.down_proj": 16,
        "mlp.up_proj": 2,
    }
    for module, alpha in wanted.items():
        assert facts.scale(f"model.layers.0.{module}", 4) == alpha / 4
    assert facts.scale("model.layers.1.mlp.down_proj", 8) == 0.5 and facts.scale("model.layers.1.mlp.up_proj", 4) == 4
    edit_json(folder / "adapter_config.json", use_rslora=True)
    assert read_adapter("a", folder).scale("model.layers.0.self_attn.q_proj", 4) == 3


def test_a_name_is_not_an_adapter(folder: Path, theirs_of: TheirsOf) -> None:
    """Chunks of one folder are not met by what lies there later."""
    before, again = read_adapter("a", folder), read_adapter("a", folder)
    assert before.digest == again.digest
    write_adapter(folder, theirs_of("llama_gqa"), seed=1)
    after = read_adapter("a", folder)
    edit_json(folder / "adapter_config.json", lora_alpha=1)
    digests = {facts.digest for facts in (before, after, read_adapter("a", folder))}
    assert len(digests) == 3
    [one], [other] = served([before]), served([after])
    assert one.mark(0) == served([again])[0].mark(0) != other.mark(0)
    assert one.mark(0)[1] == 0 and one.mark(64)[1] == 1 and one.mark(65)[1] == 1 and one.mark(64)[0] != one.mark(65)[0]


def test_where_adapters_are(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder, or a name of the hub that was downloaded."""
    snapshot = tmp_path / "hub/models--me--sql/snapshots/1"
    snapshot.parent.mkdir(parents=True)
    folder.rename(snapshot)
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    assert adapter_folder("me/sql") == adapter_folder(str(snapshot)) == snapshot
    config = EngineConfig(model="tiny", lora_modules=f"a={snapshot},b=me/sql")
    assert [facts.name for facts in read_adapters(config)] == ["a", "b"]
    assert adapter_bytes(config) >= 2 * (snapshot / "adapter_model.safetensors").stat().st_size
    without = (
        (str(tmp_path), "the folder has no adapter_config"),
        ("me/other", "there is no such folder"),
        ("x" * 999, ""),
    )
    for given, told in without:
        with pytest.raises(ValueError, match=f"lora_modules: .*{told}"):
            adapter_folder(given)


@pytest.mark.parametrize(
    ("wanted", "tokens", "place"),
    [([5], [5], 0), ([5], [1, 5, 5, 2], 2), ([5, 6], [5, 6, 5, 6, 5], 2), ([5, 5], [5, 5, 5], 1), ([5], [], None),
     ([5, 6], [6, 5], None), ([1, 2, 3], [1, 2], None)],
)  # fmt: skip
def test_where_tokens_stand_last(wanted: list[int], tokens: list[int], place: int | None) -> None:
    assert last_place(wanted, tokens) == place
