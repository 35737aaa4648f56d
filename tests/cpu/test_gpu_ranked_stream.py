"""Several ranks that stream KV, on a fake device (tests.support.fake_device): each prompt's bits alone and cold."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton", reason="Triton is built for Linux only")
if os.environ.get("TRITON_INTERPRET") != "1":  # see tests/conftest.py
    pytest.skip("there is a GPU: tests/gpu has ranks on it", allow_module_level=True)

from headrace import LLM, SamplingParams
from headrace.bench.shapes import CheckpointShape, write_checkpoint
from headrace.engine import preflight
from headrace.engine.runner import Runner
from headrace.kernels.triton import backend
from headrace.offload.streaming.staged_store import StagedStore
from tests.support.fake_device import FakeDevice
from tests.support.gpu_ranks import interpreted_on
from tests.support.thread_group import ranks_as_threads
from tests.support.traces import Trace, run, same

SHAPE = CheckpointShape(hidden=64, layers=3, heads=2, kv_heads=2, head_dim=16, mlp=64, vocab=64, context=256)
TWO = SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True)
SHORT = [[5, 7, 9], [11] * 5]
LONG = [[5] * 65]
STREAMED: dict[str, Any] = {
    "offload_schedule": "row", "kv_offloading_size": 0.001, "kv_offload_activations": "off", "max_model_len": 128,
}  # fmt: skip


Engine = Callable[..., LLM]
Truth = Callable[[Engine, list[list[int]]], list[Trace]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(SHAPE, tmp_path_factory.mktemp("model"))


@pytest.fixture
def engine(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Engine]:
    monkeypatch.setattr(preflight, "GPU_DEVICES", ("null",))
    monkeypatch.setattr(backend, "verify", lambda *given: None)
    monkeypatch.setattr(Runner, "record", lambda self: None)
    given: dict[str, Any] = {"attention_backend": "triton", "dtype": "float32", "max_batch_tokens": 128}
    with interpreted_on(FakeDevice(), monkeypatch):
        yield lambda **settings: LLM(str(folder), **given | settings)


@pytest.fixture(scope="module")
def truth() -> Truth:
    """Each prompt alone and cold, on one rank."""
    found: dict[str, list[Trace]] = {}

    def of(engine: Engine, prompts: list[list[int]]) -> list[Trace]:
        if repr(prompts) not in found:
            llm = engine(kv_cache_tokens=128, enable_prefix_caching=False, max_sequences=1)
            runner: Any = llm.engine.loaded.executor
            runner.decoding = runner.mixed = runner.eager
            found[repr(prompts)] = [run(llm, [prompt], TWO)[0] for prompt in prompts]
        return found[repr(prompts)]

    return of


def stores(llm: LLM) -> list[StagedStore]:
    ranks = llm.engine.loaded.ranks
    assert ranks is not None
    return [rank.storage for rank in (ranks.rank, *ranks.group.workers.made)]  # type: ignore[union-attr]


@pytest.mark.parametrize(
    "settings",
    [
        {"context_parallel_size": 2, "prefill_strategy": "ring-kv"},
        pytest.param({"tensor_parallel_size": 2, "offload_schedule": "column"}, marks=pytest.mark.matrix),
    ],
    ids=["context", "tensor"],
)
def test_streamed_ranks_give_the_same_bits(settings: dict[str, Any], engine: Engine, truth: Truth) -> None:
    """Two prompts together, each of which goes on with a chunk that is outside by then."""
    expected = truth(engine, SHORT)
    with ranks_as_threads():
        llm = engine(**STREAMED | settings)
        same(run(llm, SHORT, TWO), expected)
        assert all(store.totals.loaded and store.totals.bytes_out for store in stores(llm)[:1])
        llm.close()


@pytest.mark.matrix
@pytest.mark.parametrize(
    "settings",
    [
        {"context_parallel_size": 2, "prefill_strategy": "single"},
        {"tensor_parallel_size": 2},
        {"tensor_parallel_size": 2, "offload_x_resident": True},
    ],
    ids=["context", "tensor", "resident"],
)
def test_chunks_that_come_as_activations_give_the_same_bits(
    settings: dict[str, Any], engine: Engine, truth: Truth
) -> None:
    """The chunk that a prompt filled is projected when its second token is decoded."""
    expected = truth(engine, LONG)
    with ranks_as_threads():
        llm = engine(**STREAMED | {"kv_offload_activations": "on"} | settings)
        for store in stores(llm):
            assert store.x is not None
            store.x.share = 1.0
        same(run(llm, LONG, TWO), expected)
        assert sum(store.totals.projected for store in stores(llm)) == 3 * settings.get("tensor_parallel_size", 1)
        llm.close()
