"""The steps of tools/gpu/int8_kv.py in Triton's interpreter: that they run, and hold there."""

from __future__ import annotations

import os
import shutil
from subprocess import CompletedProcess
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="Triton is built for Linux only")
if os.environ.get("TRITON_INTERPRET") != "1":  # see tests/conftest.py
    pytest.skip("there is a GPU: tests/gpu asks it", allow_module_level=True)

from headrace.kernels.triton.heads import Heads
from tests.support.fake_device import fake_device
from tools.gpu import int8_kv


@pytest.mark.parametrize("replayed", [True, pytest.param(False, marks=pytest.mark.matrix)])
def test_a_layer(replayed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(int8_kv, "COMPUTED", torch.float32)  # the interpreter has no bf16
    monkeypatch.setattr(int8_kv, "HEADS", Heads(2, 1, 16))
    monkeypatch.setattr(int8_kv, "KEYS", 70)
    with fake_device(monkeypatch):
        int8_kv.launched(replayed)


def test_what_a_step_says_is_kept_when_it_takes_too_long() -> None:
    done = int8_kv.apart("stored", "/bin/sh", "-c", "echo ${CUDA_LAUNCH_BLOCKING:-ahead}; sleep 60", seconds=0.3)
    assert (done.returncode, done.stdout) == (int8_kv.LATE, "ahead\n"), "launches are not waited for unless asked"


def test_the_first_step_that_fails_runs_again(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With launches that are waited for, then under the sanitizer; the others run all the same."""
    ran: list[Any] = []

    def apart(name: str, *before: str, **given: Any) -> CompletedProcess[str]:
        ran.append((name, *before, *given))
        return CompletedProcess([], int(name in ("replayed", "three_engines") and not given), f"said by {name}")

    monkeypatch.setattr(int8_kv, "apart", apart)
    monkeypatch.setattr(shutil, "which", lambda name: f"/bin/{name}")
    assert int8_kv.main() == 1
    assert ran[:-2] == [(name,) for name in int8_kv.STEPS]
    assert ran[-2:] == [("replayed", "waited"), ("replayed", "/bin/compute-sanitizer", "--print-limit", "3", "seconds")]
    printed = capsys.readouterr().out
    assert "launched: right\nreplayed: failed (status 1)" in printed and "said by replayed" in printed
    assert "replayed, each launch waited for: right" in printed
