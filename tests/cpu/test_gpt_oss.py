"""gpt-oss as it is published, experts in MXFP4: transformers' own reading of the same files, and every schedule's bits.

The family itself is a kind of tests/support/checkpoints.py, and so in the tests of all families.
E: experts, H: hidden size, I: an expert's width.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedModel
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from headrace import LLM, SamplingParams
from headrace.config import EngineConfig
from headrace.doctor import expected
from headrace.doctor.info import info
from headrace.kernels import cpu, dispatch
from headrace.kernels.quantized import Quantized
from headrace.models.config import read_config
from headrace.models.decoder import load_decoder
from headrace.models.families.gpt_oss import GPT_OSS
from headrace.models.plain_config import plain_config
from headrace.models.shards import Share
from headrace.models.weights import StoredMatrix, load_weights
from headrace.types import UnsupportedModel
from tests.support.checkpoints import build_model
from tests.support.gguf_files import tokens_of
from tests.support.naive_attention import prompt_logits
from tests.support.thread_group import ranks_as_threads
from tests.support.traces import run, same

pytestmark = [pytest.mark.cpu, pytest.mark.usefixtures("one_thread")]

TOLERANCE = 1e-4
INNER = 128
EXPERTS = ("gate_up_proj", "down_proj")
UNCONVERTED = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]
CONFIG = {"quant_method": "mxfp4", "modules_to_not_convert": UNCONVERTED}


def coded(weight: Tensor, seed: int) -> tuple[Tensor, Tensor]:
    """Random blocks uint8 [E, outputs, inputs / 32, 16], scales [E, outputs, inputs / 32], for weight [E, inputs,
    outputs] and about as wide."""
    g = torch.Generator().manual_seed(seed)
    experts, inputs, outputs = weight.shape
    shape = (experts, outputs, inputs // 32)
    middle = 127 + int(torch.log2(weight.std() / 3).round())
    scales = torch.randint(middle - 1, middle + 2, shape, generator=g)
    return torch.randint(0, 256, (*shape, 16), generator=g).to(torch.uint8), scales.to(torch.uint8)


def write(folder: Path) -> tuple[Path, PreTrainedModel]:
    """A checkpoint with experts in MXFP4 and the rest in bf16, and transformers' model of what it stands for."""
    folder.mkdir()
    model = build_model("gpt_oss", intermediate_size=INNER)
    tensors: dict[str, Tensor] = {}
    with torch.no_grad():
        for seed, (name, parameter) in enumerate(model.named_parameters()):
            if name.endswith(EXPERTS):
                blocks, scales = coded(parameter, seed)
                parameter.copy_(convert_moe_packed_tensors(blocks, scales, dtype=torch.float32))
                tensors |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
            else:
                tensors[name] = parameter.bfloat16()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    fields = json.loads(model.config.to_json_string()) | {"quantization_config": CONFIG, "dtype": "bfloat16"}
    (folder / "config.json").write_text(json.dumps(fields | {"architectures": ["GptOssForCausalLM"]}))
    return folder, model


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, PreTrainedModel]:
    return write(tmp_path_factory.mktemp("mxfp4") / "model")


class OlderConfig:
    """The configuration of a release of transformers that has no fields for the gate (5.17 for one)."""

    def __init__(self, config: Any) -> None:
        self._config = config

    def __getattr__(self, name: str) -> Any:
        if name.startswith("swiglu"):
            raise AttributeError(name)
        return getattr(self._config, name)


def test_older_releases_of_transformers_have_no_fields_for_the_gate() -> None:
    """What a file says there still counts."""
    config: Any = OlderConfig(build_model("gpt_oss").config)
    assert GPT_OSS.facts(config)["activation"] == "swiglu_oai"
    config.swiglu_limit = 5.0
    with pytest.raises(UnsupportedModel, match=r"swiglu_limit 5\.0 is not supported; only 7\.0 is"):
        GPT_OSS.facts(config)


@pytest.fixture
def folder(written: tuple[Path, PreTrainedModel]) -> Path:
    return written[0]


def change(folder: Path, to: Path, edit: Callable[[dict[str, Tensor]], object]) -> Path:
    """A copy whose tensors are edited."""
    to.mkdir()
    tensors = load_file(folder / "model.safetensors")
    edit(tensors)
    save_file(tensors, to / "model.safetensors")
    (to / "config.json").write_text((folder / "config.json").read_text())
    return to


@pytest.mark.parametrize("forced", [None, "torch"])
def test_logits_equal_transformers(
    forced: dispatch.Implementation | None, written: tuple[Path, PreTrainedModel]
) -> None:
    """On what convert_moe_packed_tensors makes of the file: gpt-oss's own order of nibbles, which is not GGUF's."""
    folder, model = written
    tokens = tokens_of(150)
    with torch.no_grad():
        want = model(torch.tensor([tokens])).logits[0]
    with dispatch.force(forced):
        assert (prompt_logits(load_decoder(folder, "float32"), tokens) - want).abs().max() <= TOLERANCE


