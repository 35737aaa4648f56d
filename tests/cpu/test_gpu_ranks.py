"""Several ranks on a fake device, the Triton kernels in their interpreter: every strategy gives one rank's bits."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="Triton is built for Linux only")
if os.environ.get("TRITON_INTERPRET") != "1":  # see tests/conftest.py
    pytest.skip("there is a GPU: tests/gpu has ranks on it", allow_module_level=True)

from gguf import GGMLQuantizationType as Kind

from headrace import LLM, SamplingParams, device
from headrace.attention.execute import PlanAttention
from headrace.attention.plan import Span, build
from headrace.bench.shapes import write_checkpoint
from headrace.config import Quantization
from headrace.engine import gpu_memory, preflight
from headrace.engine.runner import Runner
from headrace.host import GIB
from headrace.kernels.backend import backend_of
from headrace.kernels.triton import backend, weights
from headrace.kv.storage import KVStorage
from headrace.models.decoder import TokenBatch, load_decoder
from headrace.parallel.staged_transport import StagedTransport
from headrace.parallel.tensor import TensorGroup
from headrace.parallel.transport import LoopbackHub, RankLost
from tests.support.checkpoints import make_checkpoint
from tests.support.fake_device import FakeDevice
from tests.support.fake_nccl import HostLinks
from tests.support.gguf_files import theirs, write_gguf
from tests.support.gpu_ranks import SHAPE, computed, interpreted_on, ranks_of
from tests.support.loopback_ranks import Late
from tests.support.tensor_ranks import on_ranks
from tests.support.thread_group import ranks_as_threads
from tests.support.traces import Trace, run, same

NEW = 5


@pytest.fixture(autouse=True)
def fake(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeDevice]:
    made = FakeDevice()
    with interpreted_on(made, monkeypatch):
        yield made


@pytest.fixture(scope="module")
def decoder(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = write_checkpoint(SHAPE, tmp_path_factory.mktemp("model"))
    return lru_cache(None)(lambda: load_decoder(folder, "float32", device=torch.device("cpu")))


@pytest.fixture(scope="module")
def truth(decoder: Any) -> Any:
    """Of one rank."""
    return lru_cache(None)(lambda: computed(ranks_of(decoder(), 1), "single", NEW))


@pytest.mark.parametrize(
    ("strategy", "size"),
    [
        ("ring-kv", 2),
        pytest.param("ring-q", 2, marks=pytest.mark.matrix),
        pytest.param("chain", 3, marks=pytest.mark.matrix),
    ],
)
def test_every_strategy_gives_one_ranks_bits(strategy: str, size: int, decoder: Any, truth: Any) -> None:
    """A batch on a shared prefix that lies on two ranks, within a span; then a step of decoding. What comes is seen
    late, so that rows merge ahead."""
    loopback = ranks_of(decoder(), size)
    ends = [rank.transport for rank in loopback.ranks]
    for rank in loopback.ranks:
        rank.transport = Late(rank.transport, size)
        rank.transport.close = ends[rank.transport.rank].close  # type: ignore[attr-defined]
    ours = computed(loopback, strategy, NEW)
    assert len(ours) == len(truth()) and all(torch.equal(x, y) for x, y in zip(ours, truth(), strict=True))


def numbers(folder: Path) -> Path:
    return write_checkpoint(replace(SHAPE, hidden=64, layers=1, heads=4, kv_heads=2, mlp=64), folder)


SMALL: dict[str, Any] = dict(
    hidden_size=64, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=2, head_dim=16
)


def mixture(folder: Path) -> Path:
    sizes = dict(moe_intermediate_size=64, num_experts=3, num_experts_per_tok=2)
    return make_checkpoint("qwen3_moe", folder, vocab_size=64, **SMALL, **sizes)


def biased_mixture(folder: Path) -> Path:
    return make_checkpoint("gpt_oss", folder, **SMALL | dict(head_dim=64, num_local_experts=3))


def gguf(folder: Path) -> Path:
    """Values in another format than queries and keys: three parts of one matrix."""
    model = theirs("llama", intermediate_size=64, **SMALL)
    return write_gguf(model, folder / "m.gguf", lambda name: Kind.Q8_0 if "attn_v" in name else Kind.Q4_0)


def gguf_experts(folder: Path) -> Path:
    sizes = dict(moe_intermediate_size=64, num_experts=3, num_experts_per_tok=2)
    return write_gguf(theirs("qwen3_moe", **SMALL, **sizes), folder / "m.gguf", lambda name: Kind.MXFP4)


@pytest.mark.parametrize(
    ("write", "quantization"),
    [
        (mixture, "int8"),
        (gguf, "none"),
        pytest.param(numbers, "none", marks=pytest.mark.matrix),
        pytest.param(mixture, "w8a8", marks=pytest.mark.matrix),
        pytest.param(biased_mixture, "none", marks=pytest.mark.matrix),
        pytest.param(gguf_experts, "none", marks=pytest.mark.matrix),
    ],
)
def test_tensor_ranks_give_one_ranks_bits(
    write: Callable[[Path], Path], quantization: Quantization, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two tensor ranks whose activations go through pinned memory: hidden states of a short prompt. Weights in codes
    are summed up by segments of 32 inputs, of which a share would have more than the whole if it went by itself."""
    for name, value in {"STEP": 16, "LEAST_SEGMENT": 16, "PROGRAMS": 2}.items():
        monkeypatch.setattr(weights, name, value)
    cpu = torch.device("cpu")
    load = partial(load_decoder, write(tmp_path), "float32", quantization=quantization, device=cpu)

    def states(group: TensorGroup | None) -> Tensor:
        if group is not None:
            group.transport = StagedTransport(HostLinks(hub, group.rank), device.current())
        decoder = load(tensor=group)
        storage = KVStorage(decoder.config.attention, 1, torch.float32)
        plan = build([Span(np.zeros(1, np.int32), 0, 3)])
        attend = PlanAttention(plan, storage, decoder.config.attention, backend_of("triton"))
        positions = torch.from_numpy(plan.positions)
        return decoder.forward(TokenBatch(torch.tensor([3, 1, 4]), positions), attend)

    hub = LoopbackHub(2)
    one, two = on_ranks(2, states, hub)
    truth = states(None)
    assert torch.equal(one, truth) and torch.equal(two, truth)


