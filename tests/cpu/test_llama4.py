"""Llama 4: what its published files hold, and attention within blocks of keys through the whole engine."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import Llama4Config, Llama4ForConditionalGeneration, Llama4TextConfig

from headrace import LLM, SamplingParams
from headrace.models.config import read_config
from headrace.models.decoder import load_decoder
from tests.support.checkpoint_files import SINGLE, copy_of, rename
from tests.support.checkpoints import FolderOf, OursOf, edit_json
from tests.support.kind_sizes import NO_TOKEN, VOCAB
from tests.support.thread_group import ranks_as_threads
from tests.support.traces import run, same

SCOUT: dict[str, Any] = dict(
    model_type="llama4_text", hidden_size=5120, intermediate_size=8192, intermediate_size_mlp=16384, head_dim=128,
    num_hidden_layers=48, num_attention_heads=40, num_key_value_heads=8, vocab_size=202048, no_rope_layers=[],
    max_position_embeddings=10485760, attention_chunk_size=8192, attn_temperature_tuning=4, attn_scale=0.1,
    floor_scale=8192, interleave_moe_layer_step=1, num_experts_per_tok=1, num_local_experts=16, use_qk_norm=True,
    rope_theta=500000.0, rope_scaling=dict(
        factor=16.0, high_freq_factor=1.0, low_freq_factor=1.0, original_max_position_embeddings=8192,
        rope_type="llama3",
    ),
)  # fmt: skip
VISION = dict(
    hidden_size=32, intermediate_size=64, num_attention_heads=2, num_hidden_layers=1, patch_size=14, image_size=28,
    vision_output_dim=32, projector_input_dim=32, projector_output_dim=32,
)  # fmt: skip
GREEDY = SamplingParams(temperature=0.0, max_tokens=70, ignore_eos=True)


def prompt(length: int, seed: int) -> list[int]:
    return torch.randint(5, VOCAB, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def test_the_published_file_is_read(tmp_path: Path) -> None:
    file = dict(
        architectures=["Llama4ForConditionalGeneration"], model_type="llama4", torch_dtype="bfloat16", text_config=SCOUT
    )
    (tmp_path / "config.json").write_text(json.dumps(file))
    config = read_config(tmp_path)
    assert config.attention.windows == (-8192, -8192, -8192, None) * 12 and config.max_model_len == 10485760
    assert (config.turned_apart(0), config.rotation(0), config.rotation(3)) == (True, (256, 128), (0, 128))
    assert config.experts is not None and config.experts.shared == 8192 and sum(config.experts.layers) == 48


def test_a_folder_with_a_vision_part(folder_of: FolderOf, ours_of: OursOf, tmp_path: Path) -> None:
    """As the class with a vision part writes it, whose text part is computed; images are not read."""
    text = load_file(folder_of("llama4") / SINGLE)
    fields = json.loads((folder_of("llama4") / "config.json").read_text())
    config = Llama4Config(
        text_config=Llama4TextConfig(**fields), vision_config=VISION, boi_token_index=NO_TOKEN,
        eoi_token_index=NO_TOKEN, image_token_index=NO_TOKEN,
    )  # fmt: skip
    model = Llama4ForConditionalGeneration(config)
    model.language_model.load_state_dict(text)
    model.save_pretrained(tmp_path)
    decoder = load_decoder(tmp_path, "float32")
    assert any(name.startswith("vision_model.") for name in load_file(tmp_path / SINGLE))
    ours = ours_of("llama4")
    assert decoder.weights.keys() == ours.weights.keys()
    assert all(torch.equal(decoder.weights[name], ours.weights[name]) for name in ours.weights)
    assert decoder.config.attention == ours.config.attention


def test_experts_one_by_one(folder_of: FolderOf, tmp_path: Path) -> None:
    """As files of quantised weights have them."""
    folder = copy_of(folder_of("llama4"), tmp_path / "apart")

    def apart(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        found = {}
        for name, tensor in tensors.items():
            before, fused, part = name.rpartition(".experts.")
            parts = ["gate_proj", "up_proj"] if part == "gate_up_proj" else ["down_proj"]
            for e, rows in enumerate(tensor if fused else ()):
                for each, own in zip(parts, rows.T.chunk(len(parts)), strict=True):
                    found[f"{before}.experts.{e}.{each}.weight"] = own.contiguous()
            found |= {} if fused else {name: tensor}
        return found

    rename(folder, apart)
    tokens = prompt(150, 1)
    one, other = (LLM(str(each), dtype="float32", kv_cache_tokens=512) for each in (folder, folder_of("llama4")))
    assert torch.equal(one.logits(tokens), other.logits(tokens))


@pytest.mark.parametrize(
    "settings",
    [
        dict(kv_cache_tokens=704),
        dict(kv_cache_dtype="int8"),
        pytest.param(dict(context_parallel_size=2), marks=pytest.mark.matrix),
        pytest.param(dict(tensor_parallel_size=2), marks=pytest.mark.matrix),
    ],
)
def test_prompts_and_answers_that_leave_a_block(settings: dict[str, Any], folder_of: FolderOf) -> None:
    """Blocks of 128 keys: prompts that share one and a half of them, and answers that begin another one."""
    shared = prompt(200, 2)
    prompts = [shared + prompt(count, 3 + count) for count in (1, 40, 57, 100)] + [prompt(120, 9)]
    common, ranks = dict(dtype="bfloat16", kv_cache_tokens=1024) | settings, ("context", "tensor")
    one = {name: value for name, value in common.items() if not name.startswith(ranks)}
    with LLM(str(folder_of("llama4")), **one | dict(enable_prefix_caching=False)) as alone:
        truth = [run(alone, [each], GREEDY)[0] for each in prompts]
    with ranks_as_threads(), LLM(str(folder_of("llama4")), **common, max_batch_tokens=128) as llm:
        for _ in range(2):
            same(run(llm, prompts, GREEDY), truth)


def test_within_one_block_all_keys_are_seen(folder_of: FolderOf, tmp_path: Path) -> None:
    """To the bit, as in a model of longer blocks; behind it rows see less."""
    folder, tokens = copy_of(folder_of("llama4"), tmp_path / "longer"), prompt(200, 4)
    edit_json(folder / "config.json", attention_chunk_size=256)
    short, long = (LLM(str(each), dtype="bfloat16", kv_cache_tokens=512) for each in (folder_of("llama4"), folder))
    ours, theirs = short.logits(tokens), long.logits(tokens)
    assert torch.equal(ours[:128], theirs[:128])
    assert not torch.equal(ours[128:], theirs[128:])
