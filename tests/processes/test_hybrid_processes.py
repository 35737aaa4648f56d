"""A hybrid model over ranks that are processes: the logits of one rank, cold, cached, and restored after a restart."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from headrace import LLM, SamplingParams
from headrace.parallel.transport import RankLost
from tests.support.hybrid_checkpoints import make_checkpoint
from tests.support.kind_sizes import VOCAB
from tests.support.offloading import watched
from tests.support.traces import same

PARAMS = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)


def engine(folder: Path, disk: Path | None = None, **settings: Any) -> LLM:
    kept = {} if disk is None else {"kv_offload_path": str(disk)}
    return LLM(str(folder), dtype="bfloat16", threads=1, kv_cache_tokens=2048, recurrent_states=8, **kept, **settings)


def prompts() -> list[list[int]]:
    g = torch.Generator().manual_seed(5)
    base = torch.randint(0, VOCAB, (700,), generator=g).tolist()
    return [base[:500], base[:500] + base[600:], base[:70]]


@pytest.mark.matrix  # make test has ranks as threads: tests/cpu/test_hybrid_ranks.py
def test_chain_of_two(tmp_path: Path) -> None:
    folder = make_checkpoint("3_5_ends_recurrent", tmp_path / "model")
    truth = watched(engine(folder, enable_prefix_caching=False), prompts(), PARAMS)
    chain = engine(folder, tmp_path / "kv", context_parallel_size=2, prefill_strategy="chain")
    for prompt, trace in zip(prompts(), truth, strict=True):
        same(watched(chain, [prompt], PARAMS), [trace])
    assert chain.engine.stats().ranks.prefills["chain"] >= 2
    chain.close()
    auto = engine(folder, tmp_path / "kv", context_parallel_size=2)
    same(watched(auto, prompts(), PARAMS), truth)
    assert auto.engine.stats().restore.failures == 0
    ranks = auto.engine.loaded.ranks
    assert ranks is not None
    os.kill(ranks._workers.pids[1], signal.SIGKILL)
    assert ranks._workers.failed.wait(20)
    with pytest.raises(RankLost, match="rank 1"):
        auto.generate([prompts()[0][:40]], PARAMS)
    auto.close()
