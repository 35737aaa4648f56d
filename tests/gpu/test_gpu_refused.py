"""What is refused on a GPU because it failed there: which kernel it is. Each step in a process of its own."""

from __future__ import annotations

import pytest
import torch

from tools.gpu.int8_kv import STEPS, apart

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.mark.parametrize("step", STEPS)
def test_int8_keys_and_values(step: str) -> None:
    """See tools/gpu/int8_kv.py: the first that fails names the kernel."""
    done = apart(step)
    assert done.returncode == 0, done.stdout[-4000:]