SEVERAL = {"context_parallel_size": 2, "kv_cache_tokens": 64}
STREAMED = {"offload_schedule": "row", "kv_offloading_size": 0.01}


@pytest.mark.parametrize("settings", [SEVERAL, STREAMED], ids=["ranks", "streamed"])
def test_attention_is_checked_on_the_device(
    settings: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on one rank that has its pool there. All ranks find out at once, and one of them is heard first."""

    def off(*given: object) -> None:
        raise ValueError("attention is off")

    monkeypatch.setattr(preflight, "GPU_DEVICES", ("null",))
    monkeypatch.setattr(backend, "verify", off)
    folder = write_checkpoint(replace(SHAPE, layers=1, context=256), tmp_path)
    with ranks_as_threads(), pytest.raises((ValueError, RankLost), match="attention is off"):
        LLM(str(folder), attention_backend="triton", dtype="float32", max_sequences=1, **settings)


class Uneven(FakeDevice):
    """Two ranks share it. Rank 1 has room for 70 tokens, rank 0 for 200, of 128 bytes in the pool and 768 in the
    workspace, beside the GiB that is left free. A step takes nothing."""

    def free_memory(self) -> int:
        first = threading.current_thread().name == "headrace-form"
        return 2 * (GIB + (200 if first else self.tokens) * (128 + 3 * 2 * 128))

    tokens = 70


@pytest.mark.parametrize("tokens", [70, 63])
def test_pools_are_what_the_rank_with_least_has_room_for(
    tokens: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(preflight, "GPU_DEVICES", ("null",))
    monkeypatch.setattr(Uneven, "tokens", tokens)
    monkeypatch.setattr(backend, "verify", lambda *given: None)
    monkeypatch.setattr(gpu_memory, "largest_step", lambda *given: None)
    caplog.set_level(logging.INFO)
    folder = write_checkpoint(replace(SHAPE, layers=1, context=256), tmp_path)
    given = {"attention_backend": "triton", "dtype": "float32", "context_parallel_size": 2, "max_batch_tokens": 65}
    with device.use(Uneven()), ranks_as_threads():
        if tokens < 64:
            with pytest.raises(ValueError, match=r"rank 1 has the least memory for keys and values, 0.0 GiB of a fake"):
                LLM(str(folder), **given)
            return
        llm = LLM(str(folder), **given)
        assert (llm.capacity.kv_cache_tokens, llm.capacity.max_model_len) == (128, 128)
        assert llm.capacity.length_limit == "kv_cache_tokens"
        assert "rank 1 has the least" in caplog.text and "each of 2 ranks has a pool of 64 tokens" in caplog.text
        llm.close()


@pytest.mark.matrix
def test_whole_engines_of_tensor_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A mixture of experts in int8, as the settings ask for it; ranks have theirs in files."""
    monkeypatch.setattr(preflight, "GPU_DEVICES", ("null",))
    monkeypatch.setattr(Runner, "record", lambda self: None)
    folder, params = mixture(tmp_path), SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)
    prompts = [[3, 1, 4]]

    def answers(**settings: Any) -> list[Trace]:
        llm = LLM(
            str(folder), attention_backend="triton", dtype="float32", max_sequences=1, kv_cache_tokens=128,
            quantization="int8", **settings,
        )  # fmt: skip
        try:
            return run(llm, prompts, params)
        finally:
            llm.close()

    truth = answers()
    with ranks_as_threads():
        outside = {"expert_offload_path": str(tmp_path), "expert_memory_size": 0.001}
        same(answers(tensor_parallel_size=2, **outside), truth)


@pytest.mark.matrix
def test_whole_engines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A prompt that no rank has room for: computed by ring pass-KV and decoded by both; then again, cached. Pools size
    themselves."""
    monkeypatch.setattr(preflight, "GPU_DEVICES", ("null",))
    folder = write_checkpoint(replace(SHAPE, layers=1, context=256), tmp_path)
    params = SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True)
    prompts = [torch.randint(64, (70,), generator=torch.Generator().manual_seed(2)).tolist()]

    def answers(**settings: Any) -> list[Trace]:
        given: dict[str, Any] = {"dtype": "float32", "max_sequences": 1, "max_batch_tokens": 80}
        llm = LLM(str(folder), attention_backend="triton", **given, **settings)
        found = run(llm, prompts, params) + run(llm, prompts, params)
        counts = llm.engine.stats().ranks.prefills
        assert set(counts) == ({"ring-kv"} if settings.get("context_parallel_size") else set())
        llm.close()
        return found

    truth = answers(kv_cache_tokens=128)
    with device.use(Uneven()), ranks_as_threads():
        same(answers(context_parallel_size=2, prefill_strategy="ring-kv"), truth)
