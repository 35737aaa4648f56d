"""Direct launches on a GPU (kernels/triton/launching.py): the bits of Triton's own launches. `make gpu-check` runs
these."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from headrace import LLM
from headrace.engine.runner import Runner
from tests.support.traces import prompts_of, run, same

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def test_the_device_gets_the_same_arguments() -> None:
    """Asked again, not what was found as engines started."""
    from headrace.kernels.triton import launch_agreement, launch_entries

    if not launch_entries.SUPPORTED:
        pytest.skip(f"kernels of Triton {launch_entries.VERSION} are launched by Triton")
    assert launch_agreement._compared(torch.device("cuda", torch.cuda.current_device()))


def test_launched_directly_is_the_same_as_by_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    """A whole engine, all of whose steps are launched, most kernels of them directly; and again by Triton."""
    from headrace.kernels.triton import launch_entries, launching

    llm = LLM("tiny", dtype="bfloat16", kv_cache_tokens=40_000, attention_backend="triton", max_sequences=16)
    runner, prompts = llm.engine.loaded.executor, prompts_of(llm)
    assert isinstance(runner, Runner)
    runner.decoding = runner.mixed = runner.eager
    counts = {"triton": 0, "directly": 0}

    def counted(owner: Any, name: str, way: str) -> None:
        made = getattr(owner, name)

        def call(*given: Any) -> Any:
            counts[way] += 1
            return made(*given)

        monkeypatch.setattr(owner, name, call)

    counted(launching.DirectKernel, "_by_triton", "triton")
    counted(launch_entries.Entry, "__call__", "directly")
    ours = run(llm, prompts)
    if launch_entries.SUPPORTED:
        assert counts["directly"] > counts["triton"]
    monkeypatch.setattr(launching, "_watched", lambda: True)
    llm.engine.cache.tree.clear()
    counts["directly"] = 0
    same(ours, run(llm, prompts))
    assert not counts["directly"]


def test_tensors_that_take_the_place_of_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """A weight in the memory of one that is gone, of its shape and of another: tensor maps that are kept say what is
    there now, as those do that Triton makes anew."""
    from headrace.kernels.triton import launching, tiles

    torch.manual_seed(1)
    x = torch.randn(16, 512, device="cuda").bfloat16()
    memory = torch.empty(1 << 20, dtype=torch.bfloat16, device="cuda")
    tile = tiles.Tile(16, 64, 256, 4, 4, "few")
    if not tiles.takes_blocks(x, memory[None]):
        pytest.skip("this GPU does not copy blocks by itself")
    for inputs, outputs in ((512, 1024), (512, 1024), (256, 1024), (512, 640), (512, 1024)):
        weight = memory[: inputs * outputs].view(outputs, inputs).normal_()
        rows = x[:, :inputs].contiguous()
        ours, truth = (torch.zeros(16, outputs, dtype=x.dtype, device="cuda") for _ in range(2))
        tiles.product(tile, rows, weight, None, ours)
        with monkeypatch.context() as patch:
            patch.setattr(launching, "_watched", lambda: True)
            tiles.product(tile, rows, weight, None, truth)
        assert truth.any() and torch.equal(ours, truth)


def test_a_tensor_of_the_host_is_left_to_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which refuses it, also where such launches on tensors of the device went before."""
    from headrace.kernels.triton import launching, rows

    x, weight = torch.ones(2, 64, device="cuda"), torch.ones(64, device="cuda")
    for _ in range(3):
        rows.rms_norm(x, weight, 1e-5)
    left = list[object]()
    monkeypatch.setattr(launching.DirectKernel, "_by_triton", lambda *given: left.append(given))
    monkeypatch.setattr(launching.DirectKernel, "_resolve", lambda *given: None)
    rows.rms_norm(x, weight, 1e-5)
    direct = len(left)
    rows.rms_norm(x, weight.cpu(), 1e-5)
    assert len(left) == direct + 1
