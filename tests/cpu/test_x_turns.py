"""Activations that tensor ranks keep in turn: put together they are what one rank has."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from headrace.models.x_turns import XTurns
from headrace.parallel.tensor import TensorGroup
from headrace.parallel.transport import LoopbackHub
from headrace.types import CHUNK


@given(ranks=st.integers(2, 3), numbers=st.lists(st.integers(0, 50), min_size=1, max_size=9, unique=True))
def test_gathered(ranks: int, numbers: list[int]) -> None:
    """In the order that is asked for, also where a rank has none of them."""
    hub = LoopbackHub(ranks)
    x = torch.randn(len(numbers), CHUNK, 4)

    def gathered(rank: int) -> torch.Tensor:
        turns = XTurns(TensorGroup(hub.transport(rank)))
        return turns.gathered(x[[i for i, number in enumerate(numbers) if turns.mine(number)]], numbers)

    with ThreadPoolExecutor(ranks) as threads:
        assert all(torch.equal(found, x) for found in threads.map(gathered, range(ranks)))
    assert hub.left_over() == 0


@pytest.mark.parametrize("ranks", [1, 2, 5])
def test_every_chunk_is_kept_once(ranks: int) -> None:
    places = [XTurns(TensorGroup(LoopbackHub(ranks).transport(rank))) for rank in range(ranks)]
    assert all(sum(turns.mine(number) for turns in places) == 1 for number in range(12))


def test_one_rank_keeps_all() -> None:
    x = torch.randn(3, CHUNK, 4)
    assert XTurns().gathered(x, [4, 5, 9]) is x and XTurns().mine(7)