@pytest.mark.skipif(not cpu.available(), reason="codes need the C++ kernels")
def test_experts_stay_codes(folder: Path) -> None:
    decoder = load_decoder(folder)
    config = read_config(folder)
    assert config == plain_config(folder) and config.stored is not None and config.stored.formats == ("MXFP4",)
    for name, matrix in decoder.matrices.items():
        assert isinstance(matrix, Quantized) == (".experts." in name)
    up = decoder.matrices["layers.0.experts.0.up.weight"]
    assert isinstance(up, Quantized) and up.format.name == "MXFP4" and up.gated
    assert up.nbytes == 2 * INNER * config.hidden_size * 4.25 / 8


def test_the_promise_holds(isa: str, folder: Path) -> None:
    """Alone, in a batch, cached, in prefill chunks: the same bits of logits."""
    prompts = [tokens_of(200 + 31 * i, seed=i // 2) for i in range(4)]
    short = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
    alone = LLM(str(folder), enable_prefix_caching=False, kv_cache_tokens=4096)
    want = [run(alone, [prompt], short)[0] for prompt in prompts]
    shared = LLM(str(folder), max_batch_tokens=96, kv_cache_tokens=4096)
    for _ in range(2):
        same(run(shared, prompts, short), want)
    assert shared.engine.stats().tokens.cached > 300, "nothing was cached"


@pytest.mark.parametrize("strategy", ["chain", "ring-kv"])
def test_over_ranks(strategy: str, folder: Path) -> None:
    """Two context ranks of two tensor ranks: each has a part of every expert, in its codes."""
    prompts, short = [tokens_of(n, seed=n) for n in (70, 200, 333)], SamplingParams(temperature=0.0, max_tokens=6)
    with LLM(str(folder), kv_cache_tokens=4096) as llm:
        truth = run(llm, prompts, short)
    ranks = dict(context_parallel_size=2, tensor_parallel_size=2, prefill_strategy=strategy, threads=1)
    with ranks_as_threads(), LLM(str(folder), kv_cache_tokens=4096, **ranks) as llm:
        same(run(llm, prompts, short), truth)
        assert llm.engine.stats().ranks.prefills.get(strategy)


def test_a_tensor_rank_reads_its_part_of_every_expert(folder: Path) -> None:
    """Of gates and of ups, which lie in turn in the file, and of each expert's outputs."""
    config = read_config(folder)
    whole: dict[str, StoredMatrix] = {}
    biases = load_weights(folder, config, torch.float32, stored=whole)
    for rank in range(2):
        share, mine = Share(config, rank, 2), dict[str, StoredMatrix]()
        own = load_weights(folder, config, torch.float32, share=share, stored=mine)
        for part in ("up", "down"):
            name = f"layers.1.experts.7.{part}"
            rows = [row for each in share.rows(f"{name}.weight") or () for row in each]
            assert 0 < len(rows) < whole[f"{name}.weight"].shape[0]
            numbers = whole[f"{name}.weight"].numbers(torch.float32)[rows]
            assert torch.equal(mine[f"{name}.weight"].numbers(torch.float32), numbers)
            assert torch.equal(own[f"{name}.bias"], biases[f"{name}.bias"][rows])


def test_what_is_quantised_is_not_rounded_again(folder: Path) -> None:
    with pytest.raises(ValueError, match=r"quantised already.*MXFP4"):
        load_decoder(folder, quantization="int8")


def test_info(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(expected, "TOKENS", 64)
    monkeypatch.setattr(expected, "STEPS", 1)
    found = info(EngineConfig(model=str(folder)))
    blocks = sum(tensor.nbytes for name, tensor in load_file(folder / "model.safetensors").items() if "blocks" in name)
    assert found["file"]["stored as"]["U8"] >= blocks and found["expected"]["decode tokens/s"] > 0


DOWN = "model.layers.0.mlp.experts.down_proj"
BROKEN: dict[str, tuple[Callable[[dict[str, Tensor]], object], str]] = {
    "no scales": (lambda tensors: tensors.pop(f"{DOWN}_scales"), "lacks .*down_proj.weight"),
    "a group too many": (
        lambda tensors: tensors.update({f"{DOWN}_blocks": tensors[f"{DOWN}_blocks"].repeat(1, 1, 2, 1)}),
        r"down_proj.weight of shape \[128, 256\] where \[128, 128\] is expected",
    ),
    "flat blocks": (
        lambda tensors: tensors.update({f"{DOWN}_blocks": tensors[f"{DOWN}_blocks"].flatten(2)}),
        r"down_proj.weight of shape \[128, 64\] where",
    ),
    "scales of other groups": (
        lambda tensors: tensors.update({f"{DOWN}_scales": tensors[f"{DOWN}_scales"][..., :2].contiguous()}),
        r"down_proj.weight: .*scales \[128, 2\] where \[128, 4\]",
    ),
    "a scale that is NaN": (lambda tensors: tensors[f"{DOWN}_scales"].fill_(255), "a scale is NaN"),
    "numbers for codes": (
        lambda tensors: tensors.update({f"{DOWN}_blocks": tensors[f"{DOWN}_blocks"].float()}), "must be uint8"
    ),
    "experts too few": (
        lambda tensors: tensors.update({f"{DOWN}_bias": tensors[f"{DOWN}_bias"][:5].contiguous()}), "down_proj_bias"
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_file_is_told_by_the_tensor(name: str, folder: Path, tmp_path: Path) -> None:
    edit, words = BROKEN[name]
    with pytest.raises(ValueError, match=words):
        load_decoder(change(folder, tmp_path / "broken", edit))
