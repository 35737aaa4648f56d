"""Keys and values in int8 as a GPU has them: in Triton's interpreter, in fp32, against the reference.

tests/gpu/test_triton_attend.py has them compiled.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="Triton is built for Linux only")
if os.environ.get("TRITON_INTERPRET") != "1":  # see tests/conftest.py
    pytest.skip("there is a GPU: tests/gpu has the same kernels, compiled", allow_module_level=True)

from headrace import LLM, SamplingParams
from headrace.bench.shapes import CheckpointShape, write_checkpoint
from headrace.config import combinations
from headrace.engine.runner import Runner
from headrace.kernels import reference
from headrace.kernels.records import Mask, Pool, StepInputs
from headrace.kernels.triton import attention, backend
from tests.support.attention_testbed import PoolTestbed, ends
from tests.support.fake_device import fake_device
from tests.support.small_gpu_engines import force
from tests.support.traces import run

BOUND = 1e-5
SHAPE = CheckpointShape(
    hidden=64, layers=1, heads=4, kv_heads=2, head_dim=16, mlp=64, vocab=96, context=256, experts=3, chosen=2
)


def zeros(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return torch.zeros(shape, dtype=dtype)


def pools(slots: int, kv_heads: int, dim: int) -> tuple[Pool, Pool]:
    ours, truth = (Pool.make(slots, kv_heads, dim, torch.int8, zeros) for _ in range(2))  # type: ignore[arg-type]
    return ours, truth


def hard(rows: int, dim: int) -> Tensor:
    """Rows [T, 2, D] of all magnitudes, zeros, halves of a step, and some that are no numbers."""
    x = torch.randn(rows, 2, dim, generator=torch.Generator().manual_seed(1))
    x *= torch.logspace(-6, 3, rows)[:, None, None]
    x[0], x[1], x[2, 0] = 0.0, 1e-44, (torch.arange(dim) - dim // 2) / 2
    x[2, 0, 0] = 127.0
    x[3, 0, 1], x[4, 1, 2] = float("nan"), float("inf")
    return x


@pytest.mark.filterwarnings("ignore:divide by zero", "ignore:invalid value")
@pytest.mark.parametrize("dim", [64, 80])
def test_keys_and_values_are_rounded_as_by_the_reference(dim: int) -> None:
    k, v = hard(20, dim), hard(20, dim).flip(0)
    slots, offsets = torch.arange(20, dtype=torch.int32) % 3, torch.arange(20, dtype=torch.int32) * 3
    ours, truth = pools(3, 2, dim)
    backend.append(ours, k, v, slots, offsets)
    reference.append(truth, k, v, slots, offsets)
    for one, other in zip(ours.tensors, truth.tensors, strict=True):
        assert torch.equal(one.nan_to_num(-1.0), other.nan_to_num(-1.0))
    before = ours.k.clone()
    backend.append(ours, k, v, torch.full_like(slots, -1), offsets)  # padding is not stored
    assert torch.equal(ours.k, before)


@pytest.mark.parametrize("window", [None, 40])
@pytest.mark.parametrize("way", ["flash", "split"])
def test_attention(way: str, window: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """What nobody has written has scales of NaN."""
    force(way, monkeypatch)
    testbed = PoolTestbed([(0, 600), (576, 610)], (4, 2, 32), torch.float32, apart=False)
    pool = testbed.int8()
    ours, truths = (testbed.attend(ends(testbed, 2), each, "cpu", pool, window=window) for each in (backend, reference))
    for one, truth in zip(ours, truths, strict=True):
        assert (one - truth).abs().max() < BOUND


def test_a_prepared_step() -> None:
    ours, truth = pools(2, 2, 32)
    places = torch.tensor([0, 1]), torch.tensor([1, 1], dtype=torch.int32), torch.tensor([0, 1], dtype=torch.int32)
    items = torch.tensor([[1, 0, 0, 2]], dtype=torch.int32)
    inputs = StepInputs({None: items}, *places, heads=4, shape=(2, 2, 32), dtype=torch.int8, scale=0.2)
    step = attention.TritonStep(inputs, torch.device("cpu"))
    q, k, v = torch.randn(2, 8, 32, generator=torch.Generator().manual_seed(2)).split((4, 2, 2), dim=1)
    attended = step(ours, q, k, v, None)
    reference.append(truth, k, v, *places[1:])
    assert all(torch.equal(x, y) for x, y in zip(ours.tensors, truth.tensors, strict=True))
    assert (attended - reference.attend(q, truth, Mask(items, places[0], scale=0.2))).abs().max() < BOUND


def test_an_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Experts, weights, keys and values in int8, on a fake device: as on the CPU, prefilled and replayed."""
    folder = str(write_checkpoint(SHAPE, tmp_path))
    monkeypatch.setattr(Runner, "record", lambda self: None)
    asked: dict[str, Any] = dict(dtype="float32", kv_cache_tokens=256, quantization="int8", kv_cache_dtype="int8")
    prompt, params = list(range(20)), SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True)
    truth = LLM(folder, attention_backend="reference", **asked)
    expected = run(truth, [prompt], params)
    allowed = tuple(each for each in combinations.EXCLUSIONS if {each.one, each.other} != {"gpu", "int8_kv"})
    monkeypatch.setattr(combinations, "EXCLUSIONS", allowed)  # refused until a GPU shows it right
    with fake_device(monkeypatch):
        [ours] = run(LLM(folder, attention_backend="triton", max_batch_tokens=20, **asked), [prompt], params)
    assert ours.keys() == expected[0].keys()
    for position, logits in expected[0].items():
        assert (ours[position] - logits).abs().max() <= 1e-3 * logits.abs().max()


def test_scales_that_are_missing_are_refused() -> None:
    pool, _ = pools(1, 2, 32)
    none = torch.empty(0, dtype=torch.int32)
    with pytest.raises(ValueError, match="int8 pools need both k_scale and v_scale"):
        backend.append(Pool(pool.k, pool.v, pool.k_scale), *(torch.empty(0, 2, 32),) * 2, none, none)
    with pytest.raises(ValueError, match="int8 pools need both k_scale and v_scale"):
        backend.attend(torch.empty(1, 4, 32), Pool(pool.k.float(), pool.v.float(), *(pool.k_scale,) * 2), Mask(
            none, none, scale=1.0))  # fmt: skip
