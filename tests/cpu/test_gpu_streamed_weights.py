"""Weights outside a GPU, on a fake device (tests.support.fake_device): they lie in pinned host memory, and pass through
two buffers of a layer each."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="Triton is built for Linux only")

from headrace import LLM, SamplingParams
from headrace.bench.shapes import CheckpointShape, write_checkpoint
from headrace.offload.weights.streamed import StreamedLayers
from tests.support.checkpoints import make_checkpoint
from tests.support.fake_device import FakeDevice, fake_device
from tests.support.small_gpu_engines import recorded_when_needed
from tests.support.traces import Trace, run, same

SHAPE = CheckpointShape(hidden=32, layers=3, heads=2, kv_heads=2, head_dim=16, mlp=32, vocab=64, context=256)
SHAPES = {"dense": SHAPE, "experts": replace(SHAPE, experts=4, chosen=2, mlp=16)}
LATENT: dict[str, Any] = dict(
    vocab_size=64, hidden_size=32, intermediate_size=32, num_hidden_layers=3, num_attention_heads=2,
    num_key_value_heads=2, kv_lora_rank=24, qk_rope_head_dim=8, qk_nope_head_dim=16, v_head_dim=12,
    max_position_embeddings=256, mlp_layer_types=["dense"] * 3,
)  # fmt: skip
TWO = SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True)
OUTSIDE: dict[str, Any] = {
    "offload_schedule": "auto", "weight_offload": True, "kv_offloading_size": 0.0005, "kv_offload_activations": "off",
}  # fmt: skip
PROMPTS = [[5, 7, 9], [11] * 5]
FolderOf = Callable[[str], Path]


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory: pytest.TempPathFactory) -> FolderOf:
    def made(model: str) -> Path:
        folder = tmp_path_factory.mktemp(model)
        return (
            make_checkpoint("glm_lite", folder, **LATENT)
            if model == "latent"
            else write_checkpoint(SHAPES[model], folder)
        )

    return cache(made)


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeDevice]:
    with recorded_when_needed(monkeypatch) as device:
        yield device


def engine(folder: Path, **settings: Any) -> LLM:
    given = {"max_sequences": 2, "max_batch_tokens": 128, "max_model_len": 192, **settings}
    return LLM(str(folder), attention_backend="triton", dtype="float32", **given)


def layers_of(llm: LLM) -> StreamedLayers:
    layers = llm.engine.loaded.executor.streamer.transfers.layers  # type: ignore[attr-defined]
    assert isinstance(layers, StreamedLayers)
    return layers


def launched(llm: LLM) -> list[Trace]:
    """By an engine all of whose weights lie on the device, without graphs."""
    runner: Any = llm.engine.loaded.executor
    runner.decoding = runner.mixed = runner.eager
    return run(llm, PROMPTS, TWO)


@pytest.mark.parametrize(("model", "settings"), [
    ("dense", {"offload_batches": 2}),
    pytest.param("dense", {"offload_schedule": "row", "kv_offload_activations": "on"}, marks=pytest.mark.matrix),
    pytest.param("dense", {"quantization": "int8"}, marks=pytest.mark.matrix),
    pytest.param("dense", {"quantization": "w8a8"}, marks=pytest.mark.matrix),
    pytest.param("dense", {"quantization": "fp8_rowwise"}, marks=pytest.mark.matrix),
    pytest.param("experts", {}, marks=pytest.mark.matrix),
    ("latent", {}),
    pytest.param("latent", {"offload_schedule": "row", "kv_offload_activations": "on"}, marks=pytest.mark.matrix),
], ids=str)  # fmt: skip
def test_weights_outside_give_the_same_bits(
    model: str, settings: dict[str, Any], folder_of: FolderOf, fake: FakeDevice
) -> None:
    """Three layers: which buffer a layer has changes from step to step. Layers share what is known of a buffer."""
    quantised = {name: value for name, value in settings.items() if name == "quantization"}
    truth = launched(engine(folder_of(model), kv_cache_tokens=512, **quantised))
    llm = engine(folder_of(model), **OUTSIDE | settings)
    same(run(llm, PROMPTS, TWO), truth)
    layers = layers_of(llm)
    for buffer in range(2):
        runs: list[Any] = [layers._runs[layer, buffer].run for layer in range(3)]
        name = "heads.weight" if model == "latent" else "qkv.weight"
        qkv, norms = zip(*((one.layers[0].matrices[name], one.layers[0].weights) for one in runs), strict=True)
        assert all(each is qkv[0] for each in qkv)
        assert norms[0]["attention_norm.weight"] is not norms[1]["attention_norm.weight"]
        if model == "experts":
            addresses = set(runs[0].layers[0].mixture.ups.table.flatten().tolist())
            assert addresses & {room.data_ptr() for room in layers.buffers[buffer].room.values()}
    outside = {w.data_ptr() for each in layers.outside for w in each.matrices.values() if isinstance(w, torch.Tensor)}
    rooms = {room.data_ptr() for buffer in layers.buffers for room in buffer.room.values()}
    assert not outside & rooms
    llm.close()


def test_buffers_that_do_not_fit_are_refused(folder_of: FolderOf, monkeypatch: pytest.MonkeyPatch) -> None:
    with (
        fake_device(monkeypatch, memory=100),
        pytest.raises(ValueError, match="two layers of weights"),
    ):
        engine(folder_of("dense"), **OUTSIDE)


@pytest.mark.parametrize("setting", ["expert_offload_path", "kv_offload_path"])
def test_experts_in_a_file_are_refused(setting: str, folder_of: FolderOf, fake: FakeDevice, tmp_path: Path) -> None:
    streamed = OUTSIDE if setting == "expert_offload_path" else {"weight_offload": True, "offload_schedule": "row"}
    with pytest.raises(ValueError, match=f"{setting}: where a GPU streams KV it reads no experts in a file"):
        engine(folder_of("experts"), **{setting: str(tmp_path)} | streamed)
