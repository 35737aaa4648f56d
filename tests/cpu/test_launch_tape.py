"""The graphs of a fake device take launches, and refuse what a CUDA graph refuses (tests.support.launch_tape)."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="Triton is built for Linux only")

from headrace.kernels.triton import token_kernels
from headrace.kernels.triton.launching import direct
from tests.support.fake_device import FakeDevice

X = torch.arange(4.0)


def test_python_has_no_say_in_a_replay() -> None:
    """Numbers are those of the recording, memory is what lies there now."""
    x, factors, calls = X.clone(), [2.0], []

    def run() -> Tensor:
        calls.append(1)
        return (x * torch.tensor(factors[0])).clamp(max=5)

    graph, made = FakeDevice().graph(run)
    assert not made.isfinite().any(), "a recording computes nothing"
    factors[0], x[:] = 3.0, torch.tensor([0.0, 1.0, 2.0, 9.0])
    graph.replay()
    assert made.tolist() == [0, 2, 4, 5] and len(calls) == 1


def test_kernels_are_launched_again() -> None:
    tokens, chosen = torch.tensor([5, -2], dtype=torch.int32), torch.tensor([7, 8], dtype=torch.int32)

    def run() -> Tensor:
        known = torch.empty_like(tokens)
        direct(token_kernels.look_up)[(1,)](tokens, chosen, known, 2, BLOCK=2)
        return known.view(2, 1)[:, 0]

    graph, made = FakeDevice().graph(run)
    chosen[1] = 9
    graph.replay()
    assert made.tolist() == [5, 9]


def test_memory_of_a_recording_holds_anything() -> None:
    """What one replay leaves there, another one finds no more; memory from elsewhere stays."""
    sums = torch.zeros(2)

    def run() -> Tensor:
        count = torch.empty(1)
        sums.add_(1)
        return count.add_(1) + sums

    graph, made = FakeDevice().graph(run)
    graph.replay()
    assert made.isnan().all() and sums.tolist() == [2, 2]


@pytest.mark.parametrize(
    "work",
    [
        *(partial(lambda name, x: getattr(x, name)(), name) for name in ("tolist", "numpy", "cpu", "nonzero")),
        lambda x: x.sum().item(), lambda x: x[x > 1], lambda x: torch.equal(x, x), lambda x: bool(x[0] > 1),
        lambda x: x + torch.tensor([1.0]), lambda x: np.asarray(x),
    ],
)  # fmt: skip
def test_what_waits_or_is_sent_is_refused(work: Callable[[Tensor], Any]) -> None:
    """And nothing else is, from then on."""
    with pytest.raises(RuntimeError, match="not permitted when stream is capturing"):
        FakeDevice().graph(lambda: work(X))
    assert X.tolist() == [0, 1, 2, 3] and bool(X[1])


def test_another_thread_reads_what_it_likes() -> None:
    """Counters of the host, say, while this one records."""
    with ThreadPoolExecutor(1) as other:
        _, made = FakeDevice().graph(lambda: other.submit(lambda: [X.tolist(), X.numpy().sum(), bool(X[1])]).result())
    assert made == [[0, 1, 2, 3], 6, True]
