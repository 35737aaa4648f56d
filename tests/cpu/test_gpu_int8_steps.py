"""The steps of tools/gpu/int8_kv.py in Triton's interpreter: that they run, and hold there."""

from __future__ import annotations

import os

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
