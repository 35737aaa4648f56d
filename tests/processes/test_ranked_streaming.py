"""Streaming ranks that are processes: the answers of one rank with everything in memory; a rank killed meanwhile."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from headrace import LLM, SamplingParams
from headrace.parallel.transport import RankLost
from tests.support.fake_server import until

PARAMS = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)


def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(5)
    tokens = torch.randint(10, 2000, (2500,), generator=generator).tolist()
    return [tokens, tokens[:2200] + tokens[7:30], tokens[5:100]]


def answers(llm: LLM) -> list[list[int]]:
    return [output.token_ids for output in llm.generate(prompts(), PARAMS)]


def opened(folder: Path, context: int, tensor: int, **settings: Any) -> LLM:
    return LLM("tiny", context_parallel_size=context, tensor_parallel_size=tensor, kv_offload_path=str(folder),
               kv_offload_disk_size=0.2, offload_schedule="auto", weight_offload=True, threads=1, dtype="bfloat16",
               max_model_len=4096, **settings)  # fmt: skip


@pytest.mark.matrix
def test_the_answers_of_one_rank(tmp_path: Path) -> None:
    """Of context and tensor ranks; tests/cpu/test_ranked_stream.py has each alone, as threads."""
    one = LLM("tiny", kv_cache_tokens=8192, dtype="bfloat16")
    with opened(tmp_path, 2, 2) as llm:
        assert answers(llm) == answers(one)
        assert answers(llm) == answers(one)  # on cached prefixes
        until(lambda: all(own.bytes_in for own in llm.engine.stats().stream.values()), 20)
        assert list(llm.engine.stats().stream) == ["0", "1", "2", "3"]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.matrix
def test_tensor_ranks_project_half_of_it(tmp_path: Path) -> None:
    """Rank 0 wishes all of it and the other little: they take the mean."""
    one = LLM("tiny", kv_cache_tokens=8192, dtype="bfloat16")
    with opened(tmp_path, 1, 2, kv_offload_activations="on") as llm:
        assert llm.engine.loaded.ranks is not None
        storage: Any = llm.engine.loaded.ranks.rank.storage
        storage.x.share = 1.0
        assert answers(llm) == answers(one)
        assert answers(llm) == answers(one)
        assert storage.totals.projected > 100 and storage.totals.loaded > 100


@pytest.mark.matrix
def test_a_killed_rank(tmp_path: Path) -> None:
    """While it waits for its link; nothing stays in the directory."""
    with opened(tmp_path, 2, 1, prefill_strategy="ring-kv", kv_link_gbps=0.002) as llm:
        assert llm.engine.loaded.ranks is not None
        pid = llm.engine.loaded.ranks._workers.pids[1]
        killing = threading.Timer(1.0, os.kill, (pid, signal.SIGKILL))
        killing.start()
        with pytest.raises(RankLost, match="rank 1"):
            answers(llm)
        killing.join()
    assert list(tmp_path.iterdir()) == []
