"""Several ranks on a fake device, the Triton kernels in their interpreter: every strategy gives one rank's bits."""

from __future__ import annotations

import os
from collections.abc import Iterator
from functools import lru_cache
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="Triton is built for Linux only")
if os.environ.get("TRITON_INTERPRET") != "1":  # see tests/conftest.py
    pytest.skip("there is a GPU: tests/gpu has ranks on it", allow_module_level=True)

from headrace.bench.shapes import CheckpointShape, write_checkpoint
from headrace.models.decoder import load_decoder
from tests.support.fake_device import FakeDevice
from tests.support.gpu_ranks import computed, interpreted_on, ranks_of
from tests.support.loopback_ranks import Late

SHAPE = CheckpointShape(hidden=16, layers=2, heads=1, kv_heads=1, head_dim=16, mlp=16, vocab=64, context=2048)
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
        ("ring-q", 2),
        pytest.param("chain", 3, marks=pytest.mark.matrix),
        pytest.param("gather", 2, marks=pytest.mark.matrix),
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
