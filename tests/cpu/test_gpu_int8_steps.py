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
    step = int8_kv.Apart("stored", "/bin/sh", "-c", "echo ${CUDA_LAUNCH_BLOCKING:-ahead}; sleep 60")
    done = step.done(0.3)
    assert (done.returncode, done.stdout) == (int8_kv.LATE, "ahead\n"), "launches are not waited for unless asked"


def test_the_smallest_step_that_fails_runs_again(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With launches that are waited for, then under the sanitizer, when all have run at once; what it says comes first,
    lest a limit of time cut it off. No process is left."""
    begun: list[Any] = []
    waited: list[str] = []
    left: set[int] = set()

    class Apart:
        def __init__(self, name: str, *before: str, waited: bool) -> None:
            begun.append((name, *before, waited) if before or waited else name)
            self.name, self.number, self.again = name, len(begun), bool(before or waited)
            left.add(self.number)

        def done(self, seconds: float = 0) -> CompletedProcess[str]:
            waited.append(self.name)
            failed = self.name in ("replayed", "three_engines") and not self.again
            return CompletedProcess([], int(failed), f"said by {self.name}")

        def end(self) -> None:
            left.discard(self.number)

    monkeypatch.setattr(int8_kv, "Apart", Apart)
    monkeypatch.setattr(int8_kv, "end_by_signal", lambda: None)
    monkeypatch.setattr(shutil, "which", lambda name: f"/bin/{name}")
    assert int8_kv.main() == 1
    assert begun[:-2] == waited[:-2] == list(int8_kv.STEPS)
    assert begun[-2:] == [("replayed", True), ("replayed", "/bin/compute-sanitizer", "--print-limit", "3", False)]
    printed = capsys.readouterr().out
    assert "launched: right\nreplayed: failed (status 1)\nsaid by replayed\n" in printed
    assert "replayed, each launch waited for: right" in printed and "said by three_engines" not in printed
    assert not left
