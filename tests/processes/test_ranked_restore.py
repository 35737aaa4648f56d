"""Tiers of ranks that are processes: another number of ranks restores what was stored; a rank killed in mid-restore.
In `make test` ranks with tiers are threads: tests/cpu/test_ranked_tiers.py, test_tensor_tiers.py."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from headrace import LLM, SamplingParams
from headrace.parallel.transport import RankLost
from tests.support.offloading import forced, projecting

PARAMS = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)


def opened(ranks: int, folder: Path, tensor: int = 1, **settings: Any) -> LLM:
    return LLM("tiny", context_parallel_size=ranks, tensor_parallel_size=tensor, kv_offload_path=str(folder),
               kv_cache_tokens=4096, threads=1, dtype="bfloat16", prefill_strategy="ring-kv" if ranks > 1 else "auto",
               **{"kv_offload_activations": "off", **settings})  # fmt: skip


def answer(llm: LLM, prompt: list[int]) -> tuple[list[int], int]:
    """Tokens, and how many of the prompt were restored."""
    output = llm.generate([prompt], PARAMS)[0]
    return output.token_ids, llm.engine.stats().restore.loaded_tokens


@pytest.mark.matrix
def test_tensor_ranks_project_what_they_stored_in_turn(tmp_path: Path) -> None:
    prompt = torch.randint(10, 2000, (700,), generator=torch.Generator().manual_seed(6)).tolist()
    with opened(1, tmp_path, 2, kv_offload_activations="on") as llm:
        truth, _ = answer(llm, prompt)
    with opened(1, tmp_path, 2, kv_offload_activations="on") as llm:
        assert llm.engine.offload is not None
        llm.engine.offload.choose = projecting
        assert answer(llm, prompt)[0] == truth
        assert llm.engine.stats().restore.projected_tokens == 640 and not llm.engine.stats().restore.failures


@pytest.mark.matrix
def test_tensor_ranks_of_which_one_is_killed(tmp_path: Path) -> None:
    """Each restores its heads, at the start of another engine; one is lost while they come; the next does it again."""
    prompt = torch.randint(10, 2000, (700,), generator=torch.Generator().manual_seed(5)).tolist()
    with opened(1, tmp_path, 2) as llm:
        truth, restored = answer(llm, prompt)
        assert restored == 0
    with opened(1, tmp_path, 2, kv_link_gbps=0.0002) as llm:  # seconds for a restore
        _lose_rank_1(llm, prompt)
    with opened(1, tmp_path, 2) as llm:
        _load_all(llm)
        assert answer(llm, prompt) == (truth, 640)


@pytest.mark.matrix
def test_another_number_of_ranks_and_a_killed_one(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(5)
    prompt = torch.randint(10, 2000, (2500,), generator=generator).tolist()
    with opened(2, tmp_path) as llm:
        truth, restored = answer(llm, prompt)
        assert restored == 0
    with opened(3, tmp_path, kv_link_gbps=0.0005) as llm:  # seconds for a restore
        _lose_rank_1(llm, prompt)
    with opened(1, tmp_path) as llm:
        _load_all(llm)
        assert answer(llm, prompt) == (truth, 2496)


def _load_all(llm: LLM) -> None:
    """Whatever is stored is loaded, and nothing of it computed."""
    assert llm.engine.offload is not None
    llm.engine.offload.choose = forced(0.0, 0.0)


def _lose_rank_1(llm: LLM, prompt: list[int]) -> None:
    """Kills it while chunks of the prompt come."""
    _load_all(llm)
    assert llm.engine.loaded.ranks is not None
    pid = llm.engine.loaded.ranks._workers.pids[1]
    killing = threading.Thread(target=lambda: _kill(llm, pid))
    killing.start()
    with pytest.raises(RankLost, match="rank 1"):
        answer(llm, prompt)
    killing.join()


def _kill(llm: LLM, pid: int) -> None:
    """Once something is on its way."""
    offload = llm.engine.offload
    assert offload is not None
    end = time.monotonic() + 20
    while not offload.counters.restores and time.monotonic() < end:
        time.sleep(0.005)
    os.kill(pid, signal.SIGKILL)
