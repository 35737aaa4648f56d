"""Which layers take the kernels for Hopper GPUs, once these have been compared on the GPU itself: with numbers in their
place. tests/cpu/test_ptx.py executes what is compiled, tests/gpu asks a device."""

from __future__ import annotations

import os
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="Triton is built for Linux only")
if os.environ.get("TRITON_INTERPRET") != "1":  # see tests/conftest.py
    pytest.skip("there is a GPU: tests/gpu asks it", allow_module_level=True)

from headrace.kernels.records import Mask, Pool
from headrace.kernels.triton import attention, hopper, hopper_agreement, hopper_latents
from headrace.kernels.triton.heads import Heads

CPU = torch.device("cpu")


@pytest.mark.parametrize("wrong", hopper_agreement.Ways._fields)
def test_hopper_kernels_that_do_not_agree(
    wrong: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """One of them with a single other bit is named once and not used; the other one is."""

    def run(
        work: attention.TileWork, q: Tensor, pool: Pool, mask: Mask, out: None = None, *, ways: hopper_agreement.Ways
    ) -> Tensor:
        done = q.clone()
        done[-1, -1, -1] += getattr(ways, wrong)
        return done

    monkeypatch.setattr(hopper_agreement, "_found", {})
    monkeypatch.setattr(hopper, "takes", lambda *layer: True)
    monkeypatch.setattr(attention.TileWork, "run", run)
    heads = Heads(4, 2, 64)
    for _ in range(2):
        ways = attention.agreed(heads, torch.float16, CPU)
        assert ways == hopper_agreement.Ways(flash=wrong != "flash", split=wrong != "split")
    assert attention.bounds(heads, CPU, torch.float16, plain=True).flash_lanes == (64 if wrong == "flash" else 128)
    assert [f"hopper_kernels.{wrong} " in record.message for record in caplog.records] == [True]


@pytest.mark.parametrize(("wrong", "told"), [("split", "span by span"), ("far", ""), ("", None)])
def test_latents_kernel_has_bits_of_its_own(
    wrong: str, told: str | None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Used where both of its ways have them, near the portable kernels; otherwise neither is."""

    def run(
        work: attention.TileWork, q: Tensor, pool: Pool, mask: Mask, out: None = None, *, ways: hopper_agreement.Ways
    ) -> Tensor:
        assert pool.once and pool.shape[2] == 576
        off = 0.01 + (wrong == "far") + (wrong == "split" and bool(work.rounds)) / 128
        return q + off * ways.flash

    monkeypatch.setattr(hopper_agreement, "_found", {})
    monkeypatch.setattr(hopper, "present", lambda place: True)
    monkeypatch.setattr(attention.TileWork, "run", run)
    heads = Heads(4, 1, 576, once=True)
    ways = attention.agreed(heads, torch.float16, CPU)
    assert ways == hopper_agreement.Ways(flash=not wrong, split=not wrong)
    assert attention.bounds(heads, CPU, torch.float16, plain=True).flash_lanes == 64
    assert [record.message for record in caplog.records if told is None or told not in record.message] == []
    assert len(caplog.records) == (told is not None)


def test_latents_that_cannot_be_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where memory does not suffice nothing is taken in place of the kernel, whose bits others have not."""

    def run(*given: Any, **ways: Any) -> Tensor:
        raise torch.OutOfMemoryError("none left")

    monkeypatch.setattr(hopper_agreement, "_found", {})
    monkeypatch.setattr(hopper, "present", lambda place: True)
    monkeypatch.setattr(attention.TileWork, "run", run)
    with pytest.raises(ValueError, match=r"no GPU memory left to compare hopper_latent_kernels.*none left"):
        attention.agreed(Heads(4, 1, 576, once=True), torch.float16, CPU)
    monkeypatch.setattr(hopper, "takes", lambda *layer: True)
    assert attention.agreed(Heads(4, 2, 64), torch.float16, CPU) == hopper_agreement.PORTABLE


@pytest.mark.parametrize(
    ("heads", "dtype", "taken"),
    [
        (Heads(128, 1, 576, once=True), torch.bfloat16, True),
        (Heads(32, 1, 320, once=True), torch.float16, True),
        (Heads(40, 1, 288, once=True), torch.bfloat16, False),
        (Heads(16, 1, 576, once=True), torch.float32, False),
        (Heads(4, 1, 576), torch.bfloat16, False),
    ],
    ids=str,
)
def test_latents_that_the_kernel_for_hopper_takes(
    heads: Heads, dtype: torch.dtype, taken: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert not hopper_latents.takes(CPU, dtype, heads)
    monkeypatch.setattr(hopper, "present", lambda place: True)
    assert hopper_latents.takes(CPU, dtype, heads) == taken


def test_a_pool_of_latents_that_the_gpu_cannot_copy_from() -> None:
    memory = torch.zeros(64 * 576 + 1, dtype=torch.bfloat16)[1:]
    pool, q = Pool.of([memory.view(1, 1, 64, 576)], once=True), torch.zeros(1, 4, 576, dtype=torch.bfloat16)
    heads, mask = Heads(4, 1, 576, once=True), Mask(torch.empty(0, 4), torch.empty(0), scale=1.0)
    with pytest.raises(ValueError, match="begins at a multiple of 16 bytes"):
        hopper_latents.walk(q, pool, q, q, q, q, mask, (q, q, q), q, heads, 1.0, 512, 1, split=True)


def test_hopper_kernels_are_asked_for_windows_and_sinks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those compiled for layers with either may be wrong alone; flash takes no windows."""

    def run(
        work: attention.TileWork, q: Tensor, pool: Pool, mask: Mask, out: None = None, *, ways: hopper_agreement.Ways
    ) -> Tensor:
        return q + (ways.split and mask.window is not None) + (ways.flash and mask.sinks is not None)

    monkeypatch.setattr(hopper_agreement, "_found", {})
    monkeypatch.setattr(hopper, "takes", lambda *layer: True)
    monkeypatch.setattr(hopper, "takes_call", lambda *call: True)
    monkeypatch.setattr(attention.TileWork, "run", run)
    work: Any = SimpleNamespace(heads=Heads(4, 2, 64))
    q, pool = torch.empty(1, 4, 64, dtype=torch.float16), Pool(*(torch.empty(1, 2, 64, 64).half() for _ in range(2)))
    plain = Mask(torch.empty(0, 4, dtype=torch.int32), torch.empty(0), scale=1.0)
    for more, flash, split in (({}, True, True), ({"window": 8}, False, False), ({"sinks": q[0, :, 0]}, False, True)):
        found = attention.TileWork._ways(work, q, pool, replace(plain, **more), None)
        assert found == hopper_agreement.Ways(flash, split)


def test_hopper_kernels_take_no_blocks_of_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    """They know windows alone: blocks of keys are told by negative ones."""
    monkeypatch.setattr(hopper, "takes", lambda *layer: True)
    q, pool = torch.empty(1, 4, 64, dtype=torch.float16), Pool(*(torch.empty(1, 2, 64, 64).half() for _ in range(2)))
    plain = Mask(torch.empty(0, 4, dtype=torch.int32), torch.empty(0), scale=1.0)
    taken = [hopper.takes_call(q, pool, replace(plain, window=window)) for window in (None, 8, -8)]
    assert taken == [True, True, False]
