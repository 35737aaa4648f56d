"""Gathers of tensor ranks: their order, shares of any width, and what is refused."""

from __future__ import annotations

import pytest
import torch

from headrace.parallel.tensor import TensorGroup
from headrace.parallel.transport import LoopbackHub
from tests.support.tensor_ranks import on_ranks

pytestmark = [pytest.mark.cpu, pytest.mark.usefixtures("one_thread")]


def test_gathers_keep_their_order_beyond_a_thousand() -> None:
    """More exchanges than a tag has layers; ranks run ahead of each other as they like."""

    def count(group: TensorGroup) -> list[int]:
        ones = torch.ones(1, 1 + group.rank)
        return [int(group.gather(ones * (10 * i + group.rank), [1, 2]).sum()) for i in range(1100)]

    assert on_ranks(2, count) == [[30 * i + 2 for i in range(1100)]] * 2


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_gather_puts_uneven_shares_in_order(dtype: str) -> None:
    widths = [64, 1, 70]
    whole = torch.randn(5, 2 * sum(widths)).to(getattr(torch, dtype))[:, ::2]  # columns are not contiguous
    for group, got in on_ranks(
        3, lambda group: (group.rank, group.gather(whole.split(widths, dim=1)[group.rank], widths))
    ):
        assert torch.equal(got, whole), group


def test_gather_of_no_rows() -> None:
    assert [x.shape for x in on_ranks(2, lambda group: group.gather(torch.empty(0, 3), [3, 3]))] == [(0, 6)] * 2


def test_gather_refuses_another_width() -> None:
    with pytest.raises(ValueError, match="tensor rank 0 of 2 cannot gather"):
        TensorGroup(LoopbackHub(2).transport(0)).gather(torch.empty(1, 3), [4, 4])
