"""Several ranks on GPUs: every strategy gives the bits of one rank, also where they share a device."""

from __future__ import annotations

import logging
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
import torch

from headrace import LLM, SamplingParams
from headrace.bench.shapes import CheckpointShape, write_checkpoint
from headrace.device import current
from headrace.models.decoder import load_decoder
from tests.support.gpu_ranks import computed, ranks_of
from tests.support.hybrid_checkpoints import make_checkpoint
from tests.support.loopback_ranks import Late
from tests.support.offloading import MIXES, counters, flush, forced, watched
from tests.support.traces import Trace, run, same

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

SHAPE = CheckpointShape(hidden=256, layers=3, heads=4, kv_heads=2, head_dim=64, mlp=512, vocab=64, context=4096)
NEW = 300
PARAMS = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)


@pytest.fixture(scope="module")
def decoder(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return load_decoder(write_checkpoint(SHAPE, tmp_path_factory.mktemp("model")), device=current().place)


@pytest.fixture(scope="module")
def truth(decoder: Any) -> Any:
    return lru_cache(None)(lambda: computed(ranks_of(decoder, 1), "single", NEW))


@pytest.mark.parametrize("late", [False, True], ids=["as-it-comes", "late"])
@pytest.mark.parametrize("strategy", ["ring-kv", "ring-q", "chain", "gather"])
def test_ranks_that_are_threads(strategy: str, late: bool, decoder: Any, truth: Any) -> None:
    """Through pinned memory. late: what comes is seen late, so that rows merge ahead."""
    loopback = ranks_of(decoder, 2)
    for rank in loopback.ranks if late else ():
        end: Any = rank.transport
        rank.transport = Late(end, 1)
        rank.transport.close = end.close  # type: ignore[attr-defined]
    ours = computed(loopback, strategy, NEW)
    assert len(ours) == len(truth()) and all(torch.equal(x, y) for x, y in zip(ours, truth(), strict=True))


def answers(model: str = "tiny", **settings: Any) -> list[Trace]:
    given = {"attention_backend": "triton", "kv_cache_tokens": 4096, **settings}
    llm = LLM(model, **given)
    try:
        g = torch.Generator().manual_seed(1)
        prompts = [torch.randint(200, (count,), generator=g).tolist() for count in (900, 200)]
        return run(llm, prompts, PARAMS) + run(llm, prompts, PARAMS)  # the second time on cached prefixes
    finally:
        llm.close()


@pytest.fixture(scope="module")
def alone() -> list[Trace]:
    return answers()


def test_processes_that_share_a_device(alone: list[Trace]) -> None:
    same(answers(context_parallel_size=2, prefill_strategy="ring-kv", rank_transport="host"), alone)


def test_ranks_that_share_a_device_size_their_pools(alone: list[Trace], caplog: pytest.LogCaptureFixture) -> None:
    """Both measure what they have at the same time, and nothing is short of memory then."""
    caplog.set_level(logging.INFO)
    same(answers(context_parallel_size=2, kv_cache_tokens=None, max_sequences=4, rank_transport="host"), alone)
    assert "has the least memory for keys and values" in caplog.text


@pytest.mark.parametrize(
    "settings",
    [
        {"context_parallel_size": 2, "kv_offload_activations": "on"},
        {"tensor_parallel_size": 2, "offload_x_resident": True},
        {"context_parallel_size": 2, "weight_offload": True},
    ],
    ids=["context, X", "tensor, X on the device", "weights outside"],
)
def test_ranks_that_stream(settings: dict[str, Any], alone: list[Trace]) -> None:
    """Over a pinned store of each rank: copy streams, the side stream and, of X, the stream that computes."""
    outside = {"offload_schedule": "auto", "kv_offloading_size": 0.1, "kv_cache_tokens": None}
    same(answers(**outside, **settings, rank_transport="host"), alone)


@pytest.mark.parametrize("settings", [{"context_parallel_size": 2}, {"tensor_parallel_size": 2}], ids=str)
@pytest.mark.parametrize("kind", ["3_5", "lfm2", "falcon_h1"])
def test_recurrent_layers_of_ranks_that_share_a_device(kind: str, settings: dict[str, int], tmp_path: Path) -> None:
    folder = str(make_checkpoint(kind, tmp_path))
    given = {"dtype": "bfloat16", "recurrent_states": 8, "max_sequences": 2}
    same(answers(folder, **given, **settings, rank_transport="host"), answers(folder, **given))


RESTORED: dict[str, dict[str, Any]] = {
    "ring-kv, loaded": {"context_parallel_size": 2, "prefill_strategy": "ring-kv", "mix": "load"},
    "single, from X": {"context_parallel_size": 2, "prefill_strategy": "single", "mix": "all three"},
    "tensor ranks, from X": {"tensor_parallel_size": 2, "mix": "project"},
}


@pytest.mark.parametrize("case", RESTORED)
def test_restored_by_processes_that_share_a_device(case: str, alone: list[Trace]) -> None:
    """What each rank stored in its own pinned memory comes back with the bits of one rank."""
    settings = dict(RESTORED[case])
    mix = MIXES[settings.pop("mix")]
    llm = LLM("tiny", attention_backend="triton", kv_cache_tokens=4096, kv_offloading_size=0.05,
              kv_offload_activations="on", rank_transport="host", **settings)  # fmt: skip
    try:
        assert llm.engine.offload is not None
        llm.engine.offload.choose = forced(*mix)
        g = torch.Generator().manual_seed(1)
        prompts = [torch.randint(200, (count,), generator=g).tolist() for count in (900, 200)]
        for again in (False, True):
            same(watched(llm, prompts, PARAMS), alone[:2])
            told = counters(llm)
            assert (told.loaded_tokens + told.projected_tokens > 500) == again and not told.failures
            flush(llm)
    finally:
        llm.close()


def test_tensor_ranks_that_share_a_device_with_weights_in_codes() -> None:
    """Processes: each with its share of every matrix."""
    same(answers(quantization="int8", tensor_parallel_size=2, rank_transport="host"), answers(quantization="int8"))


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices, one for each rank")
@pytest.mark.parametrize("size", ["context_parallel_size", "tensor_parallel_size"])
def test_nccl(size: str, alone: list[Trace]) -> None:
    """Whose messages are announced by links that carry what ranks tell of their memory, too."""
    same(answers(**{size: 2}, rank_transport="nccl", kv_cache_tokens=None, max_sequences=4), alone)


@pytest.mark.skipif(torch.cuda.device_count() > 1, reason="ranks do not share a device here")
def test_nccl_is_refused_where_ranks_share_a_device() -> None:
    with pytest.raises(ValueError, match="rank_transport nccl: ranks share a device"):
        answers(context_parallel_size=2, rank_transport="nccl")
