"""The kernel that gathers pieces of host memory, in Triton's interpreter."""

from __future__ import annotations

import os

import pytest
import torch

pytest.importorskip("triton", reason="Triton is built for Linux only")
if os.environ.get("TRITON_INTERPRET") != "1":  # see tests/conftest.py
    pytest.skip("there is a GPU: tests/gpu has the same kernels, compiled", allow_module_level=True)

from headrace.kernels.triton import pinned


@pytest.mark.parametrize("size", [8, pinned.WORD * pinned.BLOCK, pinned.WORD * (2 * pinned.BLOCK + 3)])
@pytest.mark.parametrize("count", [0, 1, 37])
def test_gathers(size: int, count: int) -> None:
    """Pieces in any order, of whole blocks and not, more tasks than programs."""
    memory = torch.randint(256, (count + 1, size), dtype=torch.uint8)
    order = torch.randperm(count).tolist()
    into = torch.zeros(count, size, dtype=torch.uint8)
    pinned.gather(into, [memory[place] for place in order])
    assert torch.equal(into, memory[order])


def test_refusals() -> None:
    memory, into = torch.zeros(4, 24, dtype=torch.uint8), torch.zeros(2, 16, dtype=torch.uint8)
    with pytest.raises(ValueError, match="need 2 contiguous parts of 16 bytes"):
        pinned.gather(into, [memory[0, :16]])
    with pytest.raises(ValueError, match="need 2 contiguous parts of 16 bytes"):
        pinned.gather(into, [memory[0, :16], memory[0]])
    with pytest.raises(ValueError, match="multiples of 8"):
        pinned.gather(into, [memory[0, :16], memory[0, 4:20]])
    with pytest.raises(ValueError, match="multiples of 8"):
        pinned.gather(into[:, :12].contiguous(), [memory[0, :12], memory[1, :12]])
