"""Several ranks that stream KV, on a fake device (tests.support.fake_device): each prompt's bits alone and cold."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="Triton is built for Linux only")
if os.environ.get("TRITON_INTERPRET") != "1":  # see tests/conftest.py
    pytest.skip("there is a GPU: tests/gpu has ranks on it", allow_module_level=True)

from headrace import LLM, SamplingParams
from headrace.bench.shapes import CheckpointShape, write_checkpoint
from headrace.engine import preflight, ranks
from headrace.engine.runner import Runner
from headrace.kernels.triton import backend
from headrace.offload.streaming.staged_store import StagedStore
from headrace.offload.weights.in_turn import LayersInTurn
from tests.support.checkpoints import make_checkpoint
from tests.support.fake_device import FakeDevice
from tests.support.gpu_ranks import interpreted_on
from tests.support.thread_group import ranks_as_threads
from tests.support.traces import Trace, run, same

SHAPE = CheckpointShape(hidden=16, layers=2, heads=1, kv_heads=1, head_dim=16, mlp=16, vocab=64, context=256)
THREE_LAYERS = replace(SHAPE, layers=3)
TWO_HEADS = replace(SHAPE, hidden=64, layers=1, heads=2, kv_heads=2, mlp=64)
LATENT: dict[str, Any] = dict(
    vocab_size=64, hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
    num_key_value_heads=2, kv_lora_rank=24, qk_rope_head_dim=8, qk_nope_head_dim=16, v_head_dim=12,
    max_position_embeddings=256, mlp_layer_types=["dense"] * 2,
)  # fmt: skip
TWO = SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True)
STREAMED: dict[str, Any] = {
    "offload_schedule": "row", "kv_offloading_size": 0.001, "kv_offload_activations": "off", "max_model_len": 128,
}  # fmt: skip


Engine = Callable[..., LLM]


@pytest.fixture
def engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Engine]:
    """engine(shape or fields of a model with latent attention, settings)."""
    monkeypatch.setattr(preflight, "GPU_DEVICES", ("null",))
    monkeypatch.setattr(backend, "verify", lambda *given: None)
    monkeypatch.setattr(Runner, "record", lambda self: None)
    given: dict[str, Any] = {"attention_backend": "triton", "dtype": "float32", "max_batch_tokens": 128}

    def made(shape: CheckpointShape | dict[str, Any], **settings: Any) -> LLM:
        latent = isinstance(shape, dict)
        folder = make_checkpoint("glm_lite", tmp_path, **shape) if latent else write_checkpoint(shape, tmp_path)
        return LLM(str(folder), **given | settings)

    with interpreted_on(FakeDevice(), monkeypatch):
        yield made


def truth(llm: LLM, prompts: list[list[int]]) -> list[Trace]:
    """Each prompt alone and cold."""
    runner: Any = llm.engine.loaded.executor
    runner.decoding = runner.mixed = runner.eager
    return [run(llm, [prompt], TWO)[0] for prompt in prompts]


def stores(llm: LLM) -> list[StagedStore]:
    ranks = llm.engine.loaded.ranks
    assert ranks is not None
    return [rank.storage for rank in (ranks.rank, *ranks.group.workers.made)]  # type: ignore[union-attr]


@pytest.mark.parametrize("shape", [SHAPE, pytest.param(LATENT, marks=pytest.mark.matrix)], ids=["plain", "latent"])
def test_context_ranks_give_one_ranks_bits(shape: CheckpointShape | dict[str, Any], engine: Engine) -> None:
    """Two prompts together, each of which goes on with a chunk that is outside by then."""
    prompts = [[5, 7, 9], [11] * 5]
    expected = truth(engine(shape, kv_cache_tokens=128), prompts)
    with ranks_as_threads():
        llm = engine(shape, context_parallel_size=2, prefill_strategy="ring-kv", **STREAMED)
        same(run(llm, prompts, TWO), expected)
        assert all(store.totals.loaded and store.totals.bytes_out for store in stores(llm))
        llm.close()


def test_a_start_that_fails_leaves_no_copy_streams(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of rank 0, whose process goes on."""

    def fails(*given: object) -> None:
        raise ValueError("the table does not fit")

    def streams() -> int:
        return sum(each.name in ("headrace-in", "headrace-out") for each in threading.enumerate())

    monkeypatch.setattr(ranks, "_table", fails)
    before = streams()
    with ranks_as_threads(), pytest.raises(ValueError, match="does not fit"):
        engine(SHAPE, context_parallel_size=2, **STREAMED)
    assert streams() == before + 2  # those of the other rank, a thread here


@pytest.mark.matrix
def test_what_tensor_ranks_project_has_one_ranks_bits(engine: Engine) -> None:
    """The chunk that a prompt fills comes as activations when its second token is decoded."""
    prompts = [[5] * 64]
    expected = truth(engine(TWO_HEADS, kv_cache_tokens=128), prompts)
    with ranks_as_threads():
        llm = engine(TWO_HEADS, tensor_parallel_size=2, **STREAMED | {"kv_offload_activations": "on"})
        for store in stores(llm):
            assert store.x is not None
            store.x.share = 1.0
        same(run(llm, prompts, TWO), expected)
        assert [store.totals.projected for store in stores(llm)] == [1, 1]
        llm.close()


@pytest.mark.matrix
def test_weights_outside_give_one_ranks_bits(engine: Engine) -> None:
    """They pass through two buffers on the device, from which the profile takes its matrices too."""
    prompts = [[5, 7, 9]]
    expected = truth(engine(THREE_LAYERS, kv_cache_tokens=128), prompts)
    with ranks_as_threads():
        llm = engine(THREE_LAYERS, context_parallel_size=2, **STREAMED | {"weight_offload": True})
        same(run(llm, prompts, TWO), expected)
        decoder = llm.engine.loaded.decoder
        layers: Any = decoder.layers
        rooms = {room.data_ptr() for buffer in layers.source.buffers for room in buffer.room.values()}
        assert len(rooms) == 2 * len(layers.source.outside[0].matrices)
        matrices = [x for name, x in decoder.matrices.items() if name.startswith("layers.0.")]
        assert matrices and {x.data_ptr() for x in matrices if isinstance(x, torch.Tensor)} <= rooms
        part: Any = decoder.first(2).layers
        assert isinstance(part, LayersInTurn) and part.source is layers.source and len(part.layers) == 2
        llm.close()
