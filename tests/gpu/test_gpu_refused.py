"""What is refused on a GPU because it failed there: whether it still does. Each step in a process of its own."""

from __future__ import annotations

import pytest
import torch

from tools.gpu.int8_kv import Apart

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.mark.parametrize("step", ["replayed", "engine_of_one_row"])
def test_int8_keys_and_values(step: str) -> None:
    """`python -m tools.gpu.int8_kv` has more steps, and names the kernel."""
    done = Apart(step).done()
    if done.returncode:
        pytest.xfail(f"{step} fails on this GPU, and is refused: {done.stdout[-2000:]}")
