"""The plugin that fills memory which nobody has written."""

from __future__ import annotations

import gc
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from tests.support.unwritten import filled, pytest_configure

pytestmark = pytest.mark.cpu


def test_new_memory_is_filled_and_later_is_not() -> None:
    plain = np.empty
    with filled():
        like = torch.zeros(2)
        for made in (torch.empty(2), torch.empty(2, dtype=torch.bfloat16), torch.empty_like(like), like.new_empty(2)):
            assert bool(made.isnan().all())
        assert torch.empty(2, dtype=torch.int8).tolist() == [127, 127]
        assert np.isnan(np.empty((2, 2), np.float32)).all() and np.empty(1, bool).all()
        assert np.empty(2, np.uint8).tolist() == [255, 255] and np.empty(1, "S2").dtype == "S2"
    assert np.empty is plain and not torch.are_deterministic_algorithms_enabled()


def test_the_plugin_fills_until_the_end_of_the_run() -> None:
    cleanup = list[Any]()
    pytest_configure(SimpleNamespace(add_cleanup=cleanup.append))  # type: ignore[arg-type]
    gc.collect()
    assert np.isnan(np.empty(1)).all() and bool(torch.empty(1).isnan())
    cleanup.pop()()
    assert not torch.are_deterministic_algorithms_enabled()
